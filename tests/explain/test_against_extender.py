"""Promise: explain and simulate never disagree with the extender: they are compared with its replies over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from atoll.cluster import pods
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection
from atoll.explain.codec import document_of
from atoll.explain.decision import Decision, decide, scene_of
from atoll.explain.explanation import State, explain
from atoll.explain.simulation import simulate
from atoll.explain.snapshot import ClusterSnapshot
from atoll.kube.mirror import ClusterMirror
from atoll.service.metrics import Metrics
from extender.app import Parts, build_app
from extender.binder import Binder
from tests.explain.situations import Situation, holder, situation, waiting
from tests.explain.test_situations import SITUATIONS
from tests.extender.test_app import Extender, FakeBinder, FakeMirror
from tests.fakes.clock import ManualClock

SILENCE_SECONDS = 180.0


@asynccontextmanager
async def extender_of(snapshot: ClusterSnapshot, **parts: Any) -> AsyncIterator[Extender]:
    """Yield a new extender that has seen the cluster.

    The cluster is put into its ledger here, object by object, and not by the code under test.
    """
    mirror, binder, clock = FakeMirror(), FakeBinder(), ManualClock()
    made = Parts(cast("ClusterMirror", mirror), cast("Binder", binder), clock, Metrics("extender"), 10.0, **parts)
    app = build_app(made)
    for report in snapshot.reports:
        mirror.ledger.put_report(report)
    for heartbeat in snapshot.heartbeats:
        age = snapshot.age_seconds(heartbeat.spec.renew_time)
        mirror.ledger.put_heartbeat(heartbeat.metadata.name, clock.monotonic_seconds() - age, SILENCE_SECONDS)
    for lease in snapshot.leases:
        mirror.ledger.put_lease(lease)
    for one in snapshot.pods:
        if pods.is_gpu_pod(one):
            mirror.ledger.put_pod(one)
    mirror.claims = {(claim.metadata.namespace, claim.metadata.name): claim for claim in snapshot.claims}
    async with TestClient(TestServer(app)) as http:
        yield Extender(http, mirror, binder, clock)


async def replies(snapshot: ClusterSnapshot, pod: Pod, nodes: list[str]) -> tuple[Any, Any]:
    """Return what a new extender that has seen the cluster answers to filter and prioritize."""
    (body,) = document_of(ClusterSnapshot("", pods=(pod,)))["pods"]
    async with extender_of(snapshot) as extender:
        filtered = await extender.call("filter", {"Pod": body, "NodeNames": nodes})
        asked = {"Pod": body, "NodeNames": filtered["NodeNames"] or nodes}
        return filtered, await extender.call("prioritize", asked)


def open_nodes(found: Situation, decision: Decision) -> list[str]:
    """Return the nodes that kube-scheduler asks the extender about."""
    names = [node.metadata.name for node in found.snapshot.nodes]
    return [name for name in names if name not in decision.closed and name not in decision.full]


ASKED = {name: told.found for name, told in SITUATIONS.items() if told.state is not State.NO_GPUS}


@pytest.mark.parametrize("found", ASKED.values(), ids=ASKED.keys())
async def test_explain_says_what_the_extender_answers(found: Situation) -> None:
    """The same nodes fit, the same one is the best, and where none fits each node has the same reason."""
    decision = decide(scene_of(found.snapshot), found.pod, found.claim)
    nodes = open_nodes(found, decision)

    filtered, prioritized = await replies(found.snapshot, found.pod, nodes)

    assert (filtered["NodeNames"] or []) == list(decision.verdicts.feasible)
    assert (filtered["FailedAndUnresolvableNodes"] or {}) == dict(decision.verdicts.rejected)
    assert [row["Host"] for row in prioritized if row["Score"]] == ([decision.best.node] if decision.best else [])


@pytest.mark.parametrize("found", ASKED.values(), ids=ASKED.keys())
async def test_every_node_is_explained_by_the_extenders_own_word(found: Situation) -> None:
    """Asked about one node alone, also one that kube-scheduler keeps the pod off, the extender gives that reason."""
    scene = scene_of(found.snapshot)
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
