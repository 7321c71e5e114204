"""Draws headings, steps with their seconds, and live tables.

Without a terminal, every step is one plain line and every table is printed once, when complete. NO_COLOR is honoured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress import Progress as Spinner
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from devcluster.demo.facts import MachineRow, PodRow, Progress

PLAIN_WIDTH = 120
_INDENT = 2


class Terminal:
    """Prints the demo to one terminal."""

    def __init__(self, console: Console | None = None) -> None:
        """Draw on the console; default: standard output."""
        self._console = console or Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = PLAIN_WIDTH
        is_plain = self._console.options.ascii_only
        self._yes, self._no, self._dash = ("ok", "NO", "-") if is_plain else ("✓", "✗", "·")
        self._started = time.monotonic()
        self._scene = 0

    @property
    def seconds(self) -> float:
        """Seconds since the start of the demo."""
        return time.monotonic() - self._started

    def scene(self, title: str) -> None:
        """Print the heading of a scene."""
        self._scene += 1
        self._console.print(f"\n[bold]{self._scene}. {escape(title)}[/bold]")

    def say(self, text: str) -> None:
        """Print one sentence."""
        self._print(escape(text))

    def verbatim(self, line: str) -> None:
        """Print a line to copy, without wrapping."""
        self._console.print(f"{' ' * _INDENT}{line}", markup=False, soft_wrap=True)

    def quote(self, text: str) -> None:
        """Print a message of a part of the cluster."""
        self._print(f"[dim]{self._dash} {escape(text)}[/dim]")

    def kept(self, text: str) -> None:
        """Print that a promise held."""
        self._print(f"[green]{self._yes}[/green] {escape(text)}")

    def broken(self, text: str) -> None:
        """Print that a promise failed, without wrapping, since it may name a file."""
        self._console.print(f"{' ' * _INDENT}[bold red]{self._no}[/bold red] {escape(text)}", soft_wrap=True)

    @contextmanager
    def step(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show a running step, then its duration; yields a function for progress lines."""
        columns = (TextColumn(" "), SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        started = time.monotonic()
        with Spinner(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as spinner:
            spinner.add_task(escape(text))
            yield self.quote
        self._print(f"[green]{self._yes}[/green] {escape(text)} [dim]{time.monotonic() - started:.1f} s[/dim]")

    def machines(self, rows: Sequence[MachineRow]) -> None:
        """Draw a table of machines and their islands."""
        table = _table("node", "GPUs", "islands {ids}", "driver's index of id 0, 1, ...")
        for row in rows:
            islands = "\n".join(f"{name} {{{' '.join(map(str, ids))}}}" for name, ids in row.islands)
            table.add_row(f"[bold]{row.node}[/bold]", row.product, islands, " ".join(map(str, row.indices)))
        self._console.print(_indented(table))

    @contextmanager
    def pods(self) -> Iterator[Callable[[Sequence[PodRow]], None]]:
        """Open a table of pods; yields a function that redraws it."""
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            drawn: list[RenderableType] = [""]

            def draw(rows: Sequence[PodRow]) -> None:
                drawn[0] = _indented(self._pod_table(rows))
                live.update(drawn[0], refresh=True)

            yield draw
        self._console.print(drawn[0])

    def _pod_table(self, rows: Sequence[PodRow]) -> Table:
        table = _table("pod", "claim", "node", "GPUs", "islands", "CUDA_VISIBLE_DEVICES, as ids", "")
        marks = {
            Progress.WAITING: "[yellow]waits[/yellow]",
            Progress.STARTING: "[dim]starts[/dim]",
            Progress.KEPT: f"[green]{self._yes}[/green]",
            Progress.BROKEN: f"[bold red]{self._no}[/bold red]",
        }
        for row in rows:
            saw = "" if row.saw is None else ",".join(row.saw) or "none"
            if row.indices:
                saw += f" (index {','.join(row.indices)})"
            cells = (row.pod, row.claim, row.node, ",".join(row.promised), ", ".join(row.islands), saw)
            table.add_row(*map(escape, cells), marks[row.progress])
        return table

    def _print(self, markup: str) -> None:
        self._console.print(_indented(markup))


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(escape(header))
    return table


def _indented(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 0, 0, _INDENT), expand=False)
