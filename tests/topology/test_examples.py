"""Golden results for machines that users know."""

from __future__ import annotations

import pytest

from topology.choice import Choice, ChoiceRefusal, Reason, choose, would_ever_fit
from topology.device_requests import DeviceRequest, Policy
from topology.islands import islands
from topology.model import Machine, machine, mask_of
from topology.profiles import profile
from topology.quality import rate

ALL8 = tuple(range(8))


def given(subject: Machine, free: tuple[int, ...], ask: DeviceRequest) -> Choice:
    """The choice among the free positions."""
    answer = choose(subject, mask_of(free), ask)
    assert isinstance(answer, Choice), answer
    return answer


def six_and_two() -> Machine:
    """Six cards all joined by four links each, two more joined to one another."""
    groups = ((0, 1, 2, 3, 4, 5), (6, 7))
    near = {pair for group in groups for pair in ((one, other) for one in group for other in group)}
    cells = [["X" if row == column else "NV4" if (row, column) in near else "SYS" for column in ALL8] for row in ALL8]
    return machine(cells, numa=(0, 0, 0, 0, 0, 0, 1, 1), nvlink_generation=3, pcie_generation=4)


def switched_with_a_weak_one(weak: int) -> Machine:
    """Eight cards behind a switch, of which one has lost six of its eighteen links."""
    cells = [["X" if row == column else "NV12" if weak in (row, column) else "NV18" for column in ALL8] for row in ALL8]
    return machine(cells, numa=(0, 0, 0, 0, 1, 1, 1, 1), nvlink_generation=4, nvswitch=True, pcie_generation=5)


@pytest.mark.parametrize("free", [(0, 1, 2), (0, 1, 4, 6, 7), (2, 3, 4, 5, 7)], ids=str)
def test_single_gpu_leaves_bridged_pairs_whole(free: tuple[int, ...]) -> None:
    """One GPU asked for: the card whose partner is in use already."""
    whole = [pair for pair in ((0, 1), (2, 3), (4, 5), (6, 7)) if set(pair) <= set(free)]
    (taken,) = given(profile("h100-nvl-8").machine, free, DeviceRequest(1)).positions

    assert all(taken not in pair for pair in whole)


def test_five_on_the_cube_mesh_are_not_a_quad_and_one_more() -> None:
    """A quad and a fifth GPU behind it have two rings of links; three are to be had."""
    mesh = profile("dgx1-v100").machine
    answer = given(mesh, ALL8, DeviceRequest(5))

    assert not {0, 1, 2, 3} <= set(answer.positions)
    assert not {4, 5, 6, 7} <= set(answer.positions)
    assert (answer.ring_gbps, rate(mesh, (0, 1, 2, 3, 4)).ring_gbps) == (60.0, 40.0)


@pytest.mark.parametrize(
    ("name", "free", "three"),
    [
        ("h100-nvl-8", (0, 1, 2, 4, 6), (0, 1, 2)),
        ("dgx1-v100", (0, 1, 2, 4, 7), (0, 1, 2)),
        ("dgx-h100", (0, 2, 5, 6, 7), (5, 6, 7)),
        ("l40s-8", (1, 3, 4, 6, 7), (4, 6, 7)),
    ],
)
def test_three_of_five_free(name: str, free: tuple[int, ...], three: tuple[int, ...]) -> None:
    """Three of five free GPUs are three that belong together."""
    assert given(profile(name).machine, free, DeviceRequest(3)).positions == three


def test_six_and_two_are_not_eight() -> None:
    """Eight GPUs in islands of six and of two: no island of eight, and a ring over both is a PCIe ring."""
    subject = six_and_two()
    whole = given(subject, ALL8, DeviceRequest(8))

    assert would_ever_fit(subject, DeviceRequest(8, Policy.ISLAND)) == ChoiceRefusal(Reason.NO_ISLAND)
    assert choose(subject, subject.full, DeviceRequest(7, Policy.ISLAND)) == ChoiceRefusal(Reason.NO_ISLAND)
    assert whole.islands == ("nvlink-group-0", "nvlink-group-1")
    assert whole.ring_gbps == 6.0
    assert given(subject, ALL8, DeviceRequest(6)).positions == (0, 1, 2, 3, 4, 5)
    assert given(subject, ALL8, DeviceRequest(2)).positions == (6, 7), "the pair, which leaves the six whole"


@pytest.mark.parametrize("weak", [0, 3, 7])
def test_weak_gpu_serves_single_pods_first(weak: int) -> None:
    """A GPU with dead links goes to a pod that needs no links, and to others only when nothing else is left."""
    subject = switched_with_a_weak_one(weak)

    assert given(subject, ALL8, DeviceRequest(1)).positions == (weak,)
    for count in range(2, 8):
        assert weak not in given(subject, ALL8, DeviceRequest(count)).positions
    assert given(subject, ALL8, DeviceRequest(8)).relative_quality == 1


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "h800-8", "dgx-b200", "dgx2-v100", "gb200-tray"])
def test_switch_machine_is_one_island(name: str) -> None:
    """Behind a switch all GPUs are one island, and any set of a size is as good as any other."""
    subject = profile(name).machine

    assert [island.positions for island in islands(subject)] == [tuple(range(subject.count))]
    for count in range(2, subject.count + 1):
        assert given(subject, tuple(range(subject.count))[-count:], DeviceRequest(count)).relative_quality == 1


def test_box_without_any_near_link_falls_back_to_numa() -> None:
    """Where every cell says SYS, the NUMA node is what is left to go by."""
    box = profile("pcie8-allsys-4090").machine

    assert [island.name for island in islands(box)] == ["numa-0", "numa-1"]
    assert given(box, (0, 3, 4, 5, 6), DeviceRequest(2)).positions == (0, 3)
    assert given(box, (0, 4, 5, 6), DeviceRequest(2)).islands == ("numa-1",)
    assert given(box, ALL8, DeviceRequest(4)).islands == ("numa-0",)
