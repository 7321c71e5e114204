"""Filter and preempt where kube-scheduler offers a sample of the nodes: n1 is offered, n2 is not.

The real extender over HTTP; a sample is one node here.
"""

from typing import Any

import pytest

from atoll.api import names
from atoll.cluster.hints import refusal
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.clock import Clock
from atoll.kube.mirror import WatchedKind
from extender.beyond_sample import DISTRUST_SECONDS, FAILED_MAX, MISSED_MAX, BeyondSample, HintTrust
from tests.builders import make_allocation, make_claim, make_pod, make_report, pod_json
from tests.explain.situations import make_node
from tests.extender.test_app import Extender, extender, in_form
from tests.fakes.clock import ManualClock

__all__ = ["extender"]

PREFERRED, OTHER = "h100-nvl-8", "dgx-a100"
MODELS = ["nvidia-h100", "nvidia-a100"]


@pytest.fixture(autouse=True)
def machines(extender: Extender, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offered is a machine with A100; the other one has the H100 that the claim prefers."""
    monkeypatch.setattr("atoll.cluster.hints.NOMINATION_NODES_MIN", 1)
    for name, shape in (("n1", OTHER), ("n2", PREFERRED)):
        extender.mirror.ledger.put_report(make_report(name, shape))
        extender.mirror.nodes.store[("", name)] = make_node(name)
    claim = make_claim("c", count=2, models=MODELS)
    extender.mirror.claims[("team", "c")] = claim


def asking(name: str = "p", *, nominated: str = "", rejected: bool = False, **options: Any) -> dict[str, Any]:
    """Return a pod with the claim of two GPUs."""
    pod = pod_json(name, gpus=2, claim=make_claim("c", count=2, models=MODELS), **options)
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}] if rejected else []
    pod["status"] = {"phase": "Pending", "conditions": conditions, "nominatedNodeName": nominated}
    return pod


async def filtered(extender: Extender, pod: dict[str, Any], *offered: str) -> tuple[list[str], dict[str, str]]:
    """Return the nodes that filter leaves of those offered, and the reasons of the others."""
    answer = await extender.call("filter", {"Pod": pod, "Nodes": None, "NodeNames": list(offered or ("n1",))})
    return answer["NodeNames"], answer["FailedAndUnresolvableNodes"]


def run_on(extender: Extender, node: str, *ids: int, name: str = "x", **options: Any) -> None:
    """Let every listener hear of a pod that runs on a node."""
    pod = make_pod(name, uid=name, gpus=len(ids), node=node, allocation=make_allocation(node, *ids), **options)
    extender.hear(WatchedKind.POD, Change(ChangeKind.ADDED, pod))


async def test_first_attempt_without_the_preferred_model_is_refused_once(extender: Extender) -> None:
    """The reason names the better node, whose GPUs are spoken for meanwhile; the next attempt takes what there is."""
    assert await filtered(extender, asking()) == ([], {"n1": refusal("n2")})
    now = extender.clock.monotonic_seconds()
    assert extender.mirror.ledger.free("n2", now_seconds=now).bit_count() == 6

    assert await filtered(extender, asking()) == (["n1"], {})
    page = await (await extender.http.get("/metrics")).text()
    assert 'atoll_extender_decisions_total{outcome="elsewhere"} 1.0' in page


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(asking(nominated="n1"), id="nominated"),
        pytest.param(asking(rejected=True), id="not-its-first-attempt"),
        pytest.param(asking(annotations={names.WOKEN: "3@n2"}), id="sent-before"),
        pytest.param(asking(preemptionPolicy="Never"), id="name-would-stay"),
        pytest.param(asking(nodeSelector={"zone": "a"}), id="other-node-is-not-wanted"),
        pytest.param(asking(overhead={"cpu": "1000"}), id="other-node-has-too-little-cpu"),
    ],
)
async def test_pod_that_takes_what_the_sample_has(extender: Extender, pod: dict[str, Any]) -> None:
    """It fits there, and would not get to the other node, or has been refused often enough."""
    assert await filtered(extender, pod) == (["n1"], {})


async def test_complete_offer_is_never_refused_for_better(extender: Extender) -> None:
    """Who was offered both nodes chose between them."""
    assert await filtered(extender, asking(), "n1", "n2") == (["n1", "n2"], {})


async def test_cpu_of_pods_without_gpus_counts(extender: Extender) -> None:
    """A node whose CPU others have is no better one."""
    run_on(extender, "n2", overhead={"cpu": "40"}, name="plain")
    assert await filtered(extender, asking(overhead={"cpu": "30"}), "n1") == (["n1"], {})


async def test_sample_without_room_names_the_node_that_has_it(extender: Extender) -> None:
    """As often as it is asked: the pod is refused anyhow."""
    run_on(extender, "n1", *range(8))
    for _ in range(2):
        assert await filtered(extender, asking(rejected=True)) == ([], {"n1": refusal("n2")})


async def test_nobody_is_refused_while_no_hints_arrive(extender: Extender) -> None:
    """The controllers are down or hints are off there: after a few in vain pods take what the sample has."""
    for number in range(MISSED_MAX):
        assert (await filtered(extender, asking(f"p{number}")))[0] == []
        await filtered(extender, asking(f"p{number}", rejected=True))
    assert (await filtered(extender, asking("next")))[0] == ["n1"]

    await extender.clock.advance(DISTRUST_SECONDS)
    assert (await filtered(extender, asking("later")))[0] == []


def test_hint_that_arrived_restores_trust() -> None:
    """Only misses in a row count."""
    trust = HintTrust(ManualClock())
    for number in range(3 * MISSED_MAX):
        trust.refused(f"p{number}")
        arrived = {names.WOKEN: "3@n2"} if number % MISSED_MAX == 0 else {}
        trust.came_back(make_pod("p", uid=f"p{number}", annotations=arrived))
        assert trust.may_refuse("another")
        assert not trust.may_refuse(f"p{number}")


async def test_victims_come_once_nothing_shows_that_the_free_nodes_are_any_good(extender: Extender) -> None:
    """Sent to free nodes and refused there each time: something that is not known here keeps the pod out."""
    run_on(extender, "n1", *range(8), name="low")
    for number in range(FAILED_MAX):
        name = f"free-{number}"
        extender.mirror.ledger.put_report(make_report(name, PREFERRED))
        extender.mirror.ledger.put_heartbeat(name, extender.clock.monotonic_seconds(), 180.0)
        extender.mirror.nodes.store[("", name)] = make_node(name)
    for name in ("n2", *(f"free-{number}" for number in range(FAILED_MAX))):
        pod = asking("high", priority=5, annotations={names.WOKEN: f"3@{name}"}, nominated=name)
        body = {"Pod": pod, **in_form("meta", "n1", "low")}
        last = await extender.call("preempt", body)
        is_last = name == f"free-{FAILED_MAX - 2}"
        assert bool(last["NodeNameToMetaVictims"]) is (is_last or name == f"free-{FAILED_MAX - 1}")


async def test_pod_is_sent_to_no_node_where_it_was_refused(extender: Extender) -> None:
    """The next name is another one, if there is any."""
    run_on(extender, "n1", *range(8), name="low")
    pod = asking("high", priority=5, annotations={names.WOKEN: "3@n2"}, nominated="n2")
    await extender.call("preempt", {"Pod": pod, **in_form("meta", "n1", "low")})

    assert refusal("n2") not in (await filtered(extender, asking("high", rejected=True)))[1].values()


def test_without_hints_nothing_is_refused_for_them() -> None:
    """The setting is off."""
    from atoll.cluster.ledger import Ledger
    from atoll.cluster.verdicts import FilterInput
    from tests.cluster.test_hints import question

    clock: Clock = ManualClock()
    beyond = BeyondSample(Ledger(), {("", "n1"): make_node("n1"), ("", "n2"): make_node("n2")}, clock, hints=False)
    asked: FilterInput = question(1)
    assert beyond.better(make_pod("p"), 1, asked, None) is None
