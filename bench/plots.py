"""Pictures of placement as plain SVG: `python -m bench.plots DIRECTORY`.

Writes `placement-sets.svg` (the choice of five GPUs of the DGX-1V mesh, and what their links carry) and
`placement-loss.svg` (the choice of a single GPU on a bridged machine) for docs/placement.md; with `--churn SHAPE` also
quality and fragmentation over time for each rule, `churn-SHAPE.svg`. The SVG is written as text, because a plotting
library would be a large dependency for four kinds of marks. The background is white, so that the pictures can be read
on dark pages and in print.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from bench.churn import ChurnResult, Load, Moment, run
from bench.rules import rules_for
from topology.choice import Choice, choose
from topology.demand import PRIOR
from topology.device_requests import DeviceRequest
from topology.fragmentation import losses, relative_qualities
from topology.links import direct_links
from topology.model import Machine, mask_of
from topology.profiles import profile
from topology.quality import qualities

WIDTH: Final = 760
INK: Final = "#1a1a1a"
PALE: Final = "#c8ccd2"
STRONG: Final = "#0b5fa5"
COLOURS: Final = ("#9aa0a6", "#d9a300", "#b5532a", "#7a4fa0", "#3f9b6c", "#666666", STRONG)
FONT: Final = 'font-family="sans-serif"'

Point = tuple[float, float]


def document(parts: Sequence[str], *, height: float, title: str) -> str:
    """One SVG file, readable by people and by screen readers."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
    ground = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>", ""])


def text(at: Point, words: str, *, size: int = 14, anchor: str = "start", colour: str = INK, bold: bool = False) -> str:
    """Words at a point."""
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}"'
    return f'<text {place} {FONT} font-size="{size}" fill="{colour}"{weight}>{escape(words)}</text>'


def line(start: Point, end: Point, *, width: float = 1.0, colour: str = INK) -> str:
    """A straight line."""
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:.1f}"/>'


def disc(at: Point, words: str, *, filled: bool) -> str:
    """A GPU; filled if it belongs to the set."""
    fill, ink = (STRONG, "#ffffff") if filled else ("#ffffff", INK)
    circle = f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="17" fill="{fill}" stroke="{INK}"/>'
    return circle + text((at[0], at[1] + 5), words, anchor="middle", colour=ink, bold=True)


def path(points: Sequence[Point], *, colour: str, width: float = 1.6) -> str:
    """A line through points."""
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{steps}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def sets_picture() -> str:
    """Five GPUs on the DGX-1V mesh: a quad plus one, beside the chosen set."""
    machine = profile("dgx1-v100").machine
    answer = choose(machine, machine.full, DeviceRequest(5))
    assert isinstance(answer, Choice)
    parts = [
        *_mesh(machine, (0, 1, 2, 3, 4), centre=(190, 190), words="a quad and one more"),
        *_mesh(machine, answer.positions, centre=(570, 190), words="what Atoll gives"),
    ]
    return document(parts, height=400, title="Five GPUs of a DGX-1V: links inside two sets and what rings carry")


def _mesh(machine: Machine, members: tuple[int, ...], *, centre: Point, words: str) -> list[str]:
    def at(position: int) -> Point:
        angle = 2 * math.pi * (position + 0.5) / machine.count
        return centre[0] + 125 * math.sin(angle), centre[1] - 125 * math.cos(angle)

    parts = [text((centre[0], 30), words, size=16, anchor="middle", bold=True)]
    for first in range(machine.count):
        for second in range(first + 1, machine.count):
            links = direct_links(machine.links[first][second])
            inside = first in members and second in members
            if links:
                parts.append(line(at(first), at(second), width=2.5 * links, colour=STRONG if inside else PALE))
    parts += [disc(at(position), str(position), filled=position in members) for position in range(machine.count)]
    mask = mask_of(members)
    ring, relative = float(qualities(machine).ring_gbps[mask]), float(relative_qualities(machine)[mask])
    told = f"rings of links: {ring:.0f} GB/s, relative quality {relative:.2f}"
    return [*parts, text((centre[0], 370), told, anchor="middle")]


def loss_picture() -> str:
    """One GPU on the bridged machine: what each possible choice would leave, and the loss."""
    machine = profile("h100-nvl-8").machine
    lost = losses(machine, PRIOR)
    rows = [(0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 4, 5), (0, 1, 4, 5)]
    parts = [text((20, 30), "A single GPU is asked for: which one, and what stays behind", size=16, bold=True)]
    for row, free in enumerate(rows):
        answer = choose(machine, mask_of(free), DeviceRequest(1))
        assert isinstance(answer, Choice)
        y = 80.0 + 70 * row
        parts += _pairs(machine, free, answer.positions[0], y=y)
        rest = mask_of(free) & ~mask_of(answer.positions)
        told = f"lost before {lost[mask_of(free)]:.2f}, after {lost[rest]:.2f} GPUs"
        parts.append(text((470, y + 5), told))
    legend = "filled: the GPU that is given   white: free   grey: in use   bars: NVLink bridges"
    return document(
        [*parts, text((20, 360), legend, size=13)], height=380, title="How a single GPU spares bridged pairs"
    )


def _pairs(machine: Machine, free: tuple[int, ...], given: int, *, y: float) -> list[str]:
    parts = []
    for position in range(machine.count):
        x = 45.0 + 52 * position
        if position % 2 == 0:
            parts.append(line((x, y), (x + 52, y), width=8, colour=PALE))
        if position in free:
            parts.append(disc((x, y), str(position), filled=position == given))
        else:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="17" fill="{PALE}" stroke="{PALE}"/>')
    return parts


@dataclass(frozen=True, slots=True)
class Panel:
    """Place of one chart, and the range of its values."""

    top: float
    height: float
    low: float
    high: float

    def at(self, share_of_time: float, value: float) -> Point:
        """Place of a value."""
        inside = min(max((value - self.low) / (self.high - self.low), 0), 1)
        return 70 + (WIDTH - 250) * share_of_time, self.top + self.height * (1 - inside)


def churn_picture(results: Sequence[ChurnResult], *, shape: str) -> str:
    """Mean quality of running pods, and the share of free GPUs lost to fragmentation, over time for each rule."""
    parts = [text((20, 28), f"{shape}: every rule meets the same pods", size=16, bold=True)]
    quality = [[moment.quality for moment in result.moments] for result in results]
    lost = [[moment.lost for moment in result.moments] for result in results]
    top = max((value for row in lost for value in row), default=1.0) or 1.0
    worst = min(0.9, *(min(row) for row in quality))
    parts += _sheet(Panel(60, 190, worst, 1.0), "relative quality of running pods", quality)
    parts += _sheet(Panel(310, 190, 0.0, top), "free GPUs lost to fragmentation, share", lost)
    for index, result in enumerate(results):
        y = 80 + 26 * index
        parts.append(line((WIDTH - 160, y - 5), (WIDTH - 135, y - 5), width=4, colour=COLOURS[index % len(COLOURS)]))
        parts.append(text((WIDTH - 128, y), result.rule))
    return document(parts, height=550, title=f"Quality and fragmentation over time on {shape}, for each rule")


def _sheet(panel: Panel, words: str, rows: Sequence[Sequence[float]]) -> list[str]:
    parts = [text((70, panel.top - 8), words, size=13)]
    for value in (panel.low, (panel.low + panel.high) / 2, panel.high):
        left, right = panel.at(0, value), panel.at(1, value)
        parts += [line(left, right, colour=PALE), text((62, left[1] + 4), f"{value:.2f}", size=12, anchor="end")]
    for index, row in enumerate(rows):
        points = [panel.at(number / max(len(row) - 1, 1), value) for number, value in enumerate(row)]
        parts.append(path(points, colour=COLOURS[index % len(COLOURS)]))
    return [*parts, text((70, panel.top + panel.height + 18), "time, from an empty cluster on", size=12)]


def smoothed(moments: Sequence[Moment], *, over: int) -> tuple[Moment, ...]:
    """Means of `over` moments each."""
    groups = [moments[at : at + over] for at in range(0, len(moments) - over + 1, over)]
    return tuple(
        Moment(group[0].time, sum(m.quality for m in group) / over, sum(m.lost for m in group) / over)
        for group in groups
    )


def churn_results(shape: str, *, arrivals: int, nodes: int = 64, seed: int = 2001) -> list[ChurnResult]:
    """All rules on one shape, with 480 samples, eight per point."""
    machine = profile(shape).machine
    load = Load(arrivals=arrivals, seed=seed)
    results = run(machine, nodes=nodes, load=load, rules=rules_for(machine, PRIOR), moments=480)
    return [replace(one, moments=smoothed(one.moments, over=8)) for one in results]


def main(arguments: list[str]) -> int:
    """Write the pictures."""
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--churn", action="append", default=[], metavar="SHAPE", help="also a churn on this machine")
    parser.add_argument("--arrivals", type=int, default=10_000, help="pods of a churn")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    pictures = {"placement-sets.svg": sets_picture(), "placement-loss.svg": loss_picture()}
    for shape in options.churn:
        results = churn_results(shape, arrivals=options.arrivals)
        pictures[f"churn-{shape}.svg"] = churn_picture(results, shape=shape)
    for name, picture in pictures.items():
        (options.directory / name).write_text(picture, encoding="utf-8")
        print(options.directory / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
