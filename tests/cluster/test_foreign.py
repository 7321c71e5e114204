"""Foreign use: a GPU in foreign use counts as occupied, and there are no false findings."""

from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.holds import HoldSource
from atoll.cluster.leases import Holder
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import decode_pod
from tests.builders import make_allocation, make_lease, make_pod, pod_json, report_json, uuid_of

NOW = 1000.0


def seen(
    *, sequence: int = 1, position: str = "", host: Mapping[int, tuple[int, ...]] | None = None, **pods: tuple[int, ...]
) -> GpuNodeStatus:
    """Return a report of n1 on which these pods, and processes outside of pods, use GPUs with these ids."""
    body = report_json("n1")
    body["status"]["evidence"] = {"sequence": sequence, "podResourceVersion": position}
    body["status"]["pods"] = [
        {"uid": uid, "live": True, "uuids": [uuid_of("n1", number) for number in ids]} for uid, ids in pods.items()
    ]
    body["status"]["hostUses"] = [
        {"uuid": uuid_of("n1", number), "count": len(pids), "pids": list(pids)} for number, pids in (host or {}).items()
    ]
    return GpuNodeStatus.model_validate_json(orjson.dumps(body))


def ledger_with(report: GpuNodeStatus, *pods: Any, leases: tuple[Any, ...] = ()) -> Ledger:
    """Return a ledger that has taken these, the report last."""
    ledger = Ledger()
    ledger.put_heartbeat("n1", NOW, 180.0)
    for lease in leases:
        ledger.put_lease(lease)
    for pod in pods:
        ledger.put_pod(pod)
    ledger.put_report(report)
    return ledger


def occupied(ledger: Ledger) -> set[int]:
    """Return the ids of the GPUs that nobody can get."""
    devices = ledger.nodes["n1"]
    mask = ledger.free("n1", now_seconds=NOW)
    return {device.id for position, device in enumerate(devices.devices) if not mask >> position & 1}


def foreign(ledger: Ledger) -> set[tuple[int, str]]:
    """Return id and user of every foreign use."""
    return {
        (device.id, use.pod_uid)
        for device in ledger.nodes["n1"].devices
        for use in ledger.foreign_uses("n1", device.uuid)
    }


HOLDER = make_pod("a", uid="a", node="n1", phase="Running", allocation=make_allocation("n1", 0, 1))
PLAIN = make_pod("plain", uid="plain", gpus=None, node="n1", phase="Running")


@pytest.mark.parametrize(
    ("report", "pods", "leases", "expected"),
    [
        pytest.param(seen(), (HOLDER,), (), set(), id="nobody-on-a-gpu"),
        pytest.param(seen(a=(0, 1)), (HOLDER,), (), set(), id="a-pod-uses-what-it-holds"),
        pytest.param(seen(a=(0, 5)), (HOLDER,), (), {(5, "a")}, id="a-pod-uses-more-than-it-holds"),
        pytest.param(seen(b=(1,)), (HOLDER,), (), {(1, "b")}, id="somebody-on-a-held-gpu"),
        pytest.param(seen(plain=(3, 4)), (), (), {(3, "plain"), (4, "plain")}, id="a-pod-that-is-not-ours"),
        pytest.param(seen(host={7: (4711,)}), (), (), {(7, "")}, id="a-process-of-the-machine"),
        pytest.param(seen(u=(2,)), (), (make_lease("n1", 2, holder=Holder("team", "u", "u")),), set(),
                     id="reserved-and-not-seen-bound"),
        pytest.param(seen(u=(3,)), (), (make_lease("n1", 2, holder=Holder("team", "u", "u")),), {(3, "u")},
                     id="reserved-another-gpu"),
        pytest.param(seen(gone=(2,)), (), (), {(2, "gone")}, id="a-pod-that-nobody-knows"),
        pytest.param(seen(a=(0, 1)), (make_pod("a", uid="a", node="n1", phase="Succeeded",
                     allocation=make_allocation("n1", 0, 1)),), (), set(), id="ended-and-the-report-is-older"),
    ],
)  # fmt: skip
def test_who_is_foreign(
    report: GpuNodeStatus, pods: tuple[Any, ...], leases: tuple[Any, ...], expected: set[tuple[int, str]]
) -> None:
    """A use is foreign unless the pod holds that very GPU; a foreign use occupies it, and its name is told."""
    ledger = ledger_with(report, *pods, leases=leases)

    assert foreign(ledger) == expected
    held = {number for pod in pods if pod.status.phase == "Running" for number in (0, 1)}
    assert occupied(ledger) == held | {lease_id for lease_id in (2,) if leases} | {number for number, _ in expected}
    for number, _ in expected:
        holds = ledger.holds("n1", number, uuid_of("n1", number))
        assert any(hold.source is HoldSource.FOREIGN for hold in holds)


def test_gpu_is_free_as_soon_as_its_holder_has_ended_though_the_last_report_shows_it() -> None:
    """The proof came from kubelet; the agent's next look is up to half a minute away, and must not cost that."""
    ledger = ledger_with(seen(sequence=7, a=(0, 1)), HOLDER, leases=tuple(
        make_lease("n1", number, holder=Holder("team", "a", "a")) for number in (0, 1)))  # fmt: skip
    ledger.drop_pod("a")
    assert occupied(ledger) == {0, 1}, "its Leases are still there"
    for number in (0, 1):
        ledger.drop_lease(f"gpu-n1-{number}")
    assert occupied(ledger) == set()


def test_pod_that_a_newer_report_still_shows_is_foreign() -> None:
    """A container that outlived every proof occupies its GPUs: reality wins."""
    ledger = ledger_with(seen(sequence=7, a=(0, 1)), HOLDER)
    ledger.drop_pod("a")
    assert occupied(ledger) == set()
    ledger.put_report(seen(sequence=8, a=(0, 1)))
    assert occupied(ledger) == {0, 1}
    ledger.put_report(seen(sequence=9))
    assert occupied(ledger) == set()


def test_asking_pod_does_not_get_a_gpu_of_its_own_lease_that_somebody_else_uses() -> None:
    """A repeat of its bind would otherwise take it after all."""
    ledger = ledger_with(seen(plain=(2,)), leases=(make_lease("n1", 2, holder=Holder("team", "u", "u")),))
    assert not ledger.free("n1", now_seconds=NOW, asking_uid="u") & 1 << 2


def test_cells_that_filter_judges_by_leave_foreign_gpus_out() -> None:
    """Filter, bind and wake-up see the same."""
    ledger = ledger_with(seen(plain=(3, 4)), PLAIN)
    assert ledger.cells(now_seconds=NOW)["n1"].free == 0b11100111


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcx"), st.frozensets(st.integers(0, 7), min_size=1, max_size=3), max_size=4),
    st.frozensets(st.integers(0, 7), max_size=2),
)
def test_no_gpu_is_sold_that_anybody_uses(users: dict[str, frozenset[int]], host: frozenset[int]) -> None:
    """Whoever is seen, holders or not: what the ledger calls free is neither held nor used."""
    holders = {"a": (0, 1), "b": (2,), "c": (3, 4)}
    held = [
        make_pod(uid, uid=uid, node="n1", phase="Running", allocation=make_allocation("n1", *ids))
        for uid, ids in holders.items()
    ]
    report = seen(host=dict.fromkeys(host, (1,)), **{uid: tuple(ids) for uid, ids in users.items()})
    ledger = ledger_with(report, *held)

    expected = {number for ids in holders.values() for number in ids} | set(host)
    for ids in users.values():
        expected |= ids
    assert occupied(ledger) == expected


def with_pod_at_work(*, position: str) -> Ledger:
    """Return a ledger in which pod a holds GPU 0, and a report from that position of the watch shows it there."""
    running = make_pod("a", node="n1", phase="Running", allocation=make_allocation("n1", 0), version="5")
    lease = make_lease("n1", 0, holder=Holder("team", "a", "uid-of-a"))
    return ledger_with(seen(sequence=1, position=position, **{"uid-of-a": (0,)}), running, leases=(lease,))


@pytest.mark.parametrize("is_gone", [True, False], ids=["deleted by force", "set Failed by somebody else"])
def test_container_at_work_keeps_its_gpu_when_its_lease_is_deleted_by_hand(*, is_gone: bool) -> None:
    """A report that is past the pod's departure and shows its processes is no old news: the GPU is not sold."""
    ledger = with_pod_at_work(position="5")
    failed = make_pod("a", node="n1", phase="Failed", allocation=make_allocation("n1", 0), version="10")
    if is_gone:
        ledger.drop_pod("uid-of-a", final=failed)
    else:
        ledger.put_pod(failed)
    ledger.put_report(seen(sequence=2, position="12", **{"uid-of-a": (0,)}))
    assert occupied(ledger) == {0}

    ledger.drop_lease("gpu-n1-0", version=20)
    assert foreign(ledger) == {(0, "uid-of-a")}
    assert occupied(ledger) == {0}


@pytest.mark.parametrize("is_gone", [True, False], ids=["deleted", "ended"])
def test_report_from_before_the_end_keeps_no_gpu(*, is_gone: bool) -> None:
    """What kubelet has ended is free with its Lease, although the report still shows the pod at work."""
    ledger = with_pod_at_work(position="9")
    body = pod_json("a", node="n1", phase="Succeeded", allocation=make_allocation("n1", 0), version="10")
    body["status"]["containerStatuses"] = [{"name": "main", "state": {"terminated": {"exitCode": 0}}}]
    ended = decode_pod(orjson.dumps(body))
    ledger.put_pod(ended)
    if is_gone:
        ledger.drop_pod("uid-of-a", final=ended)
    ledger.drop_lease("gpu-n1-0", version=20)
    assert occupied(ledger) == set()
