"""Problems of real clusters with links and choices by links."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from topology.choice import Choice, ChoiceRefusal, Reason, choose
from topology.device_requests import DeviceRequest, Interconnect, Policy
from topology.islands import islands
from topology.links import direct_links
from topology.model import Machine, asymmetric_pairs, machine, mask_of
from topology.profiles import profile
from topology.quality import qualities

HALVES = [0, 0, 0, 0, 1, 1, 1, 1]


def box(count: int, near: dict[tuple[int, int], str], *, rest: str = "SYS", **facts: object) -> Machine:
    """A machine with the given cells, and `rest` everywhere else."""
    cells = [["X" if row == column else rest for column in range(count)] for row in range(count)]
    for (first, second), cell in near.items():
        cells[first][second] = cells[second][first] = cell
    return machine(cells, **facts)  # type: ignore[arg-type]


def positions(subject: Machine, free: tuple[int, ...], ask: DeviceRequest) -> tuple[int, ...]:
    """Chosen positions."""
    answer = choose(subject, mask_of(free), ask)
    assert isinstance(answer, Choice), answer
    return answer.positions


CROSS_PAIRS = box(8, {(0, 2): "NV12", (1, 3): "NV12", (4, 5): "NV12", (6, 7): "NV12"}, numa=HALVES, nvlink_generation=4)


@pytest.mark.parametrize(
    ("free", "count", "wanted"),
    [
        pytest.param(tuple(range(8)), 2, {(0, 2), (1, 3), (4, 5), (6, 7)}, id="empty-machine-gives-a-pair"),
        pytest.param((0, 1, 3), 2, {(1, 3)}, id="the-one-whole-pair"),
        pytest.param((0, 1, 4, 6), 2, {(0, 1), (4, 6)}, id="no-pair-left-then-one-numa-node"),
        pytest.param((0, 1, 3), 1, {(0,)}, id="single-leaves-the-pair-whole"),
        pytest.param((1, 3, 4), 1, {(4,)}, id="also-where-the-pair-comes-first"),
    ],
)
def test_bridges_that_ignore_the_numbering_are_seen(
    free: tuple[int, ...], count: int, wanted: set[tuple[int, ...]]
) -> None:
    """Pairs bridged as (0,2), (1,3), ... are found by their cells, not by their numbers."""
    assert positions(CROSS_PAIRS, free, DeviceRequest(count)) in wanted


def test_switch_counts_links_into_the_switch() -> None:
    """Eight GPUs behind a switch are one island; a GPU with fewer links weakens only the sets that hold it."""
    near = {(5, other): "NV12" for other in range(8) if other != 5}
    subject = box(8, near, rest="NV18", numa=HALVES, nvlink_generation=4, nvswitch=True)
    ring = qualities(subject).ring_gbps

    assert [island.name for island in islands(subject)] == ["nvlink-group-0"]
    assert ring[mask_of((0, 1, 2))] == pytest.approx(18 * 20.6)
    assert ring[mask_of((0, 1, 5))] == pytest.approx(12 * 20.6)


def test_ends_that_disagree_never_score_above_the_weaker() -> None:
    """NV4 one way, SYS the other: told as asymmetric, and worth no more than SYS both ways."""
    told = [["X", "NV4"], ["SYS", "X"]]
    honest = machine([["X", "SYS"], ["SYS", "X"]], nvlink_generation=3)
    subject = machine(told, nvlink_generation=3)

    assert asymmetric_pairs(told) == ((0, 1),)
    assert qualities(subject).ring_gbps[3] == qualities(honest).ring_gbps[3]


BRIDGED = box(4, {(0, 1): "NV12", (2, 3): "NV12"}, numa=[0, 0, 0, 0], nvlink_generation=3)


def test_active_links_are_no_common_island() -> None:
    """Four bridged cards are two pairs: one island of four is refused, four contiguous ones come at low quality."""
    answer = choose(BRIDGED, 0b1111, DeviceRequest(4))

    assert [island.positions for island in islands(BRIDGED)] == [(0, 1), (2, 3)]
    assert choose(BRIDGED, 0b1111, DeviceRequest(4, Policy.ISLAND)) == ChoiceRefusal(Reason.NO_ISLAND)
    assert isinstance(answer, Choice)
    assert answer.islands == ("nvlink-group-0", "nvlink-group-1")
    assert answer.ring_gbps < qualities(BRIDGED).ring_gbps[0b11] / 10


@pytest.mark.parametrize("name", ["dgx1-v100", "mi250x-8gcd", "h100-nvl-8", "hgx-a100-4-redstone", "nv4-partial-3gpu"])
def test_dead_links_raise_nothing(name: str) -> None:
    """On a known machine with one pair's links dead, in part or all, no set is worth more than before."""
    known = profile(name).machine
    before = qualities(known).ring_gbps
    one, other, count = next(
        (row, column, direct_links(cell))
        for row, cells in enumerate(known.links)
        for column, cell in enumerate(cells)
        if direct_links(cell)
    )
    for cell in (f"{known.links[one][other].rstrip('0123456789')}{max(count - 1, 1)}", "SYS", "", "NV0", "N/A"):
        rows = [list(row) for row in known.links]
        rows[one][other] = cell
        told = machine(rows, vendor=known.vendor).links

        after = qualities(replace(known, links=told)).ring_gbps

        assert (after <= before + 1e-9).all(), cell
        assert after[1 << one | 1 << other] < before[1 << one | 1 << other] or count == 1


DGX2 = profile("dgx2-v100").machine


@pytest.mark.parametrize("count", [9, 10, 12, 16])
def test_sixteen_gpus_behind_switches_are_one_island(count: int) -> None:
    """More than half of sixteen switched GPUs are given from one island, at full quality; with one of them ill
    all sixteen are not."""
    answer, less_one = choose(DGX2, DGX2.full, DeviceRequest(count, Policy.ISLAND)), DGX2.full & ~(1 << 5)

    assert isinstance(answer, Choice)
    assert answer.islands == ("nvlink-group-0",)
    assert answer.relative_quality == 1
    ill = choose(DGX2, less_one, DeviceRequest(count, Policy.ISLAND))
    assert isinstance(ill, Choice) == (count < 16)
    assert count < 16 or ill == ChoiceRefusal(Reason.TOO_FEW_FREE)


def test_disagreement_of_any_kind_is_never_above_the_weaker_side() -> None:
    """For every two cells that the ends may tell, the pair is worth what it is when both tell the weaker."""
    words = ("NV4", "NV2", "PIX", "PHB", "SYS", "NS", "", "?", None, 7, "NV0", "NV999")
    for one, other in itertools.product(words, repeat=2):
        told = qualities(machine([["X", one], [other, "X"]], nvlink_generation=3)).ring_gbps[3]
        both = [
            qualities(machine([["X", cell], [cell, "X"]], nvlink_generation=3)).ring_gbps[3] for cell in (one, other)
        ]
        assert told == min(both), (one, other)


SIX = box(
    6,
    {(0, 1): "PIX", (0, 2): "NODE", (1, 2): "NODE", (3, 4): "PIX", (3, 5): "NODE", (4, 5): "NODE"},
    numa=[0, 0, 0, 1, 1, 1],
    pcie_generation=3,
    inter_socket_gbps=6.0,
)


@pytest.mark.parametrize(
    ("free", "count", "wanted"),
    [
        pytest.param(tuple(range(6)), 3, {(0, 1, 2), (3, 4, 5)}, id="three-stay-in-a-socket"),
        pytest.param(tuple(range(6)), 2, {(0, 1), (3, 4)}, id="two-share-a-switch"),
        pytest.param(tuple(range(6)), 5, {(0, 1, 2, 3, 4), (0, 1, 3, 4, 5)}, id="five-keep-both-switch-pairs"),
        pytest.param((0, 1, 2, 3, 4), 4, {(0, 1, 3, 4)}, id="four-of-five-keep-both-switch-pairs"),
    ],
)
def test_three_gpus_per_socket(free: tuple[int, ...], count: int, wanted: set[tuple[int, ...]]) -> None:
    """Six GPUs, a switch pair and one more per socket: where bandwidth ties, switch pairs stay together."""
    assert positions(SIX, free, DeviceRequest(count)) in wanted


@pytest.mark.parametrize("rest", ["NODE", "SYS"])
def test_cards_that_cannot_talk_are_kept_apart(rest: str) -> None:
    """Two cards without peer access, in a box where all others are near or far alike: six of eight never hold
    both, all eight are still given."""
    subject = box(8, {(2, 5): "NS"}, rest=rest, numa=[0] * 8, pcie_generation=4)

    assert not {2, 5} <= set(positions(subject, tuple(range(8)), DeviceRequest(6)))
    assert not {2, 5} <= set(positions(subject, (0, 2, 5), DeviceRequest(2)))
    assert positions(subject, tuple(range(8)), DeviceRequest(8)) == tuple(range(8))


def test_pairs_alone_may_still_use_pcie() -> None:
    """Two cards that only PCIe joins are refused to an ask for NVLink and given to any other."""
    ask = DeviceRequest(2, interconnect=Interconnect.NVLINK)

    assert choose(BRIDGED, 0b0101, ask) == ChoiceRefusal(Reason.NO_NVLINK_ISLAND)
    assert positions(BRIDGED, (0, 2), DeviceRequest(2)) == (0, 2)
    assert positions(BRIDGED, (0, 2, 3), ask) == (2, 3)


@pytest.mark.parametrize(
    ("policy", "fuller_wins", "single"), [(Policy.PACKED, True, 0), (Policy.SPREAD, False, 4)], ids=["packed", "spread"]
)
def test_pack_and_spread_are_not_swapped(policy: Policy, *, fuller_wins: bool, single: int) -> None:
    """The used machine and the used half win under packed and lose under spread."""
    subject = box(8, {}, rest="SYS", numa=HALVES, pcie_generation=4)
    fuller, emptier = (
        choose(subject, 0b11110001, DeviceRequest(1, policy)),
        choose(subject, 0xFF, DeviceRequest(1, policy)),
    )

    assert isinstance(fuller, Choice)
    assert isinstance(emptier, Choice)
    assert (fuller.cost < emptier.cost) == fuller_wins
    assert fuller.positions == (single,)
