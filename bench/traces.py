"""Traces of whole clusters, played under several rules: `python -m bench.traces --pods FILE --nodes FILE`.

In: two CSV files in the format of the openb traces (nodes: sn, cpu_milli, memory_mib, gpu, model; pods: name,
cpu_milli, memory_mib, num_gpu, gpu_milli and, where told, gpu_spec). Out: one line per rule with the GPU allocation
rate, in shares of all GPUs, when pods that ask for 100 % and for 130 % of them have come. Pods arrive and stay; the
list is filled up with pods drawn from it by chance, or cut by chance, until it asks for 130 %, and shuffled.

Every rule sees only nodes with enough CPU, memory and GPUs of an allowed model, as kube-scheduler's own filters see to.

- `whole` plays only the pods that ask for whole GPUs. `atoll` is the product's rule: it is left only nodes with enough
  CPU, but does not look at what CPU stays. `atoll, cpu` is not in the product: it shows what a price for free GPUs
  whose CPU is gone would bring.
- `full` plays all pods. Atoll's claims know no fraction of a GPU: `share` lets pods that ask for one share a GPU that
  was given as one whole (the fullest that fits), and asks Atoll for a new one where none fits; `round-up` gives each
  a GPU of its own, of which only the asked fraction counts as allocated. Both are told; the other rules share.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.baselines_fgd import MILLI, Bools, Ints, Kind, Typical, lost, scores, typical_of
from topology.asks import Ask
from topology.choice import Choice, choose
from topology.demand import Demand, Histogram
from topology.model import Machine, machine
from topology.profiles import profile
from topology.scores import Classes, best_node

OVERLOAD: Final = 1.3
SEEDS: Final = tuple(range(42, 47))
ROWS_MAX: Final = 200_000
GPUS_MAX: Final = 16
KNOWN: Final = {("V100M16", 8): "dgx1-v100", ("V100M32", 8): "dgx1-v100", ("G2", 8): "dgx-h100", ("G3", 8): "dgx-h100"}
"""Shapes of the models that have links; G2 and G3 are hidden names, taken for NVSwitch machines. Others: PCIe alone."""
STRANDED: Final = 1.0
"""What a free GPU whose CPU is gone costs `atoll, cpu`."""


class TraceError(ValueError):
    """A file that is no trace. Says which file, which line and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a trace."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of a trace; gpu_milli: thousandths of each GPU."""

    kind: Kind
    memory_mib: int

    @property
    def whole(self) -> bool:
        """Whether it asks for whole GPUs."""
        return self.kind.gpus > 0 and self.kind.gpu_milli == MILLI

    @property
    def milli(self) -> int:
        """Thousandths of GPUs in all."""
        return self.kind.gpus * self.kind.gpu_milli


def read_nodes(path: Path) -> list[Node]:
    """The machines of a trace, in the order of the file. Raises TraceError."""
    return [
        Node(
            _number(row, "cpu_milli"), _number(row, "memory_mib"), _number(row, "gpu", GPUS_MAX), row.get("model") or ""
        )
        for row in _rows(path)
    ]


def read_pods(path: Path) -> list[Pod]:
    """The pods of a trace, in the order of the file. Raises TraceError."""
    return [
        Pod(
            Kind(
                _number(row, "cpu_milli"),
                _number(row, "num_gpu", GPUS_MAX),
                _number(row, "gpu_milli", MILLI),
                row.get("gpu_spec") or "",
            ),
            _number(row, "memory_mib"),
        )
        for row in _rows(path)
    ]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=2):
            if number > ROWS_MAX:
                raise TraceError(f"{path}: more than {ROWS_MAX} rows")
            yield {**row, "": f"{path}:{number}"}


def _number(row: dict[str, str], column: str, most: int = 1 << 40) -> int:
    value = row.get(column)
    try:
        number = int(value or "")
    except ValueError as cause:
        raise TraceError(f"{row['']}: {column} needs a whole number, not {value!r}") from cause
    if not 0 <= number <= most:
        raise TraceError(f"{row['']}: {column} must be 0 to {most}, not {number}")
    return number


def arrivals(pods: Sequence[Pod], gpus: int, *, seed: int) -> list[Pod]:
    """Pods by chance until they ask for OVERLOAD of the GPUs: those of the list first, then drawn again from it."""
    if not any(pod.milli for pod in pods):
        raise TraceError("no pod asks for a GPU")
    random = np.random.default_rng(seed)
    order = [pods[index] for index in random.permutation(len(pods))]
    come: list[Pod] = []
    asked = 0
    while asked < OVERLOAD * gpus * MILLI:
        pod = order[len(come)] if len(come) < len(order) else pods[int(random.integers(len(pods)))]
        come.append(pod)
        asked += pod.milli
    return [come[index] for index in random.permutation(len(come))]


class Room:
    """What is free on every node. Changed by `take` alone."""

    def __init__(self, nodes: Sequence[Node]) -> None:
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
        """Which nodes have a GPU model that a pod may run on."""
        if models not in self._allowed:
            kind = Kind(0, 0, 0, models)
            self._allowed[models] = np.array([kind.may_run_on(node.model) for node in self.nodes], dtype=np.bool_)
        return self._allowed[models]

    def fitting(self, pod: Pod) -> Ints:
        """Indices of the nodes that can take a pod."""
        kind = pod.kind
        fits = (self.cpu_milli >= kind.cpu_milli) & (self.memory_mib >= pod.memory_mib) & self.allowed(kind.models)
        if kind.gpus:
            fits &= (self.gpu_milli >= kind.gpu_milli).sum(axis=1) >= kind.gpus
        return np.flatnonzero(fits)

    def take(self, node: int, pod: Pod, positions: Iterable[int]) -> None:
        """Place a pod."""
        self.cpu_milli[node] -= pod.kind.cpu_milli
        self.memory_mib[node] -= pod.memory_mib
        for position in positions:
            self.gpu_milli[node, position] -= pod.kind.gpu_milli
        assert min(self.cpu_milli[node], self.memory_mib[node], self.gpu_milli[node].min()) >= 0


Place = tuple[int, tuple[int, ...]]
Rule = Callable[[Room, Pod], Place | None]


@dataclass(frozen=True, slots=True)
class Result:
    """One play. Shares of all GPUs; refused: share of the pods that found no place, by GPUs asked."""

    allocated_100: float
    allocated_130: float
    refused: dict[int, float]


def play(rule: Rule, nodes: Sequence[Node], pods: Sequence[Pod]) -> Result:
    """Place the pods one after the other."""
    room = Room(nodes)
    asked = placed = 0
    allocated: float | None = None
    come: dict[int, list[bool]] = {}
    for pod in pods:
        asked += pod.milli
        place = rule(room, pod)
        come.setdefault(pod.kind.gpus, []).append(place is None)
        if place is not None:
            room.take(place[0], pod, place[1])
            placed += pod.milli
        if allocated is None and asked >= room.capacity:
            allocated = placed / room.capacity
    refused = {gpus: statistics.mean(missed) for gpus, missed in sorted(come.items())}
    return Result(allocated if allocated is not None else placed / room.capacity, placed / room.capacity, refused)


def best_fit(room: Room, pod: Pod) -> Place | None:
    """The node with the fewest free GPUs, then the least free CPU; the fullest GPU that holds a fraction."""
    fits = room.fitting(pod)
    if not len(fits):
        return None
    free = room.gpu_milli[fits].sum(axis=1)
    node = int(fits[np.lexsort((room.cpu_milli[fits], free))[0]])
    return node, first_positions(room, node, pod)


def first_fit(room: Room, pod: Pod) -> Place | None:
    """The first node that fits."""
    fits = room.fitting(pod)
    return (int(fits[0]), first_positions(room, int(fits[0]), pod)) if len(fits) else None


def by_chance(seed: int) -> Rule:
    """Any node that fits."""
    random = np.random.default_rng(seed)

    def place(room: Room, pod: Pod) -> Place | None:
        fits = room.fitting(pod)
        if not len(fits):
            return None
        node = int(random.choice(fits))
        return node, first_positions(room, node, pod)

    return place


def first_positions(room: Room, node: int, pod: Pod) -> tuple[int, ...]:
    """Whole GPUs: the first free ones; a fraction: the fullest GPU that holds it."""
    free = room.gpu_milli[node]
    able = np.flatnonzero(free >= max(pod.kind.gpu_milli, 1))
    if not pod.whole:
        able = able[np.argsort(free[able], kind="stable")]
    return tuple(int(at) for at in able[: pod.kind.gpus])


class Gradient:
    """Fragmentation gradient descent; of equal scores the node with the fewest free GPUs, then the least free CPU."""

    def __init__(self, nodes: Sequence[Node], pods: Sequence[Pod]) -> None:
        self._typical: Typical = typical_of(pod.kind for pod in pods)
        rows = {node.model: self._typical.allowed_on(node.model) for node in nodes}
        self._allowed = np.array([rows[node.model] for node in nodes])

    def __call__(self, room: Room, pod: Pod) -> Place | None:
        """Place a pod."""
        fits = room.fitting(pod)
        if not len(fits):
            return None
        before = lost(self._typical, room.cpu_milli[fits], room.gpu_milli[fits], self._allowed[fits])
        best = np.full(len(fits), -1, dtype=np.int64)
        at = np.full(len(fits), -1, dtype=np.int64)
        for position in range(room.gpu_milli.shape[1]) if self._shares_a_gpu(pod) else (None,):
            after, able = self._after(room, fits, pod, position)
            score = np.where(able, scores(before, after), -1)
            at = np.where(score > best, -1 if position is None else position, at)
            best = np.maximum(best, score)
        free = room.gpu_milli[fits].sum(axis=1)
        chosen = int(np.lexsort((room.cpu_milli[fits], free, -best))[0])
        node = int(fits[chosen])
        return node, first_positions(room, node, pod) if at[chosen] < 0 else (int(at[chosen]),)

    def _after(self, room: Room, fits: Ints, pod: Pod, position: int | None) -> tuple[np.ndarray, Bools]:
        """What is lost after placing, and where that GPU can hold the pod."""
        gpu_milli = room.gpu_milli[fits].copy()
        able = np.ones(len(fits), dtype=np.bool_)
        if position is not None:
            able = gpu_milli[:, position] >= pod.kind.gpu_milli
            gpu_milli[:, position] -= np.where(able, pod.kind.gpu_milli, 0)
        elif pod.kind.gpus:
            free = gpu_milli >= pod.kind.gpu_milli
            gpu_milli -= np.where(free & (np.cumsum(free, axis=1) <= pod.kind.gpus), pod.kind.gpu_milli, 0)
        cpu_milli = room.cpu_milli[fits] - pod.kind.cpu_milli
        return lost(self._typical, cpu_milli, gpu_milli, self._allowed[fits]), able

    @staticmethod
    def _shares_a_gpu(pod: Pod) -> bool:
        return pod.kind.gpus == 1 and pod.kind.gpu_milli < MILLI


def machine_of(node: Node) -> Machine:
    """The geometry a node is taken for: a known one, or GPUs joined by PCIe."""
    known = KNOWN.get((node.model, node.gpus))
    if known is not None:
        return profile(known).machine
    cells = [["X" if row == column else "NODE" for column in range(node.gpus)] for row in range(node.gpus)]
    return machine(cells, pcie_generation=3)


class Atoll:
    """Atoll's tables over the nodes that kube-scheduler's filters leave; pods without GPUs go by best fit."""

    def __init__(self, nodes: Sequence[Node], pods: Sequence[Pod], *, shares: bool, sees_cpu: bool = False) -> None:
        self._shares, self._sees_cpu = shares, sees_cpu
        self._cpu_of_gpu = sum(pod.kind.cpu_milli for pod in pods if pod.kind.gpus) / max(
            sum(pod.kind.gpus for pod in pods), 1
        )
        machines = {(node.model, node.gpus): machine_of(node) for node in nodes if node.gpus}
        self._machines = list(dict.fromkeys(machines.values()))
        self._class = np.array(
            [self._machines.index(machines[node.model, node.gpus]) if node.gpus else 0 for node in nodes]
        )
        self._demand = demand_of(pods)
        self._classes = Classes(self._machines, demand=self._demand)

    def __call__(self, room: Room, pod: Pod) -> Place | None:
        """Place a pod."""
        if not pod.kind.gpus:
            return best_fit(room, pod)
        fits = room.fitting(pod)
        if not pod.whole and self._shares:
            shared = _shared(room, fits, pod)
            if shared is not None:
                return shared
        free = (room.gpu_milli[fits] == MILLI) @ (1 << np.arange(room.gpu_milli.shape[1]))
        ask = Ask(pod.kind.gpus)
        costs = self._classes.costs(self._class[fits], free, ask)
        best = self._with_cpu(costs, room, fits, pod) if self._sees_cpu else best_node(costs)
        if best is None:
            return None
        node = int(fits[best])
        answer = choose(self._machines[self._class[node]], int(free[best]), ask, demand=self._demand)
        assert isinstance(answer, Choice)
        return node, answer.positions

    def _with_cpu(self, costs: np.ndarray, room: Room, fits: Ints, pod: Pod) -> int | None:
        """The least cost with a price for free GPUs whose CPU is gone, then the least free CPU."""
        if not len(fits):
            return None
        free, cpu_milli = (room.gpu_milli[fits] == MILLI).sum(axis=1), room.cpu_milli[fits]
        before = np.maximum(free - cpu_milli / self._cpu_of_gpu, 0)
        after = np.maximum(free - pod.kind.gpus - (cpu_milli - pod.kind.cpu_milli) / self._cpu_of_gpu, 0)
        dear = np.round(costs + STRANDED * (after - before), 6)
        best = int(np.lexsort((cpu_milli, dear))[0])
        return best if np.isfinite(dear[best]) else None


def _shared(room: Room, fits: Ints, pod: Pod) -> Place | None:
    """The fullest GPU that is shared already and holds the pod."""
    gpu_milli = room.gpu_milli[fits]
    open_milli = np.where((gpu_milli >= pod.kind.gpu_milli) & (gpu_milli < MILLI), gpu_milli, MILLI)
    if not len(fits) or open_milli.min() == MILLI:
        return None
    at = np.unravel_index(int(np.argmin(open_milli)), open_milli.shape)
    return int(fits[at[0]]), (int(at[1]),)


def demand_of(pods: Iterable[Pod]) -> Demand:
    """The sizes that the pods ask for, as Atoll's histogram counts them."""
    histogram = Histogram()
    for pod in pods:
        if pod.kind.gpus:
            histogram = histogram.observed(pod.kind.gpus)
    return histogram.demand()


def rules(nodes: Sequence[Node], pods: Sequence[Pod], *, seed: int, full: bool) -> dict[str, Rule]:
    """The rules that a trace is played under."""
    found: dict[str, Rule] = {
        "by-chance": by_chance(seed),
        "first-fit": first_fit,
        "best-fit": best_fit,
        "fgd": Gradient(nodes, pods),
    }
    if not full:
        seeing = Atoll(nodes, pods, shares=False, sees_cpu=True)
        return {**found, "atoll": Atoll(nodes, pods, shares=False), "atoll, cpu": seeing}
    return {
        **found,
        "atoll, share": Atoll(nodes, pods, shares=True),
        "atoll, round-up": Atoll(nodes, pods, shares=False),
    }


def run(nodes: Sequence[Node], pods: Sequence[Pod], *, seeds: Sequence[int], full: bool) -> list[dict[str, Any]]:
    """Means over the seeds, one row per rule."""
    chosen = [pod for pod in pods if full or pod.whole]
    gpus = sum(node.gpus for node in nodes)
    results: dict[str, list[Result]] = {}
    for seed in seeds:
        come = arrivals(chosen, gpus, seed=seed)
        for name, rule in rules(nodes, chosen, seed=seed, full=full).items():
            results.setdefault(name, []).append(play(rule, nodes, come))
    return [
        {
            "pods": "full" if full else "whole",
            "rule": name,
            "allocated_100": statistics.mean(result.allocated_100 for result in mine),
            "allocated_130": statistics.mean(result.allocated_130 for result in mine),
            "refused": {
                gpus: round(statistics.mean(result.refused.get(gpus, 0.0) for result in mine), 4)
                for gpus in sorted({size for result in mine for size in result.refused})
            },
            "seeds": len(mine),
        }
        for name, mine in results.items()
    ]


def main(arguments: list[str]) -> int:
    """Play one trace and print a line per rule; 2 when a file is no trace."""
    parser = argparse.ArgumentParser(prog="python -m bench.traces", description=__doc__)
    parser.add_argument("--pods", type=Path, required=True)
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--play", choices=["whole", "full", "both"], default="whole")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds, from 42 on")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    try:
        nodes, pods = read_nodes(options.nodes), read_pods(options.pods)
        for full in [False, True] if options.play == "both" else [options.play == "full"]:
            for row in run(nodes, pods, seeds=range(42, 42 + options.seeds), full=full):
                print(json.dumps(row) if options.json else _shown(row), flush=True)
    except (OSError, TraceError) as error:
        print(f"no trace can be played: {error}", file=sys.stderr)
        return 2
    return 0


def _shown(row: dict[str, Any]) -> str:
    refused = " ".join(f"{gpus}:{share:.3f}" for gpus, share in row["refused"].items())
    rates = f"at 100 %: {row['allocated_100']:.4f}  at 130 %: {row['allocated_130']:.4f}"
    return f"{row['pods']:5}  {row['rule']:15}  {rates}  refused by GPUs: {refused}  seeds: {row['seeds']}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
