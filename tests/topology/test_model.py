"""Machines: unusual facts cause no crash, and impossible facts are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.errors import MachineError, ProfileError
from topology.groups import cliques, numa_groups
from topology.islands import islands
from topology.links import clean_cell, direct_links, weaker
from topology.model import DEVICES_MAX, machine, mask_of, positions_of
from topology.profiles import profile, profile_names
from topology.quality import qualities, rate
from topology.rates import link_gbps, pcie_gbps, rates_known


@pytest.mark.parametrize(
    ("cell", "clean"),
    [
        ("NV12", "NV12"),
        (" nv2 ", "NV2"),
        ("XGMI4", "XGMI4"),
        ("SOC", "SYS"),
        ("C2C", "NODE"),
        ("CNS", "NS"),
        ("NV0", "SYS"),
        ("NV", "SYS"),
        ("NV99", "SYS"),
        ("", "SYS"),
        ("N/A", "SYS"),
        (None, "SYS"),
        (7, "SYS"),
    ],
)
def test_cells_have_one_spelling(cell: object, clean: str) -> None:
    """Every spelling of the field has one meaning; what is not known means the worst."""
    assert clean_cell(cell) == clean


@given(
    st.sampled_from(("NV1", "NV12", "XGMI2", "PIX", "SYS", "NS")), st.sampled_from(("NV1", "NV4", "PHB", "NODE", "NS"))
)
def test_weaker_side_counts(first: str, second: str) -> None:
    """The weaker of two cells is one of them, whichever comes first, and has no more links than either."""
    assert weaker(first, second) in (first, second)
    assert weaker(first, second) == weaker(second, first)
    assert direct_links(weaker(first, second)) <= min(direct_links(first), direct_links(second))


@pytest.mark.parametrize(
    "links",
    [[], [["X"] * 3] * 2, ["XX", "XX"], [["X"] * (DEVICES_MAX + 1)] * (DEVICES_MAX + 1)],
    ids=["empty", "not-square", "text-rows", "too-many"],
)
def test_impossible_shapes_are_faults(links: list[list[str]]) -> None:
    """A matrix that no machine can have names itself in the error."""
    with pytest.raises(MachineError, match="machine: needs"):
        machine(links)


def test_numa_of_another_length_is_a_fault() -> None:
    """NUMA nodes come one per device."""
    with pytest.raises(MachineError, match="one NUMA node per device"):
        machine([["X", "SYS"], ["SYS", "X"]], numa=[0])


@given(
    st.lists(
        st.lists(st.one_of(st.none(), st.text(max_size=4), st.sampled_from(("NV2", "PIX"))), max_size=3),
        min_size=3,
        max_size=3,
    ),
    st.lists(st.one_of(st.none(), st.integers(-2, 3)), min_size=3, max_size=3),
    st.floats(),
)
def test_any_cells_make_a_machine(links: list[list[str | None]], numa: list[int | None], gbps: float) -> None:
    """Missing, unknown and short rows degrade; the machine is symmetric and can be rated."""
    subject = machine(links, numa=numa, link_gbps=gbps, nvlink_generation=2)

    assert all(subject.links[row][column] == subject.links[column][row] for row in range(3) for column in range(3))
    assert len(qualities(subject).ring_gbps) == 8
    assert sum(len(island.positions) for island in islands(subject)) == 3


def test_equal_facts_are_one_machine() -> None:
    """Machines built twice from equal facts are equal and hash alike, so that tables are shared."""
    first, second = (machine([["X", "NV2"], ["NV2", "X"]], numa=[0, 0], nvlink_generation=2) for _ in range(2))

    assert first == second
    assert hash(first) == hash(second)


@given(st.integers(0, (1 << DEVICES_MAX) - 1))
def test_masks_and_positions_are_one_thing(mask: int) -> None:
    """Positions of a mask make that mask again."""
    assert mask_of(positions_of(mask)) == mask


@pytest.mark.parametrize(
    ("generation", "told", "effective"),
    [(1, None, 18.0), (2, 25.0, 20.0), (3, 25.781, 20.0), (3, 14.0625, 12.0), (4, 26.562, 20.6), (4, 25.0, 20.6),
     (5, 53.125, 40.1), (None, 25.0, 20.0), (None, None, 12.0), (6, None, 40.1), (3, 1e300, 20.0), (None, 1e300, 12.0),
     (3, -25.0, 20.0), (3, float("nan"), 20.0), (3, float("inf"), 20.0), (6, 100.0, 80.0)],
)  # fmt: skip
def test_link_rates_by_generation(generation: int | None, told: float | None, effective: float) -> None:
    """Effective GB/s per link, by generation and by the rate that is told, unless no link can have it."""
    assert link_gbps(machine([["X"]], nvlink_generation=generation, link_gbps=told)) == effective


@pytest.mark.parametrize(
    ("generation", "effective"), [(None, 12.0), (2, 12.0), (3, 12.0), (4, 24.0), (5, 48.0), (6, 48.0)]
)
def test_pcie_rates_by_generation(generation: int | None, effective: float) -> None:
    """Effective GB/s of a slot; unknown counts as slow, newer as the newest known."""
    assert pcie_gbps(machine([["X"]], pcie_generation=generation)) == effective


def test_unknown_generation_is_told() -> None:
    """Bandwidths without a generation are relative, and the machine says so."""
    cells = [["X", "NV4"], ["NV4", "X"]]

    assert not rates_known(machine(cells))
    assert rates_known(machine(cells, nvlink_generation=3))
    assert not rates_known(machine([["X", "PIX"], ["PIX", "X"]]))


@pytest.mark.parametrize("name", profile_names())
def test_profiles_are_complete(name: str) -> None:
    """Every known machine has a product, a slug, memory, a capability and rated bandwidths."""
    known = profile(name)

    assert known.name == name
    assert known.product_name
    assert known.model == known.model.lower().replace(" ", "-")
    assert known.memory_bytes > 8 << 30
    assert float(known.compute_capability) >= 6
    assert known.evidence in ("observed", "fixture", "derived")
    assert rates_known(known.machine)


def test_profiles_hold_what_others_build_on() -> None:
    """The shapes that agents and clusters play by name."""
    assert {"dgx1-v100", "dgx-a100", "dgx-h100", "l40s-8", "gb200-tray"} <= set(profile_names())
    assert profile("gb200-tray").machine.count == 4
    with pytest.raises(ProfileError, match="dgx-h100"):
        profile("dgx-h1000")


def test_cube_mesh_seen_as_cliques_and_groups() -> None:
    """The DGX-1V: two quads and four cross pairs are cliques; sockets are groups."""
    subject = profile("dgx1-v100").machine

    assert cliques(subject) == ((0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5), (2, 6), (3, 7))
    assert numa_groups(subject) == ((0, (0, 1, 2, 3)), (1, (4, 5, 6, 7)))


def test_islands_are_named_by_kind() -> None:
    """A bridged pair, a lonely card of a known NUMA node and one of an unknown are three kinds of names."""
    cells = [
        ["X", "NV4", "SYS", "SYS"],
        ["NV4", "X", "SYS", "SYS"],
        ["SYS", "SYS", "X", "SYS"],
        ["SYS", "SYS", "SYS", "X"],
    ]
    names = [(island.name, island.kind, island.positions) for island in islands(machine(cells, numa=[0, 0, 1, None]))]

    assert names == [("nvlink-group-0", "nvlink", (0, 1)), ("numa-1", "pcie", (2,)), ("pcie-group-0", "pcie", (3,))]


def test_large_machine_is_rated_set_by_set() -> None:
    """Beyond tables: a switch by its weakest member, a PCIe box by its slowest needed step."""
    switch = machine([["X" if row == column else "NV18" for column in range(20)] for row in range(20)],
                     nvlink_generation=5, nvswitch=True)  # fmt: skip
    slots = machine([["X" if row == column else "PIX" if row // 10 == column // 10 else "SYS" for column in range(20)]
                     for row in range(20)], pcie_generation=4, inter_socket_gbps=10.0)  # fmt: skip

    assert rate(switch, tuple(range(12))).ring_gbps == pytest.approx(18 * 40.1)
    assert rate(slots, (0, 1, 2)).ring_gbps == 24.0
    assert rate(slots, (0, 1, 10)).ring_gbps == 10.0
    assert rate(slots, tuple(range(10))).exact
    assert not rate(slots, tuple(range(12))).exact
