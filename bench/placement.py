"""Placement benchmarks: `python -m bench.placement speed|churn [--json]`.

speed: scoring thousands of nodes as filter and prioritize do once their rows are known, in microseconds and as a ratio
to gathering and minimising one array of that many floats in numpy; building a class's tables for all counts once its
qualities are known, in milliseconds and as a ratio to the pair sums of all its sets; the memory of a class's tables.
churn: quality of placement, rejections and GPUs in use, for Atoll and the re-created rules of others on the same
arrivals (bench/churn.py), at the target load and at 100 % and 130 % demand. Speed is CPU time of one run on one
machine; only ratios and the churn's shares can be compared between machines. Traces of real clusters: `python -m
bench.traces`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from bench.churn import ChurnResult, Load, run
from bench.fleets import FilledFleet
from bench.rules import NAMES, rules_for
from topology.demand import PRIOR, Demand
from topology.device_requests import DeviceRequest
from topology.fragmentation import losses
from topology.links import strength
from topology.model import Machine
from topology.profiles import profile
from topology.quality import qualities
from topology.tables import table

SHAPES: Final = ("dgx1-v100", "h100-nvl-8", "mi250x-8gcd", "dgx-h100", "l40s-8", "gb200-tray")
CHURN_SHAPES: Final = ("dgx1-v100", "h100-nvl-8", "mi250x-8gcd", "dgx-h100", "l40s-8", "pcie8-pix-phb")
NODES: Final = (1_000, 5_000, 50_000)
REPEATS: Final = 31
SEEDS: Final = tuple(range(7001, 7011))
"""Seeds that were not used for tuning weights."""
LOAD: Final = 0.92
QUALITY_TARGET: Final = 0.99
REJECTED_TARGET: Final = 0.01
"""Allowed excess over best fit in rejections of the largest requests."""


def main(arguments: list[str]) -> int:
    """Print one line per figure."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__)
    parser.add_argument("what", choices=["speed", "churn"])
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="seeds of the churn, from 7001 on")
    parser.add_argument("--shapes", nargs="+", default=CHURN_SHAPES, help="known machines of the churn")
    parser.add_argument("--rules", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--mix", type=_mix, default=PRIOR, help="sizes with weights, as 1:35,2:25,8:10")
    parser.add_argument(
        "--load",
        type=float,
        nargs="+",
        default=[LOAD],
        help="requested GPUs relative to all; 1 and 1.3 are a demand of 100 and 130 %%",
    )
    parser.add_argument("--arrivals", type=int, default=20_000)
    parser.add_argument("--nodes", type=int, default=64)
    options = parser.parse_args(arguments)
    rows = speed() if options.what == "speed" else _churns(options)
    for row in rows:
        told = json.dumps(row) if options.json else "  ".join(f"{key}={_shown(value)}" for key, value in row.items())
        print(told, flush=True)
    return 0


def _mix(words: str) -> Demand:
    pairs = [part.split(":") for part in words.split(",")]
    weights = {int(size): float(weight) for size, weight in pairs}
    return Demand(shares=tuple((size, weight / sum(weights.values())) for size, weight in sorted(weights.items())))


def speed() -> Iterator[dict[str, Any]]:
    """Time builds of all shapes with empty caches, then scores of all nodes."""
    yield from map(_build_figures, SHAPES)
    yield from map(_score_figures, NODES)


def _churns(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for shape, load in itertools.product(options.shapes, options.load):
        loads = [
            Load(demand=options.mix, load=load, arrivals=options.arrivals, seed=SEEDS[0] + index)
            for index in range(options.seeds)
        ]
        yield from churn(shape, loads, nodes=options.nodes, names=options.rules)


def churn(shape: str, loads: Sequence[Load], *, nodes: int, names: Iterable[str]) -> list[dict[str, Any]]:
    """Means over the loads (one per seed), per rule, on one shape; Atoll's row says whether it met its targets."""
    machine = profile(shape).machine
    rules = {name: rule for name, rule in rules_for(machine, loads[0].demand).items() if name in set(names)}
    results = [result for load in loads for result in run(machine, nodes=nodes, load=load, rules=rules)]
    rows = [_means(shape, loads[0].load, [result for result in results if result.rule == name]) for name in rules]
    base = next((row["rejected_largest"] for row in rows if row["rule"] == "best-fit"), None)
    for row in rows:
        if row["rule"] == "atoll" and base is not None:
            row["more_rejected_than_best_fit"] = row["rejected_largest"] - base
            within = row["more_rejected_than_best_fit"] <= REJECTED_TARGET
            row["within_targets"] = bool(within and row["quality"] >= QUALITY_TARGET)
    return rows


def _means(shape: str, load: float, mine: Sequence[ChurnResult]) -> dict[str, Any]:
    return {
        "shape": shape,
        "load": load,
        "rule": mine[0].rule,
        "quality": statistics.mean(result.mean_quality for result in mine),
        "rejected_largest": statistics.mean(result.rejected_largest for result in mine),
        "rejected_gpus": statistics.mean(result.rejected_gpus for result in mine),
        "gpus_in_use": statistics.mean(result.in_use for result in mine),
        "seeds": len(mine),
    }


def _score_figures(nodes: int) -> dict[str, Any]:
    machines, ask = [profile(name).machine for name in SHAPES], DeviceRequest(2)
    random = np.random.default_rng(7)
    shapes = random.integers(0, len(machines), nodes)
    free = np.array([random.integers(0, machines[shape].full + 1) for shape in shapes])
    pods = random.integers(0, 9, nodes)
    cells, flat = random.integers(0, 256, nodes), random.random(256)
    fleet = FilledFleet(machines, shapes)
    fleet.update(free, pods)
    fleet.best(ask)
    scored = _seconds(lambda: fleet.best(ask))
    plain = _seconds(lambda: int(np.argmin(flat[cells])))
    return {"figure": "score", "nodes": nodes, "microseconds": scored * 1e6, "ratio_to_one_gather": scored / plain}


def _build_figures(name: str) -> dict[str, Any]:
    machine = profile(name).machine
    rated = _once(lambda: qualities(machine))
    lost = _once(lambda: losses(machine))
    asks = [DeviceRequest(count) for count in range(1, machine.count + 1)]
    built = _once(lambda: [table(machine, ask) for ask in asks])
    plain = _once(lambda: _pair_sums_in_python(machine))
    return {
        "figure": "build",
        "shape": name,
        "quality_ms": rated * 1e3,
        "tables_ms": (lost + built) * 1e3,
        "ratio_of_tables_to_pair_sums": (lost + built) / plain,
        "memory_kilobytes": sum(table(machine, ask).memory_bytes for ask in asks) / 1000,
    }


def _pair_sums_in_python(machine: Machine) -> list[int]:
    """Baseline of builds: the simplest rule, the pair sum of every set."""
    return [
        sum(strength(machine.links[first][second]) for first, second in itertools.combinations(members, 2))
        for count in range(1, machine.count + 1)
        for members in itertools.combinations(range(machine.count), count)
    ]


def _seconds(action: Callable[[], object]) -> float:
    """Median of several runs."""
    return statistics.median(_once(action) for _ in range(REPEATS))


def _once(action: Callable[[], object]) -> float:
    """CPU seconds of one run; other work on the machine affects them least."""
    start = time.process_time()
    action()
    return time.process_time() - start


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
