"""Reads files of peers' cases, one JSON object per line, and prints one answer per case and a summary.

An invalid line becomes an answer that says why; the summary always comes last.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from topology.errors import TopologyError

UNREADABLE: Final = (
    TopologyError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, StopIteration
)  # fmt: skip
"""Errors of an invalid case: wrong types, missing fields, deep nesting, endless numbers."""
Row = dict[str, Any]


def read_lines(file: Path) -> list[str]:
    """Return the lines of a file; bytes that are not text are replaced. Raises OSError."""
    return file.read_text(encoding="utf-8-sig", errors="replace").splitlines()


def answers(
    lines: Iterable[str], answer: Callable[[Any, str], Row | None], unreadable: Callable[[str, str], Row]
) -> Iterator[Row]:
    """Answer case by case. answer: takes a case and the name of its line; None prints nothing. unreadable: gives the
    row for a line's name and the reason."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name = f"line-{number}"
        try:
            row = answer(json.loads(line), name)
        except UNREADABLE as error:
            row = unreadable(name, f"line {number} cannot be read: {type(error).__name__}: {error}")
        if row is not None:
            yield row


def report(rows: Iterable[Row], *, noun: str, verdicts: Sequence[str]) -> int:
    """Print the rows and the number of each verdict; return 1 if any is worse, else 0."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row["verdict"]] += 1
        print(json.dumps(row))
    print(json.dumps({noun: counts.total(), **{verdict: counts[verdict] for verdict in verdicts}}))
    return 1 if counts["worse"] else 0
