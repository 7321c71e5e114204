"""Hosts and what is free on them at one moment, with the arrays that every search over them shares.

In: level names, hosts. Out: a `Snapshot`; `with_hosts` and `take` give the next one and keep the tree where no host
moved.
Hosts are sorted by (path, name): that order is the last word in every tie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from topology.gangs.errors import GangError
from topology.gangs.model import Gang, Host, Placement
from topology.gangs.tree import DomainTree, domain_tree
from topology.model import Machine, mask_of
from topology.quality import Bools, Ints

Cell = tuple[Machine | None, int, str]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """tree: static structure. hosts: in the tree's order. index: position by name. cells: the distinct (machine, free
    mask, kind); cell_of: which one each host has; gpus: free GPUs per host; spare: hosts to be taken last."""

    tree: DomainTree
    hosts: tuple[Host, ...]
    index: dict[str, int]
    cells: tuple[Cell, ...]
    cell_of: Ints
    gpus: Ints
    spare: Bools
    _free: dict[str, Ints] = field(default_factory=dict)

    def free(self, resource: str) -> Ints:
        """What is free of a counted resource, per host; computed once."""
        if resource not in self._free:
            self._free[resource] = np.array([host.free.get(resource, 0) for host in self.hosts], dtype=np.int64)
        return self._free[resource]

    def with_hosts(self, changed: Iterable[Host]) -> Snapshot:
        """The snapshot with some hosts' state replaced; the tree is kept when none of them is new or moved."""
        news = {host.name: host for host in changed}
        known = all(name in self.index and self.hosts[self.index[name]].path == news[name].path for name in news)
        hosts = [news.pop(host.name, host) for host in self.hosts]
        if not known:
            return snapshot(self.tree.levels, [*hosts, *news.values()])
        return _with_tree(self.tree, tuple(hosts))

    def without(self, names: Iterable[str]) -> Snapshot:
        """The snapshot without some hosts."""
        gone = set(names)
        return snapshot(self.tree.levels, [host for host in self.hosts if host.name not in gone])

    def take(self, placement: Placement, gang: Gang) -> Snapshot:
        """What is left when every member of the placement has its place. Raises GangError for an unknown host."""
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


def snapshot(levels: Sequence[str], hosts: Iterable[Host]) -> Snapshot:
    """Build a snapshot. Raises GangError as topology.gangs.tree.domain_tree does."""
    ordered = tuple(sorted(hosts, key=lambda host: (host.path, host.name)))
    tree = domain_tree(levels, [host.path for host in ordered], [host.name for host in ordered])
    return _with_tree(tree, ordered)


def _with_tree(tree: DomainTree, hosts: tuple[Host, ...]) -> Snapshot:
    cells: dict[tuple[int, int, str], int] = {}
    kept: list[Cell] = []
    cell_of = np.empty(len(hosts), dtype=np.int64)
    machines: dict[Machine | None, int] = {}
    by_object: dict[int, int] = {}
    for position, host in enumerate(hosts):
        number = by_object.get(id(host.machine))
        if number is None:
            number = by_object[id(host.machine)] = machines.setdefault(host.machine, len(machines))
        key = (number, host.free_mask, host.kind)
        if key not in cells:
            cells[key] = len(kept)
            kept.append((host.machine, host.free_mask, host.kind))
        cell_of[position] = cells[key]
    gpus = np.array([mask.bit_count() for _, mask, _ in kept], dtype=np.int64)
    return Snapshot(
        tree=tree,
        hosts=hosts,
        index={host.name: position for position, host in enumerate(hosts)},
        cells=tuple(kept),
        cell_of=cell_of,
        gpus=gpus[cell_of] if kept else np.zeros(0, dtype=np.int64),
        spare=np.array([host.spare for host in hosts], dtype=np.bool_),
    )


def _less(host: Host, used: dict[str, int], mask: int) -> Host:
    free = {**host.free, **{resource: host.free.get(resource, 0) - amount for resource, amount in used.items()}}
    return replace(host, free=free, free_mask=host.free_mask & ~mask)
