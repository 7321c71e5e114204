"""Costs of many free masks at once, and the demand that fragmentation is weighed by."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.choice import Choice, choose
from topology.demand import FADE, PRIOR, Histogram
from topology.device_requests import DeviceRequest, Policy
from topology.errors import DeviceRequestError
from topology.model import Machine, machine
from topology.profiles import profile
from topology.scores import costs_of

MACHINES = (
    *(
        profile(name).machine
        for name in ("dgx1-v100", "dgx-h100", "h100-nvl-8", "l40s-8", "gb200-tray", "h100-vm-6gpu")
    ),
    profile("dgx2-v100").machine,
    machine([["X" if row == column else "NODE" for column in range(20)] for row in range(20)], pcie_generation=4),
)


@settings(deadline=None, max_examples=60)
@given(
    geometry=st.sampled_from(MACHINES),
    masks=st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=6),
    ask=st.builds(DeviceRequest, count=st.integers(1, 8), policy=st.sampled_from(Policy)),
)
def test_costs_at_once_equal_costs_one_by_one(geometry: Machine, masks: list[int], ask: DeviceRequest) -> None:
    """Each mask's cost is the cost of its choice, on machines with tables of all masks, of some, and with none."""
    free = np.array(masks) & geometry.full

    answers = [choose(geometry, int(mask), ask) for mask in free]
    assert list(costs_of(geometry, free, ask)) == [
        answer.cost if isinstance(answer, Choice) else np.inf for answer in answers
    ]


def test_joint_choice_keeps_whole_pairs_for_those_who_need_them() -> None:
    """A single GPU goes to the node where a pair is already broken, not to one that is tight but whole."""
    whole, broken = 0b00000011, 0b00001101

    costs = costs_of(profile("h100-nvl-8").machine, np.array([whole, broken]), DeviceRequest(1))

    assert costs[1] < costs[0]


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
