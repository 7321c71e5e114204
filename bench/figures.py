"""Arithmetic of the benchmarks: percentiles, rates, latencies of concurrent events, one table.

Pure; samples are in seconds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result: what was measured, its value, and how."""

    what: str
    value: str
    how: str


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that at least `percent` of the samples do not exceed (nearest rank).

    Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("a percentile of no samples")
    rank = math.ceil(len(samples) * percent / 100)
    return sorted(samples)[max(rank, 1) - 1]


def rate(moments: Sequence[float]) -> float:
    """Return events per second between the first and the last of `moments`. Raises ValueError for fewer than two."""
    if len(moments) < 2:
        raise ValueError("a rate needs two events")
    span_seconds = max(moments) - min(moments)
    return (len(moments) - 1) / max(span_seconds, 1e-9)


def delays(causes: Sequence[float], effects: Sequence[float]) -> list[float]:
    """Pair the first cause with the first effect, and so on; return the delay of each effect.

    Raises ValueError if the numbers differ.
    """
    return [effect - cause for cause, effect in zip(sorted(causes), sorted(effects), strict=True)]


def spread(samples_seconds: Sequence[float]) -> str:
    """Return p50 and p99 in milliseconds, and the number of samples."""
    p50, p99 = (1000 * percentile(samples_seconds, percent) for percent in (50, 99))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms (n={len(samples_seconds)})"


def read_calls(text: str) -> dict[str, list[float]]:
    """Read the timing proxy's log, `verb seconds` per line, into the seconds of each verb; ignore an incomplete last
    line."""
    calls: dict[str, list[float]] = {}
    for line in text.splitlines(keepends=True):
        verb, _, seconds = line.partition(" ")
        if line.endswith("\n"):
            calls.setdefault(verb, []).append(float(seconds))
    return calls


def cpu_seconds(stat: str, *, ticks_per_second: int) -> float:
    """Return user and system time of a process from its /proc/PID/stat; its name may contain blanks and brackets."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / ticks_per_second


def per_pod(before: Mapping[str, float], after: Mapping[str, float], pods: int) -> dict[str, float]:
    """Return the milliseconds of CPU per pod of every process that is in both readings, the largest first."""
    used = {name: 1000 * (after[name] - before[name]) / pods for name in after if name in before}
    return dict(sorted(used.items(), key=lambda entry: -entry[1]))


def table(rows: Sequence[Row]) -> str:
    """Return the rows in aligned columns."""
    what, value = (max((len(getattr(row, column)) for row in rows), default=0) for column in ("what", "value"))
    return "\n".join(f"{row.what:<{what}}  {row.value:<{value}}  {row.how}".rstrip() for row in rows)
