"""A machine as a picture: one SVG that loads nothing and says in words what it shows.

In: a Source. Out: SVG text. GPUs stand on a circle in the order of islands, so that islands never cross; each island
is shaded, a line is as wide as it has links, GPUs behind a switch are joined to the switch, and dashed lines are PCIe
paths inside one socket. Pure: the same machine gives the same picture.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from atollctl.drawing import joined_by, ring_text, title
from atollctl.topo_source import MachineSource, gpus_text, shortened
from topology.islands import Island, islands
from topology.links import PCIE_CLOSENESS, direct_links
from topology.rates import pcie_cell

GPU_RADIUS: Final = 24
RADIUS_MIN, RADIUS_PER_GPU = 140, 13
MARGIN: Final = 72
TITLE_HEIGHT, ROW_HEIGHT = 44, 22
WIDTH_MIN: Final = 760
LINK_WIDTH, LINK_WIDTH_MAX = 1.5, 14.0
COLOURS: Final = ("#cfe3f7", "#f9dfc2", "#d5ecd0", "#ead6ee", "#f6d0d3", "#e3e0cf")
"""Told apart by eyes that do not tell red from green; every island is named in the legend as well."""

Point = tuple[float, float]

TEMPLATE: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" \
role="img" aria-labelledby="title description" font-family="sans-serif" font-size="13" fill="#1b1b1b">
<title id="title">{title}</title>
<desc id="description">{description}</desc>
<rect width="{width}" height="{height}" fill="#ffffff"/>
<text x="24" y="30" font-size="17" font-weight="bold">{heading}</text>
{body}
</svg>"""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where things stand: centre of each GPU by position, and the size of the picture, in pixels."""

    width: int
    height: int
    legend_top: int
    points: dict[int, Point]


def machine_svg(source: MachineSource) -> str:
    """Draw the machine."""
    layout = _layout(source)
    legend = [_legend(source, island) for island in islands(source.machine)]
    body = itertools.chain(_shades(source, layout), _links(source, layout), _gpus(source, layout))
    return TEMPLATE.format(
        width=layout.width,
        height=layout.height,
        title=escape(title(source)),
        description=escape(". ".join([*legend, *(remark.rstrip(".") for remark in source.remarks)]) + "."),
        heading=escape(shortened(title(source))),
        body="\n".join(itertools.chain(body, _legend_rows(source, layout, legend))),
    )


def _layout(source: MachineSource) -> _Layout:
    order = [position for island in islands(source.machine) for position in island.positions]
    radius = max(RADIUS_MIN, RADIUS_PER_GPU * len(order))
    width = max(WIDTH_MIN, 2 * (radius + MARGIN))
    middle = TITLE_HEIGHT + radius + MARGIN
    points = {}
    for index, position in enumerate(order):
        angle = 2 * math.pi * (index + 0.5) / len(order) - math.pi / 2
        points[position] = (width / 2 + radius * math.cos(angle), middle + radius * math.sin(angle))
    rows = len(islands(source.machine)) + 1 + len(source.remarks)
    legend_top = middle + radius + MARGIN
    return _Layout(width=width, height=legend_top + rows * ROW_HEIGHT + 16, legend_top=legend_top, points=points)


def _shades(source: MachineSource, layout: _Layout) -> Iterator[str]:
    """One rounded area per island: neighbours on the circle, so areas do not overlap."""
    for number, island in enumerate(islands(source.machine)):
        points = " L ".join(f"{x:.1f} {y:.1f}" for x, y in (layout.points[position] for position in island.positions))
        colour = COLOURS[number % len(COLOURS)]
        yield (
            f'<path d="M {points} L {points} Z" fill="{colour}" stroke="{colour}" stroke-width="{3 * GPU_RADIUS}" '
            'stroke-linejoin="round" stroke-linecap="round"/>'
        )


def _links(source: MachineSource, layout: _Layout) -> Iterator[str]:
    machine = source.machine
    for first, second in itertools.combinations(range(machine.count), 2):
        links = direct_links(machine.links[first][second])
        if links and not machine.nvswitch:
            yield _line(layout.points[first], layout.points[second], links)
        elif not links and PCIE_CLOSENESS[pcie_cell(machine, first, second)] > PCIE_CLOSENESS["SYS"]:
            yield _line(layout.points[first], layout.points[second], 0)
    if machine.nvswitch:
        for island in islands(machine):
            yield from _switch(source, layout, island)


def _switch(source: MachineSource, layout: _Layout, island: Island) -> Iterator[str]:
    """The switch in the middle of its GPUs; a line for the links of each."""
    if island.kind != "nvlink":
        return
    members = [layout.points[position] for position in island.positions]
    centre = (sum(x for x, _ in members) / len(members), sum(y for _, y in members) / len(members))
    for position in island.positions:
        links = max(direct_links(cell) for cell in source.machine.links[position])
        yield _line(layout.points[position], centre, links)
    x, y = centre
    yield f'<rect x="{x - 48:.1f}" y="{y - 18:.1f}" width="96" height="36" rx="6" fill="#2f5d3a"/>'
    yield f'<text x="{x:.1f}" y="{y + 5:.1f}" text-anchor="middle" fill="#ffffff">NVSwitch</text>'


def _line(start: Point, end: Point, links: int) -> str:
    style = 'stroke="#8a8a8a" stroke-width="1" stroke-dasharray="3 4"'
    if links:
        style = f'stroke="#3f7f4f" stroke-width="{min(links * LINK_WIDTH, LINK_WIDTH_MAX):g}"'
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" {style}/>'


def _gpus(source: MachineSource, layout: _Layout) -> Iterator[str]:
    for position, (x, y) in layout.points.items():
        numa = source.machine.numa[position]
        fill, note = ("#dddddd", ", not given out") if position in source.unusable else ("#ffffff", "")
        place = f"NUMA node {'unknown' if numa is None else numa}"
        yield (
            f"<g><title>GPU {source.ids[position]}, {place}{note}</title>"
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{GPU_RADIUS}" fill="{fill}" stroke="#1b1b1b" stroke-width="1.5"/>'
            f'<text x="{x:.1f}" y="{y + 1:.1f}" text-anchor="middle" font-weight="bold">{source.ids[position]}</text>'
            f'<text x="{x:.1f}" y="{y + 14:.1f}" text-anchor="middle" font-size="9">'
            f"{'numa ?' if numa is None else f'numa {numa}'}</text></g>"
        )


def _legend(source: MachineSource, island: Island) -> str:
    parts = (gpus_text(source.ids_of(island.positions)), joined_by(source, island), ring_text(source, island))
    return f"{island.name}: {', '.join(part for part in parts if part)}"


def _legend_rows(source: MachineSource, layout: _Layout, legend: list[str]) -> Iterator[str]:
    links = "Solid lines: NVLink or xGMI, wider with more links. Dashed lines: PCIe inside one socket."
    for number, text in enumerate([*legend, links, *source.remarks]):
        y = layout.legend_top + (number + 1) * ROW_HEIGHT
        if number < len(legend):
            colour = COLOURS[number % len(COLOURS)]
            yield f'<rect x="24" y="{y - 12}" width="16" height="16" fill="{colour}" stroke="#8a8a8a"/>'
        yield f'<text x="{48 if number < len(legend) else 24}" y="{y}">{escape(text)}</text>'
