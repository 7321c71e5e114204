"""`atoll simulate` predicts the victims that kube-scheduler and the extender choose together.

The tests reimplement kube-scheduler's part after its source (defaultpreemption, and preemption.go), with GPU counts
only and without Atoll's code. The extender answers over HTTP.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import msgspec

from atoll.cluster.budgets import DisruptionBudgets
from atoll.cluster.objects import Pod
from atoll.explain.changes import ClusterChange, PodCase
from atoll.explain.decision import decide, index_snapshot
from atoll.explain.preemption import ForetoldPreemption, preemptions_for
from atoll.explain.proposals import check
from tests.explain.situations import Situation, holder, situation, waiting
from tests.explain.test_against_extender import extender_of
from tests.explain.test_defrag import budget
from tests.explain.test_simulate_gangs import pod_body

PRIORITY = 4
SEEDS = 160


@dataclass(frozen=True)
class DryRunHolder:
    """What the dry run looks at."""

    uid: str
    node: str
    gpus: int
    priority: int
    since: str
    kind: str


@dataclass(frozen=True)
class Crowd:
    """A full cluster as Atoll sees it and as the dry run does. `allowed`: disruptions by the budget of each kind."""

    found: Situation
    holders: tuple[DryRunHolder, ...]
    allowed: dict[str, int]

    @property
    def wanted(self) -> int:
        """How many GPUs the waiting pod asks for."""
        assert self.found.claim is not None
        return self.found.claim.spec.devices.count


def crowd(seed: int) -> Crowd:
    """Return machines of four GPUs with holders of several priorities and ages, and an important pod without room."""
    rng = random.Random(seed)
    nodes = {f"n{i}": {"profile": rng.choice(["l40s-4", "rtx8000x4-bridged"])} for i in range(rng.randint(1, 4))}
    entries, holders = [], []
    for node in nodes:
        ids = list(range(4))
        rng.shuffle(ids)
        left = rng.choice([0, 0, 1, 2])
        while len(ids) > left:
            taken = sorted(ids.pop() for _ in range(min(len(ids) - left, rng.randint(1, 2))))
            name, kind = f"{node}-{len(ids)}", rng.choice("ab")
            since = f"2026-01-{rng.randint(1, 28):02}T00:00:{len(entries):02}Z"
            told = DryRunHolder(f"uid-of-{name}", node, len(taken), rng.randrange(6), since, kind)
            pod, leases = holder(name, node, *taken, priority=told.priority, labels={"kind": kind})
            status = msgspec.structs.replace(pod.status, start_time=since)
            entries.append((msgspec.structs.replace(pod, status=status), leases))
            holders.append(told)
    claim = {"policy": rng.choice(["island", "island", "contiguous"])}
    found = situation(nodes, entries, waiting(rng.choice([1, 2, 2, 3, 4]), claim=claim, priority=PRIORITY))
    allowed = {kind: rng.choice([0, 1, 9]) for kind in "ab"}
    budgets = tuple(budget(count, kind=kind) for kind, count in allowed.items())
    named = tuple(
        msgspec.structs.replace(one, metadata=msgspec.structs.replace(one.metadata, name=f"b-{kind}"))
        for kind, one in zip(allowed, budgets, strict=True)
    )
    return Crowd(replace(found, snapshot=replace(found.snapshot, budgets=named)), tuple(holders), allowed)


def dry_run(crowd: Crowd, node: str) -> tuple[list[DryRunHolder], int] | None:
    """selectVictimsOnNode: all of lower priority go, then are spared again; None for a node that is no candidate."""
    there = [one for one in crowd.holders if one.node == node]
    free = 4 - sum(one.gpus for one in there)
    low = [one for one in there if one.priority < PRIORITY]
    if free >= crowd.wanted or not low or free + sum(one.gpus for one in low) < crowd.wanted:
        return None
    important = sorted(low, key=lambda one: (-one.priority, one.since))
    allowed = dict(crowd.allowed)
    protected, others = [], []
    for one in important:
        allowed[one.kind] -= 1
        (protected if allowed[one.kind] < 0 else others).append(one)
    free += sum(one.gpus for one in low)
    victims, broken = [], 0
    for one in (*protected, *others):
        if free - one.gpus >= crowd.wanted:
            free -= one.gpus
        else:
            victims.append(one)
            broken += one in protected
    return sorted(victims, key=lambda one: (-one.priority, one.since)), broken


def pick(crowd: Crowd, kept: dict[str, Any]) -> tuple[str, set[str]] | None:
    """pickOneNodeForPreemption, over what the extender left of the candidates; the first victim counts as highest."""
    by_uid = {one.uid: one for one in crowd.holders}

    def order(node: str) -> tuple[Any, ...]:
        victims = [by_uid[row["UID"]] for row in kept[node]["Pods"]]
        highest = max(one.priority for one in victims)
        earliest = min(one.since for one in victims if one.priority == highest)
        total = sum(one.priority + 2**31 for one in victims)
        young = tuple(-ord(character) for character in earliest)
        return kept[node]["NumPDBViolations"], victims[0].priority, total, len(victims), young

    if not kept:
        return None
    node = min(sorted(kept), key=order)
    return node, {row["UID"] for row in kept[node]["Pods"]}


async def preempted(crowd: Crowd) -> tuple[str, set[str]] | None:
    """Let kube-scheduler's dry run and the extender come to an answer."""
    offered = {}
    for node in crowd.found.snapshot.nodes:
        candidate = dry_run(crowd, node.metadata.name)
        if candidate is not None:
            victims, broken = candidate
            offered[node.metadata.name] = {"Pods": [{"UID": v.uid} for v in victims], "NumPDBViolations": broken}
    if not offered:
        return None
    body = {"Pod": pod_body(crowd.found.pod), "NodeNameToMetaVictims": offered}

    async def budgets() -> DisruptionBudgets:
        return DisruptionBudgets(crowd.found.snapshot.budgets)

    async with extender_of(crowd.found.snapshot, budgets=budgets) as extender:
        reply = await extender.call("preempt", body)
    return pick(crowd, reply["NodeNameToMetaVictims"])


def foretold(crowd: Crowd) -> ForetoldPreemption | None:
    """Return what simulate says."""
    scene = index_snapshot(crowd.found.snapshot)
    told = preemptions_for(scene, crowd.found.pod, decide(scene, crowd.found.pod, crowd.found.claim))
    return next(told, None)


def fits(crowd: Crowd) -> bool:
    """Tell whether nobody need go."""
    return decide(index_snapshot(crowd.found.snapshot), crowd.found.pod, crowd.found.claim).fits


def subsets(victims: Sequence[Pod]) -> Any:
    """Return every smaller set of the victims."""
    return chain.from_iterable(combinations(victims, size) for size in range(len(victims)))


async def test_victims_are_those_that_kube_scheduler_and_the_extender_come_to() -> None:
    """Node and victims are the same, over full clusters with budgets; where the two find nobody, simulate tells of
    nobody, or of an eviction for islands, which the controllers make: of pods below, none of whom can be spared."""
    kinds = set()
    for seed in range(SEEDS):
        made = crowd(seed)
        if fits(made):
            continue
        told, real = foretold(made), await preempted(made)
        if real is not None:
            assert told is not None, seed
            assert (told.node, {victim.metadata.uid for victim in told.victims}) == real, seed
            kinds.add("by count")
        elif told is not None:
            check_island(made, told)
            kinds.add("for an island")
        else:
            kinds.add("nobody")
    assert kinds == {"by count", "for an island", "nobody"}


def check_island(made: Crowd, told: ForetoldPreemption) -> None:
    """The pod fits once they have ended, and not before the last of them has; each is less important."""
    case = PodCase(made.found.snapshot, made.found.pod, made.found.claim)
    assert check(case, ClusterChange(ended=tuple(victim.metadata.uid for victim in told.victims))).fits
    for some in subsets(told.victims):
        after = check(case, ClusterChange(ended=tuple(victim.metadata.uid for victim in some)))
        assert told.node not in after.verdicts.feasible
    assert all(victim.spec.priority < PRIORITY for victim in told.victims)
