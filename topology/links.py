"""Cells of a link matrix: the relation of two GPUs in one word.

Parses cells from `nvidia-smi topo` or an agent into direct links and closeness over PCIe, and finds the weaker of two.
Only this module knows the spelling. An unknown, missing or broken cell means "SYS", the worst usual relation. Only a
pair known to have no peer access ("NS") ranks lower.
"""

from __future__ import annotations

import re
from typing import Final

SELF: Final = "X"
WORST: Final = "SYS"
SAME_NODE: Final = "NODE"
SAME_BOARD: Final = "PSB"
NO_PEER: Final = "NS"
LINKS_MAX: Final = 64
"""No GPU has more links; a larger number is a misread cell."""

PCIE_CLOSENESS: Final[dict[str, int]] = {"NS": -1, "SYS": 0, "NODE": 1, "PHB": 2, "PXB": 3, "PIX": 4, "PSB": 5}
"""PCIe relations from far to near: no peer traffic at all (copies through host memory), across sockets, host bridges
of one NUMA node, one host bridge, several switches, one switch, one board."""

_ALIASES: Final[dict[str, str]] = {
    "SOC": "SYS",
    "C2C": "NODE",
    **dict.fromkeys(("CNS", "GNS", "TNS", "DR"), "NS"),
}
_DIRECT: Final = re.compile(r"(NV|XGMI)([1-9][0-9]?)")


def direct_links(cell: str) -> int:
    """Number of NVLink or xGMI links in the cell; 0 for any PCIe relation.

    On switch machines these are links into the switch, not to the peer.
    """
    match = _DIRECT.fullmatch(cell)
    return int(match.group(2)) if match else 0


def clean_cell(cell: object) -> str:
    """Normalise a cell; anything unknown becomes the worst relation."""
    if not isinstance(cell, str):
        return WORST
    text = cell.strip().upper()
    text = _ALIASES.get(text, text)
    if text in PCIE_CLOSENESS or 0 < direct_links(text) <= LINKS_MAX:
        return text
    return WORST


def strength(cell: str) -> int:
    """Order of clean cells: any direct link beats any PCIe relation, more links beat fewer."""
    links = direct_links(cell)
    return 100 + links if links else PCIE_CLOSENESS[cell]


def weaker(first: str, second: str) -> str:
    """The weaker of two clean cells; it counts if the two ends of a link disagree."""
    return min(first, second, key=lambda cell: (strength(cell), cell))
