"""Arithmetic of the benchmarks: percentiles, rates, latencies of concurrent events, one table.

Pure; samples are in seconds.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

REQUESTS = "apiserver_request_total{"
RARE = 0.05
"""Kinds of requests that fewer pods than this share cause are not told."""


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


def read_requests(page: str) -> dict[str, float]:
    """Read the API server's metrics into the number of answered requests by kind, like "PATCH pods/status". Watches,
    which count when they end, are left out."""
    counted = "\n".join(line for line in page.splitlines() if line.startswith(REQUESTS))
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(counted + "\n"):
        for sample in family.samples:
            kind = "/".join(filter(None, (sample.labels["resource"], sample.labels["subresource"])))
            if sample.labels["verb"] != "WATCH" and sample.labels["resource"]:
                found[f"{sample.labels['verb']} {kind}"] += sample.value
    return dict(found)


def read_calls(text: str) -> dict[str, list[float]]:
    """Read a log of `name seconds` per line, such as the timing proxy's, into the seconds of each name; ignore an
    incomplete last line."""
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


def each_pod(before: Mapping[str, float], after: Mapping[str, float], pods: int) -> dict[str, float]:
    """Return the requests per pod between two readings by kind, the most frequent first, without rare ones."""
    asked = {kind: (count - before.get(kind, 0.0)) / pods for kind, count in after.items()}
    return {kind: per for kind, per in sorted(asked.items(), key=lambda entry: -entry[1]) if per >= RARE}


def table(rows: Sequence[Row]) -> str:
    """Return the rows in aligned columns."""
    what, value = (max((len(getattr(row, column)) for row in rows), default=0) for column in ("what", "value"))
    return "\n".join(f"{row.what:<{what}}  {row.value:<{value}}  {row.how}".rstrip() for row in rows)
