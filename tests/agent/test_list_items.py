"""The bytes of a list become its items, wherever the chunks end."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import list_items
from agent.list_items import ItemSplitter, ListTooLarge

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\{}[],: é\n', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ITEMS = st.lists(st.dictionaries(st.text(alphabet='i"{[', max_size=4), VALUES, max_size=3), max_size=4)


def split(raw: bytes, chunk_bytes: int) -> tuple[list[bytes], bytes]:
    """Return the items and the head."""
    splitter = ItemSplitter()
    items = [
        item for start in range(0, len(raw), chunk_bytes) for item in splitter.feed(raw[start : start + chunk_bytes])
    ]
    return items, bytes(splitter.head)


@given(items=ITEMS, metadata=VALUES, indent=st.sampled_from([None, 1]), chunk_bytes=st.integers(1, 40))
def test_items_are_what_the_list_holds(items: list[Any], metadata: Any, indent: int | None, chunk_bytes: int) -> None:
    """Every item comes whole and in order, and the rest is the list without items."""
    head = {"kind": "PodList", "metadata": {"inner": {"value": str(metadata)}}, "items": []}
    raw = json.dumps({**head, "items": items}, indent=indent).encode()

    found, rest = split(raw, chunk_bytes)

    assert [json.loads(item) for item in found] == items
    assert json.loads(rest) == head


@given(raw=st.binary(max_size=200) | st.text(alphabet='"\\{}[],:a', max_size=60).map(str.encode))
def test_nonsense_is_never_a_crash(raw: bytes) -> None:
    """Whatever a server sends is split somehow; only the decoder of the head decides whether it was a list."""
    split(raw, 7)


@pytest.mark.parametrize("raw", [b'{"items":["' + b"x" * 2_000, b"x" * 2_000, b'{"items":[],' + b'"k":"v",' * 400])
def test_what_never_ends_is_refused(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless item, text or head ends at a bound."""
    monkeypatch.setattr(list_items, "ITEM_BYTES_MAX", 1_000)
    monkeypatch.setattr(list_items, "HEAD_BYTES_MAX", 1_000)
    with pytest.raises(ListTooLarge):
        split(raw, 64)


def test_memory_is_that_of_one_item() -> None:
    """A hundred large items never stand in memory together."""
    item = json.dumps({"metadata": {"labels": {f"label-{number}": "x" for number in range(1_000)}}}).encode()
    splitter, held = ItemSplitter(), []
    for chunk in (b'{"kind":"PodList","items":[', *[item + b","] * 100):
        assert len(list(splitter.feed(chunk))) in {0, 1}
        held.append(len(splitter._bytes) + len(splitter.head))
    assert max(held) < 2 * len(item)
