"""Draws a machine: styled lines of text, JSON, and a self-contained SVG.

Pure except `print_lines`, which writes to the terminal. The picture has the GPUs on a circle in the order of islands,
so that islands never cross; each island is shaded, a line is wider with more links, GPUs behind a switch are joined to
the switch, and dashed lines are PCIe paths inside one socket.
"""

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from xml.sax.saxutils import escape

from rich.console import Console
from rich.text import Text

from atollctl.topo_source import AdapterRelations, MachineSource, best_pair_gbps, gpus_text, ranges, shortened
from topology.groups import cliques, numa_groups
from topology.islands import Island, island_of, islands
from topology.links import PCIE_CLOSENESS, SELF, WORST, direct_links, strength
from topology.quality import rate
from topology.rates import pcie_cell

Span = tuple[str, str]
Line = tuple[Span, ...]

CLIQUES_SHOWN_MAX: Final = 12
ADAPTERS_SHOWN_MAX: Final = 64
STRONG, WEAK, FAR, NEAR, HEADING, REMARK = "bold green", "green", "dim", "cyan", "bold", "yellow"
BLANK: Final[Line] = ()


def machine_lines(source: MachineSource) -> tuple[Line, ...]:
    """Title, link matrix in the order of islands, islands, fully linked groups, network adapters and remarks."""
    blocks = (_title(source), _matrix(source), _islands(source), _groups(source), _adapters(source), _remarks(source))
    lines: list[Line] = []
    for block in blocks:
        lines += [*([BLANK] if lines and block else []), *block]
    return tuple(lines)


def machine_json(source: MachineSource) -> dict[str, Any]:
    """The same facts for programs. Bandwidths in GB/s are null if the generation is unknown."""
    machine = source.machine
    by_position = island_of(machine)
    return {
        "name": source.name,
        "cards": source.cards,
        "nvswitch": machine.nvswitch,
        "ratesKnown": source.rates_known,
        "gpus": [
            {
                "id": number,
                "numaNode": machine.numa[position],
                "island": by_position[position].name,
                "usable": position not in source.unusable,
            }
            for position, number in enumerate(source.ids)
        ],
        "links": [list(row) for row in machine.links],
        "islands": [_island_json(source, island) for island in islands(machine)],
        "adapters": [
            {"name": adapter.name, "cells": list(adapter.cells), "nearest": list(source.ids_of(nearest_to(adapter)[1]))}
            for adapter in source.adapters
        ],
        "fullyLinked": [list(source.ids_of(group)) for group in cliques(machine)[:CLIQUES_SHOWN_MAX]],
        "remarks": list(source.remarks),
    }


def print_lines(lines: tuple[Line, ...]) -> None:
    """Write to standard output: styled on a terminal that supports it, else plain. Lines are never cut or padded."""
    console = Console(highlight=False, emoji=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True)


def title(source: MachineSource) -> str:
    """Name, number of GPUs and, if known, their product."""
    count = source.machine.count
    return f"{source.name}: {count} GPU{'s' if count > 1 else ''}{f', {source.cards}' if source.cards else ''}"


def joined_by(source: MachineSource, island: Island) -> str:
    """Links of an island, in words."""
    machine = source.machine
    if len(island.positions) == 1:
        return "a GPU on its own"
    if island.kind == "pcie":
        return "PCIe"
    cells = {machine.links[first][second] for first in island.positions for second in island.positions}
    counts = sorted({direct_links(cell) for cell in cells} - {0})
    kind = "xGMI" if any(cell.startswith("XGMI") for cell in cells) else "NVLink"
    count = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    many = "link" if counts == [1] else "links"
    return f"NVSwitch, {count} {many} per GPU" if machine.nvswitch else f"{kind}, {count} {many} per joined pair"


def ring_text(source: MachineSource, island: Island) -> str:
    """Ring bandwidth of a whole island; empty for a single GPU."""
    if len(island.positions) == 1:
        return ""
    rating = rate(source.machine, island.positions)
    return f"ring {'' if rating.exact else 'at least '}{source.bandwidth(rating.ring_gbps)}"


def nearest_to(adapter: AdapterRelations) -> tuple[str, tuple[int, ...]]:
    """The best relation of an adapter to any GPU, and the positions with it."""
    best = max(adapter.cells, key=strength)
    return best, tuple(position for position, cell in enumerate(adapter.cells) if cell == best)


def _title(source: MachineSource) -> list[Line]:
    return [((title(source), HEADING),)]


def _matrix(source: MachineSource) -> list[Line]:
    order = [position for island in islands(source.machine) for position in island.positions]
    cells = source.machine.links
    width = max(4, *(len(cell) for row in cells for cell in row), len(str(max(source.ids)))) + 2
    label = len(f"GPU {max(source.ids)}")
    head = " " * label + "".join(f"{source.ids[position]:>{width}}" for position in order)
    lines: list[Line] = [((f"{head}  NUMA  Island", HEADING),)]
    names = island_of(source.machine)
    for row in order:
        spans = [(f"{f'GPU {source.ids[row]}':<{label}}", HEADING)]
        spans += [_cell(cells[row][column], width) for column in order]
        numa = source.machine.numa[row]
        spans.append((f"  {'?' if numa is None else numa:>4}  {names[row].name}", ""))
        if row in source.unusable:
            spans.append(("  not given out", REMARK))
        lines.append(tuple(spans))
    return lines


def _cell(cell: str, width: int) -> Span:
    if cell == SELF:
        return f"{'-':>{width}}", FAR
    links = direct_links(cell)
    if links:
        return f"{cell:>{width}}", STRONG if links > 1 else WEAK
    return f"{cell:>{width}}", NEAR if PCIE_CLOSENESS[cell] > PCIE_CLOSENESS["NODE"] else FAR


def _islands(source: MachineSource) -> list[Line]:
    rows = [
        (island.name, gpus_text(source.ids_of(island.positions)), joined_by(source, island))
        for island in islands(source.machine)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines: list[Line] = [(("Islands", HEADING),)]
    for island, row in zip(islands(source.machine), rows, strict=True):
        texts = [f"{text:<{width}}" for text, width in zip(row, widths, strict=True)]
        lines.append(((f"  {'  '.join([*texts, ring_text(source, island)])}".rstrip(), ""),))
    return lines


def _adapters(source: MachineSource) -> list[Line]:
    """Network adapters with their nearest GPUs, adapters of the same GPUs in one line."""
    together: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for adapter in source.adapters[:ADAPTERS_SHOWN_MAX]:
        together.setdefault(nearest_to(adapter), []).append(adapter.name)
    if not together:
        return []
    rows = [(gpus_text(source.ids_of(near)), cell, ", ".join(names)) for (cell, near), names in together.items()]
    width = max(len(row[0]) for row in rows)
    lines: list[Line] = [(("Network adapters, by the GPUs nearest to them", HEADING),)]
    for near, cell, names in rows:
        lines.append(((f"  {near:<{width}}  ", ""), (f"{cell:<4}", FAR if cell == WORST else NEAR), (f"  {names}", "")))
    hidden = len(source.adapters) - ADAPTERS_SHOWN_MAX
    return [*lines, ((f"  and {hidden} more", ""),)] if hidden > 0 else lines


def _groups(source: MachineSource) -> list[Line]:
    """Fully linked groups, if they add something to the islands."""
    lines: list[Line] = []
    whole = {island.positions for island in islands(source.machine)}
    groups = [group for group in cliques(source.machine) if group not in whole]
    if groups:
        lines.append((("Fully linked groups", HEADING),))
        texts = ["  ".join(f"({ranges(source.ids_of(group))})" for group in groups[:CLIQUES_SHOWN_MAX])]
        texts += [f"and {len(groups) - CLIQUES_SHOWN_MAX} more"] if len(groups) > CLIQUES_SHOWN_MAX else []
        lines += [((f"  {text}", ""),) for text in texts]
    return lines


def _remarks(source: MachineSource) -> list[Line]:
    return [((remark, REMARK),) for remark in source.remarks]


def _island_json(source: MachineSource, island: Island) -> dict[str, Any]:
    several = len(island.positions) > 1
    rating = rate(source.machine, island.positions) if several else None
    unit = best_pair_gbps(source.machine)
    return {
        "name": island.name,
        "kind": island.kind,
        "gpus": list(source.ids_of(island.positions)),
        "numaNodes": [node for node, group in numa_groups(source.machine) if set(group) & set(island.positions)],
        "ringGBps": round(rating.ring_gbps, 3) if rating is not None and source.rates_known else None,
        "relativeRing": rating.ring_gbps / unit if rating is not None and unit else None,
        "bounded": rating is not None and not rating.exact,
    }


GPU_RADIUS: Final = 24
RADIUS_MIN, RADIUS_PER_GPU = 140, 13
MARGIN: Final = 72
TITLE_HEIGHT, ROW_HEIGHT = 44, 22
WIDTH_MIN: Final = 760
LINK_WIDTH, LINK_WIDTH_MAX = 1.5, 14.0
COLOURS: Final = ("#cfe3f7", "#f9dfc2", "#d5ecd0", "#ead6ee", "#f6d0d3", "#e3e0cf")
"""Colours that red-green colour-blind people can tell apart; the legend names every island as well."""

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
    """Centre of each GPU by position, and the size of the picture, in pixels."""

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
    """The switch in the middle of its GPUs; a line for each GPU's links."""
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
