"""Stores that die, fail or pause around their nth call; and a process that dies at its nth touch of a folder."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from worker.records import Part
from worker.stores import Produce, Store

TOUCHES = ("open", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.rename")


class Killed(BaseException):
    """Stands for the end of a process where there is none of its own; nobody catches it."""


def kill_this_process() -> None:
    """End as a machine that loses its power would end this process: nothing runs after it."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_touch(root: Path, number: int) -> None:
    """Kill this process right before it opens, links, makes or removes something below a folder for the nth time."""
    left = number

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in TOUCHES and arguments and str(arguments[0]).startswith(str(root)):
            left -= 1
            if left == 0:
                kill_this_process()

    sys.addaudithook(count)


class FaultyStore:
    """Passes every call on; at call number `at` it acts before it, after it, or, for writes, in its midst."""

    def __init__(self, store: Store, *, at: int, when: str, act: Callable[[], None]) -> None:
        self.at = at
        self._store, self._when, self._act = store, when, act
        self.calls = 0

    def _around(self, call: Callable[[], object]) -> object:
        self.calls += 1
        if self.calls != self.at:
            return call()
        if self._when == "before":
            self._act()
        try:
            return call()
        finally:
            if self._when == "after":
                self._act()

    def create(self, key: str, data: bytes) -> None:
        self._around(lambda: self._store.create(key, data))

    def write(self, key: str, produce: Produce) -> Part:
        def half(file: BinaryIO) -> None:
            file.write(b"half of what should lie here")

        if self.calls + 1 == self.at and self._when == "half":
            self.calls += 1
            self._store.write(key, half)  # what a careless upload leaves under the whole name
            self._act()
        return self._around(lambda: self._store.write(key, produce))

    def read(self, key: str) -> bytes:
        return self._around(lambda: self._store.read(key))

    def fetch(self, key: str, folder: Path) -> Path:
        return self._around(lambda: self._store.fetch(key, folder))

    def list_sizes(self) -> dict[str, int]:
        return self._around(self._store.list_sizes)

    def delete(self, key: str) -> None:
        self._around(lambda: self._store.delete(key))
