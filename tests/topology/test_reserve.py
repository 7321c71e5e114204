"""The last whole machines are left to asks for whole ones, as long as anything else serves a smaller ask."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.cluster.fleet import Fleet
from atoll.cluster.machines import Card, Shape, cell_of
from topology.asks import Ask, Policy
from topology.demand import PRIOR, Demand
from topology.profiles import profile
from topology.scores import RESERVED_ONE_IN, Classes, best_node, reserved

MESH = profile("mi250x-8gcd").machine
HALF = 0b00111100
"""Two pairs that form a good set of four are free."""
BROKEN = 0b01010101


def named(free: list[int], ask: Ask, demand: Demand = PRIOR) -> int | None:
    """Index of the best node among these free masks, all on the mesh."""
    masks = np.array(free, dtype=np.int64)
    return best_node(Classes([MESH], demand=demand).costs(np.zeros(len(masks), dtype=np.int64), masks, ask))


def test_last_whole_machine_is_left_alone() -> None:
    """Of 32 nodes one is whole: four GPUs go to a poorer set elsewhere; with two whole ones they get the good set."""
    poor = [0b00001111, *[0] * (RESERVED_ONE_IN - 2)]

    assert named([MESH.full, *poor], Ask(4)) == 1
    assert named([MESH.full, MESH.full, *poor], Ask(4)) == 0


def test_last_whole_machine_serves_what_nothing_else_can() -> None:
    """Reserved is not refused: where only a whole machine fits, it is taken, and a whole ask always may."""
    rest = [0b1, *[0] * (RESERVED_ONE_IN - 2)]

    assert named([MESH.full, *rest], Ask(2)) == 0
    assert named([MESH.full, *rest], Ask(8)) == 0


def test_few_nodes_reserve_nothing() -> None:
    """With fewer nodes than one in RESERVED_ONE_IN a good set on a whole machine beats a poor one elsewhere."""
    assert named([MESH.full, 0b00001111, *[0] * (RESERVED_ONE_IN - 3)], Ask(4)) == 0


@pytest.mark.parametrize(
    ("ask", "demand"),
    [(Ask(4, Policy.SPREAD), PRIOR), (Ask(4), Demand(shares=((2, 0.5), (4, 0.5))))],
    ids=["spreading", "nobody asks for whole machines"],
)
def test_nothing_is_reserved_without_a_reason(ask: Ask, demand: Demand) -> None:
    """Spreading looks for empty machines, and machines that nobody asks for whole need no keeping."""
    assert named([MESH.full, 0b00001111, *[0] * (RESERVED_ONE_IN - 2)], ask, demand) == 0


def test_classes_are_reserved_one_by_one() -> None:
    """Only whole nodes of a class that has few of them left are dear."""
    classes = np.array([0] * 64 + [1] * 64)
    whole = np.array([3, 5, 70, 71, 72])

    assert list(reserved(whole, classes, sparing=np.array([True, True]))) == [3, 5]
    assert not len(reserved(whole, classes, sparing=np.array([False, True])))


def test_fleet_reserves_as_the_scores_do() -> None:
    """The arrays that filter and prioritize read have the same machines reserved."""
    shape = Shape(machine=MESH, cards=(Card("amd-mi250x", "amd", 1 << 36, (9, 0), ""),) * 8)
    masks = [MESH.full, HALF, BROKEN, *[0] * 40]
    fleet = Fleet()
    for index, mask in enumerate(masks):
        fleet.put(f"n{index:02}", cell_of(shape, mask))
    states = fleet.states_of(fleet.rows_of([f"n{index:02}" for index in range(len(masks))]))
    none = np.zeros(len(masks))

    assert list(np.flatnonzero(fleet.with_reserve(none, states, Ask(2), PRIOR))) == [0]
    assert not fleet.with_reserve(none, states, Ask(8), PRIOR).any()
