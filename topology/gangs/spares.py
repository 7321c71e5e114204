"""Hosts that are kept for the day another one fails: a few whole ones of every domain of a level, such as two of the
eighteen trays of an NVLink clique.

In: a Snapshot, a level, how many. Out: the Snapshot with those hosts marked. They are taken only when a gang could not
lie as near without them, and by repairs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from topology.gangs.errors import GangError
from topology.gangs.snapshot import HostSnapshot


def with_spares(snapshot: HostSnapshot, level: str, count: int) -> HostSnapshot:
    """Mark, per domain of the level, the last `count` hosts whose GPUs are all free; fewer where fewer are.

    Raises GangError when the topology has no such level.
    """
    index = snapshot.tree.level_of(level)
    if index is None:
        raise GangError("the topology has no such level", value=level)
    above = snapshot.tree.above[index]
    whole = [
        position
        for position, host in enumerate(snapshot.hosts)
        if host.machine is not None and host.free_mask == host.machine.full
    ]
    chosen: set[int] = set()
    for _, positions in groupby(whole, key=lambda position: int(above[position])):
        chosen.update(list(positions)[-count:] if count > 0 else ())
    return snapshot.with_hosts(
        replace(host, spare=position in chosen)
        for position, host in enumerate(snapshot.hosts)
        if host.spare != (position in chosen)
    )
