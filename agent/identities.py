"""Device ids: a small integer for each GPU, stable for the life of the node.

Gives each new uuid an id, by the ids of the last report and the Leases looked up, or names the Leases to look up
first. Pure. The promises:

* a known uuid keeps its id when the machine is renumbered, rebooted or reported again;
* no other uuid gets an id while a Lease of the id exists, or while the card that had it is remembered;
* if the report is lost, a uuid that a Lease names gets that Lease's id back;
* any other new uuid gets the lowest free id that no forgotten card had. New uuids are served in the order of the
  argument.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.errors import TooManyDevices

IDS_MAX = 65_536


@dataclass(frozen=True, slots=True)
class LeaseLookup:
    """Ids whose Leases must be read first; then call `assign` again with them."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IdAssignment:
    """An id for every uuid passed, the known ones included."""

    ids: Mapping[str, int]


def assign(
    uuids: Sequence[str], *, known: Mapping[str, int], leases: Mapping[int, str | None], free_from: int = 0
) -> IdAssignment | LeaseLookup:
    """Give every uuid an id. Call again with more `leases` until it returns an IdAssignment.

    known: uuid to id of every device on record, seen or not, and of cards that left. leases: by id, None if no Lease
    exists, else the device uuid that it names, which may be empty. free_from: the lowest id for new devices. Without
    any known device the first 2n ids are looked up, so that a lost record is restored from the Leases. Raises
    TooManyDevices.
    """
    new = [uuid for uuid in dict.fromkeys(uuids) if uuid not in known]
    ids = {uuid: known[uuid] for uuid in uuids if uuid in known}
    if not new:
        return IdAssignment(ids)
    taken = set(known.values())
    free: list[int] = []
    unread: list[int] = []
    scan_min = 0 if known else 2 * len(new)
    candidate = free_from
    while len(free) + len(unread) < len(new) or candidate < scan_min:
        if candidate >= IDS_MAX:
            raise TooManyDevices(new[len(free)], ids_max=IDS_MAX)
        if candidate not in taken:
            _sort_candidate(candidate, leases, free=free, unread=unread)
        candidate += 1
    if unread:
        return LeaseLookup(tuple(unread))
    remembered = _remembered(new, leases, taken=taken)
    ids |= remembered
    ids |= dict(zip((uuid for uuid in new if uuid not in remembered), free, strict=False))
    return IdAssignment(ids)


def _sort_candidate(candidate: int, leases: Mapping[int, str | None], *, free: list[int], unread: list[int]) -> None:
    if candidate not in leases:
        unread.append(candidate)
    elif leases[candidate] is None:
        free.append(candidate)


def _remembered(new: Sequence[str], leases: Mapping[int, str | None], *, taken: set[int]) -> dict[str, int]:
    """Ids that Leases name for the new uuids; the lowest where two Leases name one uuid."""
    by_uuid = {uuid: device_id for device_id, uuid in sorted(leases.items(), reverse=True) if uuid}
    return {uuid: by_uuid[uuid] for uuid in new if uuid in by_uuid and by_uuid[uuid] not in taken}
