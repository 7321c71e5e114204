"""Whole machines: the last are left to asks for whole ones, as long as anything else serves a smaller ask, and those
that will soon be whole again are left to become so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster.fleet import Fleet
from atoll.cluster.machines import DeviceAttributes, NodeShape, cell_of
from atoll.cluster.requests import Request
from topology.demand import PRIOR, Demand
from topology.device_requests import DeviceRequest, Policy
from topology.profiles import profile
from topology.scores import EMPTYING, RESERVED_ONE_IN, Classes, best_node, reserved

MESH = profile("mi250x-8gcd").machine
SWITCH = profile("dgx-h100").machine
HALF = 0b00111100
"""Two pairs that form a good set of four are free."""
BROKEN = 0b01010101


def named(free: list[int], ask: DeviceRequest, demand: Demand = PRIOR) -> int | None:
    """Index of the best node among these free masks, all on the mesh."""
    masks = np.array(free, dtype=np.int64)
    return best_node(Classes([MESH], demand=demand).costs(np.zeros(len(masks), dtype=np.int64), masks, ask))


def request(count: int) -> Request:
    """What a pod asks that names a number of AMD GPUs and nothing else."""
    return Request(
        ask=DeviceRequest(count),
        models=(),
        mixed_models=False,
        memory_bytes=0,
        compute_capability=(0, 0),
        mig_profile="",
        vendor="amd",
        claim="",
        visible_devices=None,
        container_counts=(),
    )


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
    classes = np.array([0] * many + [1] * many)
    whole = np.array([3, 5, many + 3, many + 4, many + 5])

    assert list(reserved(whole, classes, sparing=np.array([True, True]))) == [3, 5]
    assert not len(reserved(whole, classes, sparing=np.array([False, True])))


def test_fleet_reserves_as_the_scores_do() -> None:
    """The arrays that filter and prioritize read have the same machines reserved."""
    shape = NodeShape(machine=MESH, cards=(DeviceAttributes("amd-mi250x", "amd", 1 << 36, (9, 0), ""),) * 8)
    masks = [MESH.full, HALF, BROKEN, *[0] * (RESERVED_ONE_IN - 3)]
    fleet = Fleet()
    for index, mask in enumerate(masks):
        fleet.put(f"n{index:02}", cell_of(shape, mask))
    rows = fleet.rows_of([f"n{index:02}" for index in range(len(masks))])
    states = fleet.states_of(rows)

    def told(count: int) -> np.ndarray:
        return fleet.with_node_costs(np.zeros(len(masks)), rows, states, DeviceRequest(count), PRIOR)

    assert list(np.flatnonzero(told(2) > EMPTYING)) == [0]
    assert (told(8) == EMPTYING).all()


def test_machine_that_is_soon_whole_again_is_left_to_become_so() -> None:
    """Of two machines alike the one with more pods is taken; who spreads does not mind; no number is too many."""
    classes, free = Classes([SWITCH]), np.array([0b1111, 0b1111])
    alike, pods = np.zeros(2, dtype=np.int64), np.array([1, 4])

    assert best_node(classes.costs(alike, free, DeviceRequest(1))) == 0
    assert best_node(classes.costs(alike, free, DeviceRequest(1), pods)) == 1
    assert best_node(classes.costs(alike, free, DeviceRequest(1, Policy.SPREAD), pods)) == 0
    assert np.isfinite(classes.costs(alike, free, DeviceRequest(1), pods * 10**6)).all()


def test_links_are_worth_more_than_an_empty_machine() -> None:
    """A pair of double links on a machine with one pod beats a pair of single links on one with many."""
    volta = profile("dgx1-v100").machine
    free, pods = np.array([0b1111, 0b11]), np.array([1, 6])

    assert best_node(Classes([volta]).costs(np.zeros(2, dtype=np.int64), free, DeviceRequest(2), pods)) == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 70)), min_size=1, max_size=12), st.integers(1, 8))
def test_fleet_weighs_pods_as_the_scores_do(nodes: list[tuple[int, int]], count: int) -> None:
    """The same node comes first in the arrays that prioritize reads, in whatever order the nodes are told."""
    shape = NodeShape(machine=MESH, cards=(DeviceAttributes("amd-mi250x", "amd", 1 << 36, (9, 0), ""),) * 8)
    fleet, names = Fleet(), [f"n{index:02}" for index in range(len(nodes))]
    for name, (mask, pods) in sorted(zip(names, nodes, strict=True), reverse=True):
        fleet.put(name, cell_of(shape, mask), pods=pods)
    rows = fleet.rows_of(names)
    states, asked = fleet.states_of(rows), request(count)
    keys = fleet.with_node_costs(fleet.keys(states, asked, PRIOR), rows, states, asked.ask, PRIOR)
    masks, pods_of_node = np.array(nodes, dtype=np.int64).T
    best = best_node(Classes([MESH]).costs(np.zeros(len(nodes), dtype=np.int64), masks, asked.ask, pods_of_node))

    if best is None:
        assert np.isinf(keys).all()
    else:
        assert fleet.pick(rows, keys, states, asked, PRIOR, cpu_milli=0) == names[best]
