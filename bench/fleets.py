"""A fleet of nodes for benchmarks and tests: the arrays that the extender reads, filled without a cluster.

Finds the node and the set that the extender would choose, through the same calls as `atoll.cluster.verdicts`. Each node
has a machine, a free mask and a number of pods that hold the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from atoll.cluster.fleet import Fleet
from atoll.cluster.machines import DeviceAttributes, cell_of, shape_of
from atoll.cluster.requests import Request
from atoll.cluster.selection import CellOffer, offer
from topology.demand import PRIOR, Demand
from topology.device_requests import DeviceRequest
from topology.model import Machine

VENDOR = "nvidia"

Ints = npt.NDArray[np.int64]


class FilledFleet:
    """Nodes of a few machines. The order of names is the order of indices."""

    def __init__(self, machines: Sequence[Machine], machine_of_node: Ints, *, demand: Demand = PRIOR) -> None:
        self._shapes = [shape_of(one, (card_of(f"model-{index}"),) * one.count) for index, one in enumerate(machines)]
        self._shape_of_node = [self._shapes[index] for index in machine_of_node.tolist()]
        self._demand = demand
        self._free: Ints = np.full(len(machine_of_node), -1, dtype=np.int64)
        self._pods: Ints = np.zeros(len(machine_of_node), dtype=np.int64)
        self.fleet = Fleet()

    def update(self, free_of_node: Ints, pods_of_node: Ints) -> None:
        """Write the nodes that differ from the last call."""
        changed = np.flatnonzero((free_of_node != self._free) | (pods_of_node != self._pods))
        for node in changed.tolist():
            cell = cell_of(self._shape_of_node[node], int(free_of_node[node]))
            self.fleet.put(name_of(node), cell, pods=int(pods_of_node[node]))
        self._free, self._pods = free_of_node.copy(), pods_of_node.copy()
        if len(changed):
            self.rows = np.array([self.fleet.row_of(name_of(node)) for node in range(len(free_of_node))])

    def keys(self, ask: DeviceRequest) -> npt.NDArray[np.float64]:
        """Return the key of each node; infinity if nothing fits."""
        request, states = request_of(ask), self.fleet.states_of(self.rows)
        found = self.fleet.keys(states, request, self._demand)
        return self.fleet.with_node_costs(found, self.rows, states, ask, self._demand)

    def best(self, ask: DeviceRequest) -> int | None:
        """Return the index of the node that the extender would choose; None if no node fits."""
        keys = self.keys(ask)
        if not np.isfinite(keys.min(initial=np.inf)):
            return None
        states = self.fleet.states_of(self.rows)
        return int(self.fleet.pick(self.rows, keys, states, request_of(ask), self._demand, cpu_milli=0))

    def positions(self, node: int, ask: DeviceRequest) -> tuple[int, ...]:
        """Return the set that a node with room for the request gives."""
        answer = offer(self.fleet.cell_of(name_of(node)), request_of(ask), self._demand)
        assert isinstance(answer, CellOffer)
        return answer.choice.positions


def name_of(node: int) -> str:
    """Return the name of node `node`."""
    return f"{node:06}"


@cache
def request_of(ask: DeviceRequest) -> Request:
    """Return the request of a pod without a claim."""
    return Request(
        ask=ask,
        models=(),
        mixed_models=False,
        memory_bytes=0,
        compute_capability=(0, 0),
        mig_profile="",
        vendor=VENDOR,
        claim="",
        visible_devices=None,
        container_counts=(),
    )


def card_of(model: str) -> DeviceAttributes:
    """Return a card of a model without any other facts."""
    return DeviceAttributes(model=model, vendor=VENDOR, memory_bytes=0, compute_capability=(0, 0), mig_profile="")
