"""Scoring many nodes: the gather names what the one-node choice would take, for any mix of classes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.choice import Choice, choose
from topology.demand import FADE, PRIOR, Histogram
from topology.device_requests import DeviceRequest, Policy
from topology.errors import DeviceRequestError
from topology.model import machine, mask_of
from topology.profiles import profile
from topology.scores import Classes, best_node

SMALL = ("dgx1-v100", "dgx-h100", "h100-nvl-8", "l40s-8", "gb200-tray", "h100-vm-6gpu")


def arrays(nodes: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Class and free mask per node."""
    return np.array([node[0] for node in nodes]), np.array([node[1] for node in nodes])


@settings(deadline=None, max_examples=60)
@given(
    nodes=st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=40),
    ask=st.builds(DeviceRequest, count=st.integers(1, 8), policy=st.sampled_from(Policy)),
)
def test_gather_equals_one_by_one(nodes: list[tuple[int, int]], ask: DeviceRequest) -> None:
    """Every node's cost is the cost of its choice, and the best node is the first of the cheapest."""
    machines = [profile(name).machine for name in SMALL]
    nodes = [(shape, free & machines[shape].full) for shape, free in nodes]

    costs = Classes(machines).costs(*arrays(nodes), ask)

    answers = [choose(machines[shape], free, ask) for shape, free in nodes]
    wanted = [answer.cost if isinstance(answer, Choice) else np.inf for answer in answers]
    assert wanted == list(costs)
    best = min(range(len(nodes)), key=lambda index: (wanted[index], index))
    assert best_node(costs) == (best if np.isfinite(wanted[best]) else None)


def test_large_machines_stand_beside_small_ones() -> None:
    """Machines of 8, 16 and 20 devices are scored in one call, each by its own means."""
    cells = [["X" if row == column else "NODE" for column in range(20)] for row in range(20)]
    machines = [profile("dgx-h100").machine, profile("dgx2-v100").machine, machine(cells, pcie_generation=4)]
    nodes = [(0, 0b1111), (1, 0b1111), (2, 0b1111), (1, 0b1), (1, 0xFFFF), (2, 0b1)]

    costs = Classes(machines).costs(*arrays(nodes), DeviceRequest(2))

    for (shape, free), cost in zip(nodes, costs, strict=True):
        answer = choose(machines[shape], free, DeviceRequest(2))
        assert cost == (answer.cost if isinstance(answer, Choice) else np.inf)


def test_one_allocation_changes_one_cell() -> None:
    """Taking GPUs from one node changes that node's cost and no other."""
    classes = Classes([profile("dgx-h100").machine])
    shape, free = np.zeros(5, dtype=np.int64), np.full(5, 0xFF)
    before = classes.costs(shape, free, DeviceRequest(4))

    free[2] &= ~mask_of((0, 1))
    after = classes.costs(shape, free, DeviceRequest(4))

    assert [index for index in range(5) if before[index] != after[index]] == [2]


@pytest.mark.parametrize("policy", Policy)
def test_equal_nodes_tie_by_order(policy: Policy) -> None:
    """Of alike nodes the first is named, for every policy."""
    classes = Classes([profile("dgx-h100").machine])
    costs = classes.costs(np.zeros(9, dtype=np.int64), np.full(9, 0x3F), DeviceRequest(2, policy))

    assert best_node(costs) == 0


def test_no_node_is_named_when_none_fits() -> None:
    """Without a fitting node, or without any node, nothing is named."""
    classes = Classes([profile("gb200-tray").machine])

    assert best_node(classes.costs(np.zeros(3, dtype=np.int64), np.full(3, 0b1), DeviceRequest(2))) is None
    assert best_node(np.empty(0)) is None


def test_joint_choice_keeps_whole_pairs_for_those_who_need_them() -> None:
    """A single GPU goes to the node where a pair is already broken, not to one that is tight but whole."""
    classes = Classes([profile("h100-nvl-8").machine])
    whole, broken = 0b00000011, 0b00001101

    costs = classes.costs(np.zeros(2, dtype=np.int64), np.array([whole, broken]), DeviceRequest(1))

    assert best_node(costs) == 1


def test_demand_follows_what_is_asked() -> None:
    """After a thousand asks for eight GPUs, fragmentation is about eights; before, about the prior."""
    histogram = Histogram()
    assert dict(histogram.demand().shares)[8] == pytest.approx(dict(PRIOR.shares)[8])

    for _ in range(1000):
        histogram = histogram.observed(8)

    assert dict(histogram.demand().shares)[8] > 0.85
    assert histogram.weights[0][1] < 1 / (1 - FADE)


def test_demand_changes_in_steps() -> None:
    """One more ask rarely makes another Demand, so tables serve on."""
    histogram, demands = Histogram(), set()
    for turn in range(2000):
        histogram = histogram.observed((1, 2, 4, 8)[turn % 4])
        demands.add(histogram.demand())

    assert len(demands) < 20


@pytest.mark.parametrize("count", [0, -3, 65])
def test_senseless_size_is_a_fault(count: int) -> None:
    """Sizes that no machine has never enter the histogram."""
    with pytest.raises(DeviceRequestError):
        Histogram().observed(count)
