"""Explain and simulate never disagree with the extender: the tests compare them with its replies over HTTP."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from atoll.cluster import pods
from atoll.cluster.host_cpu import ASKS_MIN
from atoll.cluster.ledger import Ledger
from atoll.cluster.node_audit import NodeAudit
from atoll.cluster.objects import Pod
from atoll.cluster.request_history import request_history_of
from atoll.cluster.requests import Rejection
from atoll.explain.codec import decode_snapshot, document_of, encode_snapshot
from atoll.explain.decision import PodDecision, decide, index_snapshot
from atoll.explain.explanation import PodState, explain
from atoll.explain.simulation import simulate
from atoll.explain.snapshot import ClusterSnapshot
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import ClusterMirror, WatchedKind
from atoll.service.metrics import Metrics
from extender.app import ExtenderParts, build_app
from extender.binder import Binder
from tests.builders import make_pod
from tests.explain.situations import Situation, holder, situation, waiting, with_cpu
from tests.explain.test_situations import SITUATIONS
from tests.extender.test_app import Extender, FakeBinder, FakeMirror
from tests.fakes.clock import ManualClock

SILENCE_SECONDS = 180.0


def drop_refused(ledger: Ledger, snapshot: ClusterSnapshot) -> None:
    """Let reports that show unknown pods not count, as in a mirror."""
    audit = NodeAudit({one.metadata.uid: one for one in snapshot.pods}, ledger)
    for report in snapshot.reports:
        if why := audit.refusal(report, pods_version="1"):
            ledger.drop_report(report.metadata.name, why=why)


@asynccontextmanager
async def extender_of(snapshot: ClusterSnapshot, **parts: Any) -> AsyncIterator[Extender]:
    """Yield a new extender that has seen the cluster.

    The cluster is put into its ledger here, object by object, and not by the code under test.
    """
    mirror, binder, clock = FakeMirror(), FakeBinder(), ManualClock()
    made = ExtenderParts(
        cast("ClusterMirror", mirror), cast("Binder", binder), clock, Metrics("extender"), 10.0, **parts
    )
    app = build_app(made)
    nodes = {node.metadata.name: node for node in snapshot.nodes}
    for report in snapshot.reports:
        mirror.ledger.take_report(report, nodes.get(report.metadata.name))
    for heartbeat in snapshot.heartbeats:
        age = snapshot.age_seconds(heartbeat.spec.renew_time)
        mirror.ledger.put_heartbeat(heartbeat.metadata.name, clock.monotonic_seconds() - age, SILENCE_SECONDS)
    for lease in snapshot.leases:
        mirror.ledger.put_lease(lease)
    for one in snapshot.pods:
        if pods.is_gpu_pod(one):
            mirror.ledger.put_pod(one)
    drop_refused(mirror.ledger, snapshot)
    mirror.claims = {(claim.metadata.namespace, claim.metadata.name): claim for claim in snapshot.claims}
    for listener in mirror.listeners:
        for kind, objects in ((WatchedKind.NODE, snapshot.nodes), (WatchedKind.POD, snapshot.pods)):
            for thing in objects:
                listener(kind, Change(ChangeKind.ADDED, thing))
    async with TestClient(TestServer(app)) as http:
        yield Extender(http, mirror, binder, clock)


async def replies(snapshot: ClusterSnapshot, pod: Pod, nodes: list[str]) -> tuple[Any, Any]:
    """Return what a new extender that has seen the cluster answers to filter and prioritize."""
    (body,) = document_of(ClusterSnapshot("", pods=(pod,)))["pods"]
    async with extender_of(snapshot) as extender:
        filtered = await extender.call("filter", {"Pod": body, "NodeNames": nodes})
        asked = {"Pod": body, "NodeNames": filtered["NodeNames"] or nodes}
        return filtered, await extender.call("prioritize", asked)


def open_nodes(found: Situation, decision: PodDecision) -> list[str]:
    """Return the nodes that kube-scheduler asks the extender about."""
    names = [node.metadata.name for node in found.snapshot.nodes]
    return [name for name in names if name not in decision.closed and name not in decision.full]


ASKED = {name: told.found for name, told in SITUATIONS.items() if told.state is not PodState.NO_GPUS}


@pytest.mark.parametrize("found", ASKED.values(), ids=ASKED.keys())
async def test_explain_says_what_the_extender_answers(found: Situation) -> None:
    """The same nodes fit, the same one is the best, and where none fits each node has the same reason."""
    decision = decide(index_snapshot(found.snapshot), found.pod, found.claim)
    nodes = open_nodes(found, decision)

    filtered, prioritized = await replies(found.snapshot, found.pod, nodes)

    assert (filtered["NodeNames"] or []) == list(decision.verdicts.feasible)
    assert (filtered["FailedAndUnresolvableNodes"] or {}) == dict(decision.verdicts.rejected)
    assert [row["Host"] for row in prioritized if row["Score"]] == ([decision.best.node] if decision.best else [])


@pytest.mark.parametrize("found", ASKED.values(), ids=ASKED.keys())
async def test_every_node_is_explained_by_the_extenders_own_word(found: Situation) -> None:
    """Asked about one node alone, also one that kube-scheduler keeps the pod off, the extender gives that reason."""
    scene = index_snapshot(found.snapshot)
    told = explain(scene, found.pod)
    decision = decide(scene, found.pod, found.claim)
    reasons = {one.node: one.reason for group in told.groups for one in group.nodes}
    for node, reason in reasons.items() if not isinstance(decision.request, Rejection) else ():
        filtered, _ = await replies(found.snapshot, found.pod, [node])
        refused = (filtered["FailedAndUnresolvableNodes"] or {}).get(node, "")
        assert (refused or reason) == reason
        assert bool(filtered["NodeNames"]) == (not refused)


async def test_simulated_pods_go_where_the_extender_puts_them_one_by_one() -> None:
    """Pod after pod, each bound before the next: the same node each time, until none fits, and never a GPU twice."""
    nodes = {"a": {}, "b": {"profile": "dgx-h100"}, "c": {"profile": "l40s-4"}}
    found = situation(nodes, [holder("x", "a", 0, 1)], waiting(2, claim={"policy": "island"}))
    asking = [
        msgspec.structs.replace(
            found.pod, metadata=msgspec.structs.replace(found.pod.metadata, name=f"p{i}", uid=f"uid-of-p{i}")
        )
        for i in range(12)
    ]
    snapshot = replace(found.snapshot, pods=tuple(pod for pod in found.snapshot.pods if pod is not found.pod))

    answer = simulate(snapshot, asking)

    used: set[tuple[str, int]] = set()
    for outcome in answer.outcomes:
        nodes_asked = [node.metadata.name for node in snapshot.nodes]
        _, prioritized = await replies(snapshot, outcome.pod, nodes_asked)
        best = [row["Host"] for row in prioritized if row["Score"]]
        assert best == ([outcome.node] if outcome.allocation is not None else [])
        if outcome.allocation is None:
            continue
        ids = {(outcome.node, one) for one in outcome.allocation.device_ids}
        assert not ids & used
        used |= ids
        bound, _ = holder(outcome.pod.metadata.name, outcome.node, *outcome.allocation.device_ids)
        snapshot = replace(snapshot, pods=(*snapshot.pods, bound))
    assert len(used) == 2 * sum(one.allocation is not None for one in answer.outcomes) == 18
    assert sum(answer.before.free.values()) - sum(answer.after.free.values()) == 18


def loaded(seed: int) -> Situation:
    """Return four machines of one shape with unlike CPU left, asks enough that CPU has a price, and a waiting pod."""
    rng = random.Random(seed)
    nodes = {f"n{i}": {"profile": "l40s-8", "node": {"cpu": rng.choice([48, 64, 96])}} for i in range(4)}
    holders = [holder(f"h{i}", f"n{i}", *range(rng.randint(0, 5)), cpu=str(rng.randint(1, 24))) for i in range(4)]
    plain = [with_cpu(make_pod(f"w{i}", gpus=None, node=f"n{i}", phase="Running"), "7") for i in range(3)]
    gone = [
        with_cpu(make_pod(f"g{i}", gpus=rng.choice([1, 1, 2, 4]), node="n0", phase="Succeeded"), rng.choice("48"))
        for i in range(60)
    ]
    return situation(nodes, holders, waiting(rng.randint(1, 3), cpu=str(rng.randint(1, 12))), others=[*plain, *gone])


@pytest.mark.parametrize("seed", range(12))
async def test_cpu_is_counted_as_the_extender_counts_it(seed: int) -> None:
    """Free and allocatable cores of every node, the asks that give it a price, and the node that the extender names
    over HTTP then: what explain reads off a snapshot is what the extender gathers from watches."""
    found = loaded(seed)
    scene = index_snapshot(found.snapshot)
    decision = decide(scene, found.pod, found.claim)
    (body,) = document_of(ClusterSnapshot("", pods=(found.pod,)))["pods"]
    async with extender_of(found.snapshot) as extender:
        filtered = await extender.call("filter", {"Pod": body, "NodeNames": open_nodes(found, decision)})
        prioritized = await extender.call("prioritize", {"Pod": body, "NodeNames": filtered["NodeNames"]})
        theirs, ours = extender.mirror.ledger.fleet, scene.ledger.fleet

    assert theirs._cpu_cores == ours._cpu_cores
    assert (theirs.asked.seen, theirs.asked.kinds) == (ours.asked.seen, ours.asked.kinds)
    assert ours.asked.seen >= ASKS_MIN
    assert decision.best is not None
    assert [row["Host"] for row in prioritized if row["Score"]] == [decision.best.node]


async def test_past_asks_make_simulations_agree() -> None:
    """An extender that remembers pods which are gone weighs by them; told what it remembers, a snapshot does too, also
    after a way through a file."""
    found = situation({"a": {}, "b": {"profile": "dgx-h100"}}, [holder("x", "a", 0, 1)], waiting(2))
    async with extender_of(found.snapshot) as extender:
        ledger = extender.mirror.ledger
        for number in range(300):
            ledger.put_pod(make_pod(f"gone-{number}", gpus=8))
            ledger.fleet.count_ask(8, 4000)
        past = request_history_of(ledger)
        told = decode_snapshot(encode_snapshot(replace(found.snapshot, past_asks=past)))
        scene = index_snapshot(told)

        assert scene.ledger.demand == ledger.demand != index_snapshot(found.snapshot).ledger.demand
        assert (scene.ledger.fleet.asked.seen, scene.ledger.fleet.asked.kinds) == (
            ledger.fleet.asked.seen,
            ledger.fleet.asked.kinds,
        )
