"""Wake-ups: exactly the waiting pods that fit now, in order, and never more than fit."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster import host_fit
from atoll.cluster.feasibility import NodeFacts, node_verdict, unseen_nodes
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import NodeDevices
from atoll.cluster.objects import Node, Pod
from atoll.cluster.requests import Request, Verdict, request_of
from atoll.cluster.selection import select
from atoll.cluster.wakeups import (
    NOMINATION_NODES_MIN,
    PATIENCE_SECONDS,
    SELECTIONS_MAX,
    WAKES_MAX,
    LastWake,
    NodeCapacity,
    WakeInput,
    WakePlan,
    Woken,
    is_nominated_by_us,
    is_rejected,
    missing_for,
    parse_woken,
    plan_wakeups,
    waiting_note,
)
from tests.builders import make_devices, make_pod, uuid_of
from tests.explain.situations import NO_FABRIC

GENERATION = 500
NOW = 1000.0
REJECTED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


def waiting(name: str, gpus: int = 1, *, status: dict[str, Any] | None = None, **options: Any) -> Pod:
    """Return a pod that kube-scheduler has set aside; `status` adds to it."""
    raw = msgspec.to_builtins(make_pod(name, gpus=gpus, **options))
    raw["status"] = {"phase": "Pending", "conditions": [REJECTED], **(status or {})}
    return msgspec.convert(raw, Pod)


def node(name: str = "n1", **spec: Any) -> Node:
    """Return a Node; `labels` go to its metadata, `ready` and `allocatable` to its status."""
    labels, ready = spec.pop("labels", {}), spec.pop("ready", "True")
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": spec.pop("allocatable", {})}
    return msgspec.convert({"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status}, Node)


def room(name: str = "n1", free: int = 0xFF, **spec: Any) -> NodeCapacity:
    """Return an eight-GPU machine with these positions free."""
    return NodeCapacity(node(name, **spec), DEVICES[name], free)


DEVICES: dict[str, NodeDevices] = {name: make_devices(name) for name in ("n1", "n2", "n3")}
WITHOUT_FABRIC = make_devices("n1", "dgx-h100", devices=dict.fromkeys(range(8), NO_FABRIC))


def asked(pod: Pod) -> tuple[Pod, Request]:
    """Return the pod with its request."""
    request = request_of(pod, None)
    assert isinstance(request, Request)
    return pod, request


def plan(pods: list[Pod], rooms: list[NodeCapacity], **facts: Any) -> WakePlan:
    """Plan over these pods and rooms."""
    known: dict[str, Any] = {"last_wakes": {}, "lease_holders": (), "generation": GENERATION, "now_seconds": NOW}
    return plan_wakeups(WakeInput(waiting=[asked(pod) for pod in pods], rooms=rooms, **{**known, **facts}))


def woken(found: WakePlan) -> list[str]:
    """Return the names of the pods to wake, in order."""
    return [wake.pod.metadata.name for wake in found.wakes]


ORDERS: list[tuple[str, list[Pod], list[NodeCapacity], list[str]]] = [
    ("both fit", [waiting("a"), waiting("b")], [room(free=0b11)], ["a", "b"]),
    ("one GPU for two", [waiting("b"), waiting("a")], [room(free=0b1)], ["a"]),
    ("nothing free", [waiting("a")], [room(free=0)], []),
    ("no node", [waiting("a")], [], []),
    ("priority first", [waiting("a"), waiting("z", priority=10)], [room(free=0b1)], ["z"]),
    (
        "a large one in front does not fit and holds nothing back",
        [waiting("large", 8, priority=10), waiting("small")],
        [room(free=0b111)],
        ["small"],
    ),
    (
        "a large one in front takes all",
        [waiting("large", 8, priority=10), waiting("small")],
        [room(free=0xFF)],
        ["large"],
    ),
    (
        "eight spread over two nodes fit nobody who wants eight",
        [waiting("a", 8)],
        [room(free=0xF), room("n2", 0xF)],
        [],
    ),
    ("selector matches", [waiting("a", nodeSelector={"zone": "x"})], [room(labels={"zone": "x"})], ["a"]),
    ("selector does not", [waiting("a", nodeSelector={"zone": "x"})], [room(labels={"zone": "y"})], []),
    ("cordoned", [waiting("a")], [room(unschedulable=True)], []),
    ("tainted", [waiting("a")], [room(taints=[{"key": "gpu", "effect": "NoSchedule"}])], []),
    (
        "tolerated",
        [waiting("a", tolerations=[{"key": "gpu", "operator": "Exists"}])],
        [room(taints=[{"key": "gpu", "effect": "NoSchedule"}])],
        ["a"],
    ),
    ("gated", [waiting("a", schedulingGates=[{"name": "x"}])], [room()], []),
    ("bound", [waiting("a", node="n1")], [room()], []),
    ("deleted", [waiting("a", deleted=True)], [room()], []),
    ("never tried", [make_pod("a")], [room()], []),
]


@pytest.mark.parametrize(("pods", "rooms", "names_in_order"), [o[1:] for o in ORDERS], ids=[o[0] for o in ORDERS])
def test_who_is_woken(pods: list[Pod], rooms: list[NodeCapacity], names_in_order: list[str]) -> None:
    """Exactly those that fit, by priority, then age, then uid."""
    assert woken(plan(pods, rooms)) == names_in_order


def test_older_pods_come_first() -> None:
    """Among equals the one that waits longest gets the place."""
    pods = []
    for name, created in (("young", "2026-01-02T00:00:00Z"), ("old", "2026-01-01T00:00:00Z")):
        raw = msgspec.to_builtins(waiting(name))
        raw["metadata"]["creationTimestamp"] = created
        pods.append(msgspec.convert(raw, Pod))
    assert woken(plan(pods, [room(free=0b1)])) == ["old"]


def test_pod_that_holds_a_lease_sleeps_on() -> None:
    """Its bind is under way: a wake-up would move the version under the Binding."""
    assert woken(plan([waiting("a"), waiting("b")], [room()], lease_holders={"uid-of-a"})) == ["b"]


def test_sick_devices_are_no_room() -> None:
    """A free device that may not be given out wakes nobody."""
    devices = make_devices("n1", sick=[0], cordoned=[1])
    assert woken(plan([waiting("a", 7)], [NodeCapacity(node(), devices, 0xFF)])) == []
    assert woken(plan([waiting("a", 6)], [NodeCapacity(node(), devices, 0xFF)])) == ["a"]


def test_wake_tells_its_cause_and_place() -> None:
    """The annotation is the generation alone, and the place names real devices of the node."""
    (wake,) = plan([waiting("a", 2)], [room(free=0b1001)]).wakes
    assert (wake.woken, wake.generation, wake.node) == ("500", GENERATION, "n1")
    assert wake.uuids == (uuid_of("n1", 0), uuid_of("n1", 3))
    assert not wake.nominate


REPEATS: list[tuple[str, LastWake, bool, bool]] = [
    ("just woken: keeps its place, is left alone", LastWake(1, GENERATION, NOW - 1), False, True),
    ("a moment before its patience is over", LastWake(1, GENERATION, NOW - PATIENCE_SECONDS + 0.5), False, True),
    ("patience is over: tried again", LastWake(1, GENERATION, NOW - PATIENCE_SECONDS), True, True),
    ("something became free since", LastWake(1, GENERATION - 1, NOW - 1), True, True),
    ("woken twice in vain: rests, and others may have the place", LastWake(2, GENERATION, NOW - 5), False, False),
    ("a change does not end a longer rest", LastWake(2, GENERATION - 1, NOW - 5), False, False),
    ("rest is over", LastWake(2, GENERATION, NOW - 8), True, True),
]


@pytest.mark.parametrize(("last", "is_woken", "is_kept"), [r[1:] for r in REPEATS], ids=[r[0] for r in REPEATS])
def test_repeats(last: LastWake, *, is_woken: bool, is_kept: bool) -> None:
    """A pod that fits but is not bound is tried ever more rarely, and does not keep its place for ever."""
    found = plan([waiting("a", priority=1), waiting("b")], [room(free=0b1)], last_wakes={"uid-of-a": last})
    assert ("a" in woken(found)) is is_woken
    assert ("b" in woken(found)) is not is_kept
    if not is_woken:
        assert found.again_seconds is not None
        assert 0 < found.again_seconds <= last.repeat_seconds()


def test_every_wake_of_a_pod_writes_a_new_value() -> None:
    """A write that changes nothing wakes nobody, so no value is ever written twice; also after a restart."""
    pod = waiting("a")
    seen = set()
    for step in range(4):
        (wake,) = plan([pod], [room()], generation=GENERATION + step // 3).wakes
        assert wake.woken not in seen
        seen.add(wake.woken)
        pod = waiting("a", annotations={names.WOKEN: wake.woken})
    assert seen == {"500", "500.2", "500.3", "501"}


def test_pod_without_room_is_named() -> None:
    """Whoever does not fit is told so, and its earlier wake-ups no longer count."""
    assert plan([waiting("a", 4)], [room(free=0b111)]).without_room == ("uid-of-a",)


def test_plan_is_bounded() -> None:
    """A thousand pods that fit are woken in several plans; the plan says that it is not finished."""
    rooms = [room(name) for name in DEVICES] * 50
    found = plan([waiting(f"p{i}") for i in range(1000)], rooms)
    assert len(found.wakes) == WAKES_MAX
    assert found.is_cut


def test_cut_plans_reach_everybody() -> None:
    """However many kinds of pods have no room, plan after plan the last in the line is looked at, and woken."""
    taints = [{"key": "gpu", "effect": "NoSchedule"}]
    rooms = [NodeCapacity(node(f"node-{i}", taints=taints), DEVICES["n1"], 0xFF) for i in range(SELECTIONS_MAX // 4)]
    pods = [waiting(f"h{i:02}", priority=9, tolerations=[{"key": f"t{i}"}]) for i in range(10)]
    pods.append(waiting("last", tolerations=[{"key": "gpu", "operator": "Exists"}]))
    assert plan(pods, rooms).is_cut
    skipped: set[str] = set()
    for _ in range(10):
        found = plan(pods, rooms, skipped=skipped)
        if "last" in woken(found):
            return
        skipped |= set(found.without_room)
    pytest.fail("the last pod was never looked at")


NOMINATIONS: list[tuple[str, Pod, int, bool]] = [
    ("few nodes: all are looked at", waiting("a"), NOMINATION_NODES_MIN - 1, False),
    ("many nodes: named", waiting("a"), NOMINATION_NODES_MIN, True),
    (
        "woken before, and GPUs were freed for it",
        waiting("a", annotations={names.WOKEN: "5", names.KEPT: "n1:0"}),
        NOMINATION_NODES_MIN,
        True,
    ),
    ("named by somebody already", waiting("a", status={"nominatedNodeName": "x"}), NOMINATION_NODES_MIN, False),
    ("would never be cleared", waiting("a", preemptionPolicy="Never"), NOMINATION_NODES_MIN, False),
    ("woken before", waiting("a", annotations={names.WOKEN: "400"}), NOMINATION_NODES_MIN, False),
]


@pytest.mark.parametrize(("pod", "count", "is_named"), [n[1:] for n in NOMINATIONS], ids=[n[0] for n in NOMINATIONS])
def test_nomination(pod: Pod, count: int, *, is_named: bool) -> None:
    """The node is named once, only where sampling could pass it by, and only if kube-scheduler clears it on refusal."""
    (wake,) = plan([pod], [room()] * count).wakes
    assert wake.nominate is is_named
    assert ("@n1" in wake.woken) is is_named


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500", Woken(500, 1, "")),
        ("500.3", Woken(500, 3, "")),
        ("500@n-1.example", Woken(500, 1, "n-1.example")),
        ("500.2@n1", Woken(500, 2, "n1")),
        ("", Woken(0, 0, "")),
        ("tomorrow", Woken(0, 0, "")),
        ("9" * 30, Woken(0, 0, "")),
    ],
)
def test_annotation_is_read_as_written(text: str, value: Woken) -> None:
    """The codec is its own inverse, and nonsense is generation 0."""
    assert parse_woken(waiting("a", annotations={names.WOKEN: text})) == value
    assert not value.generation or str(value) == text


def test_nomination_is_remembered_while_it_stands() -> None:
    """A later wake-up must not hide that the nomination is ours, or nobody would ever withdraw it."""
    annotations = {names.WOKEN: "400@n1"}
    stands = waiting("a", status={"nominatedNodeName": "n1"}, annotations=annotations)
    assert plan([stands], [room()]).wakes[0].woken == "500@n1"
    assert plan([waiting("a", annotations=annotations)], [room()]).wakes[0].woken == "500"


def test_preemption_is_not_ours() -> None:
    """Only a nomination that a wake-up wrote is ever withdrawn."""
    nominated = {"nominatedNodeName": "n1"}
    assert is_nominated_by_us(waiting("a", status=nominated, annotations={names.WOKEN: "5@n1"}))
    assert not is_nominated_by_us(waiting("a", status=nominated, annotations={names.WOKEN: "5"}))
    assert not is_nominated_by_us(waiting("a", status=nominated, annotations={names.WOKEN: "5@n2"}))
    assert not is_nominated_by_us(waiting("a", annotations={names.WOKEN: "5@n1"}))


def test_missing_is_counted_by_reason() -> None:
    """What is told to the user adds up to the nodes that were looked at."""
    rooms = [room(free=0b1), room("n2", 0b1), room("n3", unschedulable=True)]
    missing = missing_for(*asked(waiting("a", 2)), rooms)
    assert missing == (("too few free GPUs", 2), (host_fit.CORDONED, 1))


PRESENT = {"nvidia.com/gpu.present": "true"}


@pytest.mark.parametrize(
    ("gpus", "rooms", "unseen", "said"),
    [
        pytest.param(2, [room(free=0b1)], (), "no node of 1 can give them now", id="others hold them"),
        pytest.param(9, [room()], (), "not even an empty one", id="no machine is so large"),
        pytest.param(
            2, [room(free=0b1), room("n2", unschedulable=True)], (), "can give them now", id="busy is nearest"
        ),
        pytest.param(1, [room(unschedulable=True)], (), "may fit when n1 is uncordoned:", id="cordoned"),
        pytest.param(1, [room(ready="False")], (), "may fit when n1 is Ready:", id="not ready"),
        pytest.param(1, [room(taints=[{"key": "k", "effect": "NoSchedule"}])], (), "not even an empty", id="tainted"),
        pytest.param(
            1, [room(unschedulable=True), room("n2", ready="False")], (), "n1 is uncordoned or n2 is Ready:", id="two"
        ),
        pytest.param(1, [], (NodeFacts(node("n4"), None),), "when the agent of n4 reports:", id="no report yet"),
        pytest.param(
            1,
            [NodeCapacity(node(), WITHOUT_FABRIC, 0xFF)],
            (),
            f"n1 no longer reports: {names.REJECT_FABRIC}",
            id="fabric",
        ),
        pytest.param(9, [room()], (NodeFacts(node("n4"), None),), "when the agent of n4 reports:", id="perhaps larger"),
        pytest.param(1, [], (NodeFacts(node("n2"), DEVICES["n2"]),), "the agent of n2 reports again:", id="silent"),
        pytest.param(9, [], (NodeFacts(node("n2"), DEVICES["n2"]),), "not even an empty one", id="silent and small"),
    ],
)
def test_event_tells_busy_from_not_known_from_never(
    gpus: int, rooms: list[NodeCapacity], unseen: tuple[NodeFacts, ...], said: str
) -> None:
    """A pod waits for others, for facts, or for ever; the facts are named."""
    assert said in waiting_note(*asked(waiting("a", gpus)), rooms, unseen)


@pytest.mark.parametrize(
    ("free", "devices", "verdict"),
    [
        pytest.param(0b11, DEVICES["n1"], Verdict.FITS, id="two are free"),
        pytest.param(0b01, DEVICES["n1"], Verdict.BUSY, id="others hold one"),
        pytest.param(0b11, make_devices("n1", sick={0}), Verdict.BUSY, id="a free one is broken"),
    ],
)
def test_a_node_fits_by_what_is_free_and_healthy(free: int, devices: NodeDevices, verdict: Verdict) -> None:
    """A pod of two GPUs; six healthy ones are held."""
    assert node_verdict(*asked(waiting("a", 2)), NodeFacts(node(), devices, free)) is verdict


def test_only_nodes_that_may_have_gpus_are_waited_for() -> None:
    """A worker without GPUs never reports; a node that says it has some, or whose report does not count, may."""
    ledger = Ledger()
    ledger.put_report(GpuNodeStatus.model_validate({"metadata": {"name": "silent"}, "status": {"devices": []}}))
    found = (
        node("cpu", allocatable={"cpu": "8", "nvidia.com/gpu": "0"}),
        node("new", labels=PRESENT),
        node("plain", allocatable={"nvidia.com/gpu": "1"}),
        node("silent"),
    )
    nodes = {one.metadata.name: one for one in found}
    assert [one.node.metadata.name for one in unseen_nodes(nodes, ledger, NOW)] == ["new", "plain", "silent"]


def affinity(zone: str) -> dict[str, Any]:
    """Return an affinity that requires nodes of one zone."""
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


@pytest.mark.parametrize(
    ("refusing", "options"),
    [
        pytest.param({"unschedulable": True}, {}, id="cordoned"),
        pytest.param({"taints": [{"key": "k", "value": "v", "effect": "NoExecute"}]}, {}, id="tainted"),
        pytest.param({"labels": {"zone": "b"}}, {"nodeSelector": {"zone": "a"}}, id="another label"),
        pytest.param({"labels": {"zone": "b"}}, {"affinity": affinity("a")}, id="outside the required affinity"),
        pytest.param({"ready": "False"}, {}, id="not ready"),
        pytest.param({"ready": "Unknown"}, {}, id="kubelet is silent"),
    ],
)
def test_nobody_is_woken_for_a_node_that_refuses_the_pod(refusing: dict[str, Any], options: dict[str, Any]) -> None:
    """kube-scheduler would refuse the pod there again, and its place would be lost to others meanwhile."""
    pod = waiting("a", **options)

    assert woken(plan([pod], [room(**refusing)])) == []
    assert woken(plan([pod], [room(**refusing), room("n2", labels={"zone": "a"})])) == ["a"]


def test_a_pod_that_its_affinity_keeps_out_hides_no_room_from_others() -> None:
    """What is known not to fit is known of pods with the same affinity alone."""
    pods = [waiting("a", priority=1, affinity=affinity("b")), waiting("b")]

    assert woken(plan(pods, [room(labels={"zone": "a"})])) == ["b"]


@pytest.mark.parametrize(
    ("condition", "counts"),
    [
        (REJECTED, True),
        ({**REJECTED, "reason": "SchedulerError"}, False),
        ({**REJECTED, "status": "True"}, False),
        ({**REJECTED, "type": "Ready"}, False),
    ],
)
def test_rejection(condition: dict[str, str], *, counts: bool) -> None:
    """Only a pod that kube-scheduler calls unschedulable waits for us; errors it repeats by itself."""
    assert is_rejected(waiting("a", status={"conditions": [condition]})) is counts


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=12),
    masks=st.lists(st.integers(0, 255), min_size=1, max_size=3),
)
def test_never_more_than_fit(sizes: list[tuple[int, int]], masks: list[int]) -> None:
    """All woken pods can be placed side by side on their simulated places, and nobody who fits beside them is left."""
    pods = [waiting(f"p{i:02}", size, priority=priority) for i, (size, priority) in enumerate(sizes)]
    rooms = [room(name, mask) for name, mask in zip(DEVICES, masks, strict=False)]
    found = plan(pods, rooms)
    left = {each.devices.node: each.free for each in rooms}
    for wake in found.wakes:
        taken = DEVICES[wake.node].mask_of((), wake.uuids)
        assert taken.bit_count() == len(wake.uuids)
        assert taken & left[wake.node] == taken, "a place was given twice"
        left[wake.node] &= ~taken
    for pod in pods:
        if pod.metadata.uid in found.without_room:
            _, request = asked(pod)
            fits = [n for n, mask in left.items() if hasattr(select(DEVICES[n], mask, request), "choice")]
            assert not fits, "a pod that fits was left asleep"
    assert len(found.wakes) + len(found.without_room) == len(pods)


def test_same_question_same_answer() -> None:
    """The plan does not depend on the order in which pods are listed."""
    pods = [waiting(f"p{i}", 1 + i % 3) for i in range(9)]
    rooms = [room(free=0b11011), room("n2", 0b111)]
    assert plan(pods, rooms).wakes == plan(pods[::-1], rooms).wakes


def test_pod_for_which_gpus_were_freed_is_woken_for_those() -> None:
    """The rooms leave them out, since others may not have them; only this pod finds them, and only what is free yet."""
    pod, other = waiting("a", 2), waiting("b", 2)
    rooms = [room("n1", free=0b1)]
    assert woken(plan([pod, other], rooms, kept={"uid-of-a": ("n1", 0b110)})) == ["a"]
    assert woken(plan([pod, other], rooms, kept={"uid-of-a": ("n1", 0)})) == []
    assert woken(plan([pod, other], rooms, kept={"uid-of-a": ("n2", 0b110)})) == []
    cordoned = [room("n1", free=0b1, unschedulable=True)]
    assert woken(plan([pod, other], cordoned, kept={"uid-of-a": ("n1", 0b110)})) == []
