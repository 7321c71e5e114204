"""Preemption for islands: only if links are the only obstacle, never an equal priority, never beyond a budget."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api import names
from atoll.cluster.budgets import DisruptionBudgets, decode_budget
from atoll.cluster.island_hosts import decode_demands, refusal, unjudged
from atoll.cluster.island_preemption import IslandPlan, PreemptionInput, may_preempt, plan_island
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Node, Pod, PodCondition, decode_node
from atoll.cluster.requests import Request, request_of
from atoll.cluster.soft_reservations import SoftReservation, SoftReservations
from tests.builders import make_allocation, make_claim, make_pod, make_report

NOW = 1000.0
PAIRS = "h100-nvl-8"
"""Eight cards, bridged in pairs 0-1, 2-3, 4-5, 6-7."""


def node(name: str = "n1", text: str = "") -> Node:
    """Return a Node with eight GPUs and four cpus; `text` adds to its JSON."""
    status = '"status":{"allocatable":{"cpu":"4","pods":"10","gpu.scheduling/gpu":"8"}}'
    return decode_node(f'{{"metadata":{{"name":"{name}"}},{status}{text}}}'.encode())


def holder(name: str, priority: int, *ids: int, on: str = "n1", **options: Any) -> Pod:
    """Return a running pod with these GPUs."""
    allocation = make_allocation(on, *ids)
    return make_pod(
        name, uid=name, gpus=len(ids), node=on, phase="Running", priority=priority, allocation=allocation, **options
    )


def waiting(priority: int = 10, *, count: int = 2, policy: str = "island", **options: Any) -> tuple[Pod, Request]:
    """Return a pod that kube-scheduler has set aside, and its request."""
    claim = make_claim(count=count, policy=policy)
    pod = make_pod("high", uid="high", gpus=count, claim=claim, priority=priority, **options)
    refused = PodCondition(type="PodScheduled", status="False", reason="Unschedulable")
    pod = msgspec.structs.replace(pod, status=msgspec.structs.replace(pod.status, conditions=(refused,)))
    request = request_of(pod, claim)
    assert isinstance(request, Request)
    return pod, request


def ledger_of(holders: Iterable[Pod], nodes: Iterable[str] = ("n1",)) -> Ledger:
    """Return a ledger of machines with pairs and these pods on them."""
    ledger = Ledger()
    for name in nodes:
        ledger.put_report(make_report(name, PAIRS))
        ledger.put_heartbeat(name, NOW, 180.0)
    for pod in holders:
        ledger.put_pod(pod)
    return ledger


def plans(
    ledger: Ledger, who: tuple[Pod, Request], *, budgets: DisruptionBudgets | None = None, avoided: Iterable[str] = ()
) -> list[tuple[str, list[str]]]:
    """Return node with GPUs, and victims, of every plan."""
    nodes = {name: node(name) for name in ledger.nodes}
    found = plan_island(*who, PreemptionInput(ledger, nodes, budgets or DisruptionBudgets(), NOW, tuple(avoided)))
    return [described(plan) for plan in found]


def described(plan: IslandPlan) -> tuple[str, list[str]]:
    """Return what a plan keeps, and whom it evicts."""
    return str(plan.kept), [victim.metadata.name for victim in plan.victims]


BROKEN = [holder("a", 0, 0), holder("b", 1, 2), holder("c", 10, 4), holder("d", 10, 6)]
"""One GPU of each pair is held: four are free, and no two of them are joined."""


def test_lowest_pod_makes_room_for_the_pair() -> None:
    """Four GPUs are free and none joined: the least important pod goes, and both GPUs of its pair are kept."""
    assert plans(ledger_of(BROKEN), waiting()) == [("n1:0,1", ["a"])]


@pytest.mark.parametrize(
    ("holders", "who", "expected"),
    [
        pytest.param(BROKEN[1:], waiting(), [], id="it-fits-already"),
        pytest.param([holder("a", 0, 0, deleted=True), *BROKEN[1:]], waiting(), [], id="it-will-fit-soon"),
        pytest.param([holder(p.metadata.name, 10, i * 2) for i, p in enumerate(BROKEN)], waiting(), [], id="equals"),
        pytest.param([holder("a", 0, 0, 1, 2, 3), holder("b", 0, 4, 5, 6)], waiting(), [], id="the-count-is-short"),
        pytest.param(BROKEN, waiting(count=3), [], id="no-such-island-on-the-machine"),
    ],
)
def test_nobody_goes(holders: list[Pod], who: tuple[Pod, Request], expected: list[Any]) -> None:
    """Where the pod fits, soon will, or cannot be helped by pods below it, nothing is planned."""
    assert plans(ledger_of(holders), who) == expected


@pytest.mark.parametrize(
    ("who", "expected"),
    [
        pytest.param(waiting(), True, id="island"),
        pytest.param(waiting(policy="contiguous"), False, id="any-GPUs-would-do"),
        pytest.param(waiting(preemptionPolicy="Never"), False, id="never"),
        pytest.param(waiting(annotations={"gpu.scheduling/kept": "n1:0,1"}), False, id="under-way"),
        pytest.param(waiting(node="n1"), False, id="bound"),
        pytest.param(waiting(schedulingGates=[{"name": "g"}]), False, id="gated"),
        pytest.param(waiting(deleted=True), False, id="ending"),
    ],
)
def test_who_may_preempt(who: tuple[Pod, Request], *, expected: bool) -> None:
    """Only a refused pod whose claim demands links, and that may preempt."""
    assert may_preempt(*who) == expected


def test_pod_that_kube_scheduler_did_not_try_or_has_nominated_is_left_to_it() -> None:
    """It may fit, or gets its GPUs by kube-scheduler's own preemption."""
    pod, request = waiting()
    fresh = msgspec.structs.replace(pod, status=msgspec.structs.replace(pod.status, conditions=()))
    nominated = msgspec.structs.replace(pod, status=msgspec.structs.replace(pod.status, nominated_node_name="n2"))
    assert not may_preempt(fresh, request)
    assert not may_preempt(nominated, request)


def test_budget_is_respected() -> None:
    """A pod whose budget allows no disruption is no victim; the next one is; with none left nothing is planned."""
    text = b'{"metadata":{"name":"b","namespace":"team"},"spec":{"selector":{"matchLabels":{"app":"x"}}}}'
    budgets = DisruptionBudgets((decode_budget(text),))
    guarded = [holder("a", 0, 0, labels={"app": "x"}), *BROKEN[1:]]
    assert plans(ledger_of(guarded), waiting(), budgets=budgets) == [("n1:2,3", ["b"])]
    both = [holder(name, 0, 2 * i, labels={"app": "x"}) for i, name in enumerate("ab")] + BROKEN[2:]
    assert plans(ledger_of(both), waiting(), budgets=budgets) == []


def test_pod_that_may_not_be_preempted_is_no_victim() -> None:
    """The next one above it goes; with none left nothing is planned."""
    kept = {names.PREEMPTIBLE: "false"}
    spared = [holder("a", 0, 0, labels=kept), *BROKEN[1:]]
    assert plans(ledger_of(spared), waiting()) == [("n1:2,3", ["b"])]
    both = [holder(name, 0, 2 * i, labels=kept) for i, name in enumerate("ab")] + BROKEN[2:]
    assert plans(ledger_of(both), waiting()) == []


def test_best_node_comes_first_and_nodes_tried_in_vain_are_left_out() -> None:
    """The lower the priority of the highest victim, the better; then the fewer victims."""
    two = [holder("e", 0, 0, on="n2"), *(holder(f"f{i}", 10, 2 * i, on="n2") for i in range(1, 4))]
    one = [holder("a", 5, 0), *(holder(f"g{i}", 10, 2 * i) for i in range(1, 4))]
    ledger = ledger_of([*one, *two], ("n1", "n2"))
    assert plans(ledger, waiting()) == [("n2:0,1", ["e"]), ("n1:0,1", ["a"])]
    assert plans(ledger, waiting(), avoided=["n2"]) == [("n1:0,1", ["a"])]


def test_two_pods_do_not_free_the_same_gpus() -> None:
    """What is kept for one is neither counted as free nor freed for another of its priority."""
    ledger = ledger_of(BROKEN)
    ledger.keep("other", SoftReservation("n1", (0, 1), 10))
    assert plans(ledger, waiting()) == [("n1:2,3", ["b"])]
    assert plans(ledger, waiting(11)) == [("n1:0,1", ["a"])]


def test_what_is_kept_no_more_costs_nothing() -> None:
    """Pods come and go, and so do nodes."""
    kept = SoftReservations()
    for uid, device_id in (("a", 0), ("b", 1)):
        kept.put(uid, SoftReservation("n1", (device_id,), 10))
    kept.put("a", None)
    assert list(kept.on("n1")) == [(1,)]
    kept.put("b", None)

    assert not kept._on


@st.composite
def crowds(draw: st.DrawFn) -> list[Pod]:
    """Draw pods of any priority on two machines, some guarded by a budget, some ending."""
    found: list[Pod] = []
    for name in ("n1", "n2"):
        owners = draw(st.lists(st.integers(-1, 4), min_size=8, max_size=8))
        for number in sorted(set(owners) - {-1}):
            ids = tuple(position for position, owner in enumerate(owners) if owner == number)
            labels = {"app": draw(st.sampled_from(["x", "y"]))}
            priority, deleted = draw(st.integers(8, 12)), draw(st.integers(0, 9)) == 0
            uid = f"{name}-{number}"
            found.append(holder(uid, priority, *ids, on=name, labels=labels, deleted=deleted))
    return found


@settings(max_examples=120, deadline=None)
@given(crowds(), st.integers(0, 2))
def test_no_plan_breaks_a_promise(crowd: list[Pod], allowed: int) -> None:
    """Every victim ranks strictly below, no budget is broken, and without them the kept GPUs are a free pair."""
    text = b'{"metadata":{"name":"b","namespace":"team"},"spec":{"selector":{"matchLabels":{"app":"x"}}},'
    budgets = DisruptionBudgets((decode_budget(text + b'"status":{"disruptionsAllowed":%d}}' % allowed),))
    ledger = ledger_of(crowd, ("n1", "n2"))
    pod, request = waiting(10)
    found = plan_island(
        pod, request, PreemptionInput(ledger, {name: node(name) for name in ("n1", "n2")}, budgets, NOW)
    )

    running = {each.metadata.uid: each for each in crowd if each.metadata.deletion_timestamp is None}
    for plan in found:
        assert {victim.metadata.uid for victim in plan.victims} <= running.keys()
        assert plan.victims
        assert all(victim.spec.priority < 10 for victim in plan.victims)
        assert sum(victim.metadata.labels["app"] == "x" for victim in plan.victims) <= allowed
        for victim in plan.victims:
            ledger.drop_pod(victim.metadata.uid)
        for each in crowd:
            if each.metadata.deletion_timestamp is not None:
                ledger.drop_pod(each.metadata.uid)
        first, second = sorted(plan.kept.device_ids)
        assert second == first + 1, "a pair is bridged"
        assert first % 2 == 0
        assert ledger.free(plan.node, now_seconds=NOW) & 0b11 << first == 0b11 << first
        for each in crowd:
            ledger.put_pod(each)


def test_evicted_pod_evicts_nobody_back() -> None:
    """The victim's successor finds only pods above it or equal: no two pods push each other out in turn."""
    ledger = ledger_of([holder("high", 10, 0, 1), *BROKEN[2:], holder("b", 1, 2)])
    successor, request = waiting(0)
    assert plan_island(successor, request, PreemptionInput(ledger, {"n1": node()}, DisruptionBudgets(), NOW)) == ()


def test_node_that_does_not_admit_the_pod_is_left_alone() -> None:
    """A taint, a cordon or a missing label: nobody is evicted where kube-scheduler would not place the pod."""
    pod, request = waiting(nodeSelector={"pool": "a"})
    assert plan_island(pod, request, PreemptionInput(ledger_of(BROKEN), {"n1": node()}, DisruptionBudgets(), NOW)) == ()
    labelled = decode_node(b'{"metadata":{"name":"n1","labels":{"pool":"a"}}}')
    assert (
        len(plan_island(pod, request, PreemptionInput(ledger_of(BROKEN), {"n1": labelled}, DisruptionBudgets(), NOW)))
        == 1
    )


@pytest.mark.parametrize(
    ("spec", "others", "expected"),
    [
        pytest.param({}, [], "", id="room"),
        pytest.param({"containers": [{"name": "main", "resources": {"requests": {"cpu": "5"}}}]}, [],
                     "insufficient cpu", id="too-large-for-the-node"),
        pytest.param({"containers": [{"name": "main", "resources": {"requests": {"cpu": "1500m"}}}]}, ["2.6"],
                     "insufficient cpu", id="cpu-is-held-by-pods-that-stay"),
        pytest.param({"containers": [{"name": "main", "resources": {"requests": {"cpu": "1500m"}}}]}, ["2.5"], "",
                     id="just-enough-cpu"),
        pytest.param({}, ["0"] * 10, "insufficient pods", id="no-pod-slot"),
        pytest.param({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]}}}},
            [], "node affinity", id="node-affinity"),
    ],
)  # fmt: skip
def test_node_must_take_the_pod_beside_those_that_stay(spec: dict[str, Any], others: list[str], expected: str) -> None:
    """The victims' GPUs are not all that kube-scheduler looks at: cpu, pod slots, affinity of the node."""
    staying = [pod_with_cpu(f"o{number}", cpu) for number, cpu in enumerate(others)]
    assert refusal(pod_of(spec), node(), staying) == expected


def pod_with_cpu(name: str, cpu: str) -> Pod:
    """Return a running pod that asks for this much."""
    return pod_of({"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]}, name)


def pod_of(spec: dict[str, Any], name: str = "p") -> Pod:
    """Return a pod with this spec alone."""
    return msgspec.json.decode(msgspec.json.encode({"metadata": {"name": name}, "spec": spec}), type=Pod)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (b"{}", ""),
        (b'{"affinity":{"podAntiAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":[{}]}}}',
         "required affinity to other pods"),
        (b'{"affinity":{"podAntiAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[{}]}}}', ""),
        (b'{"topologySpreadConstraints":[{"whenUnsatisfiable":"DoNotSchedule"}]}', "a strict topology spread"),
        (b'{"topologySpreadConstraints":[{"whenUnsatisfiable":"ScheduleAnyway"}]}', ""),
        (b'{"volumes":[{"name":"v","persistentVolumeClaim":{"claimName":"c"}}]}', "persistent volumes"),
        (b'{"volumes":[{"name":"v","emptyDir":{}}]}', ""),
        (b'{"resourceClaims":[{"name":"c"}]}', "resource claims"),
    ],
)  # fmt: skip
def test_nobody_is_evicted_on_a_guess(spec: bytes, expected: str) -> None:
    """What only a view of all nodes decides is left to kube-scheduler, and so is the pod."""
    assert unjudged(decode_demands(b'{"spec":' + spec + b"}")) == expected
