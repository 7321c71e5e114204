"""What the ledger of the cluster says of every GPU, for the account of its time."""

from collections import Counter
from typing import Any

import pytest

from atoll.api import job_names
from atoll.cluster.leases import Holder, reserved_for
from atoll.cluster.ledger import Ledger
from atoll.jobs.costs.evidence import PricedNodes, gpu_facts
from atoll.jobs.costs.prices import PriceTable
from atoll.jobs.costs.spans import WHOLE_PPM, GpuFact, TimeUse
from tests.builders import make_allocation, make_lease, make_pod, make_report, uuid_of

PRICES = PriceTable.model_validate({"gpus": [{"gpu": "A100", "usd_per_hour": 2}]})
JOB = "99999999-0000-4000-8000-000000000000"


def facts_of(*, stale: bool = False, spot: bool = False, **status: Any) -> dict[str, GpuFact]:
    """Return the facts of one machine with four A100: the pod holds device 0, waits are none."""
    ledger, report = Ledger(), make_report("n1", "dgx-a100", status=status)
    ledger.put_report(report)
    ledger.put_heartbeat("n1", 0.0, 60.0)
    ledger.put_lease(make_lease("n1", 0))
    ledger.put_pod(
        make_pod("p", node="n1", allocation=make_allocation("n1", 0), phase="Running", labels={job_names.JOB_ID: JOB})
    )
    nodes = frozenset({"n1"}) if spot else frozenset[str]()
    seconds = 100.0 if stale else 1.0
    return gpu_facts(ledger, {"n1": report}, PricedNodes(PRICES, nodes), lambda _pod: (), now_seconds=seconds)


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([{"uid": "uid-of-p", "live": True, "uuids": [uuid_of("n1", 0)]}], TimeUse.USED, id="its process"),
        pytest.param([{"uid": "uid-of-p", "live": True, "uuids": []}], TimeUse.IDLE, id="no process of it"),
        pytest.param([], TimeUse.USED, id="not read yet"),
    ],
)
def test_a_held_gpu_is_used_or_idle_by_its_processes(pods: list[Any], expected: TimeUse) -> None:
    """The report shows the processes of the pod; the Lease and the pod's label say whose the GPU is."""
    found = facts_of(pods=pods)
    held = found[uuid_of("n1", 0)]

    assert held.use is expected
    assert (held.account.namespace, held.account.job_id, held.account.pod_uid) == ("team", JOB, "uid-of-p")
    assert held.price_micros == 2_000_000
    assert Counter(fact.use for fact in found.values()) == {expected: 1, TimeUse.FREE: 7}


def test_processes_that_could_not_be_read_prove_no_idleness() -> None:
    """A running pod counts as using its GPU where the agent says that it could not look."""
    pods = [{"uid": "uid-of-p", "live": True, "uuids": []}]

    assert facts_of(pods=pods, evidence={"processesRead": False})[uuid_of("n1", 0)].use is TimeUse.USED
    assert facts_of(pods=pods, evidence={"usesUnread": [uuid_of("n1", 0)]})[uuid_of("n1", 0)].use is TimeUse.USED


def test_a_silent_machine_has_nothing_to_give_and_keeps_what_is_held() -> None:
    """Its free GPUs are unavailable; its pod holds on, and is charged the spot price on a spot machine."""
    found = facts_of(stale=True, spot=True)

    assert Counter(fact.use for fact in found.values()) == {TimeUse.USED: 1, TimeUse.UNAVAILABLE: 7}
    assert found[uuid_of("n1", 0)].price_micros == 600_000


def test_what_is_held_by_nobody_who_runs_is_reserved() -> None:
    """A Lease whose pod was never seen, one that a GpuReservation holds, a pod that starts, and one that ends."""
    ledger, report = Ledger(), make_report("n1", "dgx-a100", sick=(7,))
    ledger.put_report(report)
    ledger.put_heartbeat("n1", 0.0, 60.0)
    ledger.put_lease(make_lease("n1", 0, holder=Holder("team", "gone", "uid-of-gone")))
    ledger.put_lease(make_lease("n1", 1, holder=reserved_for("kept/uid-1", "n1", "uid-of-n1", "").holder))
    ledger.put_pod(make_pod("starts", node="n1", allocation=make_allocation("n1", 2)))
    ledger.put_pod(make_pod("ends", node="n1", allocation=make_allocation("n1", 3), phase="Running", deleted=True))
    found = gpu_facts(ledger, {"n1": report}, PricedNodes(PRICES), lambda _pod: (), now_seconds=1.0)

    assert [found[uuid_of("n1", number)].use for number in range(4)] == [TimeUse.RESERVED] * 4
    assert found[uuid_of("n1", 7)].use is TimeUse.UNAVAILABLE


@pytest.mark.parametrize(
    ("count", "models", "expected"),
    [
        pytest.param(8, (), TimeUse.STRANDED, id="ten are free, five on each machine"),
        pytest.param(8, ("nvidia-a100",), TimeUse.STRANDED, id="of its model"),
        pytest.param(8, ("nvidia-h100",), TimeUse.FREE, id="it wants another model"),
        pytest.param(5, (), TimeUse.FREE, id="it fits"),
        pytest.param(11, (), TimeUse.FREE, id="there are not enough anyway"),
    ],
)
def test_free_gpus_are_stranded_while_a_pod_waits_that_needs_them_together(
    count: int, models: tuple[str, ...], expected: TimeUse
) -> None:
    """Only where moving pods would help: enough are free, and no machine has as many."""
    ledger, reports = Ledger(), {}
    for node in ("n1", "n2"):
        reports[node] = make_report(node, "dgx-a100")
        ledger.put_report(reports[node])
        ledger.put_heartbeat(node, 0.0, 60.0)
        ledger.put_pod(make_pod(node, node=node, allocation=make_allocation(node, 0, 1, 2), phase="Running"))
    ledger.put_pod(make_pod("waits", gpus=count))
    found = gpu_facts(ledger, reports, PricedNodes(PRICES), lambda _pod: models, now_seconds=1.0)

    assert {fact.use for fact in found.values() if not fact.account.pod_uid} == {expected}


def test_the_instances_of_a_card_share_it_and_its_price() -> None:
    """COST-4: 3g.40gb of an 80 GB card is half of it, 1g.10gb an eighth; with the rest they are one GPU, and one
    price."""
    card, half, eighth = (uuid_of("n1", number) for number in range(3))
    report = make_report(
        "n1",
        "dgx-a100",
        devices={
            0: {"mig": {"enabled": True}, "memoryBytes": 80 * 2**30},
            1: {"mig": {"profile": "3g.40gb", "parentUuid": card}, "memoryBytes": 0},
            2: {"mig": {"profile": "1g.10gb", "parentUuid": card}, "memoryBytes": 0},
        },
    )
    ledger = Ledger()
    ledger.put_report(report)
    ledger.put_heartbeat("n1", 0.0, 60.0)
    ledger.put_lease(make_lease("n1", 1))
    found = gpu_facts(ledger, {"n1": report}, PricedNodes(PRICES), lambda _pod: (), now_seconds=1.0)

    assert [found[uuid].share_ppm for uuid in (card, half, eighth)] == [375_000, 500_000, 125_000]
    assert sum(found[uuid].share_ppm for uuid in (card, half, eighth)) == WHOLE_PPM
    assert [found[uuid].use for uuid in (card, half, eighth)] == [TimeUse.UNAVAILABLE, TimeUse.RESERVED, TimeUse.FREE]
    assert {found[uuid].price_micros for uuid in (card, half, eighth)} == {2_000_000}
