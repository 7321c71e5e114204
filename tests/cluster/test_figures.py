"""GPU metrics: every GPU is counted once in its state, and reports cannot create unlimited series."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.gpu_stats import MODELS_MAX, OTHER, GpuState, PendingReason, gpu_stats_of, largest_ask
from atoll.cluster.leases import Holder
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import cell_of
from tests.builders import (
    make_allocation,
    make_devices,
    make_lease,
    make_pod,
    make_report,
    report_json,
    uuid_of,
)
from topology.device_requests import Policy


def heard(ledger: Ledger, *nodes: str) -> Ledger:
    """Let the agents of these nodes be heard at time 0."""
    for node in nodes:
        ledger.put_heartbeat(node, 0.0, 180.0)
    return ledger


def states(ledger: Ledger, now: float = 0.0) -> dict[str, int]:
    """Return the count of GPUs by state, whatever their model."""
    counts: dict[str, int] = {}
    for (_, _, state), count in gpu_stats_of(ledger, now).gpus.items():
        counts[str(state)] = counts.get(str(state), 0) + count
    return counts


def test_each_gpu_is_in_one_state() -> None:
    """Bound, reserved, assumed, in doubt, ill, cordoned and free GPUs of one machine add up to its GPUs."""
    ledger = heard(Ledger(), "n1")
    ledger.put_report(make_report("n1", sick=(4,), cordoned=(5,)))
    ledger.put_pod(make_pod("a", uid="a", node="n1", allocation=make_allocation("n1", 0)))
    ledger.put_lease(make_lease("n1", 1, holder=Holder("team", "b", "b")))
    ledger.assume("c", make_allocation("n1", 2))
    ledger.put_lease(make_lease("n1", 3, holder=Holder("team", "d", "d"), annotations={names.LEASE_IN_DOUBT: "why"}))

    assert states(ledger) == {
        "bound": 1,
        "reserved": 1,
        "assumed": 1,
        "in_doubt": 1,
        "quarantined": 1,
        "cordoned": 1,
        "free": 2,
    }
    figures = gpu_stats_of(ledger, 0.0)
    assert (figures.leases, figures.leases_in_doubt, figures.leases_unreadable) == (2, 1, 0)


def test_silent_node_offers_nothing_and_keeps_what_is_held() -> None:
    """After three missed heartbeats free GPUs are silent ones; what a pod holds it still holds."""
    ledger = heard(Ledger(), "n1")
    ledger.put_report(make_report("n1"))
    ledger.put_pod(make_pod("a", uid="a", node="n1", allocation=make_allocation("n1", 0)))

    assert states(ledger, now=181.0) == {"bound": 1, "silent": 7}
    assert gpu_stats_of(ledger, 181.0).silent_nodes == 1
    assert set(gpu_stats_of(ledger, 181.0).largest_ask.values()) == {0}


def test_a_gpu_whose_users_nobody_can_tell_is_counted_as_such() -> None:
    """Unknown is no foreign use and no absence of one: the GPU is given out, and the figure says how many are so."""
    ledger = heard(Ledger(), "n1")
    report = report_json("n1")
    report["status"]["evidence"] = {"processesRead": False, "usesUnread": [uuid_of("n1", 0), uuid_of("n1", 3)]}
    ledger.put_report(GpuNodeStatus.model_validate(report))
    unknown = [device_id for device_id in range(8) if ledger.is_use_unknown("n1", uuid_of("n1", device_id))]

    assert (unknown, gpu_stats_of(ledger, 0.0).uses_unknown) == ([0, 3], 2)
    assert states(ledger) == {"free": 8}
    ledger.put_report(make_report("n1"))
    assert gpu_stats_of(ledger, 0.0).uses_unknown == 0


def test_waiting_pods_are_counted_by_what_they_wait_behind() -> None:
    """Pods without a node count until they are bound, end, or are being deleted; the oldest is told."""
    ledger = Ledger()
    gates = [{"name": names.GANG_GATE}]
    young, old = (make_pod(name, uid=name) for name in ("young", "old"))
    for pod, created in ((young, "2026-02-02T00:00:00Z"), (old, "2026-02-01T00:00:00Z")):
        metadata = msgspec.structs.replace(pod.metadata, creation_timestamp=created)
        ledger.put_pod(msgspec.structs.replace(pod, metadata=metadata))
    ledger.put_pod(make_pod("gated", uid="gated", schedulingGates=gates))
    ledger.put_pod(make_pod("leaving", uid="leaving", deleted=True))
    ledger.put_pod(make_pod("bound", uid="bound", node="n1", allocation=make_allocation("n1", 0)))
    ledger.put_pod(make_pod("failed", uid="failed", phase="Failed"))

    assert gpu_stats_of(ledger, 0.0).waiting == {PendingReason.QUEUED: 2, PendingReason.GATED: 1}
    ledger.drop_pod("gated")
    assert gpu_stats_of(ledger, 0.0).oldest_created == "2026-02-01T00:00:00Z"


@given(free=st.integers(min_value=0, max_value=255))
def test_largest_ask_is_what_the_islands_allow(free: int) -> None:
    """On a machine of two islands: policy island gets the fuller island, policy contiguous all that is free."""
    shape = make_devices("n1", "l40s-8").shape
    cell = cell_of(shape, free)
    islands = [sum(1 << place for place, numa in enumerate(shape.machine.numa) if numa == one) for one in (0, 1)]

    assert largest_ask(cell, shape.cards[0].model, Policy.ISLAND) == max((free & mask).bit_count() for mask in islands)
    assert largest_ask(cell, shape.cards[0].model, Policy.CONTIGUOUS) == free.bit_count()


def test_models_beyond_the_bound_are_counted_together() -> None:
    """Agents that report a hundred models make a bounded number of series, and no GPU is lost from the sum."""
    ledger = Ledger()
    for number in range(100):
        devices = {device: {"model": f"model-{number}"} for device in range(4)}
        ledger.put_report(make_report(f"n{number}", "t4-4", devices=devices))
        heard(ledger, f"n{number}")

    figures = gpu_stats_of(ledger, 0.0)
    assert len({model for model, _, _ in figures.gpus}) == MODELS_MAX + 1
    assert figures.gpus[OTHER, "", GpuState.FREE] == 4 * (100 - MODELS_MAX)
    assert sum(figures.gpus.values()) == 400
    assert len(figures.largest_ask) == 2 * MODELS_MAX


def test_stranger_on_a_gpu_is_told_as_such() -> None:
    """A GPU that a process of the machine uses is neither free nor held."""
    ledger = heard(Ledger(), "n1")
    report = make_report("n1", "t4-4")
    assert report.status is not None
    uses = [{"uuid": uuid_of("n1", 2), "pid": 1, "program": "python"}]
    told = type(report.status).model_validate({**report.status.to_json(), "hostUses": uses})
    ledger.put_report(report.model_copy(update={"status": told}))

    assert states(ledger) == {"free": 3, "foreign": 1}
