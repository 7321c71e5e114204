"""Choices on known machines, as an engineer would make them by hand."""

from __future__ import annotations

import itertools

import pytest

from topology.choice import Choice, ChoiceRefusal, Reason, choose, would_ever_fit
from topology.device_requests import DeviceRequest, Interconnect, Policy
from topology.errors import DeviceRequestError, PositionError
from topology.links import direct_links
from topology.model import machine, mask_of, positions_of
from topology.profiles import profile

CONTIGUOUS, ISLAND, PACKED, SPREAD = Policy.CONTIGUOUS, Policy.ISLAND, Policy.PACKED, Policy.SPREAD


def chosen(name: str, free: tuple[int, ...], ask: DeviceRequest) -> tuple[int, ...]:
    """Positions chosen on a known machine."""
    answer = choose(profile(name).machine, mask_of(free), ask)
    assert isinstance(answer, Choice), answer
    return answer.positions


def refused(name: str, free: tuple[int, ...], ask: DeviceRequest) -> Reason:
    """Reason of a refusal on a known machine."""
    answer = choose(profile(name).machine, mask_of(free), ask)
    assert isinstance(answer, ChoiceRefusal), answer
    return answer.reason


ALL8 = tuple(range(8))


@pytest.mark.parametrize("free", range(1, 256), ids=lambda free: f"free-{free:08b}")
def test_pair_on_cube_mesh_is_linked_whenever_one_is_free(free: int) -> None:
    """Two contiguous GPUs on a DGX-1V are a double-linked pair if one is free, else a linked pair if one is free."""
    links = profile("dgx1-v100").machine.links
    pairs = [direct_links(links[one][other]) for one, other in itertools.combinations(positions_of(free), 2)]
    answer = choose(profile("dgx1-v100").machine, free, DeviceRequest(2))

    if not pairs:
        assert answer == ChoiceRefusal(Reason.TOO_FEW_FREE)
    else:
        assert isinstance(answer, Choice)
        assert direct_links(links[answer.positions[0]][answer.positions[1]]) == max(pairs)


@pytest.mark.parametrize(
    ("name", "free", "ask", "positions"),
    [
        pytest.param("h100-nvl-8", (0, 1, 2), DeviceRequest(1), (2,), id="single-does-not-break-a-bridged-pair"),
        pytest.param("h100-nvl-8", (0, 1, 2, 5), DeviceRequest(2), (0, 1), id="pair-takes-the-bridged-pair"),
        pytest.param("h100-nvl-8", ALL8, DeviceRequest(3), (0, 1, 2), id="three-cards-stay-in-one-socket"),
        pytest.param(
            "dgx1-v100", ALL8, DeviceRequest(5), (0, 2, 3, 4, 7), id="five-on-the-mesh-is-not-a-quad-plus-one"
        ),
        pytest.param(
            "dgx1-v100", (0, 1, 2, 3, 4, 6), DeviceRequest(4), (0, 1, 2, 3), id="quad-of-the-mesh-stays-whole"
        ),
        pytest.param(
            "dgx-h100",
            (0, 2, 5, 6, 7),
            DeviceRequest(3),
            (5, 6, 7),
            id="three-of-five-free-behind-a-switch-share-a-socket",
        ),
        pytest.param("dgx-a100", ALL8, DeviceRequest(2), (0, 1), id="switch-machine-ties-break-by-pcie-switch"),
        pytest.param(
            "dgx-a100", (1, 2, 3), DeviceRequest(1), (1,), id="single-leaves-a-pair-that-shares-a-pcie-switch"
        ),
        pytest.param(
            "pcie8-allsys-4090", (0, 3, 4, 5, 6), DeviceRequest(2), (0, 3), id="all-sys-box-falls-back-to-numa"
        ),
        pytest.param(
            "pcie8-allsys-4090", (0, 4, 5, 6), DeviceRequest(2), (4, 5), id="all-sys-box-avoids-crossing-sockets"
        ),
        pytest.param("pcie8-uneven-switch", (0, 1, 2, 4), DeviceRequest(2), (0, 1), id="pcie-pair-below-one-switch"),
        pytest.param("gb200-tray", (1, 2, 3), DeviceRequest(2), (2, 3), id="tray-prefers-the-socket-that-is-whole"),
        pytest.param("l40s-8", (1, 4, 5, 6), DeviceRequest(1, SPREAD), (4,), id="spread-takes-from-the-emptier-island"),
        pytest.param("l40s-8", (1, 4, 5, 6), DeviceRequest(1, PACKED), (1,), id="packed-takes-from-the-fuller-island"),
        pytest.param("l40s-8", ALL8, DeviceRequest(2, SPREAD), (0, 4), id="spread-uses-different-numa-nodes"),
        pytest.param("h100-nvl-8", ALL8, DeviceRequest(4, SPREAD), (0, 2, 4, 6), id="spread-uses-different-islands"),
    ],
)
def test_choice_on_known_machine(
    name: str, free: tuple[int, ...], ask: DeviceRequest, positions: tuple[int, ...]
) -> None:
    """The set that a person who knows the machine would name."""
    assert positions == chosen(name, free, ask)


@pytest.mark.parametrize(
    ("name", "free", "ask", "reason"),
    [
        pytest.param("dgx-h100", (0, 1), DeviceRequest(3), Reason.TOO_FEW_FREE, id="fewer-free-than-asked"),
        pytest.param("gb200-tray", (0, 1, 2, 3), DeviceRequest(5), Reason.TOO_FEW_GPUS, id="machine-is-too-small"),
        pytest.param(
            "h100-nvl-8",
            ALL8,
            DeviceRequest(4, ISLAND),
            Reason.NO_ISLAND,
            id="two-bridged-pairs-are-not-an-island-of-four",
        ),
        pytest.param("l40s-8", ALL8, DeviceRequest(5, ISLAND), Reason.NO_ISLAND, id="one-socket-holds-four"),
        pytest.param(
            "l40s-8",
            ALL8,
            DeviceRequest(2, CONTIGUOUS, Interconnect.NVLINK),
            Reason.NO_NVLINK_ISLAND,
            id="no-nvlink-at-all",
        ),
        pytest.param(
            "dgx1-v100",
            ALL8,
            DeviceRequest(5, CONTIGUOUS, Interconnect.NVLINK),
            Reason.NO_NVLINK_ISLAND,
            id="no-five-all-linked",
        ),
        pytest.param(
            "dgx-h100", ALL8, DeviceRequest(2, CONTIGUOUS, Interconnect.PCIE), Reason.NO_PCIE_SET, id="switch-joins-all"
        ),
        pytest.param(
            "l40s-8",
            ALL8,
            DeviceRequest(2, min_bandwidth_gbps=21.0),
            Reason.NO_BANDWIDTH,
            id="pcie-is-slower-than-asked",
        ),
    ],
)
def test_refusal_names_the_condition(name: str, free: tuple[int, ...], ask: DeviceRequest, reason: Reason) -> None:
    """A refusal says which condition no set meets."""
    assert reason is refused(name, free, ask)


def test_pcie_ask_leaves_bridges_alone() -> None:
    """An ask for PCIe alone takes two cards of one socket that no bridge joins."""
    assert chosen("h100-nvl-8", ALL8, DeviceRequest(2, interconnect=Interconnect.PCIE)) == (0, 2)


def test_island_wins_over_spanning_on_other_machine() -> None:
    """A set inside one island costs less than any set that spans islands, whatever the machines."""
    spanning = choose(profile("h100-nvl-8").machine, mask_of((0, 2, 4)), DeviceRequest(3))
    inside = choose(profile("l40s-8").machine, mask_of(ALL8), DeviceRequest(3))

    assert isinstance(spanning, Choice)
    assert isinstance(inside, Choice)
    assert inside.cost < spanning.cost


def test_nvlink_ring_wins_over_pcie_ring_on_other_machine() -> None:
    """A contiguous pair goes to an NVLink machine, however tight the PCIe machine is."""
    linked = choose(profile("dgx-h100").machine, mask_of(ALL8), DeviceRequest(2))
    tight = choose(profile("l40s-8").machine, mask_of((0, 1)), DeviceRequest(2))

    assert isinstance(linked, Choice)
    assert isinstance(tight, Choice)
    assert linked.cost < tight.cost


@pytest.mark.parametrize(("policy", "fuller_wins"), [(PACKED, True), (CONTIGUOUS, True), (SPREAD, False)])
def test_fuller_machine_wins_unless_spreading(policy: Policy, fuller_wins: bool) -> None:
    """Between alike machines packing prefers the one in use, spreading the empty one."""
    fuller = choose(profile("dgx-h100").machine, mask_of((0, 1, 2, 3)), DeviceRequest(1, policy))
    emptier = choose(profile("dgx-h100").machine, mask_of(ALL8), DeviceRequest(1, policy))

    assert isinstance(fuller, Choice)
    assert isinstance(emptier, Choice)
    assert fuller_wins == (fuller.cost < emptier.cost)


def test_weak_gpu_serves_singles_first() -> None:
    """On a switch machine the GPU with some links down goes to a single-GPU pod."""
    cells = [
        ["X" if row == column else "NV12" if 3 in (row, column) else "NV18" for column in range(8)] for row in range(8)
    ]
    weak = machine(cells, numa=[0] * 4 + [1] * 4, nvlink_generation=4, nvswitch=True)

    answer = choose(weak, weak.full, DeviceRequest(1))

    assert isinstance(answer, Choice)
    assert answer.positions == (3,)


def test_choice_tells_bandwidth_quality_and_islands() -> None:
    """The answer carries what people ask about it."""
    answer = choose(profile("h100-nvl-8").machine, mask_of(ALL8), DeviceRequest(2))

    assert isinstance(answer, Choice)
    assert answer.positions == (0, 1)
    assert pytest.approx(247.2) == answer.ring_gbps
    assert answer.relative_quality == 1.0
    assert not answer.bounded
    assert answer.islands == ("nvlink-group-0",)


def test_poor_pair_is_told_as_poor() -> None:
    """A pair that only PCIe joins is given, with its true quality."""
    answer = choose(profile("dgx1-v100").machine, mask_of((0, 5)), DeviceRequest(2))

    assert isinstance(answer, Choice)
    assert pytest.approx(6.0) == answer.ring_gbps
    assert pytest.approx(0.15) == answer.relative_quality


def test_would_ever_fit_judges_the_empty_machine() -> None:
    """What an empty machine cannot serve is refused for ever; everything else may wait."""
    pairs = profile("h100-nvl-8").machine

    assert would_ever_fit(pairs, DeviceRequest(8)) is None
    assert would_ever_fit(pairs, DeviceRequest(9)) == ChoiceRefusal(Reason.TOO_FEW_GPUS)
    assert would_ever_fit(pairs, DeviceRequest(4, ISLAND)) == ChoiceRefusal(Reason.NO_ISLAND)


def test_nine_to_sixteen_behind_one_switch() -> None:
    """A 16-GPU switch machine serves odd large asks from one island, and 16 only when all are free."""
    dgx2 = profile("dgx2-v100").machine
    for count in (9, 10, 12, 16):
        answer = choose(dgx2, dgx2.full, DeviceRequest(count, ISLAND))
        assert isinstance(answer, Choice)
        assert not answer.bounded
    assert choose(dgx2, dgx2.full & ~1, DeviceRequest(16)) == ChoiceRefusal(Reason.TOO_FEW_FREE)


def test_large_machine_is_answered_within_bounds() -> None:
    """More devices than a table holds are chosen greedily, and the answer says that it is bounded."""
    cells = [
        ["X" if row == column else "PIX" if row // 7 == column // 7 else "SYS" for column in range(56)]
        for row in range(56)
    ]
    slices = machine(cells, pcie_generation=4)

    answer = choose(slices, slices.full & ~0b11111, DeviceRequest(4))

    assert isinstance(answer, Choice)
    assert answer.bounded
    assert len({position // 7 for position in answer.positions}) == 1


@pytest.mark.parametrize(
    ("required", "count", "positions"),
    [(0b10000, 1, (4,)), (0b10000, 2, (4, 7)), (0b10000, 4, (4, 5, 6, 7)), (0b1, 2, (0, 3)), (0b100001, 2, (0, 5))],
    ids=["itself", "its-double-linked-partner", "its-quad", "first-partner", "both-given"],
)
def test_required_gpus_are_in_the_set(required: int, count: int, positions: tuple[int, ...]) -> None:
    """The set contains what is required, and is the best of those that do."""
    answer = choose(profile("dgx1-v100").machine, 0xFF, DeviceRequest(count), required=required)

    assert isinstance(answer, Choice)
    assert answer.positions == positions


@pytest.mark.parametrize(
    ("free", "required", "count"), [(0xFE, 0b1, 2), (0xFF, 0b111, 2)], ids=["not-free", "more-than-the-set"]
)
def test_required_gpus_that_cannot_be_given_are_refused(free: int, required: int, count: int) -> None:
    """A requirement that contradicts the ask is a refusal of its own."""
    answer = choose(profile("dgx1-v100").machine, free, DeviceRequest(count), required=required)

    assert answer == ChoiceRefusal(Reason.REQUIRED)


def test_required_gpus_on_a_large_machine() -> None:
    """Beyond tables the search grows from what is required."""
    cells = [
        ["X" if row == column else "PIX" if row // 4 == column // 4 else "SYS" for column in range(20)]
        for row in range(20)
    ]
    answer = choose(machine(cells, pcie_generation=4), (1 << 20) - 1, DeviceRequest(3), required=0b1000000)

    assert isinstance(answer, Choice)
    assert answer.positions == (4, 5, 6)


@pytest.mark.parametrize("free", [-1, 1 << 8], ids=["negative", "beyond-the-machine"])
def test_foreign_free_mask_is_a_fault(free: int) -> None:
    """A mask that names positions which do not exist is the caller's mistake."""
    with pytest.raises(PositionError):
        choose(profile("dgx-h100").machine, free, DeviceRequest(1))


@pytest.mark.parametrize(
    "arguments",
    [{"count": 0}, {"count": -1}, {"count": 65}, {"count": 1, "min_bandwidth_gbps": float("nan")}],
    ids=["zero", "negative", "more-than-any-machine", "bandwidth-is-no-number"],
)
def test_senseless_ask_is_a_fault(arguments: dict[str, float]) -> None:
    """Asks that no machine could answer are refused where they are made."""
    with pytest.raises(DeviceRequestError):
        DeviceRequest(**arguments)
