"""Time of a search for a whole gang: `python -m bench.gang_search`.

Three levels (block, rack, host) of DGX H100 nodes, a share of which is in use. Measured: one gang of 512 pods x 8 GPUs
(every node of it empty), the same with slices of a rack, the same with 4 GPUs per pod on scattered nodes, a gang that
does not fit, and one pass over a queue of waiting gangs. Milliseconds of CPU of one process and thread, the
least of some repeats; the limit is 1,000 ms for 512 pods on 1,000 nodes, and no more
racks than in Kueue's order. The costliest gangs that the API server takes, of sixteen pod sets that may all shrink, end
at the search's own limit of work, within 6,000 ms; the controllers search beside their event loop.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from topology.device_requests import DeviceRequest
from topology.gangs.model import Gang, Host, Mode, Order, Placement, PlacementRefusal, PodSet, Slice, TopologyRequest
from topology.gangs.search import place
from topology.gangs.snapshot import HostSnapshot, snapshot
from topology.profiles import profile

LEVELS: Final = ("block", "rack")
RACK_HOSTS: Final = 16
BLOCK_RACKS: Final = 16
NEEDS: Final = {"cpu": 16_000, "memory": 128 << 30, "pods": 1}
FREE: Final = {"cpu": 192_000, "memory": 2 << 40, "pods": 110}
LIMIT_MS: Final = 1_000.0
COSTLIEST_LIMIT_MS: Final = 6_000.0


def cluster(nodes: int, *, used: float, seed: int) -> HostSnapshot:
    """Nodes of eight GPUs; a share of them has some GPUs in use."""
    rng = random.Random(seed)
    machine = profile("dgx-h100").machine
    hosts = []
    for number in range(nodes):
        rack = number // RACK_HOSTS
        taken = rng.getrandbits(8) | 1 if rng.random() < used else 0
        path = (f"block-{rack // BLOCK_RACKS:03}", f"rack-{rack:04}")
        hosts.append(Host(f"node-{number:05}", path, FREE, machine, machine.full & ~taken, "h100"))
    return snapshot(LEVELS, hosts)


def gang(count: int, gpus: int, request: TopologyRequest) -> Gang:
    """One pod set."""
    return Gang((PodSet("workers", count, NEEDS, DeviceRequest(gpus), request),))


def timed(act: Callable[[], object], repeats: int) -> float:
    """Least CPU milliseconds of some repeats; other work on the machine does not count."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        act()
        times.append((time.process_time() - start) * 1e3)
    return min(times)


def questions(nodes: int) -> dict[str, tuple[Gang, float]]:
    """The gangs measured, each with the share of nodes in use."""
    pods = min(512, nodes * 3 // 5 // 16 * 16)
    rack = (Slice("rack", 16),)
    return {
        f"{pods} x 8, preferred rack": (gang(pods, 8, TopologyRequest(Mode.PREFERRED, "rack")), 0.2),
        f"{pods} x 8, slices of a rack": (gang(pods, 8, TopologyRequest(Mode.PREFERRED, "block", rack)), 0.0),
        f"{pods} x 4, preferred rack": (gang(pods, 4, TopologyRequest(Mode.PREFERRED, "rack")), 0.6),
        f"{pods} x 8, balanced": (gang(pods, 8, TopologyRequest(Mode.PREFERRED, "rack", balanced=True)), 0.2),
        f"{pods} x 8, unconstrained": (gang(pods, 8, TopologyRequest()), 0.2),
        "does not fit a rack": (gang(pods, 8, TopologyRequest(Mode.REQUIRED, "rack")), 0.2),
    }


def costliest(state: HostSnapshot) -> list[Gang]:
    """Gangs of sixteen pod sets that barely do or do not fit, have preferences, and may shrink; in each mode."""
    gpus = sum(host.free_mask.bit_count() for host in state.hosts)
    liked = {host.name: number % 7 - 3 for number, host in enumerate(state.hosts)}
    rack, anywhere = TopologyRequest(Mode.PREFERRED, "rack"), TopologyRequest()
    gangs = []
    for share in (0.8, 0.95, 1.0, 1.05):
        count = max(1, int(gpus * share) // 64)
        for own, whole in ((rack, rack), (anywhere, anywhere)):
            pod_sets = (
                PodSet(f"w{one}", count, NEEDS, DeviceRequest(3 + one % 3), own, max(1, count // 3), preferences=liked)
                for one in range(16)
            )
            gangs.append(Gang(tuple(pod_sets), whole))
    return gangs


def queue_ms(nodes: int, gangs: int) -> tuple[float, int, int]:
    """Milliseconds for one pass over a queue, and how many gangs found places and how many did not."""
    state = cluster(nodes, used=0.6, seed=2)
    rng = random.Random(3)
    start = time.process_time()
    placed = refused = 0
    for _ in range(gangs):
        level = rng.choice(("rack", "block"))
        asked = gang(rng.choice((2, 4, 8, 16, 32)), rng.choice((2, 4, 8)), TopologyRequest(Mode.REQUIRED, level))
        answer = place(asked, state)
        if isinstance(answer, Placement):
            placed, state = placed + 1, state.take(answer, asked)
        else:
            refused += 1
    return (time.process_time() - start) * 1e3, placed, refused


def main(arguments: list[str]) -> int:
    """Print one JSON line per size; return 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m bench.gang_search", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--gangs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    kept = True
    for nodes in options.nodes:
        row: dict[str, object] = {"nodes": nodes}
        for name, (asked, used) in questions(nodes).items():
            state = cluster(nodes, used=used, seed=1)
            first = timed(lambda state=state, asked=asked: place(asked, state), 1)  # type: ignore[misc]
            fresh = [replace(host) for host in state.hosts]
            again = timed(lambda fresh=fresh, asked=asked: place(asked, snapshot(LEVELS, fresh)), options.repeats)  # type: ignore[misc]
            answer = place(asked, state)
            row[name] = {
                "firstMs": round(first, 1),
                "withNewSnapshotMs": round(again, 1),
                "ms": round(timed(lambda state=state, asked=asked: place(asked, state), options.repeats), 1),  # type: ignore[misc]
                "answer": _told(answer),
                "kueueOrder": _told(place(asked, state, order=Order.KUEUE)),
            }
            kept &= _racks(answer) <= _racks(place(asked, state, order=Order.KUEUE))
            kept &= nodes > 1000 or first < LIMIT_MS
        state = cluster(nodes, used=0.5, seed=1)
        longest = max(timed(lambda state=state, asked=asked: place(asked, state), 1) for asked in costliest(state))  # type: ignore[misc]
        row["costliest"] = {"ms": round(longest, 1)}
        kept &= nodes > 1000 or longest < COSTLIEST_LIMIT_MS
        total, placed, refused = queue_ms(nodes, options.gangs)
        row["queue"] = {"gangs": options.gangs, "ms": round(total, 1), "placed": placed, "refused": refused}
        print(json.dumps(row))
    return 0 if kept else 1


def _told(answer: Placement | PlacementRefusal) -> str:
    if isinstance(answer, PlacementRefusal):
        return answer.text
    domains = answer.assignments[0].domains
    counts = [len({row.path[: level + 1] for row in domains}) for level in range(len(LEVELS) + 1)]
    return f"{counts[0]} blocks, {counts[1]} racks, {counts[2]} hosts" + (", bounded" if answer.bounded else "")


def _racks(answer: Placement | PlacementRefusal) -> int:
    if isinstance(answer, PlacementRefusal):
        return 0
    return len({row.path[: len(LEVELS)] for row in answer.assignments[0].domains})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
