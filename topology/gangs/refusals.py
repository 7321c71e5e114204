"""Why a unit has no place: how much fits at best, and how many hosts are out for which reason.

In: a Unit, the Occupancy that refused it, its Counts. Out: a Refusal whose reasons are short constant phrases. A host
is counted once, by the first that applies: what the caller excluded, a counted resource, its GPUs, its neighbours.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from topology.choice import Choice, choose
from topology.gangs.counts import Counts
from topology.gangs.model import Cause, Mode, PodSet, Refusal
from topology.gangs.occupancy import Occupancy
from topology.gangs.requests import Unit
from topology.gangs.snapshot import Cell
from topology.quality import Ints

NO_GPUS = "no GPUs"
NEIGHBOURS = "members that must not share a host"
HELD = "GPUs for other members of the gang"


def refusal(unit: Unit, occupancy: Occupancy, counts: Counts, capacity: Ints, among: Ints) -> Refusal:
    """Count what fits in the best domain of the level, or altogether where the level is only preferred.

    capacity: members per host; among: the hosts that were looked at.
    """
    tree = occupancy.snapshot.tree
    if not len(among):
        return Refusal(Cause.NO_DOMAIN, unit.pod_set.name, problem="no host has a place in the topology")
    required = unit.mode is Mode.REQUIRED
    fits = _most(counts, unit.level) if required else _together(counts, leader=unit.leader is not None)
    return Refusal(
        cause=Cause.NO_FIT,
        pod_set=unit.pod_set.name,
        level=tree.name_of(unit.level) if required else "",
        fits=min(fits, unit.need),
        of=unit.need,
        unit="pod" if unit.shape.size == 1 else "slice",
        hosts=len(among),
        excluded=_excluded(unit.pod_set, occupancy, among[capacity[among] == 0]),
    )


def _most(counts: Counts, level: int) -> int:
    """Slices that the roomiest domain of a level holds, with the leader where it fits."""
    return int(np.where(counts.led[level], counts.slices_led[level], counts.slices[level]).max())


def _together(counts: Counts, *, leader: bool) -> int:
    """Slices that all domains of the highest level hold."""
    losses = (counts.slices[0] - counts.slices_led[0])[counts.led[0]]
    return int(counts.slices[0].sum() - (losses.min() if leader and len(losses) else 0))


def _excluded(pod_set: PodSet, occupancy: Occupancy, out: Ints) -> tuple[tuple[str, int], ...]:
    """(reason, hosts), most frequent first, then by name."""
    hosts = occupancy.snapshot.hosts
    short = _short_of(pod_set, occupancy)
    tally: Counter[str] = Counter()
    for host in out.tolist():
        reason = pod_set.excluded.get(hosts[host].name) or short[host] or _gpu_reason(pod_set, occupancy, host)
        tally[reason or NEIGHBOURS] += 1
    return tuple(sorted(tally.items(), key=lambda row: (-row[1], row[0])))


def _short_of(pod_set: PodSet, occupancy: Occupancy) -> list[str]:
    """Per host, the first resource of which not even one member's need is left."""
    short = np.full(len(occupancy.snapshot.hosts), "", dtype=object)
    for resource, amount in sorted(pod_set.needs.items(), reverse=True):
        short[occupancy.free(resource) < amount] = f"resource {resource}"
    return [str(reason) for reason in short]


def _gpu_reason(pod_set: PodSet, occupancy: Occupancy, host: int) -> str:
    if pod_set.ask is None:
        return ""
    reason = _cell_reason(pod_set, occupancy.snapshot.cells[int(occupancy.snapshot.cell_of[host])])
    return reason or (HELD if host in occupancy.wants else "")


def _cell_reason(pod_set: PodSet, cell: Cell) -> str:
    assert pod_set.ask is not None
    machine, free, kind = cell
    if machine is None:
        return NO_GPUS
    reason = ""
    for mask in pod_set.admitted.get(kind, ()) or (machine.full,):
        answer = choose(machine, free & mask & machine.full, pod_set.ask)
        if isinstance(answer, Choice):
            return ""
        reason = reason or str(answer.reason)
    return reason
