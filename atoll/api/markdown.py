"""Tables of the pages that the code writes. In: cells. Out: Markdown. Pure."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells hold no line break and no bare bar."""
    lines = ["| " + " | ".join(cells) + " |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|" + "---|" * len(head) + "\n", *lines[1:]])
