"""Reservations in the controllers: held whatever write is lost, returned on proof, free after their deletion."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import orjson
import pytest

from atoll.api import names
from atoll.api.reservations import GpuReservation
from atoll.api.times import text_of
from atoll.cluster.leases import Holder
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import decode_node
from atoll.jobs.rendering import render
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import ClusterMirror, WatchedKind
from controllers.context import Context
from controllers.reservations import ReservationReconciler
from tests.builders import lease_json, make_allocation, make_lease, make_report, pod_json
from tests.controllers.harness import (
    LEASES,
    PODS,
    ControllerHarness,
    InMemoryServer,
    running_controllers,
    strip_version,
)
from tests.fakes.clock import ManualClock
from tests.jobs.render import job
from tests.service.test_metrics import samples

RESERVATIONS = "/apis/gpu.scheduling/v1/gpureservations"
MARK = "nightly/uid-of-nightly"
OWN = f"@reservation/{MARK}"


def put_reservation(server: InMemoryServer, count: int = 4, **spec: Any) -> None:
    """Put the reservation nightly on the server."""
    metadata = {"name": "nightly", "uid": "uid-of-nightly", "generation": 1}
    body = {"metadata": metadata, "spec": {"shape": {"count": count}, "namespaces": ["team"], **spec}}
    server.put(f"{RESERVATIONS}/nightly", body)


def put_user(
    server: InMemoryServer,
    device_id: int,
    *,
    ended: bool,
    is_stranger: bool = False,
    annotations: Mapping[str, str] | None = None,
) -> None:
    """Put a pod that took a Lease over from the reservation, or one that has nothing to do with it, and perhaps was
    ended by kubelet."""
    allocation = make_allocation("n1", device_id)
    named = {} if is_stranger else annotations or {names.RESERVATION: "nightly"}
    body = pod_json("user", node="n1", allocation=allocation, annotations=named)
    status: dict[str, Any] = {"phase": "Running"}
    if ended:
        state = {"name": "main", "state": {"terminated": {"exitCode": 0}}}
        status = {"phase": "Succeeded", "containerStatuses": [state]}
    server.put(f"{PODS}/user", strip_version({**body, "status": status}))
    holder = Holder("team", "user", "uid-of-user")
    annotations = {} if is_stranger else {names.RESERVATION: MARK}
    lease = lease_json("n1", device_id, holder=holder, annotations=annotations)
    if f"{LEASES}/gpu-n1-{device_id}" not in server.objects:
        server.put(f"{LEASES}/gpu-n1-{device_id}", strip_version(lease))


def holders(running: ControllerHarness) -> list[str]:
    """Return who holds the GPUs, sorted."""
    found = (one for path, one in running.server.objects.items() if path.startswith(f"{LEASES}/gpu-"))
    return sorted(str(one["spec"]["holderIdentity"]) for one in found)


def status(running: ControllerHarness) -> dict[str, Any]:
    """Return the status of the reservation."""
    found: dict[str, Any] = running.server.objects[f"{RESERVATIONS}/nightly"].get("status") or {}
    return found


@pytest.mark.parametrize(("fails_at", "is_after"), [(n, after) for n in range(6) for after in (False, True)])
async def test_gpus_are_held_whichever_write_is_lost(tmp_path: Path, fails_at: int, *, is_after: bool) -> None:
    """As many as it should, in its own name; and its status says so."""
    async with running_controllers(tmp_path, put_reservation, fails_at=fails_at, is_after=is_after) as running:
        await running.settled(lambda: holders(running) == [OWN] * 4 and status(running).get("phase") == "Active")
        assert (status(running)["idle"], status(running)["used"]) == (4, 0)
        await running.settled(
            lambda: (names.REASON_RESERVATION_ACTIVE, "nightly") in running.notes.recorded or fails_at
        )


@pytest.mark.parametrize("fails_at", range(4))
async def test_gpu_of_an_ended_pod_goes_back_to_it(tmp_path: Path, fails_at: int) -> None:
    """On the proof that frees any GPU, and not to whoever waits; while the pod runs it keeps its own."""

    def used(server: InMemoryServer) -> None:
        put_reservation(server, 2)
        put_user(server, 0, ended=False)

    async with running_controllers(tmp_path, used, fails_at=fails_at) as running:
        await running.settled(lambda: holders(running) == [OWN, "team/user/uid-of-user"])
        await running.settled(lambda: (status(running).get("idle"), status(running).get("used")) == (1, 1))
        put_user(running.server, 0, ended=True)
        await running.settled(lambda: holders(running) == [OWN] * 2)
        deleted = [path for method, path in running.api.writes if method == "DELETE"]
        assert not deleted, "it was never free in between"


async def test_it_frees_what_is_idle_when_it_is_deleted_and_its_pods_keep_theirs(tmp_path: Path) -> None:
    """Nobody would free it otherwise. What comes back to a reservation that is gone is everybody's. What it takes and
    frees is counted."""

    def used(server: InMemoryServer) -> None:
        put_reservation(server, 3)
        put_user(server, 0, ended=False)

    async with running_controllers(tmp_path, used) as running:
        await running.settled(lambda: holders(running) == [OWN] * 2 + ["team/user/uid-of-user"])
        running.server.remove(f"{RESERVATIONS}/nightly")
        await running.settled(lambda: holders(running) == ["team/user/uid-of-user"])
        counted = lambda did: samples(running.metrics)["atoll_controllers_reserved_gpus_total", did]  # noqa: E731
        await running.settled(lambda: (counted("taken"), counted("freed")) == (2.0, 2.0))
        put_user(running.server, 0, ended=True)
        await running.settled(lambda: holders(running) == [])


@pytest.mark.parametrize("fails_at", range(4))
@pytest.mark.parametrize("is_inside", [False, True], ids=["outside", "inside"])
async def test_reservation_gives_up_a_gpu_that_a_pod_is_bound_with(
    tmp_path: Path, fails_at: int, *, is_inside: bool
) -> None:
    """Somebody deleted the pod's Lease, and a late request of the reservation came before the repair: the pod gets the
    Lease, and the reservation another GPU. The mark on it says whether the GPU returns to the reservation."""

    def taken(server: InMemoryServer) -> None:
        put_reservation(server, 2)
        marks = {names.RESERVATION: "nightly"} if is_inside else {}
        body = pod_json("user", node="n1", allocation=make_allocation("n1", 0), annotations=marks)
        server.put(f"{PODS}/user", strip_version({**body, "status": {"phase": "Running"}}))
        for device_id in (0, 1):
            holder = Holder("@reservation", "nightly", "uid-of-nightly")
            lease = lease_json("n1", device_id, holder=holder, annotations={names.RESERVATION: MARK})
            server.put(f"{LEASES}/gpu-n1-{device_id}", strip_version(lease))

    async with running_controllers(tmp_path, taken, fails_at=fails_at) as running:
        kept = [OWN] if is_inside else [OWN] * 2
        await running.settled(lambda: holders(running) == [*kept, "team/user/uid-of-user"])
        lease = running.lease(0)
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == "team/user/uid-of-user"
        assert lease["metadata"]["annotations"].get(names.RESERVATION) == (MARK if is_inside else None)


@pytest.mark.parametrize("fails_at", range(4))
async def test_a_gpu_that_a_pod_lets_go_fills_a_reservation_without_being_free_in_between(
    tmp_path: Path, fails_at: int
) -> None:
    """A waiting pod would be faster otherwise: the Lease changes hands on the proof that the pod has ended."""

    def lacking(server: InMemoryServer) -> None:
        put_reservation(server, 8)
        put_user(server, 0, ended=False, is_stranger=True)

    async with running_controllers(tmp_path, lacking, fails_at=fails_at) as running:
        await running.settled(lambda: (status(running).get("phase"), status(running).get("idle")) == ("Filling", 7))
        put_user(running.server, 0, ended=True, is_stranger=True)
        await running.settled(lambda: holders(running) == [OWN] * 8 and status(running).get("phase") == "Active")
        assert [path for method, path in running.api.writes if method == "DELETE"] == []


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({}, [OWN] * 7, id="it has enough"),
        pytest.param({"shape": {"count": 8, "unit": "node"}}, [], id="it takes whole nodes, and another GPU is taken"),
        pytest.param({"shape": {"count": 8, "models": ["nvidia-l4"]}}, [], id="it takes other models"),
    ],
)
async def test_a_gpu_that_no_reservation_takes_is_free(tmp_path: Path, spec: dict[str, Any], want: list[str]) -> None:
    """Only what the reservation would take itself is handed over."""

    def put(server: InMemoryServer) -> None:
        put_reservation(server, 7, **spec)
        put_user(server, 0, ended=False, is_stranger=True)
        other = Holder("team", "other", "uid-of-other")
        if want == []:
            server.put(
                f"{PODS}/other", strip_version(pod_json("other", node="n1", allocation=make_allocation("n1", 1)))
            )
            server.put(f"{LEASES}/gpu-n1-1", strip_version(lease_json("n1", 1, holder=other)))

    async with running_controllers(tmp_path, put) as running:
        await running.settled(lambda: status(running).get("phase") == ("Active" if want else "Filling"))
        put_user(running.server, 0, ended=True, is_stranger=True)
        await running.settled(lambda: f"{LEASES}/gpu-n1-0" not in running.server.objects)
        assert holders(running) == (want or ["team/other/uid-of-other"])


@pytest.mark.parametrize(
    ("spec", "phase"),
    [
        pytest.param({}, "Released", id="of-one-team"),
        pytest.param({"serviceAccounts": ["other/robot"]}, "Active", id="of-two-teams"),
    ],
)
async def test_a_job_says_how_long_its_reservation_waits_for_the_next(
    tmp_path: Path, spec: dict[str, Any], phase: str
) -> None:
    """From its attribute to the release, for its own team alone; while its pod runs, nothing is released."""
    asked = job(
        attributes={"ext_ml_gpu_count": 1, "ext_ml_reservation_id": "nightly", "ext_ml_reservation_timeout_s": 1}
    )
    (workload,) = (one for one in render(asked).objects if one["kind"] == "Job")
    annotations = workload["spec"]["template"]["metadata"]["annotations"]

    def used(server: InMemoryServer) -> None:
        put_reservation(server, 2, **spec)
        put_user(server, 0, ended=False, annotations=annotations)

    async with running_controllers(tmp_path, used) as running:
        await running.settled(lambda: status(running).get("askedTimeoutSeconds") == 1)
        put_user(running.server, 0, ended=True, annotations=annotations)
        await running.settled(lambda: status(running).get("used") == 0)
        await running.settled(
            lambda: (status(running)["phase"], len(holders(running))) == (phase, 2 * (phase == "Active"))
        )


@pytest.mark.parametrize(("node", "affected"), [("n1", {"uid-of-nightly"}), ("n2", set())])
def test_a_report_concerns_the_reservations_that_hold_gpus_of_its_node(node: str, affected: set[str]) -> None:
    """One of them may have failed, or be gone."""
    ledger = Ledger()
    ledger.put_lease(make_lease("n1", 0, annotations={names.RESERVATION: MARK}))
    mirror = SimpleNamespace(ledger=ledger, reservations=SimpleNamespace(store={}))
    reconciler = ReservationReconciler(cast("Context", SimpleNamespace(mirror=mirror)))

    change = Change(ChangeKind.MODIFIED, make_report(node), make_report(node))
    assert set(reconciler.affected(WatchedKind.REPORT, change)) == affected


@pytest.mark.parametrize(("unschedulable", "taken"), [(False, 1), (True, 0)], ids=["open", "cordoned"])
async def test_a_reservation_takes_no_gpu_of_a_cordoned_node(taken: int, *, unschedulable: bool) -> None:
    """No pod could be bound there to use it."""
    ledger, api, clock = Ledger(), AsyncMock(), ManualClock()
    ledger.put_report(make_report("n1"))
    ledger.put_heartbeat("n1", clock.monotonic_seconds(), 180.0)
    spec = {"shape": {"count": 1}, "namespaces": ["team"]}
    asked = GpuReservation.model_validate({"metadata": {"name": "nightly", "uid": "uid-of-nightly"}, "spec": spec})
    node = decode_node(orjson.dumps({"metadata": {"name": "n1"}, "spec": {"unschedulable": unschedulable}}))
    mirror = SimpleNamespace(
        ledger=ledger,
        reports={},
        nodes=SimpleNamespace(store={("", "n1"): node}),
        pods=SimpleNamespace(by_uid={}),
        reservations=SimpleNamespace(store={("", "nightly"): asked}),
        unready_reason=str,
    )
    context = Context(api, cast("ClusterMirror", mirror), clock, Mock(), Mock(), str)

    await ReservationReconciler(context).reconcile("uid-of-nightly")

    assert api.create.await_count == taken


@pytest.mark.parametrize(("hours", "phase"), [(3, "Ended"), (-3, "Pending")])
async def test_a_clock_that_is_off_takes_nothing_from_a_pod(tmp_path: Path, hours: int, phase: str) -> None:
    """The reservation ends early or has not begun, so that what is idle is free; with a right clock it holds all."""
    now_seconds = datetime.now(UTC).timestamp()
    spec = {"starts": text_of(now_seconds - 3600), "ends": text_of(now_seconds + 3600)}

    def used(server: InMemoryServer) -> None:
        put_reservation(server, 3, **spec)
        put_user(server, 0, ended=False)

    async with running_controllers(tmp_path, used) as running:
        await running.settled(lambda: status(running).get("phase") == "Active")
        running.clock.ahead = timedelta(hours=hours)
        running.resync()
        await running.settled(lambda: status(running)["phase"] == phase)
        assert holders(running) == ["team/user/uid-of-user"]
        running.clock.ahead = timedelta()
        running.resync()
        await running.settled(lambda: status(running)["phase"] == "Active")
        assert holders(running) == [OWN, OWN, "team/user/uid-of-user"]
