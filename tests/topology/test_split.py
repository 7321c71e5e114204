"""Splitting an allocation among containers: disjoint, complete, in order, and each part as well linked as can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.errors import PositionError
from topology.fragmentation import relative_qualities
from topology.model import machine, mask_of
from topology.profiles import profile
from topology.split import split


@pytest.mark.parametrize(
    ("name", "positions", "counts", "parts"),
    [
        pytest.param("h100-nvl-8", (0, 1, 2, 3), (2, 2), ((0, 1), (2, 3)), id="pairs-stay-pairs"),
        pytest.param("h100-nvl-8", (0, 2, 3), (1, 2), ((0,), (2, 3)), id="single-first-does-not-break-the-pair"),
        pytest.param("dgx1-v100", tuple(range(8)), (4, 4), ((0, 1, 2, 3), (4, 5, 6, 7)), id="mesh-splits-into-quads"),
        pytest.param("rtx8000x4-bridged", (0, 1, 2, 3), (2, 2), ((0, 3), (1, 2)), id="bridges-cross-sockets"),
        pytest.param("dgx-h100", (4, 5), (1, 0, 1), ((4,), (), (5,)), id="zero-is-an-empty-part"),
        pytest.param("dgx-h100", (3, 1, 2), (3,), ((1, 2, 3),), id="one-container-takes-all-sorted"),
    ],
)
def test_split_by_hand(
    name: str, positions: tuple[int, ...], counts: tuple[int, ...], parts: tuple[tuple[int, ...], ...]
) -> None:
    """The split that a person would make."""
    assert split(profile(name).machine, positions, counts) == parts


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(("dgx1-v100", "h100-nvl-8", "l40s-8", "mi250x-8gcd")),
    positions=st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True),
    data=st.data(),
)
def test_split_is_the_best_there_is(name: str, positions: list[int], data: st.DataObject) -> None:
    """Parts are disjoint, complete and in order, and no other split has more quality in all."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(positions)), max_size=2)))
    counts = [end - start for start, end in itertools.pairwise([0, *cuts, len(positions)])]
    parts = split(profile(name).machine, positions, counts)

    def worth(split_parts: list[tuple[int, ...]]) -> float:
        relative = relative_qualities(profile(name).machine)
        return sum(float(relative[mask_of(part)]) for part in split_parts if len(part) > 1)

    assert [len(part) for part in parts] == counts
    assert sorted(itertools.chain(*parts)) == sorted(positions)
    for order in itertools.permutations(positions):
        left = iter(order)
        other = [tuple(itertools.islice(left, count)) for count in counts]
        assert worth(list(parts)) >= worth(other) - 1e-6


def test_large_allocation_is_split_part_by_part() -> None:
    """More than eight positions: each container in turn takes its best part."""
    parts = split(profile("dgx2-v100").machine, tuple(range(16)), (8, 4, 4))

    assert [len(part) for part in parts] == [8, 4, 4]
    assert sorted(itertools.chain(*parts)) == list(range(16))


def test_split_of_a_machine_without_tables() -> None:
    """Twenty devices on ten cards: pairs of one card go together."""
    cells = [
        ["X" if row == column else "PIX" if row // 2 == column // 2 else "SYS" for column in range(20)]
        for row in range(20)
    ]
    subject = machine(cells, pcie_generation=4)

    assert split(subject, (0, 2, 3, 5, 4, 1), (2, 2, 2)) == ((0, 1), (2, 3), (4, 5))


@pytest.mark.parametrize(
    ("positions", "counts"),
    [((0, 1), (1,)), ((0, 1), (3,)), ((0, 1), (-1, 3)), ((0, 0), (2,)), ((7, 8), (2,)), ((), ())],
    ids=["too-few-counts", "too-many", "negative", "twice-the-same", "foreign-position", "nothing"],
)
def test_split_that_does_not_add_up_is_a_fault(positions: tuple[int, ...], counts: tuple[int, ...]) -> None:
    """Counts and positions that contradict each other never give a silent answer."""
    with pytest.raises(PositionError):
        split(profile("dgx-h100").machine, positions, counts)
