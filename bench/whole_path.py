"""The whole path of a pod on a real control plane: binds per second, time of calls and wake-ups.

    python -m bench.whole_path [--nodes 100] [--pods 300] [--rounds 3] [--start]

Etcd, API server, kube-scheduler with the shipped configuration and flags, and Atoll's processes under their own
ServiceAccounts are real; the nodes are fake (kwok), and this script writes their reports. Atoll's cost is a ratio to
the same kube-scheduler with an extender that only binds (bench.noop_extender), in alternating rounds on the same
cluster. kwok is paused while binds are counted, since its writes would come from other machines.

Exits 1 if a pod was not bound or a GPU not freed in time. A busy machine lowers the rates and widens the ratios; it
affects CPU per pod and p50 least.
"""

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial

from bench.figures import Row, delays, per_pod, percentile, rate, read_calls, spread, table
from bench.journal import TooSlow
from bench.stand import GPUS, WAIT_SECONDS, Stand, open_stand
from devcluster import DevCluster, DevNodeSpec
from devcluster.errors import DevclusterError
from devcluster.installation import Installation

SEED = 7
CONTENDERS = ("noop", "atoll")
WARM_PODS = 40
SINGLE_NODES = 4
"""Number of machines filled by pods of one GPU, from which GPUs are freed; whole-machine pods fill the others."""
SETTLE_SECONDS = {1: 2.0, 100: 6.0}
"""By number of waiting pods: seconds until no pod is in back-off (1 s at first, 5 s at most)."""
FREED = {1: 1, 100: 4}
CYCLES = {1: 5, 100: 3}
LONE_CALLS = 50
SHAPES = ("dgx1-v100", "dgx-a100", "dgx-h100", "l40s-8")


@dataclass(slots=True)
class Burst:
    """Results of one contender for bursts of pods."""

    rates: list[float] = field(default_factory=list)
    cpu_ms: list[dict[str, float]] = field(default_factory=list)

    def cpu_per_pod(self) -> dict[str, float]:
        """Return the median milliseconds of CPU per pod of each process."""
        processes = self.cpu_ms[0]
        return {name: statistics.median(each.get(name, 0.0) for each in self.cpu_ms) for name in processes}


@dataclass(frozen=True, slots=True)
class Requeue:
    """Seconds until a waiting pod was bound: since the proof that GPUs were free, and since their Lease ended."""

    since_proof: list[float]
    since_lease: list[float]


def burst(stand: Stand, count: int, into: Burst | None) -> None:
    """Bind `count` pods that all exist before, then delete them. Raises TooSlow."""
    with stand.paused("kwok"):
        with stand.paused("kube-scheduler"):
            pods = stand.create(count)
            before = stand.cpu_seconds()
        stand.wait_bound(pods)
        if into is not None:
            into.cpu_ms.append(per_pod(before, stand.cpu_seconds(), count))
            into.rates.append(rate([stand.journal.bound_at[pod] for pod in pods]))
    stand.clear()


def lone_calls(stand: Stand, count: int) -> None:
    """Bind pods one after another. Raises TooSlow."""
    for _ in range(count):
        stand.wait_bound(stand.create(1))
    stand.clear()


def fill(stand: Stand, nodes: int) -> list[str]:
    """Fill the cluster and return the pods of one GPU. Raises TooSlow."""
    whole = stand.create(nodes - SINGLE_NODES, gpus=GPUS)
    stand.wait_bound(whole)
    singles = stand.create(SINGLE_NODES * GPUS)
    stand.wait_bound(singles)
    return singles


def requeue(stand: Stand, singles: list[str], waiting: int, rng: random.Random) -> Requeue:
    """Repeatedly free GPUs of a full cluster with `waiting` pods. `singles` is updated. Raises TooSlow."""
    journal, found = stand.journal, Requeue([], [])
    waiters = stand.create(waiting)
    for _ in range(CYCLES[waiting]):
        journal.wait(partial(journal.rejected.issuperset, waiters), f"the rejection of {waiting} pods", WAIT_SECONDS)
        time.sleep(SETTLE_SECONDS[waiting])
        freed = rng.sample(singles, FREED[waiting])
        lucky = free(stand, freed, waiters, found)
        singles[:] = [pod for pod in singles if pod not in freed] + lucky
        waiters = [pod for pod in waiters if pod not in lucky] + stand.create(len(lucky))
    stand.delete(waiters)
    journal.wait(partial(journal.present.isdisjoint, waiters), "the end of the waiting pods", WAIT_SECONDS)
    return found


def free(stand: Stand, freed: list[str], waiters: list[str], into: Requeue) -> list[str]:
    """Delete pods, wait until as many waiting ones are bound, and return those. Raises TooSlow."""
    journal = stand.journal
    stand.delete(freed)
    journal.wait(
        lambda: sum(pod in journal.bound_at for pod in waiters) >= len(freed),
        "a waiting pod in freed GPUs",
        WAIT_SECONDS,
    )
    lucky = [pod for pod in waiters if pod in journal.bound_at]
    moments = [journal.bound_at[pod] for pod in lucky]
    into.since_proof.extend(delays([journal.ended_at[pod] for pod in freed], moments))
    if stand.has_leases:
        into.since_lease.extend(delays([journal.freed_at[pod] for pod in freed], moments))
    return lucky


def measure(stand: Stand, arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Run every part, adding to the table. Raises TooSlow."""
    rng = random.Random(SEED)
    bursts = {name: Burst() for name in CONTENDERS}
    requeues: dict[str, dict[int, Requeue]] = {}
    for number in range(arguments.rounds):
        for name in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
            stand.use(name)
            burst(stand, WARM_PODS, None)
            burst(stand, arguments.pods, bursts[name])
            _say(f"round {number + 1}, {name}: {bursts[name].rates[-1]:.0f} pods/s")
    rows += _burst_rows(bursts, arguments)
    for name in CONTENDERS if arguments.rounds % 2 == 0 else reversed(CONTENDERS):
        stand.use(name)
        singles = fill(stand, arguments.nodes)
        requeues[name] = {waiting: requeue(stand, singles, waiting, rng) for waiting in arguments.waiting}
        stand.clear()
        _say(f"requeue, {name}: done")
    rows += _requeue_rows(requeues)
    stand.use("timed")
    lone_calls(stand, LONE_CALLS)
    rows += _call_rows(stand, "pods one by one")
    burst(stand, arguments.pods, None)
    rows += _call_rows(stand, f"burst of {arguments.pods} pods")
    rows += _memory_rows(stand)


def _burst_rows(bursts: dict[str, Burst], arguments: argparse.Namespace) -> list[Row]:
    ours, theirs = bursts["atoll"], bursts["noop"]
    how = f"{arguments.pods} pods of 1 GPU, created before; first to last bind; median of {arguments.rounds} rounds"
    ratios = [one / other for one, other in zip(ours.rates, theirs.rates, strict=True)]
    rows = [
        Row("pods bound per second, Atoll", f"{statistics.median(ours.rates):.1f}", how),
        Row("pods bound per second, no-op extender", f"{statistics.median(theirs.rates):.1f}", "the same"),
        Row(
            "ratio",
            f"{statistics.median(ratios):.2f} (target >= 0.9)",
            "median over pairs of rounds: " + ", ".join(f"{ratio:.2f}" for ratio in ratios),
        ),
    ]
    for name, each in bursts.items():
        used = each.cpu_per_pod()
        shown = ", ".join(f"{process} {value:.2f}" for process, value in used.items())
        rows.append(Row(f"CPU per pod, {name}", f"{sum(used.values()):.2f} ms", shown))
    return rows


def _requeue_rows(requeues: dict[str, dict[int, Requeue]]) -> list[Row]:
    rows = []
    for waiting, ours in requeues["atoll"].items():
        theirs = requeues["noop"][waiting]
        title = f"requeue, {waiting} waiting"
        rows += [
            Row(f"{title}, Atoll, since Lease DELETE", spread(ours.since_lease), "Lease gone to bind, both as watched"),
            Row(f"{title}, Atoll, since proof", spread(ours.since_proof), "pod terminal to bind, both as watched"),
            Row(f"{title}, no-op, since proof", spread(theirs.since_proof), "kube-scheduler's own wake-up"),
            Row(
                f"{title}, ratio",
                f"{percentile(ours.since_proof, 50) / percentile(theirs.since_proof, 50):.2f} (target <= 1.5)",
                "p50 since proof",
            ),
        ]
    return rows


def _call_rows(stand: Stand, how: str) -> list[Row]:
    calls = read_calls(stand.calls_log.read_text())
    stand.calls_log.write_text("")
    return [
        Row(f"{verb}, {how}", spread(seconds), "timed by a proxy before the extender")
        for verb, seconds in calls.items()
    ]


def _memory_rows(stand: Stand) -> list[Row]:
    return [
        Row(f"memory, {name}", f"{size / 2**20:.0f} MiB", "resident at the end")
        for name, size in sorted(stand.memory_bytes().items())
    ]


def start_times(name: str) -> list[Row]:
    """Start a cluster of four real nodes and Atoll on it. Raises DevclusterError."""
    started = time.monotonic()
    nodes = [DevNodeSpec(f"node-{number}", profile=shape) for number, shape in enumerate(SHAPES)]
    with DevCluster.start(name, nodes=nodes, scheduler=False) as cluster:
        ready = time.monotonic()
        Installation(cluster).install()
        installed = time.monotonic()
    return [
        Row("start, 4 real nodes", f"{ready - started:.1f} s", "binaries built before; until all nodes are Ready"),
        Row("start, Atoll on it", f"{installed - ready:.1f} s", "manifests applied, every part ready"),
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100, help="fake nodes of 8 GPUs")
    parser.add_argument("--pods", type=int, default=300, help="pods of one burst")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of bursts")
    parser.add_argument("--waiting", type=int, nargs="*", choices=sorted(FREED), default=sorted(FREED))
    parser.add_argument("--start", action="store_true", help="also time the start of four real nodes (root)")
    parser.add_argument("--name", default="bench-path", help="name of the cluster")
    arguments = parser.parse_args()
    has_room = arguments.nodes > SINGLE_NODES and 2 <= arguments.pods <= arguments.nodes * GPUS
    if not has_room or arguments.rounds < 1:
        parser.error(f"needs more than {SINGLE_NODES} nodes, from 2 to 8 x nodes pods, and a round")
    rows: list[Row] = []
    status = 0
    started = time.monotonic()
    try:
        with open_stand(arguments.name, arguments.nodes) as stand:
            _say(f"{arguments.nodes} nodes after {time.monotonic() - started:.0f} s")
            measure(stand, arguments, rows)
        if arguments.start:
            rows += start_times(f"{arguments.name}-start")
    except (TooSlow, DevclusterError, OSError) as failure:
        _say(f"FAILED: {failure}")
        status = 1
    print(f"{arguments.nodes} nodes x {GPUS} GPUs, seed {SEED}, {time.monotonic() - started:.0f} s in all")
    print(table(rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
