"""Proposals for random small clusters, checked by brute force."""

import random
from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

from hypothesis import given, note, settings
from hypothesis import strategies as st

from atoll.api import names
from atoll.cluster.health import judge
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection
from atoll.cluster.transitions import Availability
from atoll.explain.changes import ClusterChange, PodCase, changed, relaxations_of
from atoll.explain.decision import decide, index_snapshot
from atoll.explain.proposals import Proposal, ProposalKind, Suggestions, check, find_suggestions
from atoll.explain.shapes import additions
from tests.builders import make_pod
from tests.explain.situations import NODE_CPUS, Situation, holder, situation, unsociable, waiting, with_host_port

PROFILES = ("rtx8000x4-bridged", "rtx8000x4-bridged", "l40s-4", "t4-4", "gb200-tray")


TAINT = {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}
SILENT = "2026-01-31T10:00:00Z"


def cluster(seed: int) -> Situation:
    """Return one to three nodes of four GPUs, most of which are held, cordoned or sick, and a pod that may not fit."""
    rng = random.Random(seed)
    nodes: dict[str, dict[str, Any]] = {}
    holders = []
    for number in range(rng.randint(1, 3)):
        name = f"n{number}"
        held: dict[int, list[int]] = {}
        withheld: dict[str, list[int]] = {"cordoned": [], "sick": []}
        for device_id in range(4):
            fate = rng.random()
            if fate < 0.55:
                held.setdefault(rng.randrange(3), []).append(device_id)
            elif fate < 0.75:
                withheld[rng.choice(["cordoned", "sick"])].append(device_id)
        nodes[name] = {
            "profile": rng.choice(PROFILES),
            "node": {"labels": {"zone": rng.choice("ab")}, **rng.choice([{}] * 3 + [{"unschedulable": True}, TAINT])},
            "heard": rng.choice(["2026-01-31T12:00:00Z"] * 9 + [SILENT]),
            **withheld,
        }
        for who, ids in held.items():
            options = {"deleted": rng.random() < 0.2, "cpu": rng.choice(["", "20", "40"])}
            holders.append(holder(f"h{number}{who}", name, *ids, priority=rng.randrange(3), **options))
    claim: dict[str, Any] = {
        "policy": rng.choice(["contiguous", "island", "packed", "spread"]),
        "models": rng.choice([[], [], [], ["nvidia-quadro-rtx-8000"], ["nvidia-b200"]]),
    }
    if claim["policy"] != "spread":
        claim["interconnect"] = rng.choice(["any", "any", "nvlink", "pcie"])
    cpu = rng.choice(["", "", "30", "60", str(NODE_CPUS * 2)])
    pod, asked = waiting(rng.randint(1, 4), claim=claim, cpu=cpu, labels={"app": "x"})
    return situation(nodes, holders, (with_host_port(pod), asked), others=plain_pods(rng, list(nodes)))


def plain_pods(rng: random.Random, nodes: list[str]) -> list[Pod]:
    """Return at most one pod without GPUs, which keeps the waiting one off its host, or out of its zone."""
    node, options = rng.choice(nodes), {"priority": rng.randrange(4), "deleted": rng.random() < 0.2}
    taken = with_host_port(make_pod("web", gpus=None, node=node, phase="Running", **options))
    apart = unsociable("alone", node, rng.choice(["zone", "kubernetes.io/hostname"]), **options)
    return rng.choice([[], [], [taken], [apart], [with_host_port(apart)]])


def clusters() -> st.SearchStrategy[Situation]:
    """Return clusters by seed, so that a failing one can be named."""
    return st.integers(0, 1 << 32).map(cluster)


def help_of(found: Situation) -> Suggestions[Proposal] | None:
    """Return what would help; None for a pod that needs no help."""
    scene = index_snapshot(found.snapshot)
    decision = decide(scene, found.pod, found.claim)
    assert not isinstance(decision.request, Rejection)
    return None if decision.fits else find_suggestions(scene, found.pod, decision)


def subsets(items: Any) -> Iterator[tuple[Any, ...]]:
    """Yield every set of one or more, the smallest first."""
    items = sorted(items)
    return chain.from_iterable(combinations(items, size) for size in range(1, len(items) + 1))


def gpus(found: Situation, *states: Availability) -> list[tuple[str, str]]:
    """Return (node, uuid) of the GPUs that stand so."""
    return [
        (report.metadata.name, uuid)
        for report in found.snapshot.reports
        for uuid, standing in judge(report).standings.items()
        if standing.state in states
    ]


def all_changes(kind: ProposalKind, found: Situation) -> Iterator[ClusterChange]:
    """Yield every change of a kind that there is on this cluster, wherever it is."""
    others = [pod for pod in found.snapshot.pods if pod.spec.node_name]
    if kind is ProposalKind.RELAX:
        yield from (ClusterChange(relaxed=relaxed) for relaxed in subsets(relaxations_of(found.claim)))
    elif kind is ProposalKind.COUNT:
        assert found.claim is not None
        yield from (ClusterChange(count=count) for count in range(1, found.claim.spec.devices.count))
    elif kind is ProposalKind.OPEN:
        yield from (ClusterChange(opened=(node.metadata.name,)) for node in found.snapshot.nodes)
    elif kind is ProposalKind.GPU:
        yield from (ClusterChange(uncordoned=chosen) for chosen in subsets(gpus(found, Availability.CORDONED)))
    elif kind is ProposalKind.REPAIR:
        yield from (ClusterChange(healed=chosen) for chosen in subsets(gpus(found, Availability.QUARANTINED)))
    elif kind is ProposalKind.END:
        yield from (ClusterChange(ended=chosen) for chosen in subsets(pod.metadata.uid for pod in others))
    elif kind is ProposalKind.ENDING:
        ending = [pod.metadata.uid for pod in others if pod.metadata.deletion_timestamp]
        yield from (ClusterChange(ended=chosen) for chosen in subsets(ending))
    else:
        yield from (ClusterChange(added=(one,)) for one in additions(found.snapshot, found.pod))


@given(clusters())
@settings(max_examples=50, deadline=None)
def test_every_proposal_makes_the_pod_schedulable(found: Situation) -> None:
    """Whatever is proposed is applied to the whole cluster, and the scheduler's own decision then is yes: on that
    node, with those GPUs where nothing else could be better."""
    told = help_of(found)
    for proposal in told.proposals if told is not None else ():
        note(repr(proposal))
        decision = check(PodCase(found.snapshot, found.pod, found.claim), proposal.change)
        assert decision.fits
        assert proposal.node in decision.verdicts.feasible


@given(clusters())
@settings(max_examples=25, deadline=None)
def test_nothing_of_a_kind_helps_is_true(found: Situation) -> None:
    """Where no proposal of a kind is made, no change of that kind makes room: every set of them was tried."""
    told = help_of(found)
    for kind in told.helpless if told is not None else ():
        for change in all_changes(kind, found):
            note(f"{kind}: {change}")
            assert not check(PodCase(found.snapshot, found.pod, found.claim), change).fits


@given(clusters())
@settings(max_examples=25, deadline=None)
def test_first_proposal_of_a_kind_is_the_smallest(found: Situation) -> None:
    """Fewest pods, GPUs and relaxations, and the largest count: no smaller change of the kind helps."""
    told = help_of(found)
    for kind in (ProposalKind.RELAX, ProposalKind.COUNT, ProposalKind.GPU, ProposalKind.REPAIR, ProposalKind.END):
        first = next((one for one in told.proposals if one.kind is kind), None) if told is not None else None
        if first is None:
            continue
        for change in all_changes(kind, found):
            if size(change) < size(first.change):
                note(f"{kind}: {change} is smaller than {first.change}")
                assert not check(PodCase(found.snapshot, found.pod, found.claim), change).fits


def size(change: ClusterChange) -> int:
    """Return how much a change takes; a larger count takes less."""
    return len(change.relaxed) + len(change.uncordoned) + len(change.healed) + len(change.ended) - change.count


def test_changes_leave_the_cluster_alone() -> None:
    """A change makes new values: the snapshot that was asked about is the same afterwards."""
    found = situation({"n1": {"cordoned": (0,)}}, [holder("h", "n1", 1)], waiting(8, claim={"policy": "island"}))
    before = repr(found.snapshot)

    case = PodCase(found.snapshot, found.pod, found.claim)
    changed(case, ClusterChange(count=2, uncordoned=(("n1", "GPU-n1-0000"),), ended=("uid-of-h",), opened=("n1",)))

    assert repr(found.snapshot) == before
    assert names.CLAIM in found.pod.metadata.annotations


def test_the_clusters_of_these_tests_are_worth_asking_about() -> None:
    """Among them every kind of change helps some pod, and helps some other not: the properties say something."""
    helped: set[ProposalKind] = set()
    helpless: set[ProposalKind] = set()
    for seed in range(400):
        if helped == helpless == set(ProposalKind):
            break
        told = help_of(cluster(seed))
        helped |= {proposal.kind for proposal in told.proposals} if told is not None else set()
        helpless |= set(told.helpless) if told is not None else set()

    assert helped == helpless == set(ProposalKind)
