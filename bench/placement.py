"""Placement benchmarks: `python -m bench.placement speed|churn [--json]`.

speed: scoring thousands of nodes as a ratio to plainly gathering and minimising one array of that many floats in
numpy, and building a class's tables for all counts as a ratio to the plain pair sums of all its sets. churn:
placement quality and rejections of Atoll and of simpler rules on the same arrivals (bench/churn.py). Every figure is
from one run on one machine; only ratios and the churn's shares can be compared between machines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from bench.churn import Load, rules_for, run
from topology.asks import Ask
from topology.demand import PRIOR
from topology.fragmentation import losses
from topology.links import strength
from topology.model import Machine
from topology.profiles import profile
from topology.quality import qualities
from topology.scores import Classes, best_node
from topology.tables import table

SHAPES: Final = ("dgx1-v100", "h100-nvl-8", "mi250x-8gcd", "dgx-h100", "l40s-8", "gb200-tray")
CHURN_SHAPES: Final = ("dgx1-v100", "h100-nvl-8", "mi250x-8gcd", "dgx-h100", "l40s-8")
NODES: Final = (1_000, 5_000, 50_000)
REPEATS: Final = 31
SEEDS: Final = tuple(range(2001, 2011))
"""Seeds that no weight was tuned on."""


def main(arguments: list[str]) -> int:
    """Print one line per figure."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__)
    parser.add_argument("what", choices=["speed", "churn"])
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds the churn runs over")
    options = parser.parse_args(arguments)
    rows = speed() if options.what == "speed" else churn(SEEDS[: options.seeds])
    for row in rows:
        print(json.dumps(row) if options.json else "  ".join(f"{key}={_shown(value)}" for key, value in row.items()))
    return 0


def speed() -> list[dict[str, Any]]:
    """Builds of all shapes, while nothing is kept yet, then scores of all nodes."""
    return [_build_figures(name) for name in SHAPES] + [_score_figures(nodes) for nodes in NODES]


def churn(seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Means over the seeds, per shape and rule."""
    rows = []
    for name in CHURN_SHAPES:
        machine = profile(name).machine
        loads = [Load(demand=PRIOR, load=0.92, arrivals=20_000, seed=seed) for seed in seeds]
        results = [result for load in loads for result in run(machine, nodes=64, load=load, rules=rules_for(machine))]
        for rule in dict.fromkeys(result.rule for result in results):
            mine = [result for result in results if result.rule == rule]
            rows.append(
                {
                    "shape": name,
                    "rule": rule,
                    "quality": statistics.mean(result.mean_quality for result in mine),
                    "rejected_largest": statistics.mean(result.rejected_largest for result in mine),
                    "rejected_gpus": statistics.mean(result.rejected_gpus for result in mine),
                    "seeds": len(seeds),
                }
            )
    return rows


def _score_figures(nodes: int) -> dict[str, Any]:
    machines = [profile(name).machine for name in SHAPES]
    classes, ask = Classes(machines), Ask(2)
    random = np.random.default_rng(7)
    shapes = random.integers(0, len(machines), nodes)
    free = np.array([random.integers(0, machines[shape].full + 1) for shape in shapes])
    cells, flat = random.integers(0, 256, nodes), random.random(256)
    classes.costs(shapes, free, ask)
    scored = _seconds(lambda: best_node(classes.costs(shapes, free, ask)))
    plain = _seconds(lambda: int(np.argmin(flat[cells])))
    return {"figure": "score", "nodes": nodes, "microseconds": scored * 1e6, "ratio_to_one_gather": scored / plain}


def _build_figures(name: str) -> dict[str, Any]:
    machine = profile(name).machine
    rated = _once(lambda: qualities(machine))
    lost = _once(lambda: losses(machine))
    asks = [Ask(count) for count in range(1, machine.count + 1)]
    built = _once(lambda: [table(machine, ask) for ask in asks])
    plain = _once(lambda: _pair_sums_in_python(machine))
    cells = sum(table(machine, ask).costs.nbytes for ask in asks)
    return {
        "figure": "build",
        "shape": name,
        "quality_ms": rated * 1e3,
        "tables_ms": (lost + built) * 1e3,
        "ratio_of_tables_to_pair_sums": (lost + built) / plain,
        "cost_kilobytes": cells / 1000,
    }


def _pair_sums_in_python(machine: Machine) -> list[int]:
    """The yardstick of builds: what the simplest rule would do, the pair sum of every set."""
    return [
        sum(strength(machine.links[first][second]) for first, second in itertools.combinations(members, 2))
        for count in range(1, machine.count + 1)
        for members in itertools.combinations(range(machine.count), count)
    ]


def _seconds(action: Callable[[], object]) -> float:
    """Median of several runs."""
    return statistics.median(_once(action) for _ in range(REPEATS))


def _once(action: Callable[[], object]) -> float:
    """CPU seconds, which other work on the machine disturbs least."""
    start = time.process_time()
    action()
    return time.process_time() - start


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
