"""Time of an explanation of a large cluster, and the cost of `atoll top`: `python -m bench.explain_speed`.

Nodes of eight GPUs, all held by pods of one GPU, and a pod that wants four of them on one island. Measures seconds of
CPU of one process, the least of some repeats, without reading the cluster: prepare the snapshot, explain with all
proposals, read everything as `top` does. The share of a core is that of `top` with its own pauses.
"""

from __future__ import annotations

import argparse
import time
from typing import Final

from atoll.explain.decision import index_snapshot
from atoll.explain.explanation import explain
from atoll.explain.overview import overview
from atoll.service.collector import without_collector
from atollctl.top import pause_seconds
from tests.explain.situations import Situation, holder, situation, waiting

REFRESH_SECONDS: Final = 2.0


def cluster(nodes: int) -> Situation:
    """Return this many full machines, and the waiting pod."""
    holders = [holder(f"h{i}-{j}", f"n{i:05}", j, cpu="4") for i in range(nodes) for j in range(8)]
    told = {f"n{i:05}": {"profile": "dgx-h100"} for i in range(nodes)}
    return situation(told, holders, waiting(4, claim={"policy": "island"}))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found = cluster(options.nodes)
    rows: list[tuple[float, float, float]] = []
    with without_collector():
        for _ in range(options.repeats):
            times = [time.process_time()]
            scene = index_snapshot(found.snapshot)
            times.append(time.process_time())
            explain(scene, found.pod)
            times.append(time.process_time())
            overview(scene)
            times.append(time.process_time())
            rows.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
    ready, explained, seen = (min(row[number] for row in rows) for number in range(3))
    look = ready + seen
    share = look / (look + pause_seconds(REFRESH_SECONDS, look))
    size = f"{options.nodes} nodes, {options.nodes * 8} GPUs"
    print(f"{size}, seconds of CPU: snapshot {ready:.2f}, explain {explained:.2f}")
    print(f"explain in all {ready + explained:.2f} (limit 1); top {look:.2f} a look, {share:.1%} of a core (limit 5 %)")


if __name__ == "__main__":
    main()
