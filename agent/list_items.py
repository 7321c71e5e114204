"""Splits the bytes of a Kubernetes list into its items as they arrive.

Pure. A node's pods may be hundreds of megabytes together, because a tenant chooses how large his are; one at a time
they are small. What remains when every item was taken out is the list itself, with its kind.
"""

import re
from collections.abc import Iterator
from typing import Final

ITEM_BYTES_MAX: Final = 16 * 1024 * 1024
HEAD_BYTES_MAX: Final = 64 * 1024
"""What a list may have beside its items."""
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["{}\[\]]', re.DOTALL)
"""A whole text, the beginning of one that is not complete yet, or a bracket."""
_FIELD, _ITEM = 1, 2
"""Brackets around a field of the list, and around an item."""


class ListTooLarge(ValueError):
    """An item, or what is beside the items, is larger than its bound."""


class ItemSplitter:
    """Feed it chunks; it yields whole items. `head` is what is beside them, valid JSON once the list is complete."""

    def __init__(self) -> None:
        self.head = bytearray()
        self._bytes = bytearray()
        self._scanned = 0
        self._depth = 0
        self._is_in_items = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the items that `chunk` completes. Raises ListTooLarge."""
        self._bytes += chunk
        begin = 0
        for token in _TOKEN.finditer(self._bytes, self._scanned):
            start, end = token.span()
            if token[0] == b'"':
                break
            self._scanned = end
            if token[0] in b"{[":
                if self._depth == _FIELD and token[0] == b"[":
                    self.head += self._bytes[begin:end]
                    self._is_in_items = True
                elif self._depth == _ITEM and self._is_in_items:
                    begin = start
                self._depth += 1
            elif token[0] in b"}]":
                self._depth -= 1
                if self._depth == _ITEM and self._is_in_items:
                    yield bytes(self._bytes[begin:end])
                elif self._depth == _FIELD and self._is_in_items:
                    self._is_in_items = False
                    begin = start
        self._forget(begin)

    def _forget(self, begin: int) -> None:
        """Keep only the item that is not complete yet."""
        if not self._is_in_items:
            self.head += self._bytes[begin : self._scanned]
        if not self._is_in_items or self._depth == _ITEM:
            begin = self._scanned
        del self._bytes[:begin]
        self._scanned -= begin
        if len(self._bytes) > ITEM_BYTES_MAX or len(self.head) > HEAD_BYTES_MAX:
            raise ListTooLarge(f"an object larger than {ITEM_BYTES_MAX} bytes, or no list")
