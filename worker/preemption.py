"""Notices that the container is about to be ended, and how much time is left.

Sources: SIGTERM, and a file with the pod's annotation `gpu.scheduling/preemption-notice`. Gives `seconds_left()`, an
event to wait for, and a callback. The file comes first if the annotation is written; SIGTERM always comes.

The signal handler does very little: it writes a byte into a pipe and calls the previous handler of SIGTERM. A thread
reads the pipe and the file. If Python's wake-up descriptor is unused, the byte is written even while the main thread is
in a long call of a library, so that the time counts from the signal itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

ANNOTATION: Final = "gpu.scheduling/preemption-notice"
"""On the pod: the time of its end, in RFC 3339, or the number of seconds. Empty or absent: no notice."""
FILE_VARIABLE: Final = "ATOLL_PREEMPTION_FILE"
GRACE_VARIABLE: Final = "ATOLL_GRACE_SECONDS"
NOTICE_FILE: Final = "/etc/atoll/preemption-notice"
GRACE_SECONDS: Final = 30.0
"""Kubernetes' default between SIGTERM and SIGKILL."""
POLL_SECONDS: Final = 1.0
NOTICE_BYTES_MAX: Final = 256
EXIT_PREEMPTED: Final = 128 + signal.SIGTERM
"""Exit code of a training that saved and stopped early: 0 would count as done."""

logger = logging.getLogger(__name__)

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """One watch for the whole process; start it in the main thread, after your own handlers."""

    def __init__(
        self,
        *,
        notice_file: Path,
        grace_seconds: float,
        callback: Callable[[float], object] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Prefer `watch`; the clocks are for tests."""
        self._file, self._grace_seconds, self._callback = notice_file, grace_seconds, callback
        self._monotonic, self._now, self._poll_seconds = monotonic, now, poll_seconds
        self._from_signal: float | None = None
        self._from_file: float | None = None
        self._notice = ""
        self._noticed = threading.Event()
        self._is_open = True
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._previous: _Handler = None
        self._has_wakeup = False
        self._masks = threading.local()
        self._thread = threading.Thread(target=self._run, name="preemption", daemon=True)

    @classmethod
    def watch(
        cls,
        *,
        callback: Callable[[float], object] | None = None,
        variables: Mapping[str, str] = os.environ,
    ) -> Self:
        """Start the watch. callback: called once per notice with the seconds left, in its own thread.

        An existing handler of SIGTERM is called too; SIGTERM alone no longer ends the process. Raises ValueError
        outside the main thread, as Python's `signal` does.
        """
        found = cls(
            notice_file=Path(variables.get(FILE_VARIABLE) or NOTICE_FILE),
            grace_seconds=_grace(variables.get(GRACE_VARIABLE)),
            callback=callback,
        )
        found.start()
        return found

    def start(self) -> None:
        """Install the handler and start the thread."""
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        taken = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        self._has_wakeup = taken == -1
        if not self._has_wakeup:
            signal.set_wakeup_fd(taken)
        os.register_at_fork(before=self._hold, after_in_parent=self._let_go, after_in_child=self._leave_child)
        self._thread.start()

    def seconds_left(self) -> float | None:
        """Seconds until the container is killed, at least 0; None without a notice."""
        known = [deadline for deadline in (self._from_signal, self._from_file) if deadline is not None]
        return max(0.0, min(known) - self._monotonic()) if known else None

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for a notice; True if there is one."""
        return self._noticed.wait(timeout_seconds)

    def close(self) -> None:
        """Restore the previous signal handler, unless another one was installed since."""
        if not self._is_open:
            return
        self._is_open = False
        self._restore()
        self._wake()
        self._thread.join()
        os.close(self._reads)
        os.close(self._writes)

    def __enter__(self) -> Self:
        """Use it for a block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it after the block."""
        self.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_open:
            self._wake(number)
        if callable(self._previous):
            self._previous(number, frame)

    def _wake(self, number: int = 0) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._writes, bytes([number]))

    def _restore(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
        if self._has_wakeup:
            other = signal.set_wakeup_fd(-1)
            if other not in (-1, self._writes):
                signal.set_wakeup_fd(other)

    def _hold(self) -> None:
        """Block SIGTERM during a fork: until the child has detached, its signal would go into our pipe."""
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _leave_child(self) -> None:
        """Detach a forked child, such as a data loader: its SIGTERM must end it and not reach us."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(ValueError):  # forked by another thread, which is the child's main thread now
                self._restore()
        self._let_go()

    def _run(self) -> None:
        while self._is_open:
            ready, _, _ = select.select([self._reads], [], [], self._poll_seconds)
            if ready and signal.SIGTERM in os.read(self._reads, 4096) and self._from_signal is None:
                self._from_signal = self._monotonic() + self._grace_seconds
            self._read_file()
            self._tell()

    def _read_file(self) -> None:
        """Read the notice; kubelet empties the file when the annotation is removed."""
        try:
            with self._file.open("rb") as file:
                text = file.read(NOTICE_BYTES_MAX).decode(errors="replace").strip()
        except OSError:
            text = ""
        if text != self._notice:
            self._notice = text
            left = _seconds_of(text, now=self._now(), default=self._grace_seconds) if text else None
            self._from_file = None if left is None else self._monotonic() + left

    def _tell(self) -> None:
        left = self.seconds_left()
        if left is None:
            self._noticed.clear()
        elif not self._noticed.is_set():
            self._noticed.set()
            logger.warning("Received notice of this container's end: %.0f seconds left", left)
            if self._callback is not None:
                threading.Thread(target=self._call, args=(left,), name="preemption-callback", daemon=True).start()

    def _call(self, left: float) -> None:
        try:
            if self._callback is not None:
                self._callback(left)
        except Exception:
            logger.exception("Callback of the preemption notice failed")


def _seconds_of(text: str, *, now: datetime, default: float) -> float:
    """Return the seconds left by a notice; the default for an unreadable one, which is still a notice."""
    try:
        if text.isascii() and text.replace(".", "", 1).isdigit():
            return min(float(text), threading.TIMEOUT_MAX)
        end = datetime.fromisoformat(text)
        return (end - now).total_seconds()
    except (ValueError, TypeError, OverflowError):
        logger.warning("Treated an unreadable preemption notice as %.0f seconds: %r", default, text)
        return default


def _grace(text: str | None) -> float:
    if not text:
        return GRACE_SECONDS
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise ValueError(f"{GRACE_VARIABLE}={text[:50]!r}: whole seconds, such as 30")
    return float(text)
