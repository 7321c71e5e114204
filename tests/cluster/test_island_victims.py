"""Search for victims: the fewest, the least important, within budgets, and never without use.

The oracle tries every set of occupants and every set of GPUs, with islands from the machine's NVLink cells; it shares
no code with the search.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster.budgets import DisruptionBudgets, decode_budget
from atoll.cluster.island_victims import EXACT_MAX, PreemptionCandidate, demands_links, find_victims, lacks_only_links
from atoll.cluster.machines import NodeDevices
from atoll.cluster.requests import Request, request_of
from tests.builders import make_claim, make_devices, make_pod

MACHINES = ("h100-nvl-8", "h100-pcie-8-crossbridge", "l40s-8", "dgx1-v100")


def ask(count: int, **devices: Any) -> Request:
    """Return the request of a pod with this claim; policy island unless said otherwise."""
    claim = make_claim(count=count, **{"policy": "island", **devices})
    request = request_of(make_pod(claim=claim, gpus=count), claim)
    assert isinstance(request, Request)
    return request


def occupant(
    uid: str, *positions: int, priority: int = 0, since: str = "", budgets: tuple[str, ...] = ()
) -> PreemptionCandidate:
    """Return a pod that holds these positions."""
    return PreemptionCandidate(uid, sum(1 << position for position in positions), priority, since, budgets)


def uids(found: Any) -> set[str] | None:
    """Return who must go; None where nothing helps."""
    return None if found is None else {victim.uid for victim in found.victims}


# The oracle


def is_joined(devices: NodeDevices, positions: Sequence[int]) -> bool:
    """Tell whether the positions lie in one island, by flooding the machine over its NVLink cells or NUMA nodes."""
    machine = devices.machine
    linked = [
        {other for other in range(machine.count) if other != one and machine.links[one][other].startswith(("NV", "XG"))}
        for one in range(machine.count)
    ]
    if not any(linked):
        return len({machine.numa[position] for position in positions}) == 1
    reached, edge = {positions[0]}, [positions[0]]
    while edge:
        for other in linked[edge.pop()] - reached:
            reached.add(other)
            edge.append(other)
    return reached.issuperset(positions)


def would_fit(devices: NodeDevices, free: int, count: int) -> bool:
    """Tell whether some `count` free positions lie in one island."""
    positions = [position for position in range(len(devices.devices)) if free & devices.usable & 1 << position]
    return any(is_joined(devices, chosen) for chosen in combinations(positions, count))


def breaks(members: Sequence[PreemptionCandidate], allowed: Mapping[str, int]) -> bool:
    """Tell whether evicting all of them breaks some budget."""
    used: dict[str, int] = {}
    for member in members:
        for key in member.budgets:
            used[key] = used.get(key, 0) + 1
    return any(count > allowed[key] for key, count in used.items())


def every_set(occupants: Sequence[PreemptionCandidate]) -> list[tuple[PreemptionCandidate, ...]]:
    """Return all sets of occupants."""
    return [chosen for size in range(len(occupants) + 1) for chosen in combinations(occupants, size)]


def mask(members: Sequence[PreemptionCandidate]) -> int:
    """Return the positions of all of them."""
    return sum(member.mask for member in members)


def harm(members: Sequence[PreemptionCandidate], levels: Sequence[int]) -> tuple[int, ...]:
    """Return how many of each priority go, the highest first."""
    return tuple(sum(member.priority == level for member in members) for level in levels)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[NodeDevices, int, tuple[PreemptionCandidate, ...], int, dict[str, int]]:
    """Draw a machine, its free positions, occupants, a count, and what the budgets allow."""
    devices = make_devices("n1", draw(st.sampled_from(MACHINES)), sick=draw(st.sampled_from([(), (), (3,)])))
    owners = draw(st.lists(st.integers(-1, 5), min_size=8, max_size=8))  # -1: free, 5: somebody who may not go
    free = sum(1 << position for position, owner in enumerate(owners) if owner == -1)
    found = []
    for number in range(5):
        positions = [position for position, owner in enumerate(owners) if owner == number]
        budgets = tuple(draw(st.lists(st.sampled_from(["a", "b"]), unique=True, max_size=2)))
        priority, since = draw(st.integers(0, 2)), f"2026-01-0{draw(st.integers(1, 4))}T00:00:00Z"
        found.append(occupant(f"u{number}", *positions, priority=priority, since=since, budgets=budgets))
    allowed = {"a": draw(st.integers(0, 2)), "b": draw(st.integers(0, 2))}
    return devices, free, tuple(each for each in found if each.mask), draw(st.integers(2, 5)), allowed


@settings(max_examples=120, deadline=None)
@given(scenes())
def test_victims_are_those_of_brute_force(
    scene: tuple[NodeDevices, int, tuple[PreemptionCandidate, ...], int, dict[str, int]],
) -> None:
    """An answer exists exactly when one does; it gives an island, spares everybody it can, and breaks budgets last."""
    devices, free, occupants, count, allowed = scene
    found = find_victims(devices, free, ask(count), occupants, allowed=allowed)
    feasible = [chosen for chosen in every_set(occupants) if would_fit(devices, free | mask(chosen), count)]

    assert (found is not None) == bool(feasible)
    if found is None:
        return
    levels = sorted({each.priority for each in occupants}, reverse=True)
    keeping = [chosen for chosen in feasible if not breaks(chosen, allowed)]
    assert (found.violations == 0) == bool(keeping)
    assert not any(
        would_fit(devices, free | mask([each for each in found.victims if each is not spared]), count)
        for spared in found.victims
    )
    if keeping:
        assert harm(found.victims, levels) == min(harm(chosen, levels) for chosen in keeping)
    positions = found.candidate.choice.positions
    assert len(positions) == count
    assert is_joined(devices, positions)
    assert all((free | mask(found.victims)) & 1 << position for position in positions)


@settings(max_examples=40, deadline=None)
@given(scenes(), st.randoms(use_true_random=False))
def test_order_of_occupants_is_no_matter(
    scene: tuple[NodeDevices, int, tuple[PreemptionCandidate, ...], int, dict[str, int]], shuffler: Any
) -> None:
    """The same snapshot and the same request give the same victims."""
    devices, free, occupants, count, allowed = scene
    shuffled = list(occupants)
    shuffler.shuffle(shuffled)

    assert find_victims(devices, free, ask(count), shuffled, allowed=allowed) == find_victims(
        devices, free, ask(count), occupants, allowed=allowed
    )


PAIRS = "h100-nvl-8"
"""Eight cards, bridged in pairs 0-1, 2-3, 4-5, 6-7."""


@pytest.mark.parametrize(
    ("occupants", "allowed", "expected"),
    [
        pytest.param([occupant("a", 0), occupant("b", 2, 4, 6)], {}, {"a"}, id="the-fewest-pods-that-help"),
        pytest.param([occupant("a", 0, priority=5), occupant("b", 2)], {}, {"b"}, id="the-lower-priority"),
        pytest.param(
            [occupant("a", 0, since="2026-01-01T00:00:00Z"), occupant("b", 2, since="2026-02-01T00:00:00Z")],
            {},
            {"b"},
            id="the-younger-of-equals",
        ),
        pytest.param([occupant("a", 0), occupant("b", 2)], {}, {"a"}, id="the-uid-among-twins"),
        pytest.param(
            [occupant("a", 0, budgets=("team/x",)), occupant("b", 2, priority=1)],
            {"team/x": 0},
            {"b"},
            id="rather-a-higher-priority-than-a-broken-budget",
        ),
        pytest.param([occupant("a", 0, budgets=("team/x",))], {"team/x": 0}, {"a"}, id="a-broken-budget-if-need-be"),
        pytest.param([], {}, None, id="nobody-to-go"),
    ],
)
def test_who_goes(occupants: list[PreemptionCandidate], allowed: dict[str, int], expected: set[str] | None) -> None:
    """A pair is wanted where GPUs 1, 3, 5 and 7 are free: one of the four pairs must become whole."""
    devices = make_devices("n1", PAIRS)
    assert uids(find_victims(devices, 0b10101010, ask(2), occupants, allowed=allowed)) == expected


def test_broken_budget_is_counted() -> None:
    """The extender tells kube-scheduler how many victims' budgets it broke; the controllers take no such set."""
    devices = make_devices("n1", PAIRS)
    found = find_victims(
        devices, 0b10, ask(2), [occupant("a", 0, budgets=("team/x", "team/y"))], allowed={"team/x": 1, "team/y": 0}
    )
    assert found is not None
    assert found.violations == 1


def test_nobody_goes_where_the_pod_fits() -> None:
    """An empty set is an answer."""
    devices = make_devices("n1", PAIRS)
    assert uids(find_victims(devices, 0b11, ask(2), [occupant("a", 2)], allowed={})) == set()


def test_sick_gpu_is_no_reason_to_evict() -> None:
    """A pod on a sick GPU is left alone: its place would not be given out."""
    devices = make_devices("n1", PAIRS, sick=(0,))
    assert find_victims(devices, 0b10, ask(2), [occupant("a", 0)], allowed={}) is None


def test_many_small_pods_are_spared_one_by_one_and_the_result_says_so() -> None:
    """Above the exact limit the answer is bounded: minimal, and it still gives the GPUs."""
    devices = make_devices("n1", "dgx2-v100")
    occupants = [occupant(f"u{position:02}", position, priority=position % 3) for position in range(16)]
    assert len(occupants) > EXACT_MAX

    found = find_victims(devices, 0, ask(5), occupants, allowed={})

    assert found is not None
    assert found.bounded
    assert sorted(victim.priority for victim in found.victims) == [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        ({"policy": "island"}, True),
        ({"policy": "contiguous", "interconnect": "nvlink"}, True),
        ({"policy": "contiguous", "minBandwidthGBps": 20}, True),
        ({"policy": "contiguous"}, False),
        ({"policy": "packed"}, False),
        ({"policy": "spread"}, False),
        ({"policy": "contiguous", "interconnect": "pcie"}, False),
    ],
)
def test_only_a_claim_that_demands_links_is_worth_an_eviction(claim: dict[str, Any], *, expected: bool) -> None:
    """Whoever would take any GPUs waits for them; nobody is evicted for a better set."""
    assert demands_links(ask(2, **claim)) == expected
    assert not demands_links(ask(1, **claim))


def test_shortage_of_count_is_not_ours() -> None:
    """Where too few GPUs are free kube-scheduler preempts by count; the controllers act where only the links fail."""
    devices = make_devices("n1", PAIRS)
    assert lacks_only_links(devices, 0b10101010, ask(2))
    assert not lacks_only_links(devices, 0b10, ask(2))
    assert not lacks_only_links(devices, 0b11, ask(2))


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        (b'{"matchLabels":{"app":"x"}}', {"app": "x", "tier": "y"}, True),
        (b'{"matchLabels":{"app":"x"}}', {"app": "y"}, False),
        (b"{}", {}, True),
        (b"null", {}, False),
        (b'{"matchExpressions":[{"key":"app","operator":"In","values":["x","y"]}]}', {"app": "y"}, True),
        (b'{"matchExpressions":[{"key":"app","operator":"NotIn","values":["x"]}]}', {}, True),
        (b'{"matchExpressions":[{"key":"app","operator":"Exists"}]}', {}, False),
        (b'{"matchExpressions":[{"key":"app","operator":"DoesNotExist"}]}', {"app": "x"}, False),
    ],
)
def test_budget_protects_whom_its_selector_matches(selector: bytes, labels: dict[str, str], *, expected: bool) -> None:
    """An empty selector covers the whole namespace, none covers nobody, and other namespaces are never covered."""
    budget = decode_budget(
        b'{"metadata":{"name":"b","namespace":"team"},"spec":{"selector":' + selector + b'},"status":{}}'
    )
    pod = make_pod("p", labels=labels)
    stranger = make_pod("p", namespace="other", labels=labels)

    assert (DisruptionBudgets((budget,)).of(pod) == ("team/b",)) == expected
    assert DisruptionBudgets((budget,)).of(stranger) == ()


def test_budget_that_nobody_has_worked_out_allows_nothing() -> None:
    """A status of an older spec is no permission."""
    text = b'{"metadata":{"name":"b","generation":2},"status":{"disruptionsAllowed":3,"observedGeneration":%d}}'
    assert [decode_budget(text % generation).allowed for generation in (1, 2)] == [0, 3]
