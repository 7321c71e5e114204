"""Wraps the NVML bindings and records every call, its answer and its time.

`calls` gives a table of costs and lets a mock be compared with the real driver.
"""

import time
from collections import defaultdict
from ctypes import Array, Structure
from typing import Any

Answer = Any
"""Arguments and results of the bindings, which are untyped."""

ANSWERS_MAX = 4000


class Recorder:
    """Passes everything on; times functions whose name begins with nvml."""

    def __init__(self, library: Answer) -> None:
        self._library = library
        self._wrapped: dict[str, Any] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.answers: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Answer:
        value = getattr(self._library, name)
        if not name.startswith("nvml") or isinstance(value, type) or not callable(value):
            return value
        if name not in self._wrapped:
            self._wrapped[name] = self._timed(name, value)
        return self._wrapped[name]

    def _timed(self, name: str, function: Answer) -> Answer:
        def call(*arguments: Answer) -> Answer:
            started = time.perf_counter()
            answer: Any = None
            error = ""
            try:
                answer = function(*arguments)
                return answer
            except self._library.NVMLError as fault:
                error = f"{type(fault).__name__}: {fault}"
                raise
            finally:
                self.seconds[name].append(time.perf_counter() - started)
                if len(self.answers) < ANSWERS_MAX:
                    told = {"call": name, "arguments": [plain(one) for one in arguments]}
                    self.answers.append(told | ({"error": error} if error else {"answer": plain(answer)}))

        return call

    def table(self) -> list[dict[str, Any]]:
        """Per function: calls, mean and worst in microseconds; the most expensive first."""
        rows = [
            {
                "call": name,
                "calls": len(seconds),
                "mean_us": round(1e6 * sum(seconds) / len(seconds), 1),
                "max_us": round(1e6 * max(seconds), 1),
                "total_ms": round(1e3 * sum(seconds), 3),
            }
            for name, seconds in self.seconds.items()
        ]
        return sorted(rows, key=lambda row: -row["total_ms"])


def plain(value: Answer, depth: int = 0) -> Answer:
    """Convert a value for JSON; structures by field, handles and pointers as a word."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if depth > 4:
        return "..."
    if isinstance(value, Structure):
        return {field[0]: plain(getattr(value, field[0]), depth + 1) for field in value._fields_}
    if isinstance(value, list | tuple | Array):
        return [plain(one, depth + 1) for one in list(value)[:64]]
    if hasattr(value, "contents") and isinstance(getattr(value, "contents", None), Structure):
        fields = getattr(value.contents, "_fields_", [])
        return "handle" if not fields or fields[0][0] == "handle" else plain(value.contents, depth + 1)
    if hasattr(value, "__dict__"):
        return {key: plain(one, depth + 1) for key, one in vars(value).items()}
    return type(value).__name__
