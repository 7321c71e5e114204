"""The extender over HTTP: 503 while it is not ready, 400 for invalid requests, 200 for every decision."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from io import BytesIO
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY

import orjson
import pytest
from aiohttp.test_utils import TestClient, TestServer

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.cluster.host_cpu import ASKS_MIN
from atoll.cluster.leases import Holder
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Lease, LeaseSpec, Metadata, Pod, decode_pod
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import ClusterMirror, Listener, WatchedKind
from atoll.service.metrics import Metrics
from extender.app import BODY_BYTES_MAX, ExtenderParts, build_app, build_health_app
from extender.beyond_sample import SPARE_SECONDS, SPARE_UNKNOWN_SECONDS
from extender.binder import Binder, CompletedBind
from extender.node_backoff import REFUSALS_MAX
from extender.pending_releases import HOLD_SECONDS
from extender.wire import BindCall
from tests.builders import make_allocation, make_lease, make_pod, make_report, pod_json
from tests.explain.situations import make_node
from tests.extender.test_pending_releases import ended
from tests.fakes.clock import ManualClock, until


@dataclass
class FakeMirror:
    """A ledger that the test fills."""

    ledger: Ledger = field(default_factory=Ledger)
    reason: str = ""
    claims: dict[tuple[str, str], GpuClaim] = field(default_factory=dict)
    listeners: list[Listener] = field(default_factory=list)
    nodes: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(store={}))
    pods: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(store={}))
    leases: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(synced=asyncio.Event()))
    restores_count: int = 0
    relists_count: int = 0

    def relist(self) -> None:
        self.relists_count += 1

    def on_change(self, listener: Listener) -> None:
        self.listeners.append(listener)

    def unready_reason(self) -> str:
        return self.reason

    def claim(self, namespace: str, name: str) -> GpuClaim | None:
        return self.claims.get((namespace, name))

    def reservation_of(self, pod: Pod) -> None:
        """There are none."""


@dataclass
class FakeBinder:
    """Answers as the test says."""

    answer: str = ""
    calls: list[BindCall] = field(default_factory=list)
    failed: frozenset[str] = frozenset()
    observer: Callable[[CompletedBind], None] = print

    async def bind(self, call: BindCall) -> str:
        self.calls.append(call)
        return self.answer

    def failed_nodes(self, _uid: str) -> frozenset[str]:
        return self.failed


@dataclass
class Extender:
    """The extender under test, and what it stands on."""

    http: TestClient[Any, Any]
    mirror: FakeMirror
    binder: FakeBinder
    clock: ManualClock

    def hear(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Let every listener hear of a change, which the ledger has taken before."""
        if kind is WatchedKind.POD:
            self.mirror.ledger.put_pod(change.object)
        for listener in self.mirror.listeners:
            listener(kind, change)

    async def call(self, verb: str, body: object) -> Any:
        """Post a call that must be answered; time passes where the extender waits for it."""
        asked = asyncio.ensure_future(self.http.post(f"/{verb}", json=body))
        await until(lambda: asked.done() or self.clock.sleepers)
        if not asked.done():
            await self.clock.advance(HOLD_SECONDS)
        answer = await asked
        assert answer.status == 200, await answer.text()
        return await answer.json()


@pytest.fixture
async def extender() -> AsyncIterator[Extender]:
    mirror, binder, clock = FakeMirror(), FakeBinder(), ManualClock()
    for node in ("n1", "n2"):
        mirror.ledger.put_report(make_report(node, "t4-4"))
        mirror.ledger.put_heartbeat(node, clock.monotonic_seconds(), 180.0)
    parts = ExtenderParts(cast("ClusterMirror", mirror), cast("Binder", binder), clock, Metrics("extender"), 10.0)
    async with TestClient(TestServer(build_app(parts))) as http:
        yield Extender(http, mirror, binder, clock)


def arguments(name: str = "p", gpus: int = 1, nodes: list[str] | None = None) -> dict[str, object]:
    """Return the arguments of filter and prioritize."""
    return {"Pod": pod_json(name, gpus=gpus), "Nodes": None, "NodeNames": ["n1", "n2"] if nodes is None else nodes}


@pytest.mark.parametrize("verb", ["filter", "prioritize", "bind", "preempt"])
async def test_nothing_is_decided_before_the_ledger_is_complete(extender: Extender, verb: str) -> None:
    """Every verb answers 503 with the reason until the mirror is complete and fresh, and readiness says the same."""
    extender.mirror.reason = "list of pod objects is not complete yet: listing"

    answer = await extender.http.post(f"/{verb}", json=arguments())

    assert (answer.status, extender.binder.calls) == (503, [])
    assert "list of pod objects" in await answer.text()
    assert (await extender.http.get("/readyz")).status == 503
    assert (await extender.http.get("/livez")).status == 200


async def test_thousands_of_names_are_answered_from_memory_with_few_bytes(extender: Extender) -> None:
    """Filter and prioritize over 5,000 nodes: there is no API server here to ask, and the answer is names alone."""
    now = extender.clock.monotonic_seconds()
    nodes = [f"node-{number}" for number in range(5_000)]
    report = make_report("n1", "t4-4")
    for name in nodes:
        metadata = report.metadata.model_copy(update={"name": name})
        extender.mirror.ledger.put_report(report.model_copy(update={"metadata": metadata}))
        extender.mirror.ledger.put_heartbeat(name, now, 180.0)

    answer = await extender.http.post("/filter", json=arguments(nodes=nodes))
    body = await answer.read()
    assert orjson.loads(body)["NodeNames"] == nodes
    assert len(body) < 100_000
    best = await extender.call("prioritize", arguments(nodes=nodes))
    assert len(best) == 1
    refused = await extender.http.post("/filter", json=arguments("q", gpus=8, nodes=nodes))
    assert len(await refused.read()) < 500_000
    assert extender.binder.calls == []


@pytest.mark.parametrize("verb", ["filter", "prioritize", "bind", "preempt"])
@pytest.mark.parametrize("body", [b"", b"{", b'{"Pod":null}', b"\x00" * 100], ids=["empty", "cut", "null", "zeros"])
async def test_nonsense_is_answered_with_400(extender: Extender, verb: str, body: bytes) -> None:
    """A body that cannot be read is told so, and nothing happens."""
    answer = await extender.http.post(f"/{verb}", data=body)

    assert (answer.status, extender.binder.calls) == (400, [])


async def test_body_that_is_too_large_is_answered_with_413(extender: Extender) -> None:
    """The memory that one call can take is bounded."""
    answer = await extender.http.post("/filter", data=BytesIO(b" " * (BODY_BYTES_MAX + 1)))

    assert answer.status == 413


async def test_unknown_path_and_method(extender: Extender) -> None:
    """Only POST on the four verbs decides anything."""
    assert (await extender.http.post("/else", json={})).status == 404
    assert (await extender.http.get("/filter")).status == 405


async def test_filter_then_prioritize_then_bind(extender: Extender) -> None:
    """The way of one pod: names that fit, the one best node, an empty error."""
    extender.mirror.ledger.put_pod(make_pod("x", uid="x", node="n2", allocation=make_allocation("n2", 0, 1)))

    filtered = await extender.call("filter", arguments(gpus=2))
    assert filtered["NodeNames"] == ["n1", "n2"]
    assert await extender.call("prioritize", arguments(gpus=2)) == [{"Host": "n2", "Score": 10}]
    bind = {"PodName": "p", "PodNamespace": "team", "PodUID": "uid-of-p", "Node": "n2"}
    assert await extender.call("bind", bind) == {"Error": ""}
    assert extender.binder.calls == [BindCall("p", "team", "uid-of-p", "n2")]


async def test_failed_bind_says_why(extender: Extender) -> None:
    """The reason travels in Error under HTTP 200: kube-scheduler throws every other body away."""
    extender.binder.answer = "node n1: too few free GPUs"

    bind = {"PodName": "p", "PodNamespace": "team", "PodUID": "u", "Node": "n1"}
    assert await extender.call("bind", bind) == {"Error": "node n1: too few free GPUs"}


async def test_pod_that_fits_nowhere_has_a_reason_per_node(extender: Extender) -> None:
    """Refusals are unresolvable for kube-scheduler's preemption, which knows no islands."""
    answer = await extender.call("filter", arguments(gpus=5))

    assert answer["NodeNames"] == []
    assert set(answer["FailedAndUnresolvableNodes"]) == {"n1", "n2"}
    assert answer["FailedNodes"] == {}
    page = await (await extender.http.get("/metrics")).text()
    assert 'atoll_extender_rejections_total{reason="node has too few GPUs that match the claim"} 2.0' in page


async def test_pods_between_filter_and_bind_do_not_meet(extender: Extender) -> None:
    """Four pods of four GPUs on two machines: each is expected on a machine of its own, the third fits nowhere."""
    for name, expected in (("a", "n1"), ("b", "n2")):
        filtered = await extender.call("filter", arguments(name, gpus=4))
        if len(filtered["NodeNames"]) > 1:
            best = await extender.call("prioritize", {**arguments(name, gpus=4), "NodeNames": filtered["NodeNames"]})
            assert best == [{"Host": expected, "Score": 10}]
        else:
            assert filtered["NodeNames"] == [expected]

    assert (await extender.call("filter", arguments("c", gpus=4)))["NodeNames"] == []
    await extender.clock.advance(10.0)
    assert (await extender.call("filter", arguments("c", gpus=4)))["NodeNames"] == ["n1", "n2"]


async def test_filter_anew_drops_the_expectation(extender: Extender) -> None:
    """A pod that is filtered again may go elsewhere: what it was expected to take is free for others."""
    await extender.call("filter", arguments("a", gpus=4, nodes=["n1"]))
    assert (await extender.call("filter", arguments("b", gpus=4)))["NodeNames"] == ["n2"]
    await extender.call("filter", arguments("b", gpus=4, nodes=[]))

    await extender.call("filter", arguments("a", gpus=4))
    assert (await extender.call("filter", arguments("b", gpus=4)))["NodeNames"] == ["n1", "n2"]


async def test_prioritize_answers_for_the_state_of_its_own_moment(extender: Extender) -> None:
    """What filter found is used only while nothing changed: GPUs that went meanwhile are not named."""
    await extender.call("filter", arguments("a", gpus=4))
    extender.mirror.ledger.put_pod(make_pod("x", uid="x", node="n1", allocation=make_allocation("n1", 0)))

    assert await extender.call("prioritize", arguments("a", gpus=4)) == [{"Host": "n2", "Score": 10}]


async def test_prioritize_answers_for_its_own_names(extender: Extender) -> None:
    """Another extender may have left fewer names than filter; only those are answered for."""
    await extender.call("filter", arguments("a"))

    assert await extender.call("prioritize", arguments("a", nodes=["n2"])) == [{"Host": "n2", "Score": 10}]
    assert await extender.call("prioritize", arguments("a", nodes=[])) == []


async def test_prioritize_in_the_bytes_of_kube_scheduler(extender: Extender) -> None:
    """Go writes filter and prioritize of one pod alike up to the names: these alone are looked at then, and an answer
    is the same as if all was read. A pod of another uid, another state or other names are judged anew."""

    async def post(verb: str, pod: dict[str, Any], names: list[str]) -> Any:
        body = orjson.dumps({"Pod": pod, "Nodes": None, "NodeNames": names})
        return await (await extender.http.post(f"/{verb}", data=body)).json()

    extender.mirror.ledger.put_pod(make_pod("x", uid="x", node="n2", allocation=make_allocation("n2", 0, 1)))
    pod, other = pod_json("a", gpus=2), pod_json("b", gpus=4)
    await post("filter", pod, ["n1", "n2"])
    assert await post("prioritize", pod, ["n1", "n2"]) == [{"Host": "n2", "Score": 10}]
    assert extender.mirror.ledger.free("n2", now_seconds=extender.clock.monotonic_seconds()) == 0, "spoken for"

    await post("filter", pod, ["n1", "n2"])
    assert await post("prioritize", other, ["n1", "n2"]) == [{"Host": "n1", "Score": 10}]
    await post("filter", other, [])
    await post("filter", pod, ["n1", "n2"])
    assert await post("prioritize", pod, ["n1"]) == [{"Host": "n1", "Score": 10}]
    await post("filter", pod, ["n1", "n2"])
    extender.mirror.ledger.put_pod(make_pod("y", uid="y", node="n2", allocation=make_allocation("n2", 2)))
    assert await post("prioritize", pod, ["n1", "n2"]) == [{"Host": "n1", "Score": 10}]


async def test_a_node_whose_kubelet_refuses_an_owners_pods_is_left_out_for_it(extender: Extender) -> None:
    """The extender learns it from the changes of pods; pods of others go on."""
    owner = [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "uid-of-j", "controller": True}]

    def owned(name: str, **options: Any) -> dict[str, Any]:
        body = pod_json(name, **options)
        return {**body, "metadata": {**body["metadata"], "ownerReferences": owner}}

    for number in range(REFUSALS_MAX):
        old, new = (
            decode_pod(orjson.dumps({**owned(f"f{number}", node="n1"), "status": status}))
            for status in ({"phase": "Pending"}, {"phase": "Failed", "reason": "UnexpectedAdmissionError"})
        )
        extender.hear(WatchedKind.POD, Change(ChangeKind.MODIFIED, new, old=old))

    assert (await extender.call("filter", {**arguments(), "Pod": owned("next")}))["NodeNames"] == ["n2"]
    assert (await extender.call("filter", arguments("other")))["NodeNames"] == ["n1", "n2"]


async def test_a_node_to_which_kube_scheduler_has_nominated_a_pod_keeps_its_gpus_for_it(extender: Extender) -> None:
    """The extender learns it from the changes of pods; a pod of lower priority gets none of them."""
    body = pod_json("high", gpus=4, priority=5)
    high = decode_pod(orjson.dumps({**body, "status": {"phase": "Pending", "nominatedNodeName": "n1"}}))
    extender.hear(WatchedKind.POD, Change(ChangeKind.MODIFIED, high, old=high))

    assert (await extender.call("filter", arguments("low")))["NodeNames"] == ["n2"]


async def test_a_pod_waits_a_moment_for_the_leases_of_one_that_has_ended(extender: Extender) -> None:
    """The extender learns of both from changes: of the end, and of the Leases that go."""
    for node in ("n1", "n2"):
        whole = make_pod(node, gpus=4, node=node, allocation=make_allocation(node, 0, 1, 2, 3), phase="Running")
        extender.hear(WatchedKind.POD, Change(ChangeKind.ADDED, whole))
    leases = [make_lease("n1", number, holder=Holder("team", "n1", "uid-of-n1")) for number in range(4)]
    for lease in leases:
        extender.mirror.ledger.put_lease(lease)
    last = ended(extender.mirror.ledger.pods["uid-of-n1"])
    extender.hear(WatchedKind.POD, Change(ChangeKind.MODIFIED, last))

    asked = asyncio.ensure_future(extender.http.post("/filter", json=arguments(gpus=4)))
    await until(lambda: extender.clock.sleepers)
    for lease in leases:
        extender.mirror.ledger.drop_lease(lease.metadata.name)
        extender.hear(WatchedKind.LEASE, Change(ChangeKind.DELETED, lease))

    await extender.clock.advance(HOLD_SECONDS)
    assert (await (await asked).json())["NodeNames"] == ["n1"]


async def test_cpu_that_other_gpus_need_is_left_to_them(extender: Extender) -> None:
    """The extender learns from the changes of nodes and pods how much there is, and what pods ask for beside GPUs."""
    for name, cpu in (("n1", 16), ("n2", 64)):
        extender.hear(WatchedKind.NODE, Change(ChangeKind.ADDED, make_node(name, gpus=4, cpu=cpu)))
    for number in range(ASKS_MIN):
        extender.hear(WatchedKind.POD, Change(ChangeKind.ADDED, make_pod(f"p{number}", overhead={"cpu": "8"})))
    heavy = {**arguments(), "Pod": pod_json("heavy", overhead={"cpu": "16"})}

    assert await extender.call("prioritize", heavy) == [{"Host": "n2", "Score": 10}]


async def test_everything_is_read_anew_for_another_leader_of_kube_scheduler(extender: Extender) -> None:
    """The extender learns it from the changes of Leases."""
    for holder, count in (("a", 0), ("a", 0), ("b", 1)):
        lease = Lease(Metadata(names.SCHEDULER_LEADER_LEASE), LeaseSpec(holder_identity=holder))
        extender.hear(WatchedKind.LEASE, Change(ChangeKind.MODIFIED, lease))
        assert extender.mirror.relists_count == count


async def test_preempt_without_candidates_is_an_empty_map(extender: Extender) -> None:
    """Nothing possible is an answer, not an error."""
    body = {"Pod": pod_json(gpus=4), "NodeNameToVictims": None, "NodeNameToMetaVictims": None}

    assert await extender.call("preempt", body) == {"NodeNameToMetaVictims": {}}


def in_form(form: str, node: str, *uids: str) -> dict[str, object]:
    """Return one candidate node in the form that a scheduler with or without nodeCacheCapable sends."""
    whole = {"Pods": [pod_json(uid, uid=uid) for uid in uids], "NumPDBViolations": 0}
    meta = {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": 0}
    victims = {node: meta if form == "meta" else whole}
    empty = {"NodeNameToVictims": None, "NodeNameToMetaVictims": None}
    return {**empty, "NodeNameToMetaVictims" if form == "meta" else "NodeNameToVictims": victims}


@pytest.mark.parametrize("form", ["meta", "whole"])
async def test_preempt_is_understood_in_both_forms(extender: Extender, form: str) -> None:
    """Victims come by uid or as whole pods; the reply is by uid, and a node that cannot be helped is gone."""
    extender.mirror.ledger.put_pod(make_pod("low", uid="low", node="n1", allocation=make_allocation("n1", 0, 1, 2, 3)))
    body = {"Pod": pod_json("high", gpus=4, priority=5), **in_form(form, "n1", "low")}

    assert await extender.call("preempt", body) == {
        "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "low"}], "NumPDBViolations": 0}}
    }
    too_many = {"Pod": pod_json("high", gpus=5, priority=5), **in_form(form, "n1", "low")}
    assert await extender.call("preempt", too_many) == {"NodeNameToMetaVictims": {}}


SPREAD = {"maxSkew": 1, "topologyKey": "zone"}
SPARED: list[tuple[str, dict[str, Any], dict[str, Any], float, bool]] = [
    ("it fits elsewhere", {}, {}, 0.0, True),
    ("for a while", {}, {}, SPARE_SECONDS - 1, True),
    ("not for ever", {}, {}, SPARE_SECONDS, False),
    ("shorter where more is to be known", {}, {"topologySpreadConstraints": [SPREAD]}, SPARE_UNKNOWN_SECONDS, False),
    ("another node has a taint", {"taints": [{"key": "x", "effect": "NoSchedule"}]}, {}, 0.0, False),
    ("another node has too little CPU", {"cpu": 1}, {}, 0.0, False),
    ("it was sent there before", {}, {"annotations": {names.WOKEN: "1@n2"}}, 0.0, True),
    ("it was refused there", {}, {"annotations": {names.WOKEN: "1@n2"}, "nominated": "n2"}, 0.0, False),
    ("it never preempts, and is not asked about", {}, {"preemptionPolicy": "Never"}, 0.0, False),
]


@pytest.mark.parametrize(
    ("node", "pod", "seconds", "is_spared"), [row[1:] for row in SPARED], ids=[r[0] for r in SPARED]
)
async def test_nobody_is_evicted_for_a_pod_that_fits_on_a_node_that_was_not_looked_at(
    extender: Extender,
    monkeypatch: pytest.MonkeyPatch,
    *,
    node: dict[str, Any],
    pod: dict[str, Any],
    seconds: float,
    is_spared: bool,
) -> None:
    """kube-scheduler samples nodes; a wake-up names the one that fits."""
    monkeypatch.setattr("atoll.cluster.hints.NOMINATION_NODES_MIN", 1)
    low = make_pod("low", uid="low", node="n1", allocation=make_allocation("n1", 0, 1, 2, 3))
    extender.mirror.ledger.put_pod(low)
    extender.mirror.pods.store[("team", "low")] = low
    for name, state in (("n1", {}), ("n2", node)):
        extender.mirror.nodes.store[("", name)] = make_node(name, gpus=4, **state)
    options = {key: value for key, value in pod.items() if key != "nominated"}
    asking = pod_json("high", gpus=4, priority=5, overhead={"cpu": "2"}, **options)
    asking["status"]["nominatedNodeName"] = pod.get("nominated", "")
    body = {"Pod": asking, **in_form("meta", "n1", "low")}

    await extender.call("preempt", body)
    await extender.clock.advance(seconds)
    for name in ("n1", "n2"):
        extender.mirror.ledger.put_heartbeat(name, extender.clock.monotonic_seconds(), 180.0)
    found = await extender.call("preempt", body)

    assert found["NodeNameToMetaVictims"] == ({} if is_spared else {"n1": ANY})


async def test_pod_that_asks_for_no_gpu_is_let_pass(extender: Extender) -> None:
    """The shipped configuration never sends one; where another does, every node is as good as it was."""
    plain = {"Pod": pod_json("plain", gpus=None), "Nodes": None, "NodeNames": ["x", "n2", "n1"]}

    assert (await extender.call("filter", plain))["NodeNames"] == ["x", "n2", "n1"]
    assert await extender.call("prioritize", plain) == []


async def test_preempt_leaves_pods_alone_that_ask_for_no_gpu(extender: Extender) -> None:
    """A pod without GPUs gets the victims back that kube-scheduler chose."""
    body = {"Pod": pod_json("plain", gpus=None), **in_form("meta", "elsewhere", "v")}

    assert await extender.call("preempt", body) == {"NodeNameToMetaVictims": body["NodeNameToMetaVictims"]}


async def test_calls_and_decisions_are_counted(extender: Extender) -> None:
    """Each call counts by its answer, each decision by its outcome, also those that never happened."""
    await extender.call("filter", arguments(gpus=2))
    await extender.call("filter", arguments(gpus=64))
    await extender.http.post("/filter", data=b"{")
    extender.mirror.reason = "not listed yet"
    await extender.http.post("/bind", json={})
    extender.binder.observer(CompletedBind("packed", 0.5, 7.0))

    page = await (await extender.http.get("/metrics")).text()
    for line in (
        'atoll_extender_decisions_total{outcome="fits"} 1.0',
        'atoll_extender_decisions_total{outcome="never"} 1.0',
        'atoll_extender_calls_total{code="200",verb="filter"} 2.0',
        'atoll_extender_calls_total{code="400",verb="filter"} 1.0',
        'atoll_extender_calls_total{code="503",verb="bind"} 1.0',
        'atoll_extender_binds_total{outcome="failed"} 0.0',
        'atoll_extender_placement_quality_count{policy="island"} 0.0',
        'atoll_extender_placement_quality_sum{policy="packed"} 0.5',
        "atoll_extender_pod_wait_seconds_sum 7.0",
        "atoll_extender_ready 0.0",
    ):
        assert line in page


async def test_health_port_answers_health_alone() -> None:
    """Whoever reaches the port for health and metrics can neither bind a pod nor read the memory."""
    mirror, metrics = FakeMirror(reason="listing"), Metrics("extender")
    parts = ExtenderParts(cast("ClusterMirror", mirror), cast("Binder", FakeBinder()), ManualClock(), metrics, 10.0)
    build_app(parts)
    async with TestClient(TestServer(build_health_app(parts))) as http:
        assert [(await http.get(path)).status for path in ("/livez", "/readyz", "/metrics")] == [200, 503, 200]
        assert (await http.get("/debug/ledger")).status == 404
        assert (await http.post("/bind", json={})).status == 404
