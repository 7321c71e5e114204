"""The whole path of a pod on a real control plane, side by side: rate, CPU, requests, quality, longest steps, memory.

    python -m bench.scale [--nodes 100 1000 5000] [--pods 300] [--rounds 3] [--churn 100] [--waiting 1 100] [--start]

Etcd, API server, kube-scheduler with the shipped configuration and flags, and Atoll's processes under their own
ServiceAccounts are real; the nodes are fake (kwok), and this script writes their reports. kube-scheduler without any
extender, with an extender that only binds (bench.noop_extender), with Atoll and with Atoll without node hints take
turns in alternating rounds on the same cluster, so that ratios meet the same machine. kwok is paused while binds are
counted, since its writes would come from other machines.

Exits 1 if a pod was not bound or a GPU not freed in time. A busy machine lowers the rates and widens the ratios; it
affects CPU per pod and p50 least.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from atoll.kube import paths
from bench.figures import Row, delays, each_pod, per_pod, percentile, rate, read_calls, spread, table
from bench.journal import TooSlow
from bench.stand import CLAIMS, GPUS, NAMESPACE, WAIT_SECONDS, Stand, open_stand, pod_body
from bench.timed_loop import TOLD_SECONDS
from devcluster import DevCluster, DevNodeSpec
from devcluster.errors import DevclusterError
from devcluster.installation import EXTENDER_PORT, Installation

SEED = 7
ATOLLS = ("unhinted", "atoll", "sampled")
TITLES = {
    "plain": "no extender",
    "noop": "no-op extender",
    "unhinted": "Atoll without hints",
    "atoll": "Atoll",
    "sampled": "Atoll, a sample of the nodes",
}
OURS = ("extender", "controllers", "webhook")
WARM_PODS = 40
RATE_RATIOS = (
    ("atoll", "noop", " (target >= 0.75)"),
    ("atoll", "plain", ""),
    ("atoll", "unhinted", ""),
    ("sampled", "noop", ""),
)
LATE_SECONDS = 1.0
"""Events about binds are written a moment later."""
SIZES = (1, 1, 1, 1, 2, 2, 4, 8)
"""GPUs of pods of the mixed churn, drawn evenly."""
SINGLE_NODES = 4
"""Number of machines filled by pods of one GPU, from which GPUs are freed; whole-machine pods fill the others."""
SETTLE_SECONDS = {1: 2.0, 100: 6.0}
"""By number of waiting pods: seconds until no pod is in back-off (1 s at first, 5 s at most)."""
FREED = {1: 1, 100: 4}
CYCLES = {1: 5, 100: 3}
LONE_CALLS = 50
ASK = """
import json, sys, urllib.request
pod, nodes = json.load(sys.stdin)

def ask(verb, names):
    url, body = f"http://127.0.0.1:{sys.argv[1]}/{verb}", {"Pod": pod, "Nodes": None, "NodeNames": names}
    return json.load(urllib.request.urlopen(url, json.dumps(body).encode()))

scores = ask("prioritize", ask("filter", nodes)["NodeNames"])
ask("filter", [])  # what it expected for this pod is dropped
print(max(scores, key=lambda score: score["Score"])["Host"])
"""
"""Prints the best of all nodes for a pod, by the extender's own order, without a trace in its memory."""
SHAPES = ("dgx1-v100", "dgx-a100", "dgx-h100", "l40s-8")


@dataclass(slots=True)
class Burst:
    """Results of one contender for bursts of pods, round by round."""

    rates: list[float] = field(default_factory=list)
    cpu_ms: list[dict[str, float]] = field(default_factory=list)
    requests: list[dict[str, float]] = field(default_factory=list)


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each name over the rounds, in the order of the first; one that a round lacks is 0 there."""
    names = dict.fromkeys(name for one in rounds for name in one)
    return {name: statistics.median(one.get(name, 0.0) for one in rounds) for name in names}


@dataclass(frozen=True, slots=True)
class Requeue:
    """Seconds until a waiting pod was bound: since the proof that GPUs were free, and since their Lease ended."""

    since_proof: list[float]
    since_lease: list[float]


def burst(stand: Stand, count: int, into: Burst | None) -> None:
    """Bind `count` pods that all exist before, then delete them. Raises TooSlow.

    kube-scheduler stands still while they are created.
    """
    with stand.paused("kwok"):
        with stand.paused("kube-scheduler"):
            pods = stand.create(count)
            before, asked = stand.cpu_seconds(), stand.requests() if into else {}
        stand.wait_bound(pods)
        if into is not None:
            into.cpu_ms.append(per_pod(before, stand.cpu_seconds(), count))
            into.rates.append(rate([stand.journal.bound_at[pod] for pod in pods]))
            time.sleep(LATE_SECONDS)
            into.requests.append(each_pod(asked, stand.requests(), count))
    stand.clear()


def churn(stand: Stand, count: int, rng: random.Random) -> float:
    """Let pods of mixed sizes come and go, one after another, and return the share of those that came to the node that
    is the best of all at that moment by the extender's own order. Raises TooSlow."""
    journal = stand.journal
    alive = [pod for _ in range(count) for pod in stand.create(1, gpus=rng.choice(SIZES))]
    stand.wait_bound(alive)
    best = 0
    for _ in range(count):
        gone = alive.pop(rng.randrange(len(alive)))
        stand.delete([gone])
        stand.wait(partial(_is_gone, stand, gone), f"the end of {gone}")
        gpus = rng.choice(SIZES)
        expected = best_node(stand, gpus)
        [pod] = stand.create(1, gpus=gpus)
        stand.wait_bound([pod])
        best += journal.nodes[pod] == expected
        alive.append(pod)
    stand.clear()
    return best / count


def best_node(stand: Stand, gpus: int) -> str:
    """Ask the extender which of all nodes is the best for the next pod; it forgets the question."""
    path = f"{paths.pods(NAMESPACE)}?dryRun=All"
    pod = stand.cluster.api.request("POST", path, pod_body("question", CLAIMS[gpus], {}))
    asked = json.dumps([pod, stand.nodes])
    return stand.cluster.run(sys.executable, "-c", ASK, str(EXTENDER_PORT), input=asked).stdout.strip()


def _is_gone(stand: Stand, pod: str) -> bool:
    return pod not in stand.journal.present and pod not in stand.journal.leases.values()


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
    bursts = {name: Burst() for name in arguments.contenders}
    for number in range(arguments.rounds):
        for name in arguments.contenders if number % 2 == 0 else reversed(arguments.contenders):
            stand.use(name)
            burst(stand, WARM_PODS, None)
            burst(stand, arguments.pods, bursts[name])
            _say(f"round {number + 1}, {TITLES[name]}: {bursts[name].rates[-1]:.0f} pods/s")
    rows += burst_rows(bursts, arguments.pods)
    rows += _requeue_rows(requeues_of(stand, arguments)) if arguments.waiting else []
    for name in [name for name in ATOLLS if name in bursts and arguments.churn]:
        stand.use(name)
        share = churn(stand, arguments.churn, random.Random(SEED))
        how = f"{arguments.churn} pods of 1 to {GPUS} GPUs one by one, beside as many; by the extender's order"
        rows.append(Row(f"pods on the best node of all, {TITLES[name]}", f"{100 * share:.0f} %", how))
        _say(f"churn, {TITLES[name]}: done")
    stand.use("timed")
    stand.blocks_log.write_text("")
    lone_calls(stand, LONE_CALLS)
    rows += _call_rows(stand, "pods one by one")
    burst(stand, arguments.pods, None)
    rows += _call_rows(stand, f"burst of {arguments.pods} pods")
    rows += block_rows(read_calls(stand.blocks_log.read_text()))
    rows += _memory_rows(stand)


def requeues_of(stand: Stand, arguments: argparse.Namespace) -> dict[str, dict[int, Requeue]]:
    """Measure the wake-ups with Atoll and with the no-op extender. Raises TooSlow."""
    rng, found = random.Random(SEED), {}
    for name in ("noop", "atoll"):
        stand.use(name)
        singles = fill(stand, len(stand.nodes))
        found[name] = {waiting: requeue(stand, singles, waiting, rng) for waiting in arguments.waiting}
        stand.clear()
        _say(f"requeue, {TITLES[name]}: done")
    return found


def burst_rows(bursts: Mapping[str, Burst], pods: int) -> list[Row]:
    """Return the lines of all contenders, and their ratios, each the median over pairs of rounds."""
    rounds = max(len(each.rates) for each in bursts.values())
    how = f"{pods} pods of 1 GPU, created before; first to last bind; median of {rounds} rounds"
    rows = [
        Row(f"pods bound per second, {TITLES[name]}", f"{statistics.median(each.rates):.1f}", how)
        for name, each in bursts.items()
    ]
    for name, each in bursts.items():
        used = medians(each.cpu_ms)
        ours = sum(used.get(process, 0.0) for process in OURS)
        shown = ", ".join(f"{process} {value:.2f}" for process, value in used.items())
        rows.append(Row(f"CPU per pod, {TITLES[name]}", f"{sum(used.values()):.2f} ms, Atoll's {ours:.2f}", shown))
    for name, each in bursts.items():
        asked = medians(each.requests)
        shown = ", ".join(f"{kind} {count:.2f}" for kind, count in asked.items())
        rows.append(Row(f"API requests per pod, {TITLES[name]}", f"{sum(asked.values()):.2f}", shown))
    for name, other, target in [one for one in RATE_RATIOS if bursts.keys() >= set(one[:2])]:
        ratios = [one / two for one, two in zip(bursts[name].rates, bursts[other].rates, strict=True)]
        rows.append(_ratio_row(f"rate, {TITLES[name]} against {TITLES[other]}", ratios, target))
    return rows


def _ratio_row(what: str, ratios: Sequence[float], target: str) -> Row:
    return Row(what, f"{statistics.median(ratios):.2f}{target}", ", ".join(f"{ratio:.2f}" for ratio in ratios))


def block_rows(blocks: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return the longest time that each event loop was kept busy."""
    return [
        Row(
            f"longest block of the event loop, {part}",
            f"{1000 * max(blocks.get(part, [0.0])):.0f} ms",
            f"CPU between two ticks; {len(blocks.get(part, []))} of {1000 * TOLD_SECONDS:.0f} ms or more",
        )
        for part in ("extender", "controllers")
    ]


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
    parser.add_argument("--nodes", type=int, nargs="+", default=[100], help="fake nodes of 8 GPUs, one stand each")
    parser.add_argument("--contenders", nargs="+", choices=TITLES, default=[*TITLES], help="who takes turns")
    parser.add_argument("--pods", type=int, default=300, help="pods of one burst")
    parser.add_argument("--rounds", type=int, default=3, help="bursts of each contender")
    parser.add_argument("--churn", type=int, default=100, help="pods that come and go one by one; 0: none")
    parser.add_argument("--waiting", type=int, nargs="*", choices=sorted(FREED), default=[], help="also time wake-ups")
    parser.add_argument("--start", action="store_true", help="also time the start of four real nodes (root)")
    parser.add_argument("--name", default="bench-scale", help="name of the cluster")
    arguments = parser.parse_args()
    has_room = min(arguments.nodes) > SINGLE_NODES and 2 <= arguments.pods <= min(arguments.nodes) * GPUS
    if not has_room or arguments.rounds < 1:
        parser.error(f"needs more than {SINGLE_NODES} nodes, from 2 to 8 x nodes pods, and a round")
    is_done = [measured(nodes, arguments) for nodes in arguments.nodes]
    if arguments.start:
        print(table(start_times(f"{arguments.name}-start")))
    return 0 if all(is_done) else 1


def measured(nodes: int, arguments: argparse.Namespace) -> bool:
    """Print the table of one size, as far as it came; tell whether it is whole."""
    rows: list[Row] = []
    failure: Exception | None = None
    started = time.monotonic()
    try:
        with open_stand(arguments.name, nodes) as stand:
            _say(f"{nodes} nodes after {time.monotonic() - started:.0f} s")
            measure(stand, arguments, rows)
    except (TooSlow, DevclusterError, OSError) as caught:
        failure = caught
        _say(f"FAILED: {failure}")
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"{nodes} nodes x {GPUS} GPUs, seed {SEED}, {time.monotonic() - started:.0f} s in all, load {load}")
    print(table(rows), flush=True)
    return failure is None


if __name__ == "__main__":
    sys.exit(main())
