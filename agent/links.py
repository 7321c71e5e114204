"""The link matrix of a machine, from each GPU's own links.

Pure: makes rows of cells from each device's active NVLinks and its PCIe relations. Counting alone is wrong in these
cases:

* On NVSwitch machines the far end of every link is a switch: two GPUs with links into switches are joined by the
  smaller of their numbers of links, whatever address the switch has.
* An active link does not say which two cards it joins: on bridged cards the address of the far end does.
* Inside a VM the switch may be invisible. Links to an unknown end count as one shared switch only if every
  device has such links and no others.
* A device with unread links, or an end that cannot be matched, leaves the PCIe relation.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.readings import UNTOLD, Cells, NicReading, NvLink, Remote
from atoll.api.node_status import Nic
from topology.links import SELF, WORST

_BUS_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")

NvLinks = Sequence[tuple[NvLink, ...] | None]


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """Rows in the order of the devices. Row i is what device i reports; the other end may report something else."""

    cells: Cells
    nvswitch: bool


def plain_bus_id(text: str) -> str:
    """Spell a PCI bus id as 00000000:07:00.0; other text stays unchanged."""
    match = _BUS_ID.fullmatch(text.strip().lower())
    if match is None:
        return text
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):08x}:{bus}:{device}.{function}"


def link_matrix(nvlinks: NvLinks, *, bus_ids: Sequence[str | None], pcie: Cells) -> LinkMatrix:
    """Combine NVLinks and PCIe relations. nvlinks: active links per device, None if unread."""
    into_switch = _links_into_switch(nvlinks)
    rows = []
    for first, own in enumerate(nvlinks):
        row = []
        for second, bus_id in enumerate(bus_ids):
            count = _links_to(own, bus_id) + min(into_switch[first], into_switch[second])
            row.append(SELF if first == second else f"NV{count}" if count else pcie[first][second])
        rows.append(tuple(row))
    return LinkMatrix(tuple(rows), nvswitch=any(into_switch))


def _links_to(own: tuple[NvLink, ...] | None, bus_id: str | None) -> int:
    if not own or bus_id is None:
        return 0
    return sum(link.remote is Remote.GPU and link.remote_pci_bus_id == bus_id for link in own)


def _links_into_switch(nvlinks: NvLinks) -> list[int]:
    hidden = bool(nvlinks) and all(links and all(link.remote is Remote.UNKNOWN for link in links) for links in nvlinks)
    wanted = Remote.UNKNOWN if hidden and len(nvlinks) > 1 else Remote.SWITCH
    return [sum(link.remote is wanted for link in links or ()) for links in nvlinks]


def rows_by_uuid(uuids: Sequence[str], *sources: tuple[Cells | None, Sequence[str | None]]) -> Cells:
    """Rows in the order of `uuids`; each cell from the first source (rows, and the uuids in their order) that has both
    devices, else the worst relation."""
    cells: dict[tuple[str, str], str] = {}
    for rows, order in reversed(sources):
        cells |= _cells_by_pair(rows, order)
    return tuple(
        tuple(SELF if first == second else cells.get((first, second), WORST) for second in uuids) for first in uuids
    )


def _cells_by_pair(rows: Cells | None, order: Sequence[str | None]) -> Mapping[tuple[str, str], str]:
    if rows is None or len(rows) != len(order):
        return {}
    return {
        (first, second): cell
        for first, row in zip(order, rows, strict=True)
        for second, cell in zip(order, row, strict=False)
        if first is not None and second is not None and cell != UNTOLD
    }


def nics_by_uuid(
    uuids: Sequence[str],
    now: tuple[Sequence[NicReading] | None, Sequence[str | None]],
    last: tuple[Sequence[Nic], Sequence[str]],
) -> tuple[Nic, ...]:
    """Adapters with cells in the order of `uuids`; now and last: adapters, and the uuids in the order of their cells.
    An adapter missing from `now` was unplugged; a missing cell keeps its last value."""
    if now[0] is None and not last[0]:
        return ()
    before = {nic.name: dict(zip(last[1], nic.cells, strict=False)) for nic in last[0]}
    told: dict[str, dict[str, str]] = {name: {} for name in before} if now[0] is None else {}
    for nic in now[0] or ():
        pairs = zip(now[1], nic.cells, strict=False)
        told[nic.name] = {uuid: cell for uuid, cell in pairs if uuid is not None and cell is not None}
    return tuple(
        Nic(name=name, cells=tuple(cells.get(uuid, before.get(name, {}).get(uuid, WORST)) for uuid in uuids))
        for name, cells in sorted(told.items())
    )
