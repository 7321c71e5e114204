"""Nodes beyond kube-scheduler's sample: which are worth a second attempt, and which pods are sent to them."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.cluster.elsewhere import SetQuality, is_noticeable, nodes_elsewhere
from atoll.cluster.hints import (
    HintInput,
    LastHint,
    has_unknown_needs,
    is_sample,
    may_be_sent,
    may_wait_for_better,
    named_node,
    next_hint,
    plan_hints,
    refusal,
)
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Request, request_of
from atoll.cluster.verdicts import FilterInput, judge_nodes
from atoll.cluster.wakeups import NodeCapacity, is_nominated_by_us
from tests.builders import make_allocation, make_claim, make_devices, make_lease, make_pod, make_report
from tests.explain.situations import make_node

NOW = 1000.0
DEVICES = {name: make_devices(name) for name in ("n1", "n2")}


def fleet_of(**shapes: str) -> Ledger:
    """Return a ledger of empty machines of these shapes."""
    ledger = Ledger()
    for name, shape in shapes.items():
        ledger.put_report(make_report(name, shape.replace("_", "-")))
        ledger.put_heartbeat(name, NOW, 180.0)
    return ledger


def take(ledger: Ledger, node: str, *ids: int) -> None:
    """Let a pod hold GPUs of a node."""
    ledger.put_pod(make_pod(f"on-{node}", uid=f"on-{node}", node=node, allocation=make_allocation(node, *ids)))


def question(count: int, **claim: Any) -> FilterInput:
    """Return what filter is asked for a pod with this claim."""
    wanted = make_claim(count=count, **claim)
    request = request_of(make_pod("p", gpus=count, claim=wanted), wanted)
    assert isinstance(request, Request)
    return FilterInput(uid="uid-of-p", request=request, now_seconds=NOW)


def elsewhere(ledger: Ledger, asked: FilterInput, *sample: str) -> list[str]:
    """Return the nodes that are worth leaving this sample for, in order."""
    return [one.node for one in nodes_elsewhere(asked, ledger, judge_nodes(sample, asked, ledger).best)]


def test_any_node_counts_where_the_sample_has_none() -> None:
    """The best comes first: the fuller machine, as filter would order them."""
    ledger = fleet_of(n1="t4-4", n2="dgx-a100", n3="dgx-a100", n4="t4-4")
    take(ledger, "n3", 0, 1)

    assert elsewhere(ledger, question(6), "n1", "n4") == ["n3", "n2"]
    assert elsewhere(ledger, question(8), "n1") == ["n2"]
    assert elsewhere(ledger, question(16), "n1") == []


def test_small_differences_are_not_worth_another_attempt() -> None:
    """A fuller machine is before an emptier one in the order, and gives links that are as good."""
    ledger = fleet_of(n1="dgx-a100", n2="dgx-a100")
    take(ledger, "n2", 0, 1)
    assert judge_nodes(["n1", "n2"], question(2), ledger).best.node == "n2"  # type: ignore[union-attr]

    assert elsewhere(ledger, question(2), "n1") == []


def test_better_links_and_preferred_models_are() -> None:
    """A whole pair beside cards without a bridge, and a model that the claim prefers."""
    ledger = fleet_of(n1="h100-nvl-8", n2="h100-nvl-8")
    take(ledger, "n1", 0, 2, 4, 6)
    assert elsewhere(ledger, question(2), "n1") == ["n2"]

    ledger.put_report(make_report("n3", "t4-4"))
    ledger.put_heartbeat("n3", NOW, 180.0)
    assert elsewhere(ledger, question(2, policy="packed"), "n1") == []
    assert elsewhere(ledger, question(1), "n1") == []
    assert elsewhere(ledger, question(1, models=["nvidia-h100", "nvidia-t4"]), "n3") == ["n1", "n2"]
    assert elsewhere(ledger, question(1, models=["nvidia-t4", "nvidia-h100"]), "n3") == []


def test_links_are_compared_within_a_class_of_machines() -> None:
    """A pair with the best links of its model stays, however fast others are; a machine with damaged links does not."""
    ledger = fleet_of(n1="h100-nvl-8", n2="dgx-h100")
    assert elsewhere(ledger, question(2), "n1") == elsewhere(ledger, question(2), "n2") == []


def test_pod_that_has_its_place_is_sent_nowhere() -> None:
    """It holds Leases, its reservation has nothing there, or it has failed on the other node."""
    ledger = fleet_of(n1="t4-4", n2="dgx-a100")
    asked = question(8)
    assert elsewhere(ledger, asked, "n1") == ["n2"]

    assert elsewhere(ledger, replace(asked, failed_nodes=frozenset({"n2"})), "n1") == []
    assert isinstance(asked.request, Request)
    assert elsewhere(ledger, replace(asked, request=replace(asked.request, reservation="u")), "n1") == []
    ledger.put_lease(make_lease("n2", 0))
    assert elsewhere(ledger, asked, "n1") == []


@pytest.mark.parametrize(
    ("one", "is_better"),
    [
        pytest.param(SetQuality(0, 3, 0.1), True, id="a-better-model"),
        pytest.param(SetQuality(2, 1, 1.0), False, id="a-worse-model"),
        pytest.param(SetQuality(1, 1, 0.3), True, id="fewer-islands"),
        pytest.param(SetQuality(1, 3, 1.0), False, id="more-islands"),
        pytest.param(SetQuality(1, 2, 0.551), True, id="a-tenth-faster"),
        pytest.param(SetQuality(1, 2, 0.549), False, id="less-than-a-tenth"),
    ],
)
def test_what_a_user_notices(one: SetQuality, is_better: bool) -> None:
    """Against a set in two islands with half of the best ring, of the claim's second model."""
    assert is_noticeable(one, SetQuality(1, 2, 0.5)) is is_better


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        (SetQuality(0), False),
        (SetQuality(0, 1, 0.92), False),
        (SetQuality(0, 1, 0.9), True),
        (SetQuality(0, 2, 1.0), True),
        (SetQuality(1), True),
    ],
)
def test_set_that_nothing_betters_is_known_at_once(sampled: SetQuality, *, expected: bool) -> None:
    """Most pods get one, and the other nodes are not looked at."""
    assert sampled.may_be_bettered is expected
    bettered = any(is_noticeable(SetQuality(0, 1, ring), sampled) for ring in (1.0, 0.5, 0.0))
    assert bettered is expected


@pytest.mark.parametrize(
    ("offered", "nodes", "expected"), [(99, 5000, False), (100, 100, False), (100, 101, True), (500, 5000, True)]
)
def test_sample(offered: int, nodes: int, *, expected: bool) -> None:
    """kube-scheduler leaves out no node that its filters admit before it has found a hundred."""
    assert is_sample(offered, nodes) is expected


def waiting(name: str = "a", node: str = "n1", gpus: int = 1, **options: Any) -> Pod:
    """Return a pod that kube-scheduler has set aside with the reason that names this node."""
    message = f"0/5000 nodes are available: 4500 Insufficient cpu, 500 {refusal(node)}. preemption: 0/5000 nodes."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    nominated = options.pop("nominated", "")
    raw = msgspec.to_builtins(make_pod(name, gpus=gpus, **options))
    raw["status"] = {"phase": "Pending", "conditions": [condition], "nominatedNodeName": nominated}
    return msgspec.convert(raw, Pod)


@pytest.mark.parametrize("node", ["n1", "ip-10-0-0-1.eu-west-1.compute.internal", "a" * 253])
def test_node_is_read_from_the_message(node: str) -> None:
    """kube-scheduler counts reasons, sorts them, and ends with a full stop."""
    assert named_node(waiting(node=node)) == node


def test_other_messages_name_no_node() -> None:
    """Nor does a message on a pod that is not set aside."""
    assert named_node(make_pod("a")) == ""
    pod = waiting(node="")
    assert named_node(pod) == ""
    assert named_node(msgspec.structs.replace(waiting(), spec=make_pod("a", node="n9").spec)) == ""


def hints(*pods: Pod, free: int = 0xFF, last: dict[str, LastHint] | None = None, holders: tuple[str, ...] = ()) -> Any:
    """Return (uid, node, annotation) of the pods that are sent, where n1 and n2 have these GPUs free."""
    asked = HintInput(
        waiting=[(pod, request) for pod in pods if isinstance(request := request_of(pod, None), Request)],
        room_of=lambda node, _: NodeCapacity(make_node(node), DEVICES[node], free) if node in DEVICES else None,
        last_hints=last or {},
        lease_holders=holders,
        generation=7,
        now_seconds=NOW,
    )
    return [(one.uid, one.node, one.woken) for one in plan_hints(asked)]


def test_pods_are_sent_to_the_node_that_was_named() -> None:
    """By rank; two pods are not sent to the same GPUs, and the annotation says whose nomination it is."""
    first, second = waiting("a", gpus=5), waiting("b", gpus=4, priority=9)

    assert hints(first, second) == [("uid-of-b", "n1", "7@n1")]
    assert hints(first, waiting("b", "n2", gpus=4)) == [("uid-of-a", "n1", "7@n1"), ("uid-of-b", "n2", "7@n2")]
    assert is_nominated_by_us(waiting(annotations={names.WOKEN: "7@n1"}, nominated="n1"))


@pytest.mark.parametrize(
    ("pod", "options"),
    [
        pytest.param(waiting(node="gone"), {}, id="node-is-gone"),
        pytest.param(waiting(gpus=5), {"free": 0x0F}, id="gpus-went-meanwhile"),
        pytest.param(waiting(nominated="n2"), {}, id="nominated-already"),
        pytest.param(waiting(preemptionPolicy="Never"), {}, id="kube-scheduler-would-keep-the-name"),
        pytest.param(waiting(), {"holders": ("uid-of-a",)}, id="a-bind-is-under-way"),
        pytest.param(waiting(), {"last": {"uid-of-a": LastHint(1, NOW - 9.9)}}, id="sent-a-moment-ago"),
    ],
)
def test_pod_that_is_not_sent(pod: Pod, options: dict[str, Any]) -> None:
    """A name keeps a node from others: it is written only where it is worth that."""
    assert hints(pod, **options) == []


def test_pauses_between_the_hints_of_one_pod() -> None:
    """They double up to five minutes, because each name that is withdrawn wakes others."""
    last, pauses = None, []
    for _ in range(7):
        last = next_hint(last, NOW)
        pauses.append(last.ends_seconds - NOW)
    assert pauses == [10, 20, 40, 80, 160, 300, 300]
    assert hints(waiting(), last={"uid-of-a": LastHint(1, NOW - 10.0)}) == [("uid-of-a", "n1", "7@n1")]


VOLUME = {"name": "v", "persistentVolumeClaim": {"claimName": "c"}}
TOKEN = {"name": "kube-api-access", "projected": {}}
SPREAD = {"maxSkew": 1, "topologyKey": "zone"}
APART = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}


@pytest.mark.parametrize(
    ("pod", "may"),
    [
        pytest.param(make_pod("p"), True, id="plain"),
        pytest.param(make_pod("p", volumes=[TOKEN]), True, id="the-token-of-every-pod"),
        pytest.param(make_pod("p", volumes=[VOLUME]), False, id="volume"),
        pytest.param(make_pod("p", topologySpreadConstraints=[SPREAD]), False, id="spread"),
        pytest.param(make_pod("p", affinity={"podAntiAffinity": APART}), False, id="apart"),
        pytest.param(make_pod("p", annotations={names.GANG: "g"}), False, id="member"),
        pytest.param(make_pod("p", annotations={names.KEPT: "n1:0"}), False, id="evicted-for"),
        pytest.param(make_pod("p", annotations={names.WOKEN: "1"}), False, id="woken"),
        pytest.param(waiting(), False, id="refused-before"),
    ],
)
def test_who_waits_for_better_gpus(pod: Pod, may: bool) -> None:
    """Only at the first attempt, and only for a node of which all is known."""
    assert may_wait_for_better(pod) is may
    assert may_be_sent(make_pod("p", preemptionPolicy="Never")) is False
    assert has_unknown_needs(make_pod("p", resourceClaims=[{"name": "x"}]))
