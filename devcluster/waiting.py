"""Waits for conditions and reports why one failed.

Returns the first true answer. Raises StartError with the end of a process's log on timeout, or as soon as that process
ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from devcluster.control import Control
from devcluster.errors import AdminApiError, StartError

_PAUSE_SECONDS = 0.1
_TAIL_LINES = 20
_TAIL_BYTES = 8192

Answer = TypeVar("Answer")


def wait_until(
    question: Callable[[], Answer | None],
    *,
    what: str,
    timeout_seconds: float,
    control: Control | None = None,
    process: str | None = None,
    log: Path | None = None,
) -> Answer:
    """Return the first true answer; refused connections and errors of the API server count as no answer yet."""
    deadline = time.monotonic() + timeout_seconds
    last = ""
    while time.monotonic() < deadline:
        try:
            answer = question()
        except (OSError, AdminApiError) as error:
            last = f" ({error})"
        else:
            if answer:
                return answer
        if control and process and not control.status()[process].running:
            raise StartError(what, problem=f"did not come: {process} has ended", log_tail=log_tail(log))
        time.sleep(_PAUSE_SECONDS)
    raise StartError(what, problem=f"did not come within {timeout_seconds:.0f} s{last}", log_tail=log_tail(log))


def log_tail(log: Path | None) -> str:
    """Return the last lines of a log file, or an empty text if there is none."""
    if log is None or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
