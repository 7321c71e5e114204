"""Small random clusters and gangs for hypothesis, and larger ones built by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from tests.oracles.gangs import ReferenceCluster
from topology.device_requests import DeviceRequest, Interconnect, Policy
from topology.gangs.model import Gang, Host, Limit, Mode, Placement, PodSet, Slice, TopologyRequest
from topology.gangs.snapshot import HostSnapshot, snapshot
from topology.profiles import profile

LEVELS = ("block", "rack")
MACHINES = tuple(profile(name).machine for name in ("rtx8000x4-bridged", "gb200-tray", "hgx-a100-4-2nic"))
ASKS = (
    None,
    None,
    DeviceRequest(1),
    DeviceRequest(2),
    DeviceRequest(2, Policy.ISLAND),
    DeviceRequest(2, interconnect=Interconnect.NVLINK),
    DeviceRequest(3),
    DeviceRequest(4),
)


@st.composite
def worlds(draw: st.DrawFn, *, hosts_max: int = 5) -> ReferenceCluster:
    """Draw hosts in up to two blocks of up to three racks, with little free capacity."""
    count = draw(st.integers(1, hosts_max))
    hosts = []
    for number in range(count):
        machine = draw(st.sampled_from(MACHINES))
        path = (f"b{draw(st.integers(0, 1))}", f"r{draw(st.integers(0, 2))}")
        free = {"cpu": draw(st.integers(0, 4)), "pods": draw(st.sampled_from((1, 3, 9)))}
        mask = draw(st.integers(0, machine.full))
        hosts.append(Host(f"h{number}", path, free, machine, mask, draw(st.sampled_from(("x", "y")))))
    return ReferenceCluster(LEVELS, tuple(hosts))


@st.composite
def lean_worlds(draw: st.DrawFn) -> ReferenceCluster:
    """Draw hosts where only the number of pods counts, for many rack shapes in few examples."""
    hosts = [
        Host(f"h{number}", (f"b{draw(st.integers(0, 1))}", f"r{draw(st.integers(0, 2))}"), {"pods": size})
        for number, size in enumerate(draw(st.lists(st.integers(0, 3), min_size=3, max_size=6)))
    ]
    return ReferenceCluster(LEVELS, tuple(hosts))


@st.composite
def lean_gangs(draw: st.DrawFn, world: ReferenceCluster) -> Gang:
    """Draw pods that need only a pod slot: in slices, limited per domain, or with a leader."""
    count = draw(st.integers(1, 7))
    grouped = draw(st.booleans())
    limits = draw(st.lists(st.builds(Limit, st.sampled_from(("host", *LEVELS)), st.integers(1, 4)), max_size=2))
    excluded = draw(st.sets(st.sampled_from([host.name for host in world.hosts]), max_size=2))
    workers = PodSet(
        "workers",
        max(count, 2) if grouped else count,
        {"pods": 1},
        request=draw(requests(max(count, 2) if grouped else count)),
        limits=tuple(limits),
        group="g" if grouped else "",
    )
    leader = PodSet("leader", 1, {"pods": 1}, excluded=dict.fromkeys(excluded, "cordoned"), group="g")
    return Gang((workers, leader) if grouped else (workers,))


@st.composite
def requests(draw: st.DrawFn, count: int) -> TopologyRequest:
    """Draw any request that `count` members can meet in principle."""
    levels = [*LEVELS, "host"]
    mode = draw(st.sampled_from((Mode.REQUIRED, Mode.PREFERRED, Mode.UNCONSTRAINED, Mode.AUTO)))
    level = draw(st.sampled_from(levels)) if mode in (Mode.REQUIRED, Mode.PREFERRED) else ""
    below = levels[levels.index(level) :] if level else []
    parts: list[Slice] = []
    size = count
    for name in below:
        divisors = [number for number in range(1, size + 1) if size % number == 0]
        if draw(st.booleans()):
            size = draw(st.sampled_from(divisors)) if divisors else 1
            parts.append(Slice(name, size))
    return TopologyRequest(mode, level, tuple(parts))


@st.composite
def pod_sets(
    draw: st.DrawFn, world: ReferenceCluster, *, name: str = "workers", count_max: int = 5, plain: bool = False
) -> PodSet:
    """Draw members with small requests, which may exclude some hosts or be limited per domain."""
    count = draw(st.integers(1, count_max))
    excluded = draw(st.sets(st.sampled_from([host.name for host in world.hosts]), max_size=1))
    limits = (
        draw(st.sampled_from(((), (), (Limit("host", 1),), (Limit("rack", 2),), (Limit("block", 3),))))
        if not plain
        else ()
    )
    return PodSet(
        name,
        count,
        needs={"cpu": draw(st.integers(0, 2)), "pods": 1},
        ask=draw(st.sampled_from(ASKS)),
        request=TopologyRequest() if plain else draw(requests(count)),
        admitted=draw(st.sampled_from(({}, {}, {"y": (0b0011, 0b1100)}))),
        excluded=dict.fromkeys(excluded, "cordoned"),
        limits=limits,
    )


@st.composite
def gangs(draw: st.DrawFn, world: ReferenceCluster) -> Gang:
    """Draw one pod set, or workers with one leader."""
    workers = draw(pod_sets(world))
    if not draw(st.booleans()):
        return Gang((workers,))
    leader = draw(pod_sets(world, name="leader", count_max=1, plain=True))
    apart = frozenset(draw(st.sampled_from(((), (), ("workers",)))))
    leader = PodSet("leader", 1, leader.needs, leader.ask, excluded=leader.excluded, apart=apart, group="g")
    grouped = PodSet(
        "workers",
        max(workers.count, 2) if not workers.request.slices else workers.count,
        workers.needs,
        workers.ask,
        workers.request,
        admitted=workers.admitted,
        excluded=workers.excluded,
        limits=workers.limits,
        group="g",
    )
    if grouped.count < 2:
        return Gang((workers,))
    return Gang((leader, grouped) if draw(st.booleans()) else (grouped, leader))


def snapshot_of(world: ReferenceCluster) -> HostSnapshot:
    """Convert a cluster to the search's snapshot."""
    return snapshot(world.levels, world.hosts)


def counts_of(placement: Placement) -> dict[str, dict[str, int]]:
    """Return members per pod set and host."""
    counts: dict[str, dict[str, int]] = {}
    for assignment in placement.assignments:
        there = counts.setdefault(assignment.pod_set, {})
        for member in assignment.members:
            there[member.host] = there.get(member.host, 0) + 1
    return counts


def hosts_of(placement: Placement, pod_set: str) -> list[str]:
    """Return hosts by rank."""
    found = next(one for one in placement.assignments if one.pod_set == pod_set)
    return [member.host for member in found.members]


def grid(
    racks: Mapping[tuple[str, str], int] | Sequence[tuple[str, str]],
    *,
    machine: str = "dgx-h100",
    free: Mapping[str, int] | None = None,
) -> HostSnapshot:
    """Return empty machines: the given number of hosts per (block, rack), named block-rack-number."""
    shape = profile(machine).machine
    numbers = racks if isinstance(racks, Mapping) else dict.fromkeys(racks, 4)
    left = free if free is not None else {"cpu": 128_000, "memory": 1 << 40, "pods": 110}
    return snapshot(
        LEVELS,
        [
            Host(f"{block}-{rack}-{number}", (block, rack), left, shape, shape.full, machine)
            for (block, rack), count in numbers.items()
            for number in range(count)
        ],
    )
