"""`atoll defrag`: every plan makes room, every moved pod gets a place, and protected pods are not moved."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from atoll.cluster.budgets import DisruptionBudget, decode_budget
from atoll.cluster.objects import OwnerReference
from atoll.explain.changes import without_pods
from atoll.explain.codec import encode_snapshot, with_objects
from atoll.explain.decision import decide, index_snapshot
from atoll.explain.defrag import Defrag, DefragRequest, asking_pod, find_moves, unplaced
from atoll.explain.simulation import bound_pod
from atoll.explain.snapshot import ClusterSnapshot
from atollctl.__main__ import app
from tests.builders import make_claim
from tests.explain.situations import holder, situation

OWNER = (OwnerReference("ReplicaSet", "r", "uid-of-r", controller=True),)


def owned(*entry: Any, **options: Any) -> Any:
    """Return a holder that something makes anew."""
    pod, leases = holder(*entry, **options)
    metadata = msgspec.structs.replace(pod.metadata, owner_references=OWNER)
    return msgspec.structs.replace(pod, metadata=metadata), leases


def scattered(*holders: Any, nodes: Any = None, **fields: Any) -> ClusterSnapshot:
    """Return two machines of four cards each, with these holders."""
    built = situation(nodes or {"n1": {"profile": "l40s-4"}, "n2": {"profile": "l40s-4"}}, list(holders))
    pods = tuple(pod for pod in built.snapshot.pods if pod.metadata.name != "p")
    return replace(built.snapshot, pods=pods, **fields)


def moves_for(snapshot: ClusterSnapshot, count: int, *, priority: int = 0, **claim: Any) -> Defrag:
    """Look for moves that make room for so many GPUs."""
    return find_moves(index_snapshot(snapshot), DefragRequest(make_claim("asked", count=count, **claim), priority))


def budget(allowed: int, **labels: str) -> DisruptionBudget:
    """Return a PodDisruptionBudget over pods with these labels, all by default."""
    body = {
        "metadata": {"name": "b", "namespace": "team"},
        "spec": {"selector": {"matchLabels": labels}},
        "status": {"disruptionsAllowed": allowed},
    }
    return decode_budget(msgspec.json.encode(body))


ONE_EACH = (owned("a", "n1", 0), owned("b", "n2", 0, 1))


def test_the_cheapest_move_comes_first() -> None:
    """One GPU that moves is better than two; where the pod goes is told."""
    answer = moves_for(scattered(*ONE_EACH), 4)

    assert answer.fits is None
    (first, *_) = answer.plans
    assert [(m.pod.metadata.name, m.source.node, m.target.node) for m in first.moves] == [("a", "n1", "n2")]
    assert (first.room.node, first.room.device_ids) == ("n1", (0, 1, 2, 3))
    assert [plan.cost for plan in answer.plans] == sorted(plan.cost for plan in answer.plans)


@pytest.mark.parametrize(
    ("snapshot", "reason"),
    [
        pytest.param(scattered(holder("a", "n1", 0), holder("b", "n2", 0)), "which nobody would make anew", id="bare"),
        pytest.param(
            scattered(owned("a", "n1", 0, priority=5), owned("b", "n2", 0, priority=5)),
            "of a higher priority",
            id="more important",
        ),
        pytest.param(
            scattered(*ONE_EACH, budgets=(budget(0),)), "protected by a PodDisruptionBudget", id="under a budget"
        ),
        pytest.param(
            scattered(
                owned("a", "n1", 0, annotations={"gpu.scheduling/gang": "g"}),
                owned("b", "n2", 0, annotations={"gpu.scheduling/gang": "g"}),
            ),
            "member of a gang",
            id="in a gang",
        ),
        pytest.param(
            scattered(owned("a", "n1", 0, deleted=True), owned("b", "n2", 0, deleted=True)), "ends anyway", id="ending"
        ),
    ],
)  # fmt: skip
def test_who_may_not_be_disturbed_stays(snapshot: ClusterSnapshot, reason: str) -> None:
    """No plan moves such a pod, and the reason is counted."""
    answer = moves_for(snapshot, 4)

    assert not answer.plans
    assert answer.unmoved == {reason: 2}


def test_a_budget_counts_all_moves_of_a_plan() -> None:
    """A budget that allows one eviction lets one pod go, not two."""
    holders = (owned("a", "n1", 0), owned("b", "n1", 1), owned("c", "n2", 0), owned("d", "n2", 1))
    assert [len(plan.moves) for plan in moves_for(scattered(*holders, budgets=(budget(2),)), 4).plans][:1] == [2]

    assert not moves_for(scattered(*holders, budgets=(budget(1),)), 4).plans


def test_no_plan_where_the_moved_pod_finds_no_place() -> None:
    """Room for one set that costs another pod its place is no defragmentation."""
    assert not moves_for(scattered(owned("a", "n1", 0), owned("b", "n2", 0, 1, 2, 3)), 4).plans


def test_nodes_that_the_asked_pod_cannot_go_to_are_told(tmp_path: Path) -> None:
    """GPU nodes often carry a taint: nobody is told that no moves help where only a toleration was not named."""
    taint = {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]}
    nodes = {name: {"profile": "l40s-4", "node": taint} for name in ("n1", "n2")}
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    holders = (owned("a", "n1", 0, tolerations=tolerations), owned("b", "n2", 0, 1, tolerations=tolerations))
    path = tmp_path / "cluster.json"
    path.write_bytes(encode_snapshot(scattered(*holders, nodes=nodes)))
    words = ["defrag", "--count", "4", "--policy", "contiguous", "--snapshot", str(path)]

    shut = CliRunner().invoke(app, words)
    opened = CliRunner().invoke(app, [*words, "--tolerate", "nvidia.com/gpu"])

    assert (shut.exit_code, opened.exit_code) == (1, 0)
    assert "left out: 2 nodes, untolerated taint: name its key by --tolerate" in shut.output
    assert "1. 1 move: then 4 GPUs fit on n1" in opened.output


def test_nothing_moves_where_the_set_fits() -> None:
    """A set that fits is told, and no plan is made."""
    answer = moves_for(scattered(owned("a", "n1", 0)), 4)

    assert answer.fits is not None
    assert answer.fits.node == "n2"
    assert not answer.plans


def check_plans(seed: int) -> None:
    """Play every plan on the cluster: the set fits, and every moved pod has other GPUs than anybody else."""
    rng = random.Random(seed)
    nodes = {f"n{i}": {"profile": rng.choice(["l40s-4", "rtx8000x4-bridged"])} for i in range(rng.randint(2, 4))}
    holders = []
    for node in nodes:
        free = list(range(4))
        rng.shuffle(free)
        for number in range(rng.randint(0, 3)):
            ids = sorted(free.pop() for _ in range(min(len(free), rng.randint(1, 2))))
            if ids:
                holders.append(owned(f"{node}-{number}", node, *ids, priority=rng.randrange(2)))
    snapshot = scattered(*holders, nodes=nodes)
    policy = rng.choice(["island", "contiguous"])
    claim = make_claim("asked", count=rng.choice([2, 3, 4]), policy=policy)
    answer = find_moves(index_snapshot(snapshot), DefragRequest(claim, 1))
    for plan in answer.plans:
        after = without_pods(snapshot, {move.pod.metadata.uid for move in plan.moves})
        asking = asking_pod(DefragRequest(claim, 1))
        assert decide(index_snapshot(after), asking, claim, only=[plan.room.node]).fits, seed
        after = with_objects(after, pods=[bound_pod(asking, plan.room)])
        used = {(plan.room.node, device) for device in plan.room.device_ids}
        for move in plan.moves:
            assert decide(index_snapshot(after), unplaced(move.pod), None, only=[move.target.node]).fits, seed
            after = with_objects(after, pods=[bound_pod(unplaced(move.pod), move.target)])
            gpus = {(move.target.node, device) for device in move.target.device_ids}
            assert not gpus & used, seed
            used |= gpus


@given(st.integers(0, 1 << 32))
@settings(max_examples=30, deadline=None)
def test_every_plan_can_be_played(seed: int) -> None:
    """Over random clusters."""
    check_plans(seed)


def test_command_ranks_moves(tmp_path: Path) -> None:
    """Text and JSON; status 0 with a plan, 1 without, 2 for a question that makes no sense."""
    path = tmp_path / "cluster.json"
    path.write_bytes(encode_snapshot(scattered(*ONE_EACH)))
    base = ["defrag", "--policy", "contiguous", "--snapshot", str(path)]

    text = CliRunner().invoke(app, [*base, "--count", "4"])
    data = CliRunner().invoke(app, [*base, "--count", "4", "-o", "json"])
    none = CliRunner().invoke(app, [*base, "--count", "7"])
    wrong = CliRunner().invoke(app, [*base, "--count", "4", "--model", "NO SUCH"])

    assert (text.exit_code, data.exit_code, none.exit_code) == (0, 0, 1), text.output
    assert "team/a: n1 GPUs 0 -> n2 GPUs" in text.output
    assert msgspec.json.decode(data.output)["plans"][0]["room"]["node"] == "n1"
    assert "no moves of pods make room for 7 GPUs" in none.output
    assert wrong.exit_code == 2
