"""Markdown tables of generated pages. Pure."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells must not contain line breaks or unescaped bars."""
    lines = ["| " + " | ".join(cells) + " |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|" + "---|" * len(head) + "\n", *lines[1:]])
