"""Splits the bytes of a watch into lines and events.

Pure. Lines are split here because the HTTP library limits their length and one object may be megabytes long. The object
itself stays raw: only the consumer knows its type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from atoll.api.depth import at_any_depth
from atoll.kube.errors import MalformedAnswer, truncate

LINE_BYTES_MAX = 16 * 1024 * 1024
INITIAL_EVENTS_END: Final = "k8s.io/initial-events-end"


class EventMeta(msgspec.Struct, rename="camel", frozen=True, gc=False):
    """The least that every object has."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None


class AnyObject(msgspec.Struct, frozen=True, gc=False):
    """An object of which only the metadata is read."""

    metadata: EventMeta


class WatchEvent(msgspec.Struct, frozen=True, gc=False):
    """ADDED, MODIFIED, DELETED, BOOKMARK or ERROR, with the object undecoded."""

    type: str
    object: msgspec.Raw


_decode_event = at_any_depth(msgspec.json.Decoder(WatchEvent).decode)
decode_metadata = at_any_depth(msgspec.json.Decoder(AnyObject).decode)


class LineSplitter:
    """Collects chunks and returns whole lines."""

    def __init__(self, *, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._line_bytes_max = line_bytes_max

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the lines that `chunk` completes, without their ends; MalformedAnswer when one is too long."""
        *complete, rest = chunk.split(b"\n")
        for line in complete:
            self._keep(line)
            whole = b"".join(self._parts)
            self._parts, self._size_bytes = [], 0
            yield whole
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        self._size_bytes += len(part)
        if self._size_bytes > self._line_bytes_max:
            raise MalformedAnswer(f"watch event longer than {self._line_bytes_max} bytes")
        if part:
            self._parts.append(part)


def parse_event(line: bytes) -> WatchEvent:
    """Read one line of a watch; MalformedAnswer if it is not a watch event."""
    try:
        return _decode_event(line)
    except msgspec.MsgspecError as error:
        raise MalformedAnswer(f"not a watch event: {truncate(str(error))}") from error
