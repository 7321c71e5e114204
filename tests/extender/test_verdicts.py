"""Filter, prioritize and preempt: pure functions of the state that agree with bind."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api import names
from atoll.cluster.cells import TentativePlacement
from atoll.cluster.leases import Holder
from atoll.cluster.ledger import Ledger
from atoll.cluster.requests import Rejection, Request, Verdict, refused_request, request_of
from atoll.cluster.selection import Candidate, select
from atoll.cluster.verdicts import FilterInput, NodeVerdicts, judge_nodes
from tests.builders import make_allocation, make_claim, make_lease, make_pod, make_report
from tests.explain.situations import NO_FABRIC
from topology.choice import Reason

NOW = 1000.0


def machine_room(**profiles: str) -> Ledger:
    """Return a ledger of nodes, each with a fresh heartbeat."""
    ledger = Ledger()
    for node, profile in profiles.items():
        ledger.put_report(make_report(node, profile))
        ledger.put_heartbeat(node, NOW, 180.0)
    return ledger


def ask(count: int = 1, **devices: Any) -> Request:
    """Return the request of a pod with this claim."""
    claim = make_claim(count=count, **devices)
    request = request_of(make_pod(claim=claim, gpus=count), claim)
    assert isinstance(request, Request)
    return request


def take(ledger: Ledger, node: str, *ids: int, uid: str = "other") -> None:
    """Bind a pod to these devices."""
    ledger.put_pod(make_pod(uid=uid, node=node, allocation=make_allocation(node, *ids)))


def judge(
    ledger: Ledger, request: Request | Rejection, node_names: list[str] | None = None, **question: Any
) -> NodeVerdicts:
    """Return the verdicts over all nodes, or those that are named."""
    asked = FilterInput(**{"uid": "u1", "request": request, "now_seconds": NOW, **question})
    return judge_nodes(node_names if node_names is not None else list(ledger.nodes), asked, ledger)


def test_names_that_fit_come_back_in_their_order() -> None:
    """kube-scheduler gets a subset of what it asked for; while any node fits nobody would read the others' reasons."""
    ledger = machine_room(n3="dgx-h100", n1="dgx-h100", n2="dgx-h100")
    take(ledger, "n1", *range(8))

    verdicts = judge(ledger, ask(2), ["n2", "n1", "unknown", "n3"])

    assert list(verdicts.feasible) == ["n2", "n3"]
    assert verdicts.rejected == {}
    assert verdicts.best is not None
    assert verdicts.best.node == "n2"


@pytest.mark.parametrize(
    ("claim", "reasons"),
    [
        ({"count": 8}, {"full": Reason.TOO_FEW_FREE, "small": names.REJECT_NEVER_FITS}),
        ({"count": 9}, {"full": names.REJECT_NEVER_FITS, "small": names.REJECT_NEVER_FITS}),
        ({"models": ["amd-x"]}, {"full": names.REJECT_NO_MODEL, "small": names.REJECT_NO_MODEL}),
        ({"memory": "200Gi"}, {"full": names.REJECT_NO_MEMORY, "small": names.REJECT_NO_MEMORY}),
        ({"count": 2, "policy": "island"}, {"full": Reason.TOO_FEW_FREE, "small": Reason.TOO_FEW_FREE}),
    ],
    ids=str,
)
def test_pod_that_fits_nowhere_hears_why_of_every_node(claim: dict[str, Any], reasons: dict[str, str]) -> None:
    """Every node has one short constant reason; silent and unknown nodes have theirs."""
    ledger = machine_room(full="dgx-h100", small="l40s-4", silent="dgx-h100")
    take(ledger, "full", *range(8))
    take(ledger, "small", 0, 1, 2, 3, uid="another")
    ledger.put_heartbeat("silent", NOW - 181, 180.0)

    verdicts = judge(ledger, ask(**claim), ["full", "small", "silent", "unknown"])

    unseen = {"silent": names.REJECT_STALE_REPORT, "unknown": names.REJECT_NO_REPORT}
    assert verdicts.rejected == {**reasons, **unseen}


@pytest.mark.parametrize(
    ("claim", "asked", "verdict"),
    [
        pytest.param({"count": 2}, ["free", "full"], Verdict.FITS, id="one node has room"),
        pytest.param({"count": 8}, ["full", "small", "silent"], Verdict.BUSY, id="others hold what it could have"),
        pytest.param({"count": 8}, ["small", "sick"], Verdict.UNKNOWN, id="a card that is withheld may come back"),
        pytest.param({"count": 8}, ["small", "silent"], Verdict.UNKNOWN, id="an agent that is silent may speak again"),
        pytest.param({"count": 8}, ["small", "strange"], Verdict.UNKNOWN, id="a node that never reported may have it"),
        pytest.param({"count": 8}, ["small"], Verdict.NEVER, id="the only machine is too small"),
        pytest.param({"models": ["amd-x"]}, ["free", "full"], Verdict.NEVER, id="no machine has the model"),
        pytest.param({"count": 8}, ["small", "unready"], Verdict.UNKNOWN, id="an NVLink fabric may become ready"),
        pytest.param({"count": 8}, ["small", "partly"], Verdict.UNKNOWN, id="one card's NVLink fabric may"),
        pytest.param({"count": 9}, ["small", "unready"], Verdict.NEVER, id="too small with any fabric"),
        pytest.param({"count": 1}, [], Verdict.UNKNOWN, id="no node is asked about"),
    ],
)
def test_filter_says_whether_it_is_busy_unknown_or_never(
    claim: dict[str, Any], asked: list[str], verdict: Verdict
) -> None:
    """The verdict on all nodes together is that of explanations, events and gangs, from the same function."""
    ledger = machine_room(free="dgx-h100", full="dgx-h100", small="l40s-4", silent="dgx-h100")
    ledger.put_report(make_report("sick", "dgx-h100", sick=[3]))
    ledger.put_report(make_report("unready", "dgx-h100", devices=dict.fromkeys(range(8), NO_FABRIC)))
    ledger.put_report(make_report("partly", "dgx-h100", devices={5: NO_FABRIC}))
    for name in ("sick", "unready", "partly"):
        ledger.put_heartbeat(name, NOW, 180.0)
    take(ledger, "full", *range(8))
    ledger.put_heartbeat("silent", NOW - 181, 180.0)

    assert judge(ledger, ask(**claim), asked).verdict is verdict


def test_request_that_is_rejected_is_rejected_everywhere() -> None:
    """A pod without its claim fits no node, and says so of each."""
    ledger = machine_room(n1="dgx-h100", n2="dgx-h100")

    assert judge(ledger, refused_request(names.REJECT_CLAIM_MISSING)) == NodeVerdicts(
        Verdict.UNKNOWN, rejected={"n1": names.REJECT_CLAIM_MISSING, "n2": names.REJECT_CLAIM_MISSING}
    )
    assert judge(ledger, refused_request(names.REJECT_COUNT_MISMATCH)).verdict is Verdict.NEVER


def test_best_node_is_first_by_model_then_cost_then_name() -> None:
    """The claim's first model wins over any cost; equal machines are ordered by name."""
    ledger = machine_room(b="dgx-h100", a="dgx-h100", c="dgx1-v100")

    assert _best(judge(ledger, ask(2))) in {"a", "c"}
    assert _best(judge(ledger, ask(2, models=["nvidia-h100", "nvidia-v100"]))) == "a"
    assert _best(judge(ledger, ask(2, models=["nvidia-v100", "nvidia-h100"]))) == "c"
    take(ledger, "c", *range(8))
    assert _best(judge(ledger, ask(2, models=["nvidia-v100", "nvidia-h100"]))) == "a"


def test_fuller_machine_is_preferred() -> None:
    """Small pods go where they fragment least: whole machines stay for those who need them."""
    ledger = machine_room(a="dgx-h100", b="dgx-h100")
    take(ledger, "b", 0, 1, 2, 3, 4, 5)

    assert _best(judge(ledger, ask(2))) == "b"


def _best(verdicts: NodeVerdicts) -> str:
    assert verdicts.best is not None
    return verdicts.best.node


def test_pod_goes_back_to_the_node_of_its_leases() -> None:
    """A pod whose earlier attempt is in doubt is offered that node alone, with the devices that it holds."""
    ledger = machine_room(n1="t4-4", n2="t4-4")
    for device_id in range(4):
        ledger.put_lease(make_lease("n2", device_id, holder=Holder("team", "p", "u1")))

    verdicts = judge(ledger, ask(4))
    assert list(verdicts.feasible) == ["n2"]

    take(ledger, "n2", 3)
    verdicts = judge(ledger, ask(4))
    assert verdicts.rejected == {"n1": names.REJECT_HOLDS_ELSEWHERE, "n2": str(Reason.TOO_FEW_FREE)}
    assert list(judge(ledger, ask(4), uid="u2").feasible) == ["n1"]


def test_node_where_bind_just_failed_is_avoided_while_others_fit() -> None:
    """A node that cannot be bound is not chosen again and again, and is not lost either."""
    ledger = machine_room(n1="t4-4", n2="t4-4")

    assert list(judge(ledger, ask(1), failed_nodes=frozenset({"n1"})).feasible) == ["n2"]
    take(ledger, "n2", 0, 1, 2, 3)
    assert list(judge(ledger, ask(1), failed_nodes=frozenset({"n1"})).feasible) == ["n1"]


def test_next_pod_counts_what_the_last_one_will_take() -> None:
    """Between filter and bind of one pod the next pod is filtered: what is expected is not offered twice."""
    ledger = machine_room(n1="t4-4")
    ledger.put_tentative("u1", TentativePlacement("n1", (0, 1, 2), NOW + 10))

    assert judge(ledger, ask(2), uid="u2").rejected == {"n1": str(Reason.TOO_FEW_FREE)}
    assert list(judge(ledger, ask(4), uid="u1").feasible) == ["n1"]
    assert list(judge(ledger, ask(2), uid="u2", now_seconds=NOW + 10).feasible) == ["n1"]


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 7)), max_size=6),
    st.integers(1, 8),
    st.sampled_from(["contiguous", "island", "packed", "spread"]),
    st.permutations(range(6)),
)
def test_sweep_agrees_with_node_by_node(used: dict[int, set[int]], count: int, policy: str, order: list[int]) -> None:
    """The sweep over cells gives exactly what bind's choice gives node by node, whatever the order of the names."""
    profiles = ["dgx-h100", "dgx-h100", "dgx1-v100", "dgx1-v100", "l40s-8", "l40s-4"]
    ledger = machine_room(**{f"n{i}": profile for i, profile in enumerate(profiles)})
    for number, ids in used.items():
        if ids:
            take(ledger, f"n{number}", *ids, uid=f"on-{number}")
    request = ask(count, policy=policy)

    verdicts = judge(ledger, request, [f"n{i}" for i in order])

    answers = {
        f"n{i}": select(ledger.nodes[f"n{i}"], ledger.free(f"n{i}", now_seconds=NOW), request, ledger.demand)
        for i in order
    }
    candidates = [answer for answer in answers.values() if isinstance(answer, Candidate)]
    assert list(verdicts.feasible) == [candidate.node for candidate in candidates]
    assert verdicts.best == min(candidates, key=lambda candidate: candidate.order, default=None)
    if not candidates:
        assert verdicts.rejected == {n: a.reason for n, a in answers.items() if isinstance(a, Rejection)}
