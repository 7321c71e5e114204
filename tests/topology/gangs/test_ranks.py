"""Ranks of a pod set's members: by index where there is one of each, else by name."""

from __future__ import annotations

import pytest

from topology.gangs.ranks import ranks


@pytest.mark.parametrize(
    ("members", "wanted"),
    [
        pytest.param([("w-b", 1), ("w-a", 0)], (1, 0), id="the index counts, not the name"),
        pytest.param([("w-b", 7), ("w-a", 3)], (7, 3), id="indices may have gaps"),
        pytest.param([("w-b", None), ("w-a", 0)], (1, 0), id="one index is missing"),
        pytest.param([("w-b", 0), ("w-a", 0)], (1, 0), id="an index is repeated"),
        pytest.param([("worker-10", None), ("worker-2", None), ("leader", None)], (2, 1, 0), id="numbers by value"),
        pytest.param([("a2b10", None), ("a2b9", None), ("a10b1", None)], (1, 0, 2), id="every number of a name counts"),
        pytest.param([("w-1", None), ("w", None)], (1, 0), id="no number comes first"),
        pytest.param([(f"w-{'9' * 5000}", None), ("w-1", None)], (1, 0), id="a number of any length"),
        pytest.param([("w-0", None), ("w-00", None)], (0, 1), id="equal numbers keep the order given"),
        pytest.param([], (), id="nobody"),
    ],
)
def test_ranks(members: list[tuple[str, int | None]], wanted: tuple[int, ...]) -> None:
    """One rank per member, in the order given."""
    assert ranks(members) == wanted
