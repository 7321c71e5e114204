"""Prints answers: the `--output` option that commands share, lines, tables and JSON."""

import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from math import isfinite
from typing import Annotated, Any, Literal

import typer


class Output(StrEnum):
    """Format of the answer. wide: everything, uncut."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"


OUTPUT = typer.Option("-o", "--output", help="Format.")
OutputOption = Annotated[Output, OUTPUT]
TableOption = Annotated[Literal["table", "json"], OUTPUT]
DrawingOption = Annotated[Literal["table", "svg", "json"], OUTPUT]


def plain(text: str) -> str:
    """Return the text with control characters escaped, so that foreign text cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def show_line(text: str) -> None:
    """Print one line."""
    typer.echo(plain(text))


def show_json(value: Any) -> None:  # noqa: ANN401 - plain values
    """Print plain values."""
    typer.echo(json.dumps(value, indent=2))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without frames; columns are as wide as their content, and the last is not padded."""
    told = [columns, *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(row[number]) for row in told) for number in range(len(columns))]
    for row in told:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        typer.echo("  ".join(cells).rstrip())


def counted(number: int, one: str, many: str) -> str:
    """Return a number with its singular or plural noun."""
    return f"{number} {one if number == 1 else many}"


def age_text(seconds: float) -> str:
    """Return a duration as in kubectl: 45s, 12m, 3h, 2d; - if unknown."""
    if not isfinite(seconds):
        return "-"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"
