"""Clusters in which choosing the fewest or fullest racks misses the fewest hosts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.oracles.gangs import ReferenceCluster, distance, faults, nearest
from tests.topology.gangs.worlds import LEVELS, counts_of, snapshot_of
from topology.gangs.model import Gang, Host, Limit, Mode, Placement, PodSet, Slice, TopologyRequest
from topology.gangs.search import place

AUTO = TopologyRequest(Mode.AUTO)
RACK = (Limit("rack", 2),)


def world(*hosts: tuple[str, str, int]) -> ReferenceCluster:
    """Hosts by block, rack, pods."""
    return ReferenceCluster(
        LEVELS, tuple(Host(f"h{n}", (b, r), {"pods": pods}) for n, (b, r, pods) in enumerate(hosts))
    )


def workers(count: int, request: TopologyRequest = AUTO, *, limits: Sequence[Limit] = ()) -> PodSet:
    """Members that ask for a place alone."""
    return PodSet("workers", count, {"pods": 1}, request=request, limits=tuple(limits))


def led(pod_set: PodSet, *excluded: str) -> Gang:
    """The members with a leader that may not use some hosts."""
    leader = PodSet("leader", 1, {"pods": 1}, excluded=dict.fromkeys(excluded, "cordoned"), group="g")
    grouped = PodSet("workers", pod_set.count, pod_set.needs, request=pod_set.request, limits=pod_set.limits, group="g")
    return Gang((grouped, leader))


CASES = {
    "two of a roomy host before the fourth of single ones": (
        world(("b1", "r1", 1), ("b1", "r1", 1), ("b1", "r0", 1), ("b0", "r0", 3), ("b1", "r0", 1)),
        Gang((workers(5, limits=RACK),)),
        (3, 4),
    ),
    "the leader's rack takes no worker that another rack's host takes with its mate": (
        world(("b0", "r0", 1), ("b0", "r0", 1), ("b0", "r1", 3)),
        led(workers(2, limits=RACK), "h2"),
        (2, 2),
    ),
    "three racks have fewer hosts than two": (
        world(("b0", "r0", 1), ("b0", "r0", 1), ("b0", "r0", 1), ("b0", "r1", 2), ("b0", "r2", 2)),
        Gang((workers(5),)),
        (2, 3),
    ),
    "a limit of the block holds for the racks in it": (
        world(("b0", "r0", 3), ("b1", "r0", 1), ("b1", "r1", 1)),
        Gang((workers(3, TopologyRequest(Mode.PREFERRED, "rack"), limits=(Limit("block", 2),)),)),
        (2, 2),
    ),
    "slices are counted below the limits": (
        world(("b0", "r0", 2), ("b0", "r0", 2), ("b0", "r1", 3), ("b1", "r0", 2)),
        Gang((workers(6, TopologyRequest(Mode.PREFERRED, "host", (Slice("host", 2),)), limits=RACK),)),
        (3, 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_fewest_domains_are_found_whatever_lies_between(name: str) -> None:
    """As few as trying everything finds, and what is found is right."""
    state, gang, expected = CASES[name]
    answer = place(gang, snapshot_of(state))

    assert nearest(gang, state) == expected
    assert isinstance(answer, Placement), answer
    assert faults(gang, state, counts_of(answer)) == []
    assert distance(gang, state, counts_of(answer)) == expected
