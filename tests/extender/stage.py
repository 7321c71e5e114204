"""A node with GPUs on a real control plane, and binders behind a proxy that can apply faults to any request.

Only network and kubelet are simulated: Leases, Bindings and watches are the API server's.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from atoll.api import names
from atoll.api.claims import VisibleDevices
from atoll.api.times import format_microtime
from atoll.cluster.allocations import Allocation, bound_allocation
from atoll.cluster.leases import lease_body, reserved_for
from atoll.cluster.objects import Lease, Pod, decode_lease, decode_pod
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import NotFound
from atoll.kube.mirror import ClusterMirror
from atoll.service.clock import SystemClock
from extender.binder import Binder, BinderSettings
from extender.wire import BindCall
from tests.builders import creatable, pod_json, report_json, uuid_of
from tests.fakes.fault_proxy import FaultProxy

NAMESPACE = "default"
WAIT_SECONDS = 120.0
ANSWER_SECONDS = 6.0


@dataclass
class Replica:
    """One extender: its mirror, its binder, and the proxy through which both see the API server."""

    proxy: FaultProxy
    mirror: ClusterMirror
    binder: Binder
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, question: Callable[[], bool], what: str) -> None:
        """Wait until the mirror's changes make the answer true."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not question():
                self.changed.clear()
                try:
                    await self.changed.wait()
                except TimeoutError:
                    raise AssertionError(f"never seen: {what}") from None

    async def knows(self, pod: Pod) -> None:
        """Wait until the pod is in the ledger."""
        await self.until(lambda: pod.metadata.uid in self.mirror.ledger.pods, f"pod {pod.metadata.name}")

    async def bind(self, pod: Pod, node: str) -> str:
        """Bind as kube-scheduler asks for it."""
        return await self.binder.bind(BindCall(pod.metadata.name, pod.metadata.namespace, pod.metadata.uid, node))


class ExtenderHarness:
    """The objects of one test. `api` is the administrator, past every proxy."""

    def __init__(self, kubeconfig: Path, folder: Path, api: ApiClient) -> None:
        self._kubeconfig = kubeconfig
        self._folder = folder
        self._stack = AsyncExitStack()
        self._nodes: list[str] = []
        self.api = api
        self.name = uuid4().hex[:8]

    @classmethod
    @asynccontextmanager
    async def open(cls, kubeconfig: Path, folder: Path) -> AsyncIterator["ExtenderHarness"]:
        """Give a stage; afterwards nothing of it is left."""
        async with await ApiClient.connect(kubeconfig, requests_per_second=1000, burst=1000) as api:
            stage = cls(kubeconfig, folder, api)
            try:
                async with stage._stack:
                    yield stage
            finally:
                await stage._clear()

    async def add_node(self, suffix: str = "a", profile: str = "dgx1-v100", **report: Any) -> str:
        """Register a node with its report and a fresh heartbeat; return its name."""
        node = f"{self.name}-{suffix}"
        self._nodes.append(node)
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}
        uid = orjson.loads(await self.api.create(paths.nodes(), body))["metadata"]["uid"]
        status = report_json(node, profile, node_uid=uid, **report)
        await self.api.create(paths.gpunodestatuses(), {**status, "metadata": {"name": node}})
        await self.api.patch(paths.gpunodestatuses(node, "status"), {"status": status["status"]})
        heartbeat = {"holderIdentity": node, "leaseDurationSeconds": 3600, "renewTime": self.now()}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": node}, "spec": heartbeat}
        await self.api.create(paths.leases(names.HEARTBEAT_NAMESPACE), lease)
        return node

    async def add_replica(self, *, answer_seconds: float = ANSWER_SECONDS) -> Replica:
        """Start an extender's mirror and binder; return it when it has seen every node of the stage."""
        proxy = await self._stack.enter_async_context(FaultProxy(self._kubeconfig).running())
        folder = self._folder / uuid4().hex
        folder.mkdir()
        kubeconfig = proxy.client_kubeconfig(folder)
        client = await self._stack.enter_async_context(
            await ApiClient.connect(kubeconfig, requests_per_second=1000, burst=1000)
        )
        clock = SystemClock()
        mirror = ClusterMirror(client, clock)
        settings = BinderSettings(answer_seconds, reservation_seconds=60.0, default_mode=VisibleDevices.UUID)
        replica = Replica(proxy, mirror, Binder(client, mirror, clock, settings, new_token=lambda: uuid4().hex))
        mirror.on_change(lambda _kind, _change: replica.changed.set())
        running = asyncio.create_task(mirror.run())
        self._stack.push_async_callback(_end, running)
        self._stack.push_async_callback(replica.binder.drain)
        self._stack.callback(proxy.heal)
        await mirror.synced()
        await replica.until(lambda: set(self._nodes) <= set(mirror.ledger.nodes), "the reports")
        return replica

    async def add_pod(self, name: str = "p", gpus: int | Mapping[str, int] = 1, **options: Any) -> Pod:
        """Create a pod that waits."""
        body = creatable(pod_json(f"{self.name}-{name}", namespace=NAMESPACE, gpus=gpus, **options))
        return decode_pod(await self.api.create(paths.pods(NAMESPACE), body))

    async def reserve(self, node: str, *ids: int) -> str:
        """Hold GPUs of a node for a GpuReservation of the stage, as the controllers do; return its name."""
        name = f"{self.name}-r"
        body = {"apiVersion": names.API_VERSION, "kind": "GpuReservation", "metadata": {"name": name}}
        spec = {"shape": {"count": len(ids)}, "namespaces": [NAMESPACE]}
        made = orjson.loads(await self.api.create(paths.gpureservations(), {**body, "spec": spec}))
        await self.api.patch(paths.gpureservations(name, "status"), {"status": {"phase": "Active"}})
        self._stack.push_async_callback(self.api.delete, paths.gpureservations(name))
        for number in ids:
            reserved = reserved_for(f"{name}/{made['metadata']['uid']}", node, "", self.now())
            lease = lease_body(reserved, number, uuid_of(node, number))
            await self.api.create(paths.leases(names.SYSTEM_NAMESPACE), lease)
        return name

    async def pod(self, pod: Pod) -> Pod:
        """Return the pod as it is now."""
        return decode_pod(await self.api.get(paths.pods(NAMESPACE, pod.metadata.name)))

    async def allocation(self, pod: Pod) -> Allocation | None:
        """Return what the pod was given."""
        return bound_allocation(await self.pod(pod))

    async def touch(self, pod: Pod, filler: str = "") -> None:
        """Change the pod, so that its resourceVersion moves; `filler` becomes the value of an annotation."""
        changes = {"labels": {"at": uuid4().hex}, "annotations": {"filler": filler}}
        await self.api.patch(paths.pods(NAMESPACE, pod.metadata.name), {"metadata": changes})

    async def delete(self, pod: Pod) -> None:
        """Remove the pod at once."""
        await self.api.delete(paths.pods(NAMESPACE, pod.metadata.name), {"gracePeriodSeconds": 0})

    async def leases(self) -> dict[str, Lease]:
        """Return the GPU Leases of the stage's nodes by device uuid."""
        listing = await self.api.list(paths.leases(names.SYSTEM_NAMESPACE), decode_lease)
        return {
            lease.metadata.annotations[names.LEASE_DEVICE_UUID]: lease
            for lease in listing.items
            if lease.metadata.annotations.get(names.LEASE_NODE) in self._nodes
        }

    async def holders(self) -> dict[str, str]:
        """Return the uid of the pod that holds each leased device, by device uuid."""
        return {uuid: lease.spec.holder_identity.split("/")[-1] for uuid, lease in (await self.leases()).items()}

    async def check_holds_exactly(self, pod: Pod) -> Allocation:
        """Assert that the pod is bound, and that its annotations and its Leases name the same uuids; return those."""
        allocation = await self.allocation(pod)
        assert allocation is not None
        held = {uuid for uuid, uid in (await self.holders()).items() if uid == pod.metadata.uid}
        assert held == set(allocation.uuids)
        return allocation

    async def take_over(self, pod: Pod) -> None:
        """Take back the reservations of an unbound pod as the controllers do: mark, move the pod's version, delete."""
        held = [
            lease for lease in (await self.leases()).values() if lease.spec.holder_identity.endswith(pod.metadata.uid)
        ]
        for lease in held:
            path = paths.leases(names.SYSTEM_NAMESPACE, lease.metadata.name)
            await self.api.patch(path, {"metadata": {"annotations": {names.LEASE_FENCED: "true"}}})
        await self.touch(pod)
        assert not (await self.pod(pod)).spec.node_name
        for lease in held:
            await self.api.delete(paths.leases(names.SYSTEM_NAMESPACE, lease.metadata.name))

    async def sweep(self, pods: list[Pod]) -> None:
        """Delete the Leases that no annotation of these pods names, as controllers do when no bind is under way."""
        allocations = [await self.allocation(pod) for pod in pods]
        used = {uuid for allocation in allocations if allocation is not None for uuid in allocation.uuids}
        for uuid, lease in (await self.leases()).items():
            if uuid not in used:
                await self.api.delete(paths.leases(names.SYSTEM_NAMESPACE, lease.metadata.name))

    async def check_no_double_use(self) -> int:
        """Assert that no uuid stands in two live pods; return how many devices are in use."""
        listing = await self.api.list(paths.pods(NAMESPACE), decode_pod)
        allocations = [bound_allocation(pod) for pod in listing.items if pod.spec.node_name in self._nodes]
        uuids = [uuid for allocation in allocations if allocation is not None for uuid in allocation.uuids]
        assert len(set(uuids)) == len(uuids), f"a GPU is used twice: {sorted(uuids)}"
        return len(uuids)

    @staticmethod
    def now() -> str:
        """Return the time as Leases carry it."""
        return format_microtime(SystemClock().now())

    async def _clear(self) -> None:
        pods = await self.api.list(paths.pods(NAMESPACE), decode_pod)
        for pod in pods.items:
            if pod.metadata.name.startswith(self.name):
                await _ignoring_absence(self.delete(pod))
        for lease in (await self.leases()).values():
            await _ignoring_absence(self.api.delete(paths.leases(names.SYSTEM_NAMESPACE, lease.metadata.name)))
        for node in self._nodes:
            await _ignoring_absence(self.api.delete(paths.leases(names.HEARTBEAT_NAMESPACE, node)))
            await _ignoring_absence(self.api.delete(paths.gpunodestatuses(node)))
            await _ignoring_absence(self.api.delete(paths.nodes(node)))


async def _ignoring_absence(deletion: Awaitable[object]) -> None:
    with contextlib.suppress(NotFound):
        await deletion


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
