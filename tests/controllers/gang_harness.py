"""Harness for gangs: terms of leadership over one API server in memory, and the parts of Kubernetes around Atoll.

A term ends after a number of writes, like a killed process: between two writes, or in the middle of one (sent, never
answered). The next term starts only with the server's objects. The test acts as kube-scheduler and kubelet: it binds
ungated pods and makes them ready.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atoll.api import names
from atoll.api.times import format_microtime
from atoll.cluster.allocations import Allocation, allocation_annotations
from atoll.kube.errors import Unanswered
from tests.builders import pod_json, report_json
from tests.controllers.harness import (
    CLAIMS,
    HEARTBEATS,
    LEASES,
    PODS,
    REPORTS,
    FaultyApi,
    InMemoryServer,
    Term,
    leading,
    strip_version,
)  # fmt: skip
from tests.fakes.api_server import Object
from tests.fakes.clock import until

GANGS = "/apis/gpu.scheduling/v1/namespaces/team/gpugangs"
JOBS = "/apis/batch/v1/namespaces/team/jobs"
TOPOLOGIES = "/apis/gpu.scheduling/v1/topologies"
GATES = [{"name": names.GANG_GATE}]
FULL = "2026-01-01T00:00:00Z"


class Killed(BaseException):
    """The process was killed."""


@dataclass
class MortalApi(FaultyApi):
    """Raises Killed at write number `fails_at`: before it is sent or, with `is_after`, before it is answered."""

    dead: asyncio.Event = field(default_factory=asyncio.Event)

    async def _write(self, method: str, path: str, send: Callable[[], Any]) -> bytes:
        if self.dead.is_set():
            raise Unanswered("dead", path=path, sent=False)
        self.writes.append((method, path))
        if len(self.writes) == self.fails_at:
            self.dead.set()
            if self.is_after:
                await send()
            raise Unanswered("killed", path=path, sent=self.is_after)
        answer: bytes = await send()
        return answer


class GangHarness:
    """The server, and actions of users, kube-scheduler and kubelet on it."""

    def __init__(self, server: InMemoryServer) -> None:
        self.server = server

    def add_node(self, name: str, *, labels: dict[str, str] | None = None, gpus: int = 8, **options: Any) -> None:
        """Add a node with GPUs (default: eight), its report and its heartbeat."""
        allocatable = {"cpu": "64", "memory": "512Gi", "pods": "110", names.GPU_RESOURCE: str(gpus)}
        metadata = {"name": name, "uid": f"uid-of-{name}", "labels": labels or {}}
        self.server.put(f"{REPORTS}/{name}", strip_version(report_json(name, **options)))
        beat = {"holderIdentity": name, "leaseDurationSeconds": 36_000,
                "renewTime": format_microtime(datetime.now(UTC))}  # fmt: skip
        self.server.put(f"{HEARTBEATS}/{name}", {"metadata": {"name": name}, "spec": beat})
        self.server.put(f"/api/v1/nodes/{name}", {"metadata": metadata, "status": {"allocatable": allocatable}})

    def add_gang(self, name: str, count: int, **spec: Any) -> None:
        """Create a GpuGang with one pod set."""
        body = {"metadata": {"name": name, "creationTimestamp": FULL},
                "spec": {"podSets": [{"name": "workers", "count": count}], **spec}}  # fmt: skip
        self.server.put(f"{GANGS}/{name}", body)

    def add_member(self, gang: str, number: int, *, gpus: int = 4, annotations: Any = None, **options: Any) -> str:
        """Create a gated member; return its name."""
        name = f"{gang}-{number}"
        options.setdefault("schedulingGates", GATES)
        body = strip_version(
            pod_json(name, gpus=gpus, annotations={names.GANG: gang, **(annotations or {})}, **options)
        )
        self.server.put(f"{PODS}/{name}", body)
        return name

    def pod(self, name: str) -> Object:
        """Return a pod."""
        return self.server.objects[f"{PODS}/{name}"]

    def gang(self, name: str) -> Object:
        """Return a gang."""
        return self.server.objects[f"{GANGS}/{name}"]

    def reason(self, name: str, kind: str = names.CONDITION_ADMITTED) -> str:
        """Return the reason of a gang's condition; empty if there is none."""
        found = self.server.objects.get(f"{GANGS}/{name}", {}).get("status", {}).get("conditions", [])
        return next((str(one["reason"]) for one in found if one["type"] == kind), "")

    def is_gated(self, name: str) -> bool:
        """True if a pod has Atoll's gate."""
        return GATES[0] in self.pod(name)["spec"].get("schedulingGates", [])

    def leases_of(self, name: str) -> list[Object]:
        """Return a pod's Leases."""
        uid = self.pod(name)["metadata"]["uid"] if f"{PODS}/{name}" in self.server.objects else f"uid-of-{name}"
        return [
            one
            for path, one in self.server.objects.items()
            if path.startswith(LEASES + "/gpu-") and one["spec"]["holderIdentity"].endswith(f"/{uid}")
        ]

    def held(self) -> int:
        """Return the number of held GPUs."""
        return sum(path.startswith(LEASES + "/gpu-") for path in self.server.objects)

    def change_pod(self, name: str, **parts: Any) -> None:
        """Merge parts into a pod, one level deep."""
        pod = self.pod(name)
        merged = {key: {**pod.get(key, {}), **value} for key, value in parts.items()}
        metadata = {key: value for key, value in {**pod["metadata"], **merged.get("metadata", {})}.items()
                    if key != "resourceVersion"}  # fmt: skip
        self.server.put(f"{PODS}/{name}", {**pod, **merged, "metadata": metadata})

    def bind(self, name: str) -> None:
        """Bind an ungated pod to the GPUs that it holds, as extender and kube-scheduler do."""
        leases = sorted(
            self.leases_of(name), key=lambda one: int(one["metadata"]["annotations"][names.LEASE_DEVICE_ID])
        )
        notes = [one["metadata"]["annotations"] for one in leases]
        node = notes[0][names.LEASE_NODE]
        ids = tuple(int(one[names.LEASE_DEVICE_ID]) for one in notes)
        allocation = Allocation(node, ids, tuple(one[names.LEASE_DEVICE_UUID] for one in notes))
        annotations = {**self.pod(name)["metadata"]["annotations"], **allocation_annotations(allocation, ())}
        self.change_pod(name, metadata={"annotations": annotations}, spec={"nodeName": node})

    def make_ready(self, name: str, *, ready: bool = True) -> None:
        """Make a bound pod run and set its Ready condition."""
        condition = {"type": "Ready", "status": str(ready)}
        self.change_pod(name, status={"phase": "Running", "conditions": [condition]})

    def end(self, name: str, phase: str = "Succeeded") -> None:
        """End a pod as kubelet does: terminal phase, terminated containers, and kubelet's conditions."""
        code = 0 if phase == "Succeeded" else 1
        state = {"name": "main", "state": {"terminated": {"exitCode": code}}}
        ready = {"type": "Ready", "status": "False", "reason": f"Pod{'Completed' if code == 0 else 'Failed'}"}
        self.change_pod(name, status={"phase": phase, "containerStatuses": [state], "conditions": [ready]})

    def delete(self, name: str) -> None:
        """Delete a pod at once."""
        self.server.remove(f"{PODS}/{name}")

    def run_all(self, gang: str, count: int) -> None:
        """Bind every member and make it ready."""
        for number in range(count):
            self.bind(f"{gang}-{number}")
            self.make_ready(f"{gang}-{number}")


@asynccontextmanager
async def cluster(*nodes: str, **options: Any) -> AsyncIterator[GangHarness]:
    """Run a server with nodes of eight GPUs."""
    async with InMemoryServer().running() as server:
        made = GangHarness(server)  # type: ignore[arg-type]
        for node in nodes or ("n1",):
            made.add_node(node, **options)
        yield made


def term(
    made: GangHarness, folder: Path, *, dies_at: int = 0, is_after: bool = False, settings: dict[str, Any] | None = None
) -> AbstractAsyncContextManager[Term]:
    """Run mirror and loops as leader until the block ends."""
    return leading(
        made.server, folder, lambda client: MortalApi(client, dies_at, is_after), with_gangs=True, settings=settings
    )


async def settled(running: Term, condition: Callable[[], object], *, seconds: float = 8.0) -> None:
    """Wait for a condition; resync now and then."""
    for _ in range(4):
        try:
            await until(condition, timeout_seconds=seconds / 4)
        except TimeoutError:
            running.resync()
        else:
            return
    await until(condition, timeout_seconds=seconds)


__all__ = ["CLAIMS", "GANGS", "JOBS", "TOPOLOGIES", "GangHarness", "Term", "cluster", "settled", "term"]
