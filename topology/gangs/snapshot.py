"""Hosts and their free resources at one moment, with arrays that all searches share.

`with_hosts` and `take` give the next HostSnapshot and keep the tree if no host moved. Hosts are sorted by (path, name),
which is the last tie-break.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from topology.gangs.devices import MachineRef, machine_ref
from topology.gangs.errors import GangError
from topology.gangs.model import Gang, Host, Placement
from topology.gangs.tree import DomainTree, domain_tree
from topology.model import mask_of
from topology.quality import Bools, Ints

Cell = tuple[MachineRef | None, int, str]
CELLS_IDLE_MAX: Final = 4096
AMOUNT_MAX: Final = 1 << 61
"""Keeps sums of free and needed resources within 64 bits; no machine has more of anything."""


@dataclass(frozen=True, slots=True, eq=False)
class HostSnapshot:
    """tree: static structure. hosts: in the tree's order. index: position by name. cells: the distinct (machine, free
    mask, kind); cell_of: each host's cell; gpus: free GPUs per host; spare: hosts to use last."""

    tree: DomainTree
    hosts: tuple[Host, ...]
    index: dict[str, int]
    cells: tuple[Cell, ...]
    cell_of: Ints
    gpus: Ints
    spare: Bools
    _free: dict[str, Ints] = field(default_factory=dict)

    def free(self, resource: str) -> Ints:
        """Free amount of a counted resource per host; computed once."""
        if resource not in self._free:
            self._free[resource] = np.array(
                [_bounded(host.free.get(resource, 0)) for host in self.hosts], dtype=np.int64
            )
        return self._free[resource]

    def with_hosts(self, changed: Iterable[Host]) -> HostSnapshot:
        """The snapshot with some hosts replaced; the tree is kept if none is new or moved."""
        news = {host.name: host for host in changed}
        known = all(name in self.index and self.hosts[self.index[name]].path == news[name].path for name in news)
        if not known:
            kept = [host for host in self.hosts if host.name not in news]
            return snapshot(self.tree.levels, [*kept, *news.values()])
        hosts = list(self.hosts)
        for name, host in news.items():
            hosts[self.index[name]] = host
        if len(self.cells) > CELLS_IDLE_MAX:
            return _with_tree(self.tree, tuple(hosts), self.index)
        return self._patched(tuple(hosts), [self.index[name] for name in news])

    def _patched(self, hosts: tuple[Host, ...], places: Sequence[int]) -> HostSnapshot:
        cells = {cell: number for number, cell in enumerate(self.cells)}
        cell_of, gpus, spare = self.cell_of.copy(), self.gpus.copy(), self.spare.copy()
        free = {resource: amounts.copy() for resource, amounts in self._free.items()}
        for place in places:
            host = hosts[place]
            cell_of[place] = cells.setdefault(_cell(host), len(cells))
            gpus[place], spare[place] = host.free_mask.bit_count(), host.spare
            for resource, amounts in free.items():
                amounts[place] = _bounded(host.free.get(resource, 0))
        return HostSnapshot(self.tree, hosts, self.index, tuple(cells), cell_of, gpus, spare, free)

    def without(self, names: Iterable[str]) -> HostSnapshot:
        """The snapshot without some hosts."""
        gone = set(names)
        return snapshot(self.tree.levels, [host for host in self.hosts if host.name not in gone])

    def take(self, placement: Placement, gang: Gang) -> HostSnapshot:
        """The snapshot after every member of the placement is placed. Raises GangError for an unknown host."""
        pod_sets = {pod_set.name: pod_set for pod_set in gang.pod_sets}
        used: dict[str, dict[str, int]] = {}
        masks: dict[str, int] = {}
        for assignment in placement.assignments:
            for member in assignment.members:
                needs = used.setdefault(member.host, {})
                for resource, amount in pod_sets[assignment.pod_set].needs.items():
                    needs[resource] = needs.get(resource, 0) + amount
                masks[member.host] = masks.get(member.host, 0) | mask_of(member.positions)
        unknown = [name for name in used if name not in self.index]
        if unknown:
            raise GangError("a placement names hosts that the snapshot lacks", value=unknown)
        return self.with_hosts(_less(self.hosts[self.index[name]], used[name], masks[name]) for name in used)


def snapshot(levels: Sequence[str], hosts: Iterable[Host]) -> HostSnapshot:
    """Build a snapshot. Raises GangError as topology.gangs.tree.domain_tree does."""
    ordered = tuple(sorted(hosts, key=lambda host: (host.path, host.name)))
    tree = domain_tree(levels, [host.path for host in ordered], [host.name for host in ordered])
    return _with_tree(tree, ordered)


def _with_tree(tree: DomainTree, hosts: tuple[Host, ...], index: dict[str, int] | None = None) -> HostSnapshot:
    cells: dict[Cell, int] = {}
    cell_of = np.fromiter((cells.setdefault(_cell(host), len(cells)) for host in hosts), np.int64, count=len(hosts))
    return HostSnapshot(
        tree=tree,
        hosts=hosts,
        index=index if index is not None else {host.name: position for position, host in enumerate(hosts)},
        cells=tuple(cells),
        cell_of=cell_of,
        gpus=np.fromiter((host.free_mask.bit_count() for host in hosts), np.int64, count=len(hosts)),
        spare=np.fromiter((host.spare for host in hosts), np.bool_, count=len(hosts)),
    )


def _cell(host: Host) -> Cell:
    return (machine_ref(host.machine) if host.machine is not None else None, host.free_mask, host.kind)


def _less(host: Host, used: dict[str, int], mask: int) -> Host:
    free = {**host.free, **{resource: host.free.get(resource, 0) - amount for resource, amount in used.items()}}
    return replace(host, free=free, free_mask=host.free_mask & ~mask)


def _bounded(amount: int) -> int:
    return max(-AMOUNT_MAX, min(amount, AMOUNT_MAX))
