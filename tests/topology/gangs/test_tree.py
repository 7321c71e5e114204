"""The tree of domains and the snapshots over it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.topology.gangs.worlds import grid
from topology.device_requests import DeviceRequest
from topology.gangs.errors import GangError
from topology.gangs.model import (
    LEVELS_MAX,
    MEMBERS_MAX,
    Cause,
    Gang,
    Host,
    Mode,
    Placement,
    PlacementRefusal,
    PodSet,
    Slice,
    TopologyRequest,
)
from topology.gangs.search import place
from topology.gangs.snapshot import snapshot
from topology.gangs.tree import check_levels

HOSTS = [
    Host("h2", ("b1", "r0")),
    Host("h0", ("b0", "r0")),
    Host("h3", ("b1", "r1")),
    Host("h1", ("b0", "r0")),
]


def test_domains_stand_in_the_order_of_their_paths() -> None:
    """Levels, domains, children and parents agree, and racks of one name in two blocks are two."""
    tree = snapshot(("block", "rack"), HOSTS).tree

    assert tree.paths[0] == (("b0",), ("b1",))
    assert tree.paths[1] == (("b0", "r0"), ("b1", "r0"), ("b1", "r1"))
    assert tree.paths[2] == (("b0", "r0", "h0"), ("b0", "r0", "h1"), ("b1", "r0", "h2"), ("b1", "r1", "h3"))
    assert [list(tree.children(0, block)) for block in (0, 1)] == [[0], [1, 2]]
    assert tree.parents[1].tolist() == [0, 0, 1, 2]
    assert tree.above[0].tolist() == [0, 0, 1, 1]
    assert [tree.level_of(name) for name in ("block", "rack", "host", "zone")] == [0, 1, 2, None]


@pytest.mark.parametrize(
    "levels", [("a",) * 2, ("a", ""), tuple("abcdefghi")], ids=["repeated", "empty", "more than eight"]
)
def test_impossible_levels_are_told(levels: tuple[str, ...]) -> None:
    """Levels have names of their own, eight at most."""
    assert len(levels) > LEVELS_MAX or len(levels) == 2
    with pytest.raises(GangError, match="at most 8 levels"):
        check_levels(levels)


def test_contradictory_hosts_are_told() -> None:
    """Two hosts of one name, and a path of another length."""
    with pytest.raises(GangError, match=r"one name per host, got \['h0'\]"):
        snapshot(("block", "rack"), [*HOSTS, Host("h0", ("b9", "r9"))])
    with pytest.raises(GangError, match="paths of 2 names"):
        snapshot(("block", "rack"), [Host("h0", ("b0",))])


@pytest.mark.parametrize("count", [-1, MEMBERS_MAX + 1])
def test_impossible_pod_sets_are_told(count: int) -> None:
    """Counts, least counts, slices and names that contradict themselves."""
    with pytest.raises(GangError, match="members"):
        PodSet("p", count)
    with pytest.raises(GangError, match="least count"):
        PodSet("p", 1, min_count=2)
    with pytest.raises(GangError, match="slice"):
        Slice("rack", 0)
    with pytest.raises(GangError, match="names of their own"):
        Gang((PodSet("p", 1), PodSet("p", 1)))


@pytest.mark.parametrize(
    ("slices", "problem"),
    [
        ((Slice("rack", 3),), "slices of 3 at rack do not divide 8 members"),
        ((Slice("block", 8), Slice("rack", 3)), "slices of 3 at rack do not divide 8 members"),
        ((Slice("rack", 4), Slice("block", 2)), "slices of 2 at block must lie below rack"),
        ((Slice("rack", 4), Slice("rack", 2)), "slices of 2 at rack must lie below rack"),
    ],
)
def test_slices_that_do_not_nest_are_refused(slices: tuple[Slice, ...], problem: str) -> None:
    """Sizes divide, levels go down."""
    request = TopologyRequest(Mode.PREFERRED, "block", slices)
    answer = place(Gang((PodSet("p", 8, request=request),)), snapshot(("block", "rack"), HOSTS))

    assert isinstance(answer, PlacementRefusal)
    assert (answer.cause, answer.text) == (Cause.BAD_SLICES, f"pod set p: {problem}")


def test_slices_above_the_requested_level_are_refused() -> None:
    """A slice cannot be wider than the domain that holds everything."""
    request = TopologyRequest(Mode.REQUIRED, "rack", (Slice("block", 2),))
    answer = place(Gang((PodSet("p", 2, request=request),)), snapshot(("block", "rack"), HOSTS))

    assert isinstance(answer, PlacementRefusal)
    assert answer.cause is Cause.BAD_SLICES


def test_an_empty_cluster_refuses_and_an_empty_gang_fits() -> None:
    """No host has a place: refused; no member wants one: placed."""
    answer = place(Gang((PodSet("p", 1),)), snapshot(("block",), []))

    assert isinstance(answer, PlacementRefusal)
    assert answer.cause is Cause.NO_DOMAIN
    nobody = place(Gang((PodSet("p", 0), PodSet("q", 1))), snapshot(("block", "rack"), HOSTS))
    assert isinstance(nobody, Placement)
    assert [row.count for row in nobody.assignments] == [0, 1]


def test_a_changed_host_keeps_the_tree_and_a_moved_one_does_not() -> None:
    """Use changes by the second, structure by the day."""
    state = grid({("b0", "r0"): 2})
    host = state.hosts[0]
    used = state.with_hosts([replace(host, free_mask=0b1111, free={"cpu": 5, "pods": 1})])
    moved = used.with_hosts([replace(used.hosts[0], path=("b0", "r9"))])
    added = moved.with_hosts([replace(host, name="new", path=("b0", "r0"))])

    assert used.tree is state.tree
    assert (used.gpus.tolist(), used.free("cpu").tolist()) == ([4, 8], [5, 128_000])
    assert state.gpus.tolist() == [8, 8]
    assert len(moved.tree.paths[1]) == 2
    assert len(added.hosts) == 3
    assert len(added.without(["new"]).hosts) == 2


def test_taking_a_placement_twice_is_told_by_unknown_hosts_only() -> None:
    """What a placement takes is subtracted; a host that is not there is a contradiction."""
    gang = Gang((PodSet("p", 2, {"cpu": 1_000, "pods": 1}, DeviceRequest(4)),))
    state = grid({("b0", "r0"): 1})
    answer = place(gang, state)

    assert isinstance(answer, Placement)
    left = state.take(answer, gang)
    assert (left.hosts[0].free_mask, left.hosts[0].free["cpu"]) == (0, 126_000)
    with pytest.raises(GangError, match="lacks"):
        grid({("b1", "r0"): 1}).take(answer, gang)


def test_absurd_amounts_are_refused_and_break_nothing() -> None:
    """More than 64 bits of anything, free, needed or overdrawn, is only a number."""
    absurd = 1 << 80
    state = snapshot(
        ("block",),
        [Host("rich", ("b0",), {"memory": absurd, "pods": 1}), Host("poor", ("b0",), {"memory": -absurd, "pods": 9})],
    )
    modest = place(Gang((PodSet("p", 1, {"memory": 1, "pods": 1}),)), state)
    greedy = place(Gang((PodSet("p", 1, {"memory": absurd, "pods": 1}), PodSet("q", 1, {"memory": 1}))), state)

    assert isinstance(modest, Placement)
    assert modest.assignments[0].members[0].host == "rich"
    assert isinstance(greedy, PlacementRefusal)
    assert greedy.excluded == (("resource memory", 2),)
