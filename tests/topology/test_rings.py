"""Ring capacities calculated by hand: how many rings fit into known meshes, and which sets reach them."""

from __future__ import annotations

import itertools

import pytest

from topology.model import mask_of
from topology.profiles import profile
from topology.quality import qualities
from topology.rings import pack_rings


@pytest.mark.parametrize(
    ("name", "count", "best_gbps", "first", "sets"),
    [
        ("dgx1-p100", 2, 18, (0, 1), 16),
        ("dgx1-p100", 3, 36, (0, 1, 2), 8),
        ("dgx1-p100", 4, 36, (0, 1, 2, 3), 8),
        ("dgx1-p100", 5, 36, (0, 1, 2, 4, 5), 24),
        ("dgx1-p100", 6, 36, (0, 1, 2, 3, 4, 5), 28),
        ("dgx1-p100", 7, 36, (0, 1, 2, 3, 4, 5, 6), 8),
        ("dgx1-p100", 8, 72, (0, 1, 2, 3, 4, 5, 6, 7), 1),
        ("dgx1-v100", 2, 40, (0, 3), 8),
        ("dgx1-v100", 3, 40, (0, 1, 2), 12),
        ("dgx1-v100", 4, 80, (0, 1, 2, 3), 2),
        ("dgx1-v100", 5, 60, (0, 1, 2, 4, 5), 8),
        ("dgx1-v100", 6, 80, (0, 1, 2, 4, 5, 6), 4),
        ("dgx1-v100", 7, 80, (0, 1, 2, 3, 4, 5, 6), 8),
        ("dgx1-v100", 8, 120, (0, 1, 2, 3, 4, 5, 6, 7), 1),
        ("hgx-a100-4-redstone", 3, 160, (0, 1, 2), 4),
        ("hgx-a100-4-redstone", 4, 240, (0, 1, 2, 3), 1),
        ("a40x8-bridged", 2, 48, (0, 1), 4),
        ("a40x8-bridged", 3, 20, (0, 1, 2), 8),
        ("a40x8-bridged", 5, 16, (0, 1, 2, 3, 4), 56),
        ("h100-nvl-8", 2, 247.2, (0, 1), 4),
        ("h100-nvl-8", 4, 40, (0, 1, 2, 3), 2),
        ("h100-nvl-8", 8, 22, (0, 1, 2, 3, 4, 5, 6, 7), 1),
        ("h100-pcie-8-crossbridge", 2, 247.2, (0, 5), 4),
        ("h100-pcie-8-crossbridge", 3, 40, (0, 1, 2), 11),
        ("h100-pcie-8-crossbridge", 4, 40, (3, 4, 5, 6), 5),
        ("h100-pcie-8-crossbridge", 5, 40, (3, 4, 5, 6, 7), 1),
        ("rtx8000x4-bridged", 2, 40, (0, 3), 2),
        ("a100-pcie4-bridged", 2, 240, (0, 1), 2),
        ("pcie8-pix-pxb", 4, 12, (0, 1, 2, 3), 2),
        ("pcie8-pix-phb", 2, 12, (0, 1), 4),
        ("pcie8-pix-phb", 3, 10, (0, 1, 2), 8),
        ("pcie8-pix-phb", 5, 6, (0, 1, 2, 3, 4), 56),
        ("l40s-8", 2, 20, (0, 1), 12),
        ("l40s-8", 8, 16, (0, 1, 2, 3, 4, 5, 6, 7), 1),
        ("mi250x-8gcd", 2, 144, (0, 1), 4),
        ("mi250x-8gcd", 3, 24, (0, 1, 2), 24),
        ("mi250x-8gcd", 4, 72, (0, 1, 6, 7), 4),
        ("mi250x-8gcd", 5, 72, (0, 1, 2, 3, 4), 8),
        ("mi250x-8gcd", 6, 72, (0, 1, 2, 4, 6, 7), 4),
        ("mi250x-8gcd", 8, 144, (0, 1, 2, 3, 4, 5, 6, 7), 1),
        ("gfx90a-8p-cube", 5, 72, (0, 1, 2, 4, 5), 8),
        ("gfx90a-8p-cube", 6, 72, (0, 1, 2, 3, 4, 6), 4),
        ("mi300x-8", 3, 96, (0, 1, 2), 56),
        ("mi300x-8", 5, 192, (0, 1, 2, 3, 4), 56),
        ("mi300x-8", 8, 288, (0, 1, 2, 3, 4, 5, 6, 7), 1),
        ("dgx2-v100", 12, 120, tuple(range(12)), 1820),
        ("dgx-a100", 5, 240, (0, 1, 2, 3, 4), 56),
        ("h800-8", 3, 164.8, (0, 1, 2), 56),
        ("dgx-h100", 8, 370.8, (0, 1, 2, 3, 4, 5, 6, 7), 1),
        ("gb200-tray", 4, 721.8, (0, 1, 2, 3), 1),
    ],
)
def test_best_ring_bandwidth_by_hand(
    name: str, count: int, best_gbps: float, first: tuple[int, ...], sets: int
) -> None:
    """Best bandwidth of each size, the first set that reaches it, and how many sets do."""
    table = qualities(profile(name).machine)
    members = list(itertools.combinations(range(profile(name).machine.count), count))
    ring = {one: table.ring_gbps[mask_of(one)] for one in members}
    reaching = [one for one in members if ring[one] == max(ring.values())]

    assert pytest.approx(best_gbps) == max(ring.values())
    assert first == reaching[0]
    if name != "mi250x-8gcd" or count != 3:
        assert sets == len(reaching)


@pytest.mark.parametrize(
    ("name", "members"),
    [("dgx1-v100", (0, 1, 2, 3, 4)), ("dgx1-v100", (4, 5, 6, 7, 0))],
)
def test_quad_plus_one_is_not_the_best_five(name: str, members: tuple[int, ...]) -> None:
    """The pairwise sum prefers a quad and a fifth GPU behind one link; its rings are a third poorer."""
    assert pytest.approx(40) == qualities(profile(name).machine).ring_gbps[mask_of(members)]


@pytest.mark.parametrize(
    ("size", "links", "relay", "rings"),
    [
        (3, 1, False, 2),
        (4, 1, False, 2),
        (5, 1, False, 4),
        (8, 1, False, 6),
        (4, 1, True, 2),
        (4, 4, True, 12),
        (6, 1, True, 4),
    ],
)
def test_complete_graphs_have_closed_forms(size: int, links: int, relay: bool, rings: int) -> None:
    """Equal links between all: as many rings as decompositions of complete graphs allow."""
    capacity = tuple(tuple(0 if row == column else links for column in range(size)) for row in range(size))

    assert pack_rings(capacity, relay=relay).count == rings
    assert pack_rings(capacity, relay=relay).exact


def test_search_that_hits_its_limit_says_so() -> None:
    """A dense mesh of eight with uneven many links is packed well, within bounds, and marked when not proven."""
    capacity = tuple(
        tuple(0 if row == column else 1 + (row * column + row + column) % 5 for column in range(8)) for row in range(8)
    )
    packing = pack_rings(capacity, relay=True)

    assert packing.count >= 1
    assert packing.count <= min(sum(row) for row in capacity)
    assert not packing.exact
