"""Plays traces of whole clusters under several rules: `python -m bench.traces --pods FILE --nodes FILE`.

In: two CSV files in the format of the openb traces (nodes: sn, cpu_milli, memory_mib, gpu, model; pods: name,
cpu_milli, memory_mib, num_gpu, gpu_milli and optionally gpu_spec). Out: one line per rule with the share of GPUs
allocated when the arrived pods ask for 100 % and for 130 % of them. Pods arrive and stay; random pods are drawn from
the list, or cut, until it asks for 130 %, and the list is shuffled.

Every rule sees only nodes with enough CPU, memory and GPUs of an allowed model, like kube-scheduler's own filters.

- `whole` plays only the pods that ask for whole GPUs. `atoll` is the product's own choice, through the
  extender's arrays; `atoll, blind` is the same without the nodes' free CPU.
- `full` plays all pods. Atoll's claims have no fractions of a GPU: `share` lets pods that ask for one share a whole
  allocated GPU (the fullest that fits), and asks Atoll for a new one if none fits; `round-up` gives each its own GPU,
  of which only the requested fraction counts as allocated. Both are shown; the other rules share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.trace_files import TraceError, TraceNode, TracePod, arrivals, read_nodes, read_pods
from bench.trace_rules import Rule, TraceCapacity, rules

SEEDS: Final = tuple(range(201, 206))
"""Seeds that were not used for tuning weights, which used 42."""


@dataclass(frozen=True, slots=True)
class TraceResult:
    """One run. Shares of all GPUs; refused: share of the pods without a place, by number of GPUs."""

    allocated_100: float
    allocated_130: float
    refused: dict[int, float]


def play(rule: Rule, nodes: Sequence[TraceNode], pods: Sequence[TracePod]) -> TraceResult:
    """Place the pods one after the other."""
    room = TraceCapacity(nodes)
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
    return TraceResult(allocated if allocated is not None else placed / room.capacity, placed / room.capacity, refused)


def run(
    nodes: Sequence[TraceNode], pods: Sequence[TracePod], *, seeds: Sequence[int], full: bool
) -> list[dict[str, Any]]:
    """Means over the seeds, one row per rule."""
    chosen = [pod for pod in pods if full or pod.whole]
    gpus = sum(node.gpus for node in nodes)
    results: dict[str, list[TraceResult]] = {}
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
    """Play one trace and print a line per rule; return 2 if a file is not a trace."""
    parser = argparse.ArgumentParser(prog="python -m bench.traces", description=__doc__)
    parser.add_argument("--pods", type=Path, required=True)
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--play", choices=["whole", "full", "both"], default="whole")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=SEEDS[0])
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    try:
        nodes, pods = read_nodes(options.nodes), read_pods(options.pods)
        for full in [False, True] if options.play == "both" else [options.play == "full"]:
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            for row in run(nodes, pods, seeds=seeds, full=full):
                print(json.dumps(row) if options.json else _shown(row), flush=True)
    except (OSError, TraceError) as error:
        print(f"cannot play the trace: {error}", file=sys.stderr)
        return 2
    return 0


def _shown(row: dict[str, Any]) -> str:
    refused = " ".join(f"{gpus}:{share:.3f}" for gpus, share in row["refused"].items())
    rates = f"at 100 %: {row['allocated_100']:.4f}  at 130 %: {row['allocated_130']:.4f}"
    return f"{row['pods']:5}  {row['rule']:15}  {rates}  refused by GPUs: {refused}  seeds: {row['seeds']}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
