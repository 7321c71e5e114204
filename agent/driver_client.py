"""The agent's end of the driver worker: every step has a deadline, and a worker that misses it is killed.

The driver runs in a process because a process can be killed and a thread cannot. A worker that cannot be killed (it
waits in the kernel) is left behind and counted; when too many are left, none is started until one has ended.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from agent.amd_driver import AmdDriver
from agent.driver import Driver, Facts

LEFT_BEHIND_MAX = 4
ANSWER_BYTES_MAX = 1 << 20
OPEN_SECONDS = 60.0
"""Without persistence mode the driver initialises every card first."""


class DriverSilent(Exception):
    """The worker hung or died in the step."""


class DriverRefused(Exception):
    """The library as a whole refuses."""


class Steps(Protocol):
    """Source of answers to steps."""

    def ask(self, step: str, index: int = 0, others: Sequence[int] = ()) -> Facts:
        """Facts of one step. Raises DriverSilent and DriverRefused."""
        ...

    def close(self) -> None:
        """Close the driver."""
        ...


class OwnDriver:
    """Steps answered in this process, for tests with a fake library that cannot hang."""

    def __init__(self, driver: Driver | AmdDriver) -> None:
        self._driver = driver

    def ask(self, step: str, index: int = 0, others: Sequence[int] = ()) -> Facts:
        """Facts of one step. Raises DriverRefused."""
        if step == "events":
            return {"events": self._driver.events()}
        if step != "open":
            return self._driver.step(step, index, others)
        try:
            return self._driver.open()
        except Exception as error:
            self._driver.close()
            raise DriverRefused(str(error)) from error

    def close(self) -> None:
        """Close the driver."""
        self._driver.close()


class DriverWorker:
    """Steps answered by a worker process, started at the first step and again after each failure."""

    def __init__(self, *, step_seconds: float, open_seconds: float = OPEN_SECONDS, library: str = "pynvml") -> None:
        """library: the bindings that the worker imports, pynvml or amdsmi."""
        self._library = library
        self._step_seconds = step_seconds
        self._open_seconds = open_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._left_behind: list[subprocess.Popen[bytes]] = []
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The worker's process id, None without a worker."""
        return self._process.pid if self._process is not None else None

    def ask(self, step: str, index: int = 0, others: Sequence[int] = ()) -> Facts:
        """Facts of one step. Raises DriverSilent and DriverRefused."""
        process = self._running()
        request = json.dumps([step, index, list(others)]).encode() + b"\n"
        seconds = self._open_seconds if step == "open" else self._step_seconds
        try:
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
            line = self._line(process, time.monotonic() + seconds)
        except (OSError, TimeoutError) as error:
            self._abandon()
            word = f"no answer within {seconds:g} s" if isinstance(error, TimeoutError) else "the driver's library died"
            raise DriverSilent(f"{word} ({step})") from error
        return self._facts(line, step)

    def _facts(self, line: bytes, step: str) -> Facts:
        """Facts of an answer. Raises DriverRefused for an error, DriverSilent for an answer without meaning."""
        try:
            answer: Any = json.loads(line)
        except ValueError:
            answer = None
        facts = answer.get("facts") if isinstance(answer, dict) else None
        if isinstance(facts, dict):
            return facts
        self._abandon()
        if isinstance(answer, dict) and "error" in answer:
            raise DriverRefused(str(answer["error"]))
        raise DriverSilent(f"the worker's answer makes no sense ({step})")

    def close(self) -> None:
        """End the worker."""
        if self._process is not None:
            self._abandon()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        self._left_behind = [one for one in self._left_behind if one.poll() is None]
        if len(self._left_behind) >= LEFT_BEHIND_MAX:
            raise DriverRefused(f"{len(self._left_behind)} workers hang in the driver and cannot be killed")
        paths = os.pathsep.join(path or "." for path in sys.path)
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-S", "-m", "agent.driver_worker", self._library),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": paths},
            )
        except OSError as error:
            raise DriverRefused(f"no worker can be started: {error}") from error
        self._buffer = b""
        self.starts += 1
        return self._process

    def _line(self, process: subprocess.Popen[bytes], deadline_seconds: float) -> bytes:
        assert process.stdout is not None
        with selectors.PollSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline_seconds - time.monotonic())):
                    raise TimeoutError
                read = os.read(process.stdout.fileno(), 65_536)
                if not read or len(self._buffer) > ANSWER_BYTES_MAX:
                    raise BrokenPipeError
                self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _abandon(self) -> None:
        """Kill the worker; remember it if it does not die at once."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                _close(pipe)
        try:
            process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._left_behind.append(process)


def _close(pipe: Any) -> None:  # noqa: ANN401 - a pipe of either direction
    try:
        pipe.close()
    except OSError:
        return
