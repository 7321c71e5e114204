"""Traces of whole clusters as frozen values: the machines, the pods, and the order of arrivals.

Reads two CSV files in the format of the openb traces (nodes: sn, cpu_milli, memory_mib, gpu, model; pods: name,
cpu_milli, memory_mib, num_gpu, gpu_milli and optionally gpu_spec). A seed gives the order of arrivals.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.baselines_fgd import MILLI, FgdPodKind

OVERLOAD: Final = 1.3
ROWS_MAX: Final = 200_000
GPUS_MAX: Final = 16


class TraceError(ValueError):
    """A file is not a trace; the message names the file, the line and the fault."""


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One machine of a trace."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


@dataclass(frozen=True, slots=True)
class TracePod:
    """One pod of a trace; gpu_milli: thousandths of each GPU."""

    kind: FgdPodKind
    memory_mib: int

    @property
    def whole(self) -> bool:
        """True if it asks for whole GPUs."""
        return self.kind.gpus > 0 and self.kind.gpu_milli == MILLI

    @property
    def milli(self) -> int:
        """Thousandths of GPUs in all."""
        return self.kind.gpus * self.kind.gpu_milli


def read_nodes(path: Path) -> list[TraceNode]:
    """The machines of a trace, in the order of the file. Raises TraceError."""
    return [
        TraceNode(
            _number(row, "cpu_milli"), _number(row, "memory_mib"), _number(row, "gpu", GPUS_MAX), row.get("model") or ""
        )
        for row in _rows(path)
    ]


def read_pods(path: Path) -> list[TracePod]:
    """The pods of a trace, in the order of the file. Raises TraceError."""
    return [
        TracePod(
            FgdPodKind(
                _number(row, "cpu_milli"),
                _number(row, "num_gpu", GPUS_MAX),
                _number(row, "gpu_milli", MILLI),
                row.get("gpu_spec") or "",
            ),
            _number(row, "memory_mib"),
        )
        for row in _rows(path)
    ]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=2):
            if number > ROWS_MAX:
                raise TraceError(f"{path}: more than {ROWS_MAX} rows")
            yield {**row, "": f"{path}:{number}"}


def _number(row: dict[str, str], column: str, most: int = 1 << 40) -> int:
    value = row.get(column)
    try:
        number = int(value or "")
    except ValueError as cause:
        raise TraceError(f"{row['']}: {column} needs a whole number, not {value!r}") from cause
    if not 0 <= number <= most:
        raise TraceError(f"{row['']}: {column} must be 0 to {most}, not {number}")
    return number


def arrivals(pods: Sequence[TracePod], gpus: int, *, seed: int) -> list[TracePod]:
    """Shuffled pods until they ask for OVERLOAD of the GPUs: those of the list first, then drawn again from it."""
    if not any(pod.milli for pod in pods):
        raise TraceError("no pod asks for a GPU")
    random = np.random.default_rng(seed)
    order = [pods[index] for index in random.permutation(len(pods))]
    come: list[TracePod] = []
    asked = 0
    while asked < OVERLOAD * gpus * MILLI:
        pod = order[len(come)] if len(come) < len(order) else pods[int(random.integers(len(pods)))]
        come.append(pod)
        asked += pod.milli
    return [come[index] for index in random.permutation(len(come))]
