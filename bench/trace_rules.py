"""The rules that a trace is played under: each chooses a node and GPUs for a pod.

A rule takes the free capacity of every node (`TraceCapacity`) and a pod, and gives a node and positions, or None. It
sees only nodes with enough CPU, memory and GPUs of an allowed model, like kube-scheduler's own filters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from atoll.cluster.fleet import Fleet
from atoll.cluster.machines import NodeShape, cell_of, shape_of
from atoll.cluster.selection import CellOffer, offer
from bench.baselines_fgd import MILLI, Bools, FgdPodKind, Ints, Typical, lost, scores, typical_of
from bench.fleets import card_of, name_of, request_of
from bench.trace_files import TraceNode, TracePod
from topology.demand import Demand, Histogram
from topology.device_requests import DeviceRequest
from topology.model import Machine, machine, mask_of
from topology.profiles import profile

KNOWN: Final = {("V100M16", 8): "dgx1-v100", ("V100M32", 8): "dgx1-v100", ("G2", 8): "dgx-h100", ("G3", 8): "dgx-h100"}
"""Shapes of the models that have links; G2 and G3 are anonymised names, taken for NVSwitch machines. Others: PCIe
only."""


class TraceCapacity:
    """Free capacity of every node; only `take` changes it."""

    def __init__(self, nodes: Sequence[TraceNode]) -> None:
        self.nodes = tuple(nodes)
        self.cpu_milli = np.array([node.cpu_milli for node in nodes], dtype=np.int64)
        self.memory_mib = np.array([node.memory_mib for node in nodes], dtype=np.int64)
        widest = max(max(node.gpus for node in nodes), 1)
        self.gpu_milli = np.array(
            [[MILLI * (at < node.gpus) for at in range(widest)] for node in nodes], dtype=np.int64
        )
        self.capacity = int(self.gpu_milli.sum())
        self._allowed: dict[str, Bools] = {}

    def allowed(self, models: str) -> Bools:
        """For each node, whether a pod may run on its GPU model."""
        if models not in self._allowed:
            kind = FgdPodKind(0, 0, 0, models)
            self._allowed[models] = np.array([kind.may_run_on(node.model) for node in self.nodes], dtype=np.bool_)
        return self._allowed[models]

    def fitting(self, pod: TracePod) -> Ints:
        """Indices of the nodes that can take a pod."""
        kind = pod.kind
        fits = (self.cpu_milli >= kind.cpu_milli) & (self.memory_mib >= pod.memory_mib) & self.allowed(kind.models)
        if kind.gpus:
            fits &= (self.gpu_milli >= kind.gpu_milli).sum(axis=1) >= kind.gpus
        return np.flatnonzero(fits)

    def take(self, node: int, pod: TracePod, positions: Iterable[int]) -> None:
        """Place a pod."""
        self.cpu_milli[node] -= pod.kind.cpu_milli
        self.memory_mib[node] -= pod.memory_mib
        for position in positions:
            self.gpu_milli[node, position] -= pod.kind.gpu_milli
        assert min(self.cpu_milli[node], self.memory_mib[node], self.gpu_milli[node].min()) >= 0


Place = tuple[int, tuple[int, ...]]
Rule = Callable[[TraceCapacity, TracePod], Place | None]


def best_fit(room: TraceCapacity, pod: TracePod) -> Place | None:
    """The node with the fewest free GPUs, then the least free CPU; the fullest GPU that holds a fraction."""
    fits = room.fitting(pod)
    if not len(fits):
        return None
    free = room.gpu_milli[fits].sum(axis=1)
    node = int(fits[np.lexsort((room.cpu_milli[fits], free))[0]])
    return node, first_positions(room, node, pod)


def first_fit(room: TraceCapacity, pod: TracePod) -> Place | None:
    """The first node that fits."""
    fits = room.fitting(pod)
    return (int(fits[0]), first_positions(room, int(fits[0]), pod)) if len(fits) else None


def by_chance(seed: int) -> Rule:
    """A random node that fits."""
    random = np.random.default_rng(seed)

    def place(room: TraceCapacity, pod: TracePod) -> Place | None:
        fits = room.fitting(pod)
        if not len(fits):
            return None
        node = int(random.choice(fits))
        return node, first_positions(room, node, pod)

    return place


def first_positions(room: TraceCapacity, node: int, pod: TracePod) -> tuple[int, ...]:
    """Whole GPUs: the first free ones; a fraction: the fullest GPU that holds it."""
    free = room.gpu_milli[node]
    able = np.flatnonzero(free >= max(pod.kind.gpu_milli, 1))
    if not pod.whole:
        able = able[np.argsort(free[able], kind="stable")]
    return tuple(int(at) for at in able[: pod.kind.gpus])


class Gradient:
    """Fragmentation gradient descent; of equal scores the node with the fewest free GPUs, then the least free CPU.

    Scores are cached by kind of pod; only those of changed nodes are computed again.
    """

    def __init__(self, nodes: Sequence[TraceNode], pods: Sequence[TracePod]) -> None:
        self._typical: Typical = typical_of(pod.kind for pod in pods)
        rows = {node.model: self._typical.allowed_on(node.model) for node in nodes}
        self._allowed = np.array([rows[node.model] for node in nodes])
        self._moment = 0
        self._changed_at = np.zeros(len(nodes), dtype=np.int64)
        self._seen: TraceCapacity | None = None
        self._kept: dict[FgdPodKind, _Scores] = {}

    def __call__(self, room: TraceCapacity, pod: TracePod) -> Place | None:
        """Place a pod."""
        self._look(room)
        fits = room.fitting(pod)
        if not len(fits):
            return None
        kept = self._kept.setdefault(pod.kind, _Scores(len(room.nodes)))
        old = np.flatnonzero(self._changed_at > kept.moment)
        kept.best[old], kept.at[old] = self._scores(room, old, pod)
        kept.moment = self._moment
        free = room.gpu_milli[fits].sum(axis=1)
        node = int(fits[np.lexsort((room.cpu_milli[fits], free, -kept.best[fits]))[0]])
        return node, first_positions(room, node, pod) if kept.at[node] < 0 else (int(kept.at[node]),)

    def _look(self, room: TraceCapacity) -> None:
        """Note the nodes that changed since the last look; all for another room."""
        self._moment += 1
        if self._seen is not room:
            self._seen = room
            self._changed_at[:] = self._moment
        else:
            changed = (self._cpu_milli != room.cpu_milli) | (self._gpu_milli != room.gpu_milli).any(axis=1)
            self._changed_at[changed] = self._moment
        self._cpu_milli, self._gpu_milli = room.cpu_milli.copy(), room.gpu_milli.copy()

    def _scores(self, room: TraceCapacity, rows: Ints, pod: TracePod) -> tuple[Ints, Ints]:
        """The score of these nodes, and its GPU if the pod asks for a fraction, else -1."""
        before = lost(self._typical, room.cpu_milli[rows], room.gpu_milli[rows], self._allowed[rows])
        best = np.full(len(rows), -1, dtype=np.int64)
        at = np.full(len(rows), -1, dtype=np.int64)
        for position in range(room.gpu_milli.shape[1]) if self._shares_a_gpu(pod) else (None,):
            after, able = self._after(room, rows, pod, position)
            score = np.where(able, scores(before, after), -1)
            at = np.where(score > best, -1 if position is None else position, at)
            best = np.maximum(best, score)
        return best, at

    def _after(self, room: TraceCapacity, rows: Ints, pod: TracePod, position: int | None) -> tuple[np.ndarray, Bools]:
        """Loss after placing, and where that GPU can hold the pod."""
        gpu_milli = room.gpu_milli[rows]
        able = np.ones(len(rows), dtype=np.bool_)
        if position is not None:
            able = gpu_milli[:, position] >= pod.kind.gpu_milli
            gpu_milli[:, position] -= np.where(able, pod.kind.gpu_milli, 0)
        elif pod.kind.gpus:
            free = gpu_milli >= pod.kind.gpu_milli
            gpu_milli -= np.where(free & (np.cumsum(free, axis=1) <= pod.kind.gpus), pod.kind.gpu_milli, 0)
        cpu_milli = room.cpu_milli[rows] - pod.kind.cpu_milli
        return lost(self._typical, cpu_milli, gpu_milli, self._allowed[rows]), able

    @staticmethod
    def _shares_a_gpu(pod: TracePod) -> bool:
        return pod.kind.gpus == 1 and pod.kind.gpu_milli < MILLI


class _Scores:
    """Scores of one kind of pod on every node, and the GPUs, as of a moment."""

    def __init__(self, nodes: int) -> None:
        self.moment = 0
        self.best: Ints = np.zeros(nodes, dtype=np.int64)
        self.at: Ints = np.zeros(nodes, dtype=np.int64)


def machine_of(node: TraceNode) -> Machine:
    """The assumed geometry of a node: a known one, or GPUs joined by PCIe."""
    known = KNOWN.get((node.model, node.gpus))
    if known is not None:
        return profile(known).machine
    cells = [["X" if row == column else "NODE" for column in range(node.gpus)] for row in range(node.gpus)]
    return machine(cells, pcie_generation=3)


class Atoll:
    """The extender's own choice of a node and a set, among the nodes that pass kube-scheduler's filters; pods without
    GPUs use best fit. It knows the nodes' free CPU and the requests of all pods, as after some time of service.
    """

    def __init__(
        self, nodes: Sequence[TraceNode], pods: Sequence[TracePod], *, shares: bool, sees_cpu: bool = True
    ) -> None:
        self._shares = shares
        self._demand = demand_of(pods)
        self._fleet = Fleet()
        self._shapes = [
            shape_of(machine_of(node), (card_of(node.model),) * node.gpus) if node.gpus else None for node in nodes
        ]
        self._sees_cpu = sees_cpu
        self._placed: set[int] = set()
        self._pods = [0] * len(nodes)
        room = TraceCapacity(nodes)
        for index in range(len(nodes)):
            self._renew(room, index)
        self._rows = np.array([self._fleet.row_of(name_of(index)) for index in range(len(nodes))])
        for pod in pods:
            if pod.kind.gpus:
                self._fleet.count_ask(pod.kind.gpus, pod.kind.cpu_milli)

    def __call__(self, room: TraceCapacity, pod: TracePod) -> Place | None:
        """Place a pod."""
        for node in self._placed:
            self._renew(room, node)
        place = self._place(room, pod)
        self._placed = {place[0]} if place is not None else set()
        for node in self._placed:
            self._pods[node] += pod.kind.gpus > 0
        return place

    def _place(self, room: TraceCapacity, pod: TracePod) -> Place | None:
        if not pod.kind.gpus:
            return best_fit(room, pod)
        fits = room.fitting(pod)
        if not pod.whole and self._shares:
            shared = _shared(room, fits, pod)
            if shared is not None:
                return shared
        request, rows = request_of(DeviceRequest(pod.kind.gpus)), self._rows[fits]
        states = self._fleet.states_of(rows)
        keys = self._fleet.keys(states, request, self._demand)
        keys = self._fleet.with_node_costs(keys, rows, states, request.ask, self._demand)
        if not np.isfinite(keys.min(initial=np.inf)):
            return None
        name = self._fleet.pick(rows, keys, states, request, self._demand, cpu_milli=pod.kind.cpu_milli)
        answer = offer(self._fleet.cell_of(name), request, self._demand)
        assert isinstance(answer, CellOffer)
        return int(name), answer.choice.positions

    def _renew(self, room: TraceCapacity, index: int) -> None:
        """Update the fleet with the free GPUs of a node."""
        shape, name, total = self._shapes[index], name_of(index), room.nodes[index].cpu_milli
        if shape is None:
            return
        free = mask_of([int(at) for at in np.flatnonzero(room.gpu_milli[index] == MILLI)])
        self._fleet.put(name, cell_of(shape, free), pods=self._pods[index])
        if self._sees_cpu:
            self._fleet.put_cpu(name, free_milli=int(room.cpu_milli[index]), allocatable_milli=total)


def _shape(node: TraceNode) -> NodeShape:
    return shape_of(machine_of(node), (card_of(node.model),) * node.gpus)


def _shared(room: TraceCapacity, fits: Ints, pod: TracePod) -> Place | None:
    """The fullest GPU that is already shared and can hold the pod."""
    gpu_milli = room.gpu_milli[fits]
    open_milli = np.where((gpu_milli >= pod.kind.gpu_milli) & (gpu_milli < MILLI), gpu_milli, MILLI)
    if not len(fits) or open_milli.min() == MILLI:
        return None
    at = np.unravel_index(int(np.argmin(open_milli)), open_milli.shape)
    return int(fits[at[0]]), (int(at[1]),)


def demand_of(pods: Iterable[TracePod]) -> Demand:
    """The pods' sizes, as Atoll's histogram counts them."""
    histogram = Histogram()
    for pod in pods:
        if pod.kind.gpus:
            histogram = histogram.observed(pod.kind.gpus)
    return histogram.demand()


def rules(nodes: Sequence[TraceNode], pods: Sequence[TracePod], *, seed: int, full: bool) -> dict[str, Rule]:
    """The rules that a trace is played under."""
    found: dict[str, Rule] = {
        "by-chance": by_chance(seed),
        "first-fit": first_fit,
        "best-fit": best_fit,
        "fgd": Gradient(nodes, pods),
    }
    if not full:
        blind = Atoll(nodes, pods, shares=False, sees_cpu=False)
        return {**found, "atoll": Atoll(nodes, pods, shares=False), "atoll, blind": blind}
    return {
        **found,
        "atoll, share": Atoll(nodes, pods, shares=True),
        "atoll, round-up": Atoll(nodes, pods, shares=False),
    }
