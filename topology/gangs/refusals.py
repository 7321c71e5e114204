"""Why a unit has no place: how much fits at best, and how many hosts each reason excludes.

Reasons are short constant phrases. A host counts once, for the first reason that applies: excluded by the caller, a
counted resource, its GPUs, its neighbours.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from topology.choice import Choice, choose
from topology.gangs.counts import Counts
from topology.gangs.model import Cause, Mode, PlacementRefusal, PodSet
from topology.gangs.occupancy import SearchOccupancy
from topology.gangs.requests import PlacementUnit
from topology.gangs.snapshot import AMOUNT_MAX, Cell
from topology.quality import Ints

NO_GPUS = "no GPUs"
NEIGHBOURS = "members that must not share a host"
HELD = "GPUs for other members of the gang"


def refusal(
    unit: PlacementUnit, occupancy: SearchOccupancy, counts: Counts, capacity: Ints, among: Ints
) -> PlacementRefusal:
    """Count what fits in the best domain of the level, or in total if the level is only preferred.

    capacity: members per host; among: the hosts examined.
    """
    tree = occupancy.snapshot.tree
    if not len(among):
        return PlacementRefusal(Cause.NO_DOMAIN, unit.pod_set.name, problem="no host has a place in the topology")
    required = unit.mode is Mode.REQUIRED
    fits = _most(counts, unit.level) if required else _together(counts, leader=unit.leader is not None)
    return PlacementRefusal(
        cause=Cause.NO_FIT,
        pod_set=unit.pod_set.name,
        level=tree.name_of(unit.level) if required else "",
        fits=min(fits, unit.need),
        of=unit.need,
        unit="pod" if unit.shape.size == 1 else "slice",
        hosts=len(among),
        excluded=excluded_hosts(unit.pod_set, occupancy, among[capacity[among] == 0]),
    )


def _most(counts: Counts, level: int) -> int:
    """Slices that the roomiest domain of a level holds, with the leader if it fits."""
    return int(np.where(counts.led[level], counts.slices_led[level], counts.slices[level]).max())


def _together(counts: Counts, *, leader: bool) -> int:
    """Slices that all domains of the highest level hold."""
    losses = (counts.slices[0] - counts.slices_led[0])[counts.led[0]]
    return int(counts.slices[0].sum() - (losses.min() if leader and len(losses) else 0))


def excluded_hosts(pod_set: PodSet, occupancy: SearchOccupancy, out: Ints) -> tuple[tuple[str, int], ...]:
    """Return why these hosts take no member, as (reason, hosts), most frequent first, then by name."""
    snapshot = occupancy.snapshot
    tally: Counter[str] = Counter()
    named = {snapshot.index[name]: reason for name, reason in pod_set.excluded.items() if name in snapshot.index}
    tally.update(named[host] for host in out.tolist() if host in named)
    left = out[[host not in named for host in out.tolist()]] if named else out
    for resource, amount in sorted(pod_set.needs.items()):
        short = occupancy.free(resource)[left] < min(amount, 2 * AMOUNT_MAX)
        tally[f"resource {resource}"] += int(short.sum())
        left = left[~short]
    tally.update(_gpu_reasons(pod_set, occupancy, left))
    return tuple(
        sorted(((reason, count) for reason, count in tally.items() if count), key=lambda row: (-row[1], row[0]))
    )


def _gpu_reasons(pod_set: PodSet, occupancy: SearchOccupancy, left: Ints) -> Counter[str]:
    """Reasons by cell; a host with suitable GPUs holds other members of the gang, or neighbours rule it out."""
    snapshot = occupancy.snapshot
    tally: Counter[str] = Counter()
    if pod_set.ask is None:
        return Counter({NEIGHBOURS: len(left)})
    cells, counts = np.unique(snapshot.cell_of[left], return_counts=True)
    for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
        reason = _cell_reason(pod_set, snapshot.cells[cell])
        if reason:
            tally[reason] += count
            continue
        held = sum(int(snapshot.cell_of[host]) == cell for host in set(left.tolist()) & occupancy.wants.keys())
        tally[HELD] += held
        tally[NEIGHBOURS] += count - held
    return tally


def _cell_reason(pod_set: PodSet, cell: Cell) -> str:
    assert pod_set.ask is not None
    board, free, kind = cell
    if board is None:
        return NO_GPUS
    reason = ""
    full = board.machine.full
    for mask in pod_set.admitted.get(kind, ()) or (full,):
        answer = choose(board.machine, free & mask & full, pod_set.ask)
        if isinstance(answer, Choice):
            return ""
        reason = reason or str(answer.reason)
    return reason
