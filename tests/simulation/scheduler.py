"""kube-scheduler for the extender: one scheduling cycle at a time, binds in parallel, retries after a pause.

It uses its own, stale copy of a pod. If a bind times out or its answer is lost, it forgets the pod and tries again: the
same bind, or another node. Another leader calls another replica; calls of the old one continue. Where it samples nodes
it offers one at a time, mostly the same one; a node that is named in nominatedNodeName is tried first.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

from tests.simulation.faults import FaultPlan
from tests.simulation.plan import NODES
from tests.simulation.server import PODS, Object, SimulatedServer
from tests.simulation.shells import ExtenderReplica
from tests.simulation.virtual_time import VirtualLoop

HTTP_SECONDS = 5.0
BACKOFF_SECONDS = (1.0, 4.0)
LOST_SECONDS = 0.2
ALONE = "0/2 nodes are available"
FAVOURED = 0.9
"""Share of the samples that hold the first node alone, so that the other is hardly found without a hint."""


class Scheduler:
    """One kube-scheduler that leads until `stop`. `replica` is asked for each call, because it may be restarted."""

    def __init__(
        self, server: SimulatedServer, weather: FaultPlan, loop: VirtualLoop, replica: Any, *, is_sampled: bool = False
    ) -> None:
        self._is_sampled = is_sampled
        self._server = server
        self._weather = weather
        self._loop = loop
        self._replica = replica
        self._queue: deque[str] = deque()
        self._queued: set[str] = set()
        self._binding: set[str] = set()
        self._wake = asyncio.Event()
        self._is_stopped = False
        self.binds: set[asyncio.Task[None]] = set()
        self._task = loop.create_task(self._run())
        for pod in server.pods():
            self.hear(pod)

    def hear(self, pod: Object) -> None:
        """A pod changed; queue it if it waits."""
        if (
            pod["spec"].get("nodeName")
            or pod["metadata"].get("deletionTimestamp")
            or pod["spec"].get("schedulingGates")
        ):
            return
        if pod["status"].get("phase", "Pending") == "Pending":
            self._again(pod["metadata"]["name"], self._weather.between("informer", 0.001, 0.05))

    def stop(self) -> None:
        """Lose leadership: begin nothing any more."""
        self._is_stopped = True
        self._task.cancel()

    def _again(self, name: str, seconds: float) -> None:
        if name in self._queued or self._is_stopped:
            return
        self._queued.add(name)
        self._loop.call_later(seconds, self._due, name)

    def _due(self, name: str) -> None:
        self._queue.append(name)
        self._wake.set()

    async def _run(self) -> None:
        while True:
            while self._queue:
                name = self._queue.popleft()
                self._queued.discard(name)
                pod = self._server.objects.get(f"{PODS}/{name}")
                if pod is not None and self._may_start(pod):
                    await self._schedule(pod)
            self._wake.clear()
            await self._wake.wait()

    def _may_start(self, pod: Object) -> bool:
        """Tell whether a pod of a name that was queued is to be bound now: it may be a successor, still gated."""
        is_free = not pod["spec"].get("nodeName") and not pod["spec"].get("schedulingGates")
        return is_free and pod["metadata"]["uid"] not in self._binding

    async def _schedule(self, pod: Object) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        nodes = sorted(node["metadata"]["name"] for node in self._server.collection("/api/v1/nodes"))
        nodes = [node for node in nodes if node in _pinned_to(pod, nodes)]
        feasible: list[str] = []
        for offered in self._offers(pod, nodes):
            reply = await self._call("filter", {"Pod": pod, "NodeNames": offered})
            feasible = (reply or {}).get("NodeNames") or []
            if reply is not None and not feasible:
                self._reject(pod, (reply.get("FailedAndUnresolvableNodes") or {}).values())
            if feasible:
                break
        if not feasible:
            self._again(name, self._pause(name))
            return
        node = feasible[0]
        if len(feasible) > 1:
            scores = await self._call("prioritize", {"Pod": pod, "NodeNames": feasible}) or []
            node = max(scores, key=lambda row: row["Score"], default={"Host": node})["Host"]
        self._binding.add(uid)
        task = self._loop.create_task(self._bind(pod, node))
        self.binds.add(task)
        task.add_done_callback(self.binds.discard)

    def _offers(self, pod: Object, nodes: list[str]) -> list[list[str]]:
        """Return the nodes to ask about, one list after the other."""
        named = [node for node in nodes if node == pod["status"].get("nominatedNodeName")]
        if not self._is_sampled or len(nodes) < len(NODES):
            return [nodes]
        is_favoured = self._weather.draw(f"sample {pod['metadata']['name']}") < FAVOURED
        sample = nodes[:1] if is_favoured else nodes[1:]
        return [named, sample] if named else [sample]

    async def _bind(self, pod: Object, node: str) -> None:
        metadata = pod["metadata"]
        call = {
            "PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"], "Node": node,
        }  # fmt: skip
        replica = self._replica()
        is_lost = self._weather.strikes("call lost", metadata["name"])
        if self._weather.strikes("call twice", metadata["name"]):
            twin = self._loop.create_task(self._call("bind", call, replica))
            self.binds.add(twin)
            twin.add_done_callback(self.binds.discard)
        seconds = LOST_SECONDS if is_lost else HTTP_SECONDS
        await self._call("bind", call, replica, seconds)
        self._binding.discard(metadata["uid"])
        now = self._server.objects.get(f"{PODS}/{metadata['name']}")
        if now is not None and not now["spec"].get("nodeName"):
            self._again(metadata["name"], self._pause(metadata["name"]))

    async def _call(
        self, verb: str, body: Any, replica: ExtenderReplica | None = None, seconds: float = HTTP_SECONDS
    ) -> Any | None:
        chosen = replica or self._replica()
        if chosen is None:
            return None
        try:
            return await asyncio.wait_for(chosen.call(verb, body), seconds)
        except TimeoutError:
            return None

    def _reject(self, pod: Object, reasons: Iterable[str]) -> None:
        """Write what kube-scheduler writes: the condition that says that nothing fits, anew where its message changes,
        and no node that was named in vain."""
        message = f"0/2 nodes are available: {', '.join(sorted(set(reasons)))}." if self._is_sampled else ALONE
        known = [condition.get("message") for condition in pod["status"].get("conditions") or ()]
        status: dict[str, Any] = {}
        if not known or (self._is_sampled and known != [message]):
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            status["conditions"] = [condition]
        if pod["status"].get("nominatedNodeName"):
            status["nominatedNodeName"] = None
        path = f"{PODS}/{pod['metadata']['name']}"
        if status:
            self._server.patch(path, {"status": status}, uid=pod["metadata"]["uid"])

    def _pause(self, name: str) -> float:
        return self._weather.between(f"backoff {name}", *BACKOFF_SECONDS)


def _pinned_to(pod: Object, nodes: list[str]) -> list[str]:
    """Return the nodes that the pod's affinity names; all where it names none."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity", {}).get(required, {})
    fields = [one for term in affinity.get("nodeSelectorTerms", ()) for one in term.get("matchFields", ())]
    return fields[0]["values"] if fields else nodes
