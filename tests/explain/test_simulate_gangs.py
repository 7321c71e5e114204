"""`atoll simulate` for gangs: they start whole or not at all, and victims are reported."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from atoll.api.gangs import GpuGang, GpuGangStatus
from atoll.cluster.gangs import lifecycle
from atoll.cluster.objects import Pod
from atoll.explain.codec import document_of
from atoll.explain.decision import decide, index_snapshot
from atoll.explain.preemption import preemptions_for
from atoll.explain.simulation import simulate
from atoll.explain.snapshot import ClusterSnapshot
from tests.builders import make_pod
from tests.explain.gang_situations import gang_situation, rack
from tests.explain.situations import Situation, holder, situation, waiting
from tests.explain.test_against_extender import extender_of
from tests.explain.test_defrag import budget
from tests.explain.test_simulate import answer, ask, claim_manifest, pod_manifest

ROOM = situation({"n1": {"profile": "l40s-4"}, "n2": {"profile": "l40s-4"}}, [holder("a", "n1", 0)])


def member(name: str, claim: str = "two", *, size: int | None = None, **spec: Any) -> dict[str, Any]:
    """Return a member of the gang g as a user writes it."""
    body = pod_manifest(name, claim, **spec)
    body["metadata"]["annotations"][names.GANG] = "g"
    if size is not None:
        body["metadata"]["annotations"][names.GANG_SIZE] = str(size)
    return body


def gang_manifest(count: int, **spec: Any) -> dict[str, Any]:
    """Return a GpuGang as a user writes it."""
    return {"kind": "GpuGang", "metadata": {"name": "g"}, "spec": {"podSets": [{"name": "w", "count": count}], **spec}}


def fits(told: Any) -> dict[str, bool]:
    """Return which pods fit, by name."""
    return {one["pod"]: one["fits"] for one in told["pods"]}


@pytest.mark.parametrize(("count", "whole"), [(3, True), (4, False)])
def test_a_gang_starts_whole_or_not_at_all(count: int, whole: bool, tmp_path: Path) -> None:
    """Three members of two GPUs fit beside the holder, four do not, and then none of them gets anything."""
    members = [member(f"m{i}") for i in range(count)]

    told = answer(tmp_path, ROOM, gang_manifest(count), *members, claim_manifest())

    assert set(fits(told).values()) == {whole}
    given = [(one["node"], device) for one in told["pods"] for device in one["deviceIds"]]
    assert len(given) == len(set(given)) == (6 if whole else 0)
    assert ("n1", 0) not in given
    if not whole:
        assert "fits 3 of 4 pods" in told["pods"][0]["headline"]


def test_members_may_name_claims_for_volumes_that_come_with_them(tmp_path: Path) -> None:
    """The storage classes are known, and the claims are not created yet: where they bind is left to kube-scheduler."""
    room = replace(ROOM, snapshot=replace(ROOM.snapshot, storage_classes=()))
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
    members = [member(f"m{i}", volumes=volumes) for i in range(2)]

    assert set(fits(answer(tmp_path, room, gang_manifest(2), *members, claim_manifest())).values()) == {True}


def test_members_that_say_how_many_they_are_need_no_gang(tmp_path: Path) -> None:
    """With the annotation gang-size the controllers make the GpuGang, and so does the simulation."""
    members = [member(f"m{i}", size=2) for i in range(2)]

    assert set(fits(answer(tmp_path, ROOM, *members, claim_manifest())).values()) == {True}
    told = answer(tmp_path, ROOM, member("m0"), claim_manifest())
    assert "its GpuGang is missing" in told["pods"][0]["headline"]


def test_a_gang_waits_for_all_its_members(tmp_path: Path) -> None:
    """A gang of three of which two are there does not start."""
    told = answer(tmp_path, ROOM, gang_manifest(3), member("m0"), member("m1"), claim_manifest())

    assert set(fits(told).values()) == {False}
    assert "2 of 3 members" in told["pods"][0]["headline"]


def priority_class(name: str, value: int, **fields: Any) -> dict[str, Any]:
    """Return a PriorityClass."""
    return {"kind": "PriorityClass", "metadata": {"name": name}, "value": value, **fields}


def test_priority_class_names_count(tmp_path: Path) -> None:
    """The pod of the more important class goes first, the default class holds for who names none, and a class that
    nobody has defined is denied as the API server denies it."""
    classes = (priority_class("high", 100), priority_class("low", 1, globalDefault=True))
    full = situation({"n1": {"profile": "l40s-4"}})
    pods = (pod_manifest("late", "four"), pod_manifest("early", "four", priorityClassName="high"))

    told = answer(tmp_path, full, *classes, *pods, claim_manifest("four", 4))
    denied = ask(tmp_path, full, pod_manifest(priorityClassName="none"), claim_manifest())

    assert fits(told) == {"team/early": True, "team/late": False}
    assert denied.exit_code == 2
    assert "there is no PriorityClass 'none'" in denied.output


@pytest.mark.parametrize(
    ("spec", "options", "evicted"),
    [
        ({"priority": 5}, (), [["team/low"]]),
        ({"priority": 5, "preemptionPolicy": "Never"}, (), [[]]),
        ({"priority": 5}, ("--no-preemption",), [[]]),
        ({"priority": 1}, (), [[]]),
    ],
    ids=["more important", "may not preempt", "switched off", "as important"],
)
def test_who_is_pushed_out_is_told(
    spec: dict[str, Any], options: tuple[str, ...], evicted: list[list[str]], tmp_path: Path
) -> None:
    """Only pods of a lower priority go, and nobody where the pod may not preempt."""
    found = situation({"n1": {"profile": "l40s-4"}}, [holder("low", "n1", *range(4), priority=1)])

    told = answer(tmp_path, found, pod_manifest("p", "four", **spec), claim_manifest("four", 4), options=options)

    assert [one["evicted"] for one in told["pods"]] == evicted
    assert fits(told) == {"team/p": bool(evicted[0])}


def test_a_gang_pushes_out_what_it_needs(tmp_path: Path) -> None:
    """A gang of a higher priority evicts one pod and not the other, which it can lie beside."""
    nodes = {name: {"profile": "l40s-4"} for name in ("n1", "n2", "n3")}
    holders = [holder("low", "n1", *range(4), priority=1), holder("mid", "n2", *range(4), priority=2)]
    members = [member(f"m{i}", "four", priority=5) for i in range(2)]

    told = answer(tmp_path, situation(nodes, holders), gang_manifest(2), *members, claim_manifest("four", 4))

    assert set(fits(told).values()) == {True}
    assert sorted(name for one in told["pods"] for name in one["evicted"]) == ["team/low"]


def crowded(seed: int) -> Situation:
    """Return nodes full of pods of several priorities, some under a budget, and an important pod that wants room."""
    rng = random.Random(seed)
    nodes = {f"n{i}": {"profile": rng.choice(["l40s-4", "rtx8000x4-bridged"])} for i in range(rng.randint(1, 3))}
    holders = []
    for node in nodes:
        ids, number = list(range(4)), 0
        rng.shuffle(ids)
        while ids:
            size = min(len(ids), rng.randint(1, 2))
            labels = {"kind": rng.choice(["a", "b"])}
            taken = sorted(ids.pop() for _ in range(size))
            holders.append(holder(f"{node}-{number}", node, *taken, priority=rng.randrange(6), labels=labels))
            number += 1
    claim = {"policy": rng.choice(["island", "contiguous"])}
    return situation(nodes, holders, waiting(rng.randint(1, 4), claim=claim, priority=4))


@pytest.mark.parametrize("block", range(4))
async def test_victims_are_those_that_the_extender_would_confirm(block: int) -> None:
    """kube-scheduler offers each node with the victims of its dry run; the extender's own reply over HTTP keeps the
    node that is foretold, with the same victims."""
    for seed in range(block * 10, block * 10 + 10):
        found = crowded(seed)
        snapshot = found.snapshot
        scene = index_snapshot(snapshot)
        plan = next(preemptions_for(scene, found.pod, decide(scene, found.pod, found.claim)), None)
        if plan is None:
            continue
        offered = {
            plan.node: {"Pods": [{"UID": victim.metadata.uid} for victim in plan.victims], "NumPDBViolations": 0}
        }
        body = {"Pod": pod_body(found.pod), "NodeNameToMetaVictims": offered}
        async with extender_of(snapshot) as extender:
            reply = await extender.call("preempt", body)
        kept = reply["NodeNameToMetaVictims"]
        assert set(kept) == {plan.node}, seed
        assert {v["UID"] for v in kept[plan.node]["Pods"]} == {v.metadata.uid for v in plan.victims}, seed
        for spared in plan.victims:
            assert spared.spec.priority < found.pod.spec.priority


def pod_body(pod: Pod) -> Any:
    """Return a pod as kube-scheduler sends it."""
    (body,) = document_of(ClusterSnapshot("", pods=(pod,)))["pods"]
    return json.loads(json.dumps(body))


def test_budgets_turn_the_choice_of_victims() -> None:
    """Of two nodes that serve alike, the one whose pod no budget protects is preempted."""
    nodes = {"n1": {"profile": "l40s-4"}, "n2": {"profile": "l40s-4"}}
    holders = [
        holder("a", "n1", *range(4), labels={"kind": "a"}),
        holder("b", "n2", *range(4), labels={"kind": "b"}),
    ]
    found = situation(nodes, holders, waiting(4, claim={}, priority=4))
    for kind, node in (("a", "n2"), ("b", "n1")):
        scene = index_snapshot(replace(found.snapshot, budgets=(budget(0, kind=kind),)))
        plan = next(preemptions_for(scene, found.pod, decide(scene, found.pod, found.claim)), None)
        assert plan is not None
        assert (plan.node, plan.violations) == (node, 0)


def test_a_gang_that_is_there_is_what_the_files_say(tmp_path: Path) -> None:
    """A new spec for a gang of the cluster counts, as `kubectl apply` would write it."""
    held = gang_situation({"n1": rack("a")}, count=2, there=0)

    told = answer(tmp_path, Situation(held.snapshot, make_pod()), gang_manifest(1), member("m0"), claim_manifest())

    assert fits(told) == {"team/m0": True}


def test_gangs_give_way_whole_where_an_island_is_wanted() -> None:
    """Where only a gang's needed member is in the way, all running members are pushed out, on other nodes too; a member
    that the gang does not need goes alone."""
    taint = {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}
    nodes = {"n1": {"profile": "rtx8000x4-bridged"}, "n2": {"profile": "rtx8000x4-bridged", "node": taint}}
    for needed, evicted in ((3, {"team/g-0", "team/g-1", "team/g-2"}), (2, {"team/g-2"})):
        gang = admitted_gang(3, needed)
        marks = {names.GANG: "g"}
        holders = [
            holder("g-0", "n2", 0, 1, priority=1, annotations=marks),
            holder("g-1", "n2", 2, 3, priority=1, annotations=marks),
            holder("g-2", "n1", 0, priority=1, annotations=marks),
            holder("dear", "n1", 2, priority=9),
        ]
        found = situation(nodes, holders, waiting(2, claim={"policy": "island"}, priority=5))
        snapshot = replace(found.snapshot, gangs=(gang,), pods=found.snapshot.pods[:-1])

        (outcome,) = simulate(snapshot, [found.pod]).outcomes

        assert (outcome.node, set(outcome.evicted)) == ("n1", evicted)


def admitted_gang(count: int, needed: int) -> GpuGang:
    """Return a gang whose members were let go."""
    spec = {"podSets": [{"name": "workers", "count": count, "minCount": needed}], "minMember": needed}
    body = {"metadata": {"name": "g", "namespace": "team", "uid": "uid-of-g"}, "spec": spec}
    gang = GpuGang.model_validate(body)
    status = lifecycle.admit(GpuGangStatus(), now_seconds=0.0, message="admitted")
    return gang.model_copy(update={"status": status})
