"""Proposals if more than GPUs is missing: ports, anti-affinity, CPU, taints, kinds of nodes.

Brute force over single pods and nodes, on clusters of one or two nodes: explain finds what helps, and its proposals
help. It shares only the decision itself with the searches.
"""

import random
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from atoll.cluster.objects import Pod
from atoll.explain.changes import ClusterChange, PodCase
from atoll.explain.decision import decide, index_snapshot
from atoll.explain.explanation import explain
from atoll.explain.proposals import ProposalKind, check
from atoll.explain.shapes import additions
from atoll.explain.wording import sentence
from tests.builders import make_pod
from tests.explain.situations import Situation, holder, situation, waiting, with_cpu, with_host_port

APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"side": "other"}}}
        ]
    }
}
CORDONED = {
    "unschedulable": True,
    "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}],
}
"""A node as `kubectl cordon` and the node lifecycle controller leave it."""


def crowd(seed: int) -> Situation:
    """Return one or two nodes with holders and plain pods, of which some open the port or keep away."""
    rng = random.Random(seed)
    nodes: dict[str, dict[str, Any]] = {f"n{i}": {"profile": "l40s-4"} for i in range(rng.randint(1, 2))}
    holders, plain = [], []
    for node in nodes:
        ids = rng.sample(range(4), rng.randint(0, 4))
        holders += [
            holder(f"{node}-h{i}", node, device_id, priority=rng.randrange(3), labels=side(rng))
            for i, device_id in enumerate(ids)
        ]
        for i in range(rng.randint(0, 5)):
            pod = make_pod(f"{node}-p{i}", gpus=None, node=node, phase="Running", labels=side(rng))
            plain.append(dressed(pod, rng))
    pod, claim = waiting(rng.randint(1, 5), claim={}, labels=side(rng), **({"affinity": APART} if seed % 3 else {}))
    return situation(nodes, holders, (dressed(pod, rng), claim), others=plain)


def side(rng: random.Random) -> dict[str, str]:
    return {"side": rng.choice(["one", "other"])}


def dressed(pod: Pod, rng: random.Random) -> Pod:
    """Return the pod with a host port, or cpu, or as it is."""
    fate = rng.random()
    return with_host_port(pod) if fate < 0.3 else with_cpu(pod, rng.choice(["5", "30"])) if fate < 0.6 else pod


@given(st.integers(0, 1 << 32).map(crowd))
@settings(max_examples=60, deadline=None)
def test_ends_are_found_whatever_stands_in_the_way(found: Situation) -> None:
    """Ends make room if and only if a set of them is proposed, the first has the fewest pods, and each helps."""
    scene = index_snapshot(found.snapshot)
    if decide(scene, found.pod, found.claim).fits:
        return
    told = explain(scene, found.pod).help
    ends = [one for one in told.proposals if one.kind is ProposalKind.END]
    case = PodCase(found.snapshot, found.pod, found.claim)
    fewest = None
    for node in found.snapshot.nodes:
        uids = [pod.metadata.uid for pod in found.snapshot.pods if pod.spec.node_name == node.metadata.name]
        sets = chain.from_iterable(combinations(uids, size) for size in range(1, min(len(uids), (fewest or 9) - 1) + 1))
        helping = next((some for some in sets if check(case, ClusterChange(ended=some)).fits), None)
        fewest = len(helping) if helping is not None else fewest

    note(f"fewest: {fewest}, proposed: {[one.change.ended for one in ends]}")
    assert (ProposalKind.END in told.helpless) == (fewest is None)
    assert [len(one.change.ended) for one in ends[:1]] == ([] if fewest is None else [fewest])
    for one in ends:
        assert check(case, one.change).fits


def test_these_crowds_are_worth_asking_about() -> None:
    """Ports, neighbours and cpu all refuse nodes among them, and ends help some and do not help others."""
    reasons: set[str] = set()
    helps: set[bool] = set()
    for seed in range(80):
        found = crowd(seed)
        scene = index_snapshot(found.snapshot)
        decision = decide(scene, found.pod, found.claim)
        if not decision.fits:
            reasons |= {reason for closed in decision.closed.values() for reason in closed}
            helps.add(ProposalKind.END in explain(scene, found.pod).help.helpless)

    assert {"host port in use", "pod affinity", "insufficient cpu"} <= reasons
    assert helps == {True, False}


def test_a_cordoned_node_is_opened_by_its_cordon_alone() -> None:
    """The taint that comes with a cordon goes with it: nobody is told to tolerate it."""
    found = situation({"n1": {"node": CORDONED}}, [], waiting(1, claim={}))
    scene = index_snapshot(found.snapshot)

    proposals = explain(scene, found.pod).help.proposals

    texts = [sentence(one, scene, found.pod) for one in proposals if one.kind is ProposalKind.OPEN]
    assert texts == ["open node n1 (uncordon the node): then it fits on n1 with GPU 0"]
    assert "like n1" in {more.shape for one in proposals for more in one.change.added}


@pytest.mark.parametrize("taint", ["node.kubernetes.io/disk-pressure", "node.cloudprovider.kubernetes.io/shutdown"])
def test_nobody_is_told_to_tolerate_an_ill_node(taint: str) -> None:
    """A taint that tells how the node is goes when the node is well; a pod that endured it would not run there."""
    ill = {"taints": [{"key": taint, "effect": "NoSchedule"}]}
    found = situation({"n1": {"node": ill}}, [], waiting(1, claim={}))

    told = explain(index_snapshot(found.snapshot), found.pod)

    assert ProposalKind.OPEN in told.help.helpless
    assert "untolerated taint" in told.headline


TAINTED = {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}


@pytest.mark.parametrize("first", [TAINTED, {"cpu": 4}, {"labels": {"zone": "far"}}], ids=["taint", "cpu", "label"])
def test_a_node_is_added_like_one_that_the_pod_can_go_to(first: dict[str, Any]) -> None:
    """Of two pools with the same machines the first by name may be closed to the pod; the other is proposed."""
    nodes = {"a1": {"node": first}, "b1": {"node": {"labels": {"zone": "near"}}}}
    busy = [holder(f"on-{name}", name, *range(8)) for name in nodes]
    pod, claim = waiting(8, claim={"models": ["nvidia-v100"]}, cpu="32", nodeSelector={"zone": "near"})
    found = situation(nodes, busy, (pod, claim))

    proposals = explain(index_snapshot(found.snapshot), found.pod).help.proposals

    assert "like b1" in {more.shape for one in proposals for more in one.change.added}


def test_machines_in_other_zones_are_other_kinds() -> None:
    """A pod that keeps apart from others by zone is offered a node in a zone without them."""
    zones = [
        {"topologyKey": "zone", "labelSelector": {"matchLabels": {"side": "other"}}},
    ]
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": zones}}
    nodes = {"a1": {"node": {"labels": {"zone": "a"}}}, "b1": {"node": {"labels": {"zone": "b"}}}}
    busy = [holder("on-a1", "a1", *range(8), labels={"side": "other"}), holder("on-b1", "b1", *range(8))]
    pod, claim = waiting(8, claim={}, affinity=apart)
    found = situation(nodes, busy, (pod, claim))

    shapes = [one.shape for one in additions(found.snapshot, pod)]

    assert shapes[:2] == ["like a1", "like b1"]
    proposals = explain(index_snapshot(found.snapshot), pod).help.proposals
    assert "like b1" in {more.shape for one in proposals for more in one.change.added}
