"""A machine for people, as styled lines of text and as JSON.

In: a Source. Out: frozen lines, each a row of (text, style) spans, or plain data. Pure; `print_lines` alone writes,
and only what the lines say. Separate from the picture (drawing_svg), which has another geometry.
"""

import os
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from atollctl.topo_source import AdapterRelations, MachineSource, best_pair_gbps, gpus_text, ranges
from topology.groups import cliques, numa_groups
from topology.islands import Island, island_of, islands
from topology.links import PCIE_CLOSENESS, SELF, WORST, direct_links, strength
from topology.quality import rate

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
    """The same facts for programs. Bandwidths in GB/s are null where the generation is unknown."""
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
    """Write to standard output: styled on a terminal that wants it, else plain. Lines are never cut or padded."""
    console = Console(highlight=False, emoji=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True)


def title(source: MachineSource) -> str:
    """Name, number of GPUs and their product, where it is known."""
    count = source.machine.count
    return f"{source.name}: {count} GPU{'s' if count > 1 else ''}{f', {source.cards}' if source.cards else ''}"


def joined_by(source: MachineSource, island: Island) -> str:
    """What joins an island, in words."""
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
    """Ring bandwidth of a whole island; empty for a GPU on its own."""
    if len(island.positions) == 1:
        return ""
    rating = rate(source.machine, island.positions)
    return f"ring {'' if rating.exact else 'at least '}{source.bandwidth(rating.ring_gbps)}"


def nearest_to(adapter: AdapterRelations) -> tuple[str, tuple[int, ...]]:
    """The best relation that an adapter has to any GPU, and the positions that have it."""
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
    """Each network adapter with the GPUs that are nearest to it, adapters of the same GPUs in one line."""
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
    """Fully linked groups, where they tell more than the islands."""
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
