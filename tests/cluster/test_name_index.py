"""Promises of the name index: the rows of a dict, for any names, at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import name_index
from atoll.cluster.name_index import NameIndex

names = st.text(alphabet="ab-.0", max_size=4)


@given(st.lists(names, unique=True, max_size=60), st.lists(names, max_size=80))
def test_rows_are_those_of_a_dict(known: list[str], asked: list[str]) -> None:
    """Known names have their row, also asked twice or not at all; all others have 0."""
    row_of = {name: row for row, name in enumerate(known, start=1)}

    assert NameIndex(row_of).rows_of(asked).tolist() == [row_of.get(name, 0) for name in asked]


def test_thousands_of_names_are_all_found() -> None:
    """Names of a large cluster, and as many that are not of it."""
    row_of = {f"node-{number:05d}": number for number in range(1, 6000)}
    asked = [f"node-{number:05d}" for number in range(12_000)]

    assert NameIndex(row_of).rows_of(asked).tolist() == [row_of.get(name, 0) for name in asked]


@pytest.mark.parametrize("buckets", [1, 3, 7])
def test_crowded_slots_are_searched_to_their_end(buckets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many names begin in one slot, each is found, and a stranger that begins there is not."""
    numbers = {f"n{number}": number for number in range(40)}
    hashes = {name: (number % buckets) + (number << 32) for name, number in numbers.items()}
    monkeypatch.setattr(
        name_index, "_hashes", lambda asked: name_index.np.array([hashes[name] for name in asked], dtype="int64")
    )
    row_of = {name: number + 1 for name, number in numbers.items() if number < 30}

    assert NameIndex(row_of).rows_of(list(numbers)).tolist() == [row_of.get(name, 0) for name in numbers]


def test_known_names_with_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should two known names ever have one hash, names are compared in full."""
    monkeypatch.setattr(name_index, "_hashes", lambda asked: name_index.np.zeros(len(asked), dtype="int64"))

    assert NameIndex({"a": 1, "b": 2}).rows_of(["b", "c", "a"]).tolist() == [2, 0, 1]
