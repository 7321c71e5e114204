"""Parser for saved output of `nvidia-smi topo -m` or `-mp`: gives link cells, NUMA nodes and NIC relations.

The output is not meant for programs: wide columns run together, headers contain terminal codes, NIC rows and columns
have several spellings, trailing columns vary, and a legend follows. The parser therefore goes by known words, never by
width: a line that begins with a GPU's label is a row, its first cells are its relations to all GPUs and NICs in the
header's order, then come CPU affinity, NUMA affinity and the GPU's own NUMA id. An unknown word counts as the worst
relation (topology.links); only text without any GPU row is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from topology.errors import TopologyTextError
from topology.links import NO_PEER, SELF, WORST, clean_cell, direct_links
from topology.model import DEVICES_MAX, Machine, asymmetric_pairs, machine

UNKNOWN: Final = "U"
"""The tool's own output for an unknown peer state."""
TEXT_MAX: Final = 1 << 20
"""Limit of characters read; a matrix of 64 GPUs and 64 NICs has some fifty thousand."""
STRANGE_MAX: Final = 8
"""Limit of unknown words reported."""
LINKS_PER_GPU_MAX: Final = 18
"""No GPU has more links; cells that add up to more count links into a switch."""

_TERMINAL_CODE: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ROW: Final = re.compile(r"\s*GPU(\d+)(?!\d)(.*)")
_COLUMN: Final = re.compile(r"(GPU|NIC|mlx\d+_|bnxt_re|efa_|rdmap|ib)(\d+)")
_AFFINITY: Final = re.compile(r"\s*(CPU|NUMA) Affinity|\s*GPU NUMA ID")
_CELL: Final = re.compile(r"\s*(X(?!G)|NV\d{1,2}|XGMI\d{1,2}|PIX|PXB|PSB|PHB|NODE|SYS|SOC|C2C|OK|[CGT]?NS|DR)[*?!]?")
_WORD: Final = re.compile(r"\s*(\S+)")
_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class TextNic:
    """One network adapter: its column name and its relation to every GPU, by position."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopologyText:
    """Content of the text, GPUs in the order of their rows. asymmetric: pairs whose two ends disagree; strange: some
    unknown words in place of relations; rowless: GPUs that have a column and no row."""

    labels: tuple[str, ...]
    links: tuple[tuple[str, ...], ...]
    numa: tuple[int | None, ...]
    nics: tuple[TextNic, ...]
    asymmetric: tuple[tuple[int, int], ...]
    strange: tuple[str, ...] = ()
    rowless: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    cells: tuple[str, ...]
    trailer: tuple[str, ...]
    strange: tuple[str, ...]


def read_topology(text: str) -> TopologyText:
    """Read the matrix. Raises TopologyTextError for no GPU row, or more GPUs than a machine can have."""
    lines = _TERMINAL_CODE.sub("", text[:TEXT_MAX]).splitlines()
    names = _columns(lines)
    columns = {name: index for index, name in reversed(list(enumerate(names)))}
    rows = _first_of_each([row for line in lines if (row := _row(line, names)) is not None])
    if not rows:
        raise TopologyTextError("no row begins with a GPU", excerpt=text[:40])
    if len(rows) > DEVICES_MAX:
        raise TopologyTextError(f"more than {DEVICES_MAX} GPUs", excerpt=rows[-1].label)
    labels = tuple(row.label for row in rows)
    links = tuple(tuple(_cell(row, columns, label, index) for index, label in enumerate(labels)) for row in rows)
    nics = [(index, name) for index, name in enumerate(names) if not _is_gpu(name)]
    return TopologyText(
        labels=labels,
        links=links,
        numa=_numa(rows, has_column=_has_numa_column(lines)),
        nics=tuple(TextNic(name, tuple(_cell(row, columns, name, index) for row in rows)) for index, name in nics),
        asymmetric=asymmetric_pairs(links),
        strange=tuple(dict.fromkeys(word for row in rows for word in row.strange))[:STRANGE_MAX],
        rowless=tuple(name for name in columns if _is_gpu(name) and name not in labels),
    )


def machine_of(
    matrix: TopologyText,
    *,
    pcie: TopologyText | None = None,
    peers: TopologyText | None = None,
    nvlink_generation: int | None = None,
    nvswitch: bool | None = None,
    link_gbps: float | None = None,
    pcie_generation: int | None = None,
    inter_socket_gbps: float | None = None,
) -> Machine:
    """The machine in a matrix. pcie: output of `-mp`, peers: output of `-p2p r`, both for the same GPUs; nvswitch: None
    = judge by the cells.

    The text has no generation; without one, bandwidths are relative (topology.rates.rates_known).
    """
    return machine(
        _without_peers(matrix, peers),
        pcie=_without_peers(pcie, peers) if pcie is not None and pcie.labels == matrix.labels else None,
        numa=matrix.numa,
        nvlink_generation=nvlink_generation,
        nvswitch=looks_switched(matrix.links) if nvswitch is None else nvswitch,
        link_gbps=link_gbps,
        pcie_generation=pcie_generation,
        inter_socket_gbps=inter_socket_gbps,
        nics=[[nic.cells[position] for nic in matrix.nics] for position in range(len(matrix.labels))],
    )


def looks_switched(links: tuple[tuple[str, ...], ...]) -> bool:
    """True if the cells must count links into a switch: some GPU would otherwise have more links than any GPU has."""
    return any(sum(direct_links(clean_cell(cell)) for cell in row) > LINKS_PER_GPU_MAX for row in links)


def _without_peers(matrix: TopologyText, peers: TopologyText | None) -> tuple[tuple[str, ...], ...]:
    """Cells, with pairs without peer access marked as such, whatever joins them."""
    if peers is None or peers.labels != matrix.labels:
        return matrix.links
    devices = range(len(matrix.links))
    return tuple(
        tuple(NO_PEER if peers.links[row][column] == NO_PEER else matrix.links[row][column] for column in devices)
        for row in devices
    )


def _columns(lines: list[str]) -> list[str]:
    """Column names of the header, even if they run together; empty if no line looks like a header."""
    for line in lines:
        names = [match.group(0) for match in _COLUMN.finditer(line)]
        if not names or not names[0].startswith("GPU") or not line.strip().startswith(names[0]):
            continue
        if len(names) > 1 and not _CELL.match(line.strip()[len(names[0]) :]):
            return _named(_AFFINITY.split(line, maxsplit=1)[0])
    return []


def _named(titles: str) -> list[str]:
    """Column names: words, split if they are several known names in a row. Adapters may have any name."""
    names: list[str] = []
    for word in titles.split():
        known = [match.group(0) for match in _COLUMN.finditer(word)]
        names += known if "".join(known) == word else [word]
    return names


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"GPU\d+", name) is not None


def _row(line: str, columns: list[str]) -> _Row | None:
    match = _ROW.match(line)
    if match is None or _ROW.match(match.group(2)):
        return None
    words, trailer = _cells(match.group(2), expected=len(columns))
    cells = tuple(word if word == SELF else clean_cell(word) for word in words)
    strange = tuple(word for word in words if word != SELF and _CELL.fullmatch(word) is None and word != UNKNOWN)
    return _Row(f"GPU{match.group(1)}", cells, trailer, strange) if SELF in cells else None


def _first_of_each(rows: list[_Row]) -> list[_Row]:
    """Rows up to the first repeated label: a file may hold several matrices, and the first is read."""
    by_label: dict[str, _Row] = {}
    for row in rows:
        by_label.setdefault(row.label, row)
    return list(by_label.values())


def _cells(text: str, *, expected: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words of cells, as many as the header has or as there are known words, and the words after them."""
    cells: list[str] = []
    at = 0
    while not expected or len(cells) < expected:
        match = _CELL.match(text, at)
        if match is None and expected and not _is_trailer(text[at:]):
            match = _WORD.match(text, at)
        if match is None:
            break
        cells.append(match.group(1))
        at = match.end()
    return tuple(cells), tuple(text[at:].split())


def _is_trailer(text: str) -> bool:
    """True if a CPU list follows: fewer cells than columns were printed."""
    return re.match(r"\s*\d", text) is not None


def _cell(row: _Row, columns: Mapping[str, int], name: str, index: int) -> str:
    position = columns.get(name, index)
    return row.cells[position] if position < len(row.cells) else WORST


def _has_numa_column(lines: list[str]) -> bool:
    return any("NUMA Affinity" in line for line in lines)


def _numa(rows: list[_Row], *, has_column: bool) -> tuple[int | None, ...]:
    """NUMA node per GPU: the second trailing word. A range such as 0-1 is unknown. Without the column, equal CPU
    lists mean one node, if there are several lists."""
    if has_column:
        words = [row.trailer[1] if len(row.trailer) > 1 else "" for row in rows]
        return tuple(int(word) if _NUMBER.fullmatch(word) else None for word in words)
    lists = [row.trailer[0] if row.trailer else "" for row in rows]
    known = sorted({cpus for cpus in lists if cpus}, key=lists.index)
    if len(known) < 2:
        return (None,) * len(rows)
    return tuple(known.index(cpus) if cpus else None for cpus in lists)
