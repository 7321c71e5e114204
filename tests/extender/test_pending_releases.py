"""The wait for GPUs that will soon be free: it helps pods that would fit, and delays no pod for long."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field

import pytest

from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import ContainerState, ContainerStatus, Pod, PodStatus, Terminated
from atoll.cluster.pods import holder_of
from atoll.cluster.requests import Rejection, request_of
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import WatchedKind
from extender.pending_releases import DISTRUST_SECONDS, HOLD_SECONDS, LAG_SECONDS, PendingReleases
from tests.builders import make_allocation, make_lease, make_pod, make_report
from tests.fakes.clock import ManualClock, settle

NODES = ("n1", "n2")


def ended(pod: Pod) -> Pod:
    """Return the pod as kubelet leaves it: terminal, its container terminated."""
    statuses = (ContainerStatus("main", ContainerState(terminated=Terminated())),)
    status = PodStatus(phase="Succeeded", container_statuses=statuses)
    return Pod(pod.metadata, pod.spec, status)


@dataclass
class HeldMachines:
    """Two machines of 4 GPUs, all held by pods of 1 GPU on n1 and by one pod of 4 on n2."""

    clock: ManualClock = field(default_factory=ManualClock)
    ledger: Ledger = field(default_factory=Ledger)
    pods: dict[str, Pod] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.endings = PendingReleases(self.ledger, self.clock)
        for node in NODES:
            self.ledger.put_report(make_report(node, "t4-4"))
            self.ledger.put_heartbeat(node, self.clock.monotonic_seconds(), 1e6)
        for number in range(4):
            self.hold(f"single-{number}", "n1", number)
        self.hold("whole", "n2", 0, 1, 2, 3)

    def hold(self, name: str, node: str, *ids: int) -> None:
        """Put a running pod with its Leases."""
        pod = make_pod(name, gpus=len(ids), node=node, allocation=make_allocation(node, *ids), phase="Running")
        self.pods[name] = pod
        self.ledger.put_pod(pod)
        for number in ids:
            self.ledger.put_lease(make_lease(node, number, holder=holder_of(pod)))

    def end(self, name: str) -> None:
        """Let the watch show that a pod has ended."""
        pod = ended(self.pods[name])
        self.ledger.put_pod(pod)
        self.endings.observe(WatchedKind.POD, Change(ChangeKind.MODIFIED, pod))

    def free(self, name: str) -> None:
        """Let the watch show that the controllers deleted the pod's Leases."""
        for record in self.ledger.leases_of(self.pods[name].metadata.uid):
            lease = make_lease(record.node, record.device_id)
            self.ledger.drop_lease(record.lease_name)
            self.endings.observe(WatchedKind.LEASE, Change(ChangeKind.DELETED, lease))

    def ask(self, gpus: int, nodes: tuple[str, ...] = NODES) -> asyncio.Task[bool]:
        """Ask for a pod of so many GPUs."""
        request = request_of(make_pod("asker", gpus=gpus), None)
        assert not isinstance(request, Rejection)
        work: Awaitable[bool] = self.endings.wait(nodes, request)
        return asyncio.ensure_future(work)


@pytest.fixture
async def world() -> HeldMachines:
    return HeldMachines()


async def test_waits_until_the_last_lease_of_an_ended_pod_is_gone(world: HeldMachines) -> None:
    """A pod that fits once the Leases go is not refused before."""
    world.end("whole")
    asked = world.ask(4)
    await settle()
    assert not asked.done()

    world.free("whole")

    assert await asked


async def test_waits_for_news_of_an_end_that_kube_scheduler_heard_first(world: HeldMachines) -> None:
    """Nodes offered that are full by our count say that kube-scheduler knows of an end."""
    asked = world.ask(1)
    await settle()
    world.end("single-2")
    await settle()
    assert not asked.done()
    world.free("single-2")

    assert await asked


async def test_gives_up_when_the_leases_stay_and_then_does_not_wait_for_a_while(world: HeldMachines) -> None:
    """Without controllers kube-scheduler is held up once in a while, not for every pod."""
    world.end("single-0")
    asked = world.ask(1)
    await world.clock.advance(HOLD_SECONDS)
    assert not await asked

    world.end("single-1")
    assert not await world.ask(1)
    await world.clock.advance(DISTRUST_SECONDS)
    world.end("single-2")
    again = world.ask(1)
    await settle()
    assert not again.done()
    world.free("single-2")
    assert await again


async def test_gives_up_soon_when_no_end_is_heard_of(world: HeldMachines) -> None:
    """Counts that differ for good (a GPU in doubt, a cordon) hold up one call in a while, and shortly."""
    asked = world.ask(1)
    await world.clock.advance(2 * LAG_SECONDS)
    assert not await asked

    assert not await world.ask(1)


@pytest.mark.parametrize(
    ("gpus", "nodes"),
    [(4, ("n1",)), (1, ("n2",)), (5, NODES)],
    ids=["still too few", "on a node that was not offered", "more than any machine has"],
)
async def test_never_waits_for_an_end_that_does_not_help(
    world: HeldMachines, gpus: int, nodes: tuple[str, ...]
) -> None:
    """A pod that would not fit even then is refused without waiting for those Leases."""
    world.end("single-0")
    asked = world.ask(gpus, nodes)
    await world.clock.advance(2 * LAG_SECONDS)

    assert asked.done()
    assert not asked.result()


async def test_phase_alone_is_no_end(world: HeldMachines) -> None:
    """Somebody who writes the phase by hand proves nothing, and nobody waits for Leases that stay."""
    pod = world.pods["single-0"]
    forged = Pod(pod.metadata, pod.spec, PodStatus(phase="Failed"))
    world.ledger.put_pod(forged)
    world.endings.observe(WatchedKind.POD, Change(ChangeKind.MODIFIED, forged))
    asked = world.ask(1)
    await world.clock.advance(2 * LAG_SECONDS)

    assert asked.done()
    assert not asked.result()
