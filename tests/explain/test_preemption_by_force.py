"""Simulated preemption matches kube-scheduler and the running extender; brute force finds the victims for an island.

The reference shares no code with the simulation: it reimplements kube-scheduler's dry run and choice of nodes on plain
numbers, after `pkg/scheduler/framework/preemption`. Victims because of links, and whether a pod fits, come from the
extender's replies over HTTP.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.cluster.budgets import DisruptionBudget, DisruptionBudgets, decode_budget
from atoll.cluster.objects import Pod
from atoll.explain.changes import without_pods
from atoll.explain.codec import document_of
from atoll.explain.simulation import PodOutcome, simulate
from atoll.explain.snapshot import ClusterSnapshot
from tests.explain.situations import holder, situation, waiting, with_cpu
from tests.explain.test_against_extender import extender_of

GPUS, CPUS = 4, 64
SEEDS = 20


@dataclass(frozen=True)
class Runner:
    """A running pod in numbers."""

    name: str
    node: str
    ids: tuple[int, ...]
    priority: int
    cpu: int
    start: str
    labels: dict[str, str]
    is_in_gang: bool

    @property
    def uid(self) -> str:
        return f"uid-of-{self.name}"


@dataclass(frozen=True)
class Plot:
    """A cluster in numbers, and as objects. budgets: (labels it selects, evictions it allows)."""

    nodes: dict[str, str]
    runners: list[Runner]
    budgets: list[tuple[dict[str, str], int]]
    count: int
    cpu: int
    priority: int
    policy: str
    snapshot: ClusterSnapshot = field(default_factory=lambda: ClusterSnapshot(""))
    pod: Pod | None = None

    def on(self, node: str) -> list[Runner]:
        return [one for one in self.runners if one.node == node]


def plot(seed: int) -> Plot:
    """Return one to three nodes with pods of several priorities, starts, gangs, budgets; and a pod that wants room.

    With every third seed the count would do on all nodes, and both pairs of bridged GPUs are broken.
    """
    rng = random.Random(seed)
    is_broken = seed % 3 == 0
    nodes = {
        f"n{i}": rng.choice(["l40s-4"] * (not is_broken) + ["rtx8000x4-bridged"]) for i in range(rng.randint(1, 3))
    }
    starts = [f"2026-01-31T{hour:02d}:00:00Z" for hour in rng.sample(range(24), 24)]
    runners = []
    for node in nodes:
        ids = rng.sample(range(GPUS), GPUS - rng.choice([0, 0, 1, 2]))
        if is_broken:
            ids = [rng.choice([0, 1]), rng.choice([2, 3])]
        while ids:
            some = tuple(sorted(ids.pop() for _ in range(1 if is_broken else min(len(ids), rng.randint(1, 2)))))
            labels = rng.choice([{}, {"kind": "a"}, {"kind": "b"}])
            cpu = rng.choice([1, 8, 24])
            in_gang = rng.random() < 0.15
            name = f"{node}-{len(runners)}"
            runners.append(Runner(name, node, some, rng.randrange(6), cpu, starts.pop(), labels, in_gang))
    selectors: list[dict[str, str]] = [{"kind": "a"}, {"kind": "b"}, {}]
    budgets = [(labels, rng.randint(0, 1)) for labels in selectors if rng.random() < 0.3]
    count, cpu = rng.choice([1, 2, 2, 2, 3, 4]), rng.choice([1, 1, 30])
    policy = rng.choice(["island", "island", "contiguous"])
    count, policy = (2, "island") if is_broken else (count, policy)
    return objects(Plot(nodes, runners, budgets, count, cpu, 4, policy))


def objects(made: Plot) -> Plot:
    """Return the plot with its objects."""
    holders = []
    for one in made.runners:
        marks = {names.GANG: f"gang-of-{one.name}"} if one.is_in_gang else {}
        pod, leases = holder(
            one.name, one.node, *one.ids, priority=one.priority, cpu=str(one.cpu), labels=one.labels, annotations=marks
        )
        status = msgspec.structs.replace(pod.status, start_time=one.start)
        holders.append((msgspec.structs.replace(pod, status=status), leases))
    pod, claim = waiting(made.count, claim={"policy": made.policy}, priority=made.priority)
    shapes = {name: {"profile": profile, "node": {"cpu": CPUS}} for name, profile in made.nodes.items()}
    found = situation(shapes, holders, (with_cpu(pod, str(made.cpu)), claim))
    budgets = tuple(budget(number, labels, allowed) for number, (labels, allowed) in enumerate(made.budgets))
    others = tuple(one for one in found.snapshot.pods if one is not found.pod)
    return replace(made, snapshot=replace(found.snapshot, budgets=budgets, pods=others), pod=found.pod)


def budget(number: int, labels: dict[str, str], allowed: int) -> DisruptionBudget:
    body = {
        "metadata": {"name": f"b{number}", "namespace": "team"},
        "spec": {"selector": {"matchLabels": labels}},
        "status": {"disruptionsAllowed": allowed},
    }
    return decode_budget(msgspec.json.encode(body))


def fits_by_count(made: Plot, there: Sequence[Runner]) -> bool:
    """What kube-scheduler's filters say of a node where these run."""
    gpus, cpus = sum(len(one.ids) for one in there), sum(one.cpu for one in there)
    return gpus + made.count <= GPUS and cpus + made.cpu <= CPUS


def dry_run(made: Plot, node: str) -> tuple[list[Runner], int]:
    """SelectVictimsOnNode: take all away that are less important, and spare them one by one."""
    low = sorted((one for one in made.on(node) if one.priority < made.priority), key=importance)
    kept = [one for one in made.on(node) if one.priority >= made.priority]
    if not low or not fits_by_count(made, kept):
        return [], 0
    allowed = [count for _, count in made.budgets]
    violating, others = [], []
    for one in low:
        (violating if breaks(one, made.budgets, allowed) else others).append(one)
    victims = []
    for one in (*violating, *others):
        if fits_by_count(made, [*kept, one]):
            kept.append(one)
        else:
            victims.append(one)
    return sorted(victims, key=importance), sum(one in violating for one in victims)


def importance(one: Runner) -> tuple[int, str]:
    return (-one.priority, one.start)


def breaks(one: Runner, budgets: Sequence[tuple[dict[str, str], int]], allowed: list[int]) -> bool:
    """FilterVictimsWithPDBViolation: a pod without labels, or a budget without a selector, is none of its business."""
    for number, (labels, _) in enumerate(budgets):
        if one.labels and labels and labels.items() <= one.labels.items():
            allowed[number] -= 1
            if allowed[number] < 0:
                return True
    return False


def picked(nodes: dict[str, tuple[list[Runner], int]]) -> set[str]:
    """PickOneNodeForPreemption: the nodes among which only chance decides."""
    left = set(nodes)
    scores: list[Any] = [
        lambda node: nodes[node][1],
        lambda node: nodes[node][0][0].priority,
        lambda node: sum(one.priority + 2**31 for one in nodes[node][0]),
        lambda node: len(nodes[node][0]),
        lambda node: tuple(-ord(letter) for letter in oldest(nodes[node][0])),
    ]
    for score in scores:
        best = min(score(node) for node in left)
        left = {node for node in left if score(node) == best}
    return left


def oldest(victims: Sequence[Runner]) -> str:
    highest = max(one.priority for one in victims)
    return min(one.start for one in victims if one.priority == highest)


async def asked(made: Plot, snapshot: ClusterSnapshot, verb: str, **body: Any) -> Any:
    """Ask a new extender that has seen the cluster."""

    async def budgets() -> DisruptionBudgets:
        return DisruptionBudgets(snapshot.budgets)

    assert made.pod is not None
    (pod,) = document_of(ClusterSnapshot("", pods=(made.pod,)))["pods"]
    async with extender_of(snapshot, budgets=budgets) as extender:
        return await extender.call(verb, {"Pod": pod, **body})


async def feasible(made: Plot, gone: Sequence[Runner], nodes: Sequence[str]) -> list[str]:
    """The nodes that kube-scheduler and the extender would both take without these pods."""
    uids = {one.uid for one in gone}
    open_nodes = [node for node in nodes if fits_by_count(made, [one for one in made.on(node) if one.uid not in uids])]
    if not open_nodes:
        return []
    reply = await asked(made, without_pods(made.snapshot, uids), "filter", NodeNames=open_nodes)
    return reply["NodeNames"] or []


async def by_count(made: Plot) -> dict[str, tuple[list[Runner], int]]:
    """The extender's answer about the candidates of kube-scheduler's dry run."""
    offered = {node: dry_run(made, node) for node in made.nodes if not fits_by_count(made, made.on(node))}
    body = {
        node: {"Pods": [{"UID": one.uid} for one in victims], "NumPDBViolations": broken}
        for node, (victims, broken) in offered.items()
        if victims
    }
    if not body:
        return {}
    reply = (await asked(made, made.snapshot, "preempt", NodeNameToMetaVictims=body))["NodeNameToMetaVictims"]
    runners = {one.uid: one for one in made.runners}
    return {
        node: ([runners[victim["UID"]] for victim in told["Pods"]], told["NumPDBViolations"])
        for node, told in reply.items()
    }


async def by_links(made: Plot) -> list[tuple[str, tuple[Runner, ...]]]:
    """Every set of one node's pods that may go, whose end makes room where only the links do not suit."""
    found = []
    for node in made.nodes:
        if not fits_by_count(made, made.on(node)):
            continue
        low = [one for one in made.on(node) if one.priority < made.priority and not one.is_in_gang]
        for some in chain.from_iterable(combinations(low, size) for size in range(1, len(low) + 1)):
            left = [count for _, count in made.budgets]
            if not any(evicts_too_many(one, made.budgets, left) for one in some) and await feasible(made, some, [node]):
                found.append((node, some))
    return found


def evicts_too_many(one: Runner, budgets: Sequence[tuple[dict[str, str], int]], left: list[int]) -> bool:
    """The eviction API: an empty selector means every pod."""
    is_broken = False
    for number, (labels, _) in enumerate(budgets):
        if labels.items() <= one.labels.items():
            left[number] -= 1
            is_broken = is_broken or left[number] < 0
    return is_broken


def rank(made: Plot, victims: Sequence[Runner]) -> tuple[Any, ...]:
    """As docs and module say: on one node the fewest of the highest priority, then of the next, and so on."""
    levels = sorted({one.priority for one in made.runners}, reverse=True)
    return tuple(sum(one.priority == level for one in victims) for level in levels)


def simulated(made: Plot) -> PodOutcome:
    assert made.pod is not None
    (outcome,) = simulate(made.snapshot, [made.pod]).outcomes
    return outcome


def names_of(victims: Sequence[Runner]) -> set[str]:
    return {f"team/{one.name}" for one in victims}


async def compare(made: Plot) -> str:
    """Compare one plot; return which way it went."""
    outcome = simulated(made)
    told = (outcome.node, set(outcome.evicted))
    if await feasible(made, (), list(made.nodes)):
        assert outcome.allocation is not None
        assert not outcome.evicted
        return "fits"
    nodes = await by_count(made)
    if nodes:
        best = picked(nodes)
        assert told in [(node, names_of(nodes[node][0])) for node in best], (told, nodes)
        return "kube-scheduler" if len(best) == 1 else "tie"
    sets = await by_links(made) if made.policy == "island" and made.count > 1 else []
    assert (outcome.allocation is not None) == bool(sets), (told, sets)
    if not sets:
        return "nobody"
    assert told in [(node, names_of(some)) for node, some in sets]
    chosen = next(some for node, some in sets if (node, names_of(some)) == told)
    assert rank(made, chosen) == min(rank(made, some) for node, some in sets if node == outcome.node)
    firsts = {node: min((some for at, some in sets if at == node), key=lambda s: rank(made, s)) for node, _ in sets}
    scores = {node: (max(o.priority for o in s), sum(o.priority for o in s), len(s)) for node, s in firsts.items()}
    assert scores[outcome.node] == min(scores.values())
    return "islands"


@pytest.mark.parametrize("block", range(4))
async def test_simulations_evict_whom_the_cluster_would(block: int) -> None:
    """The same node and the same victims, or nobody, for random clusters with gangs, budgets, cpu and start times."""
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        made = plot(seed)
        try:
            await compare(made)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


async def test_these_plots_go_every_way() -> None:
    """Pods that fit, that kube-scheduler makes room for, that need an island, and that nobody can help."""
    ways = {await compare(plot(seed)) for seed in range(2 * SEEDS)}

    assert {"fits", "kube-scheduler", "islands", "nobody"} <= ways
