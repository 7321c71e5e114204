"""Spare hosts for failures: a few whole hosts in every domain of a level, such as two of the eighteen trays of an
NVLink clique.

They are used only by repairs, and by a gang that could not be placed as near without them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from topology.gangs.errors import GangError
from topology.gangs.snapshot import HostSnapshot


def with_spares(snapshot: HostSnapshot, level: str, count: int) -> HostSnapshot:
    """Mark, per domain of the level, up to `count` of the last hosts whose GPUs are all free.

    Raises GangError if the topology has no such level.
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
