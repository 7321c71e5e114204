"""What a search has given out, and how many more members each host could hold.

Gives capacities per host as arrays. A capacity is exact: the least that counted resources, the GPUs' tables (beside
everything that the search placed there), limits per host and neighbours that must not share it allow. It is copied at
every branch of a search, and is the only state that changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from topology.device_requests import Policy
from topology.gangs import devices
from topology.gangs.devices import MemberDevices, Wants
from topology.gangs.model import PodSet
from topology.gangs.snapshot import AMOUNT_MAX, Cell, HostSnapshot
from topology.quality import Ints

CAPACITY_MAX: Final = 1 << 20
"""Capacity of an unrestricted host."""


@dataclass(slots=True)
class SearchOccupancy:
    """used: per resource, what the search took per host. wants: GPUs promised per host. members: per host, members by
    pod set; placed: those pod sets. one_island: sets that span islands do not count for contiguous requests."""

    snapshot: HostSnapshot
    one_island: bool = False
    used: dict[str, Ints] = field(default_factory=dict)
    wants: dict[int, Wants] = field(default_factory=dict)
    members: dict[int, dict[str, int]] = field(default_factory=dict)
    placed: dict[str, PodSet] = field(default_factory=dict)

    def copy(self) -> SearchOccupancy:
        """An independent copy."""
        return SearchOccupancy(
            self.snapshot,
            self.one_island,
            {resource: amounts.copy() for resource, amounts in self.used.items()},
            dict(self.wants),
            {host: dict(counts) for host, counts in self.members.items()},
            dict(self.placed),
        )

    def free(self, resource: str) -> Ints:
        """Remainder of a counted resource per host."""
        free = self.snapshot.free(resource)
        return free - self.used[resource] if resource in self.used else free

    def put(self, pod_set: PodSet, host: int, count: int) -> None:
        """Place `count` members of a pod set on a host."""
        for resource, amount in pod_set.needs.items():
            if resource not in self.used:
                self.used[resource] = np.zeros(len(self.snapshot.hosts), dtype=np.int64)
            self.used[resource][host] += amount * count
        if pod_set.ask is not None:
            want = self.want(pod_set, self.snapshot.hosts[host].kind)
            self.wants[host] = devices.add(self.wants.get(host, ()), want, count)
        self.placed[pod_set.name] = pod_set
        counts = self.members.setdefault(host, {})
        counts[pod_set.name] = counts.get(pod_set.name, 0) + count

    def want(self, pod_set: PodSet, kind: str) -> MemberDevices:
        """A member's request for GPUs on hosts of one kind."""
        assert pod_set.ask is not None
        contiguous = pod_set.ask.policy is Policy.CONTIGUOUS
        return MemberDevices(pod_set.ask, pod_set.admitted.get(kind, ()), one_island=self.one_island and contiguous)

    def capacity(self, pod_set: PodSet, *, beside: PodSet | None = None) -> Ints:
        """Members of a pod set that fit per host; `beside`: with one member of that pod set there as well."""
        capacity = self._counted(pod_set, beside)
        if pod_set.ask is not None:
            capacity = np.minimum(capacity, self._gpus(pod_set, beside))
        for host, counts in self.members.items():
            if any(_apart(pod_set, self.placed[name]) for name in counts):
                capacity[host] = 0
        if beside is not None and _apart(pod_set, beside):
            capacity[:] = 0
        return capacity

    def room(self, pod_set: PodSet) -> dict[int, Ints]:
        """Per limited level, members that each domain may still take."""
        tree = self.snapshot.tree
        room: dict[int, Ints] = {}
        for limit in pod_set.limits:
            level = tree.level_of(limit.level)
            if level is None:
                continue
            left = np.full(tree.size(level), limit.count, dtype=np.int64)
            for name, count in limit.present.items():
                if name in self.snapshot.index:
                    left[tree.above[level][self.snapshot.index[name]]] -= count
            for host, counts in self.members.items():
                left[tree.above[level][host]] -= counts.get(pod_set.name, 0)
            left = np.maximum(left, 0)
            room[level] = np.minimum(left, room.get(level, left))
        return room

    def _counted(self, pod_set: PodSet, beside: PodSet | None) -> Ints:
        capacity = np.full(len(self.snapshot.hosts), CAPACITY_MAX, dtype=np.int64)
        for resource, amount in sorted(pod_set.needs.items()):
            if amount > 0:
                free = self.free(resource)
                if beside is not None:
                    free = free - min(beside.needs.get(resource, 0), 2 * AMOUNT_MAX)
                np.minimum(capacity, np.maximum(free, 0) // min(amount, 2 * AMOUNT_MAX), out=capacity)
        return capacity

    def _gpus(self, pod_set: PodSet, beside: PodSet | None) -> Ints:
        """Members whose GPUs fit: once per cell, and one by one where the search placed others."""
        per_cell = np.array([self._fits(cell, (), pod_set, beside) for cell in self.snapshot.cells], dtype=np.int64)
        per_host: Ints = per_cell[self.snapshot.cell_of] if len(per_cell) else per_cell
        for host, held in self.wants.items():
            cell = self.snapshot.cells[int(self.snapshot.cell_of[host])]
            per_host[host] = self._fits(cell, held, pod_set, beside)
        return per_host

    def _fits(self, cell: Cell, held: Wants, pod_set: PodSet, beside: PodSet | None) -> int:
        board, free, kind = cell
        if board is None or not free:
            return 0
        if beside is not None and beside.ask is not None:
            held = devices.add(held, self.want(beside, kind), 1)
        return devices.most(board, free, held, self.want(pod_set, kind))


def _apart(first: PodSet, second: PodSet) -> bool:
    """True if members of the two may not share a host."""
    return second.name in first.apart or first.name in second.apart
