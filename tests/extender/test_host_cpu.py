"""The fleet's free CPU: that of the nodes minus the requests of all pods on them."""

from typing import Any

import orjson
import pytest

from atoll.cluster.fleet import Fleet
from atoll.cluster.objects import Node, Pod, decode_node
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import WatchedKind
from extender.host_cpu import HostCpu
from tests.builders import make_pod

ADDED, MODIFIED, DELETED = ChangeKind.ADDED, ChangeKind.MODIFIED, ChangeKind.DELETED


class RecordingFleet(Fleet):
    """Keeps what it is told: (free, allocatable) by node, and asks."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu: dict[str, tuple[int, int]] = {}
        self.asks: list[tuple[int, int]] = []

    def put_cpu(self, name: str, *, free_milli: int, allocatable_milli: int) -> None:
        """Keep it."""
        self.cpu[name] = free_milli, allocatable_milli

    def forget_cpu(self, name: str) -> None:
        """Forget it."""
        del self.cpu[name]

    def count_ask(self, gpus: int, cpu_milli: int) -> None:
        """Keep it."""
        self.asks.append((gpus, cpu_milli))


def node(name: str = "n1", cpu: str = "16") -> Node:
    """Return a node with this much allocatable CPU."""
    return decode_node(orjson.dumps({"metadata": {"name": name}, "status": {"allocatable": {"cpu": cpu}}}))


def pod(name: str = "p", *, cpu: str = "4", on: str = "n1", **options: Any) -> Pod:
    """Return a pod without GPUs that asks for this much CPU."""
    return make_pod(name, gpus=None, node=on, resources={"requests": {"cpu": cpu}}, **options)


@pytest.fixture
def told() -> RecordingFleet:
    """An empty fleet."""
    return RecordingFleet()


@pytest.fixture
def cpu(told: RecordingFleet) -> HostCpu:
    """One node of 16 cores."""
    listener = HostCpu(told)
    listener.observe(WatchedKind.NODE, Change(ADDED, node()))
    return listener


def test_pods_take_cpu_until_they_end(cpu: HostCpu, told: RecordingFleet) -> None:
    """A bound pod counts once, a finished or deleted one no more, and one that waits takes nothing."""
    waiting, bound, done = pod(on=""), pod(), pod(phase="Succeeded")
    seen = []
    for change in (
        Change(ADDED, waiting),
        Change(MODIFIED, bound, waiting),
        Change(MODIFIED, bound, bound),
        Change(ADDED, pod("q", cpu="500m")),
        Change(MODIFIED, done, bound),
        Change(DELETED, done, done),
        Change(DELETED, pod("q", cpu="500m")),
    ):
        cpu.observe(WatchedKind.POD, change)
        seen.append(told.cpu["n1"][0])

    assert seen == [16_000, 12_000, 12_000, 11_500, 15_500, 15_500, 16_000]


def test_pod_that_is_resized_counts_by_its_new_size(cpu: HostCpu, told: RecordingFleet) -> None:
    """A change of the requests of a running pod counts."""
    cpu.observe(WatchedKind.POD, Change(ADDED, pod()))
    cpu.observe(WatchedKind.POD, Change(MODIFIED, pod(cpu="6"), pod()))

    assert told.cpu["n1"] == (10_000, 16_000)


def test_pods_may_be_seen_before_their_node(told: RecordingFleet) -> None:
    """The order of lists does not matter."""
    listener = HostCpu(told)
    listener.observe(WatchedKind.POD, Change(ADDED, pod()))
    listener.observe(WatchedKind.NODE, Change(ADDED, node()))

    assert told.cpu == {"n1": (12_000, 16_000)}


def test_node_that_goes_is_forgotten_and_other_collections_do_not_matter(cpu: HostCpu, told: RecordingFleet) -> None:
    """A node without CPU in its status, or gone, has none."""
    cpu.observe(WatchedKind.LEASE, Change(ADDED, node("x")))
    cpu.observe(WatchedKind.NODE, Change(ADDED, node("odd", cpu="many")))
    cpu.observe(WatchedKind.NODE, Change(DELETED, node()))

    assert told.cpu == {}


def test_asks_are_counted_once_per_pod_with_gpus(cpu: HostCpu, told: RecordingFleet) -> None:
    """Pods without GPUs say nothing of the CPU that GPUs need, and those without CPU ask for none."""
    asking, modest = make_pod("g", gpus=2, overhead={"cpu": "3"}), make_pod("h", gpus=1)
    for change in (
        Change(ADDED, pod()),
        Change(ADDED, asking),
        Change(MODIFIED, asking, asking),
        Change(ADDED, modest),
    ):
        cpu.observe(WatchedKind.POD, change)

    assert told.asks == [(2, 3000), (1, 0)]
