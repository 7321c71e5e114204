"""The watch reader: any split of the bytes gives the same lines; invalid input is a typed error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.kube.errors import MalformedAnswer
from atoll.kube.watch_events import LineSplitter, parse_event


@given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.integers(1, 7))
def test_lines_do_not_depend_on_how_the_bytes_arrive(lines: list[bytes], size: int) -> None:
    """Chunks are the network's business, lines are ours."""
    data = b"".join(line + b"\n" for line in lines)
    splitter = LineSplitter()

    cut = [line for start in range(0, len(data), size) for line in splitter.feed(data[start : start + size])]

    assert cut == lines


def test_line_of_megabytes_passes_and_endless_line_does_not() -> None:
    """Big objects are fine; a peer that never ends its line cannot fill our memory."""
    splitter = LineSplitter(line_bytes_max=8 * 1024 * 1024)
    chunk = b"x" * (1024 * 1024)
    for _ in range(5):
        assert list(splitter.feed(chunk)) == []
    assert len(next(splitter.feed(b"\n"))) == 5 * 1024 * 1024

    for _ in range(8):
        list(splitter.feed(chunk))
    with pytest.raises(MalformedAnswer):
        list(splitter.feed(b"x"))


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"type":7,"object":{}}', b'{"type":"ADDED"}', b"\xff\xfe"])
def test_line_that_is_no_event_is_malformed(line: bytes) -> None:
    """The reader never passes on half an event."""
    with pytest.raises(MalformedAnswer):
        parse_event(line)
