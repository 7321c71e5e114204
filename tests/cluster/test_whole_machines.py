"""Whole machines: the last are left to asks for whole ones, as long as anything else serves a smaller ask, and those
that will soon be whole again are left to become so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fleets import FilledFleet
from topology.choice import Choice, choose
from topology.demand import PRIOR, Demand
from topology.device_requests import DeviceRequest, Policy
from topology.model import Machine
from topology.profiles import profile
from topology.scores import EMPTYING, RESERVE, RESERVED_ONE_IN

MESH = profile("mi250x-8gcd").machine
SWITCH = profile("dgx-h100").machine
BROKEN = 0b01010101


def named(
    free: Sequence[int],
    ask: DeviceRequest,
    demand: Demand = PRIOR,
    *,
    geometry: Machine = MESH,
    pods: Sequence[int] | None = None,
) -> int | None:
    """Index of the node that the extender names among these free masks."""
    fleet = FilledFleet([geometry], np.zeros(len(free), dtype=np.int64), demand=demand)
    fleet.update(np.array(free, dtype=np.int64), np.array(pods or [0] * len(free), dtype=np.int64))
    return fleet.best(ask)


def test_last_whole_machine_is_left_alone() -> None:
    """Of RESERVED_ONE_IN nodes one is whole: four GPUs go to a poorer set elsewhere; with two they get the good set."""
    poor = [0b00001111, *[0] * (RESERVED_ONE_IN - 2)]

    assert named([MESH.full, *poor], DeviceRequest(4)) == 1
    assert named([MESH.full, MESH.full, *poor], DeviceRequest(4)) == 0


def test_last_whole_machine_serves_what_nothing_else_can() -> None:
    """Reserved is not refused: where only a whole machine fits, it is taken, and a whole ask always may."""
    rest = [0b1, *[0] * (RESERVED_ONE_IN - 2)]

    assert named([MESH.full, *rest], DeviceRequest(2)) == 0
    assert named([MESH.full, *rest], DeviceRequest(8)) == 0


def test_few_nodes_reserve_nothing() -> None:
    """With fewer nodes than one in RESERVED_ONE_IN a good set on a whole machine beats a poor one elsewhere."""
    assert named([MESH.full, 0b00001111, *[0] * (RESERVED_ONE_IN - 3)], DeviceRequest(4)) == 0


@pytest.mark.parametrize(
    ("ask", "demand"),
    [(DeviceRequest(4, Policy.SPREAD), PRIOR), (DeviceRequest(4), Demand(shares=((2, 0.5), (4, 0.5))))],
    ids=["spreading", "nobody asks for whole machines"],
)
def test_nothing_is_reserved_without_a_reason(ask: DeviceRequest, demand: Demand) -> None:
    """Spreading looks for empty machines, and machines that nobody asks for whole need no keeping."""
    assert named([MESH.full, 0b00001111, *[0] * (RESERVED_ONE_IN - 2)], ask, demand) == 0


def test_classes_are_reserved_one_by_one() -> None:
    """Only whole nodes of a class that has few of them left are dear."""
    many = 2 * RESERVED_ONE_IN
    free = np.array([BROKEN] * (2 * many))
    free[[3, 5]] = free[[many + 3, many + 4, many + 5]] = MESH.full
    fleet = FilledFleet([MESH, MESH], np.array([0] * many + [1] * many))
    fleet.update(free, np.zeros(len(free), dtype=np.int64))

    keys = fleet.keys(DeviceRequest(2))

    assert keys[3] == keys[5] == pytest.approx(keys[many + 3] + RESERVE)


def test_machine_that_is_soon_whole_again_is_left_to_become_so() -> None:
    """Of two machines alike the one with more pods is taken; who spreads does not mind; no number is too many."""
    free, ask = [0b1111, 0b1111], DeviceRequest(1)

    assert named(free, ask, geometry=SWITCH) == 0
    assert named(free, ask, geometry=SWITCH, pods=[1, 4]) == 1
    assert named(free, DeviceRequest(1, Policy.SPREAD), geometry=SWITCH, pods=[1, 4]) == 0
    assert named(free, ask, geometry=SWITCH, pods=[10**6, 4 * 10**6]) == 0


def test_links_are_worth_more_than_an_empty_machine() -> None:
    """A pair of double links on a machine with one pod beats a pair of single links on one with many."""
    assert named([0b1111, 0b11], DeviceRequest(2), geometry=profile("dgx1-v100").machine, pods=[1, 6]) == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 70)), min_size=1, max_size=12), st.integers(1, 8))
def test_best_node_is_the_least_sum_of_set_and_pods(nodes: list[tuple[int, int]], count: int) -> None:
    """What prioritize names has the least cost of its set and of its pods, the first by name of several."""
    ask = DeviceRequest(count)

    def cost(mask: int, pods: int) -> float:
        answer = choose(MESH, mask, ask)
        return round(answer.cost + EMPTYING / (pods + 1), 6) if isinstance(answer, Choice) else np.inf

    costs = [cost(mask, min(pods, 64)) for mask, pods in nodes]
    masks, pods_of_node = zip(*nodes, strict=True)
    wanted = min(range(len(nodes)), key=lambda node: (costs[node], node))

    found = named(masks, ask, pods=pods_of_node)

    assert found == (wanted if np.isfinite(costs[wanted]) else None)
