"""The reconcilers while the API server fails: each write is lost once, before or after it is carried out."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import orjson
import pytest
from aiohttp import web

from atoll.api import names
from atoll.cluster.leases import RESERVATION_NAMESPACE, Holder, parse_lease
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import decode_lease, decode_pod
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import AlreadyExists, Conflict, NotFound
from atoll.kube.mirror import ClusterMirror, WatchedKind
from controllers.claims import ClaimReconciler
from controllers.context import Context
from controllers.leases.orphans import SKEW_SECONDS, OrphanReconciler
from controllers.leases.repair import MissingLeaseRepair
from controllers.leases.writes import delete_lease
from tests.builders import claim_json, lease_json, make_allocation, make_claim, make_lease, pod_json, report_json
from tests.controllers.harness import (
    CLAIMS,
    LEASES,
    PODS,
    REPORTS,
    ControllerHarness,
    InMemoryServer,
    running_controllers,
    strip_version,
)
from tests.fakes.api_server import answering, status
from tests.fakes.clock import ManualClock, until
from tests.service.test_metrics import samples

HOLDER = Holder("team", "p", "uid-of-p")
REJECTED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
PAST = {names.LEASE_DEADLINE: "2020-01-01T00:00:00.000000Z"}
FUTURE = {names.LEASE_DEADLINE: "2099-01-01T00:00:00.000000Z"}

each_fault = pytest.mark.parametrize(
    ("fails_at", "is_after"), [(n, after) for n in range(7) for after in (False, True)]
)


def put_pod(server: InMemoryServer, name: str = "p", **options: Any) -> None:
    """Put a pod on the server; `status` adds to its status."""
    status = options.pop("status", {})
    body = strip_version(pod_json(name, **options))
    server.put(f"{PODS}/{name}", {**body, "status": {**body["status"], **status}})


def put_leases(server: InMemoryServer, *device_ids: int, holder: Holder = HOLDER, **annotations: str) -> None:
    """Put Leases of n1 on the server."""
    for device_id in device_ids:
        body = strip_version(lease_json("n1", device_id, holder=holder, annotations=annotations))
        server.put(f"{LEASES}/gpu-n1-{device_id}", body)


def put_bound(server: InMemoryServer, name: str = "p", *device_ids: int, **options: Any) -> None:
    """Put a bound pod on the server."""
    put_pod(server, name, node="n1", allocation=make_allocation("n1", *device_ids), **options)


async def test_reservation_by_a_clock_that_is_ahead_ends_all_the_same(tmp_path: Path) -> None:
    """A bind on a machine whose clock is years ahead reserves for as long as any other, not for years."""

    def setup(server: InMemoryServer) -> None:
        put_pod(server)
        body = strip_version(lease_json("n1", 0, holder=HOLDER))
        body["metadata"]["annotations"][names.LEASE_DEADLINE] = "2099-01-01T00:00:05.000000Z"
        body["spec"]["renewTime"] = "2099-01-01T00:00:00.000000Z"
        server.put(f"{LEASES}/gpu-n1-0", body)

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: not running.held())
        assert ("PATCH", f"{PODS}/p") in running.api.writes


def orphans_of(ledger: Ledger, api: AsyncMock, clock: ManualClock) -> OrphanReconciler:
    """Return the reconciler over one pod that is not bound, and the Leases of this ledger."""
    pod = decode_pod(orjson.dumps(pod_json("p")))
    ledger.put_pod(pod)
    mirror = SimpleNamespace(ledger=ledger, pods=SimpleNamespace(by_uid={HOLDER.uid: pod}), unready_reason=str)
    return OrphanReconciler(Context(api, cast("ClusterMirror", mirror), clock, Mock(), Mock(), str))


async def test_a_reservation_that_is_renewed_lasts_from_then_on_by_our_own_clock() -> None:
    """The other machine's clock is years ahead, so ours counts: seven seconds, and seven more after the renewal."""
    clock, ledger, api = ManualClock(), Ledger(), AsyncMock()
    orphans = orphans_of(ledger, api, clock)

    def reserve(second: int, version: str) -> None:
        body = lease_json("n1", 0, holder=HOLDER, version=version)
        body["spec"]["renewTime"] = f"2099-01-01T00:00:{second:02}.000000Z"
        body["metadata"]["annotations"][names.LEASE_DEADLINE] = f"2099-01-01T00:00:{second + 2:02}.000000Z"
        ledger.put_lease(decode_lease(orjson.dumps(body)))

    reserve(0, "1")
    assert await orphans.reconcile(HOLDER.uid) == 2.0 + SKEW_SECONDS
    await clock.advance(6.0)
    reserve(6, "2")

    assert await orphans.reconcile(HOLDER.uid) == 2.0 + SKEW_SECONDS
    await clock.advance(6.0)
    assert await orphans.reconcile(HOLDER.uid) == 1.0
    api.patch.assert_not_called()


async def test_a_pod_that_changes_is_looked_at_while_it_holds_a_lease() -> None:
    """It may have been bound, or fenced off, by that change."""
    ledger = Ledger()
    orphans = orphans_of(ledger, AsyncMock(), ManualClock())
    pod = ledger.pods[HOLDER.uid]
    change = Change(ChangeKind.MODIFIED, pod, pod)
    assert tuple(orphans.affected(WatchedKind.POD, change)) == ()
    ledger.put_lease(make_lease("n1", 0, holder=HOLDER))
    assert tuple(orphans.affected(WatchedKind.POD, change)) == (HOLDER.uid,)
    assert tuple(orphans.affected(WatchedKind.POD, Change(ChangeKind.DELETED, pod, pod))) == ()


async def test_a_reservation_that_ended_by_itself_costs_its_pod_no_write() -> None:
    """Its Lease was deleted meanwhile: there is nothing to fence off."""
    ledger, api = Ledger(), AsyncMock()
    ledger.put_lease(make_lease("n1", 0, holder=HOLDER, annotations=PAST))
    api.patch.side_effect = NotFound("gone", status=404, reason="NotFound", path="")

    assert await orphans_of(ledger, api, ManualClock()).reconcile(HOLDER.uid) is None
    assert [call.args[0] for call in api.patch.await_args_list] == [f"{LEASES}/gpu-n1-0"]


@pytest.mark.parametrize("digits", [18, 5000])
async def test_agent_is_asked_whatever_somebody_wrote_before(tmp_path: Path, digits: int) -> None:
    """A version that no pod has reached yet was written by nobody who waits for it, however long the number is."""

    def setup(server: InMemoryServer) -> None:
        put_leases(server, 0)
        report = server.objects[f"{REPORTS}/n1"]
        wanted = {names.EVIDENCE_WANTED: "9" * digits}
        server.put(f"{REPORTS}/n1", {**report, "metadata": {**report["metadata"], "annotations": wanted}})

    async with running_controllers(tmp_path, setup) as running:
        asked = lambda: running.server.objects[f"{REPORTS}/n1"]["metadata"]["annotations"][names.EVIDENCE_WANTED]  # noqa: E731
        await running.settled(lambda: len(asked()) < 10)


ENDED = {"phase": "Succeeded", "containerStatuses": [{"name": "main", "state": {"terminated": {"exitCode": 0}}}]}


@each_fault
async def test_release_survives_any_lost_write(tmp_path: Path, fails_at: int, *, is_after: bool) -> None:
    """Three Leases of an ended pod go, whichever write is lost; the Lease of somebody else is never touched."""

    def setup(server: InMemoryServer) -> None:
        put_bound(server, "p", 0, 1, 2, status=ENDED)
        put_leases(server, 0, 1, 2)
        put_bound(server, "other", 3)
        put_leases(server, 3, holder=Holder("team", "other", "uid-of-other"))

    async with running_controllers(tmp_path, setup, fails_at=fails_at, is_after=is_after) as running:
        await running.settled(lambda: running.held() == {"gpu-n1-3"})
        assert all("gpu-n1-3" not in path for _, path in running.api.writes)


async def test_released_gpus_are_counted_by_what_proved_the_end(tmp_path: Path) -> None:
    """Each once, however many one pod had."""

    def setup(server: InMemoryServer) -> None:
        put_bound(server, "p", 0, 1, 2, status=ENDED)
        put_leases(server, 0, 1, 2)

    async with running_controllers(tmp_path, setup) as running:
        counted = ("atoll_controllers_leases_released_total", "ended")
        await running.settled(lambda: samples(running.metrics)[counted] == 3)
        assert samples(running.metrics)[("atoll_controllers_queue_wait_seconds_count", "release")], (
            "and how long it waited"
        )


async def test_a_lease_that_changes_while_it_is_ended_is_looked_at_again_before_the_next_resync(tmp_path: Path) -> None:
    """Somebody marked it meanwhile: its GPU is not free, and nothing else would bring it up again."""

    def setup(server: InMemoryServer) -> None:
        put_bound(server, "p", 0, status=ENDED)
        put_leases(server, 0)
        server.fail(answering(409, "Conflict"), times=3, containing=f"DELETE {LEASES}/gpu-n1-0")

    async with running_controllers(tmp_path, setup) as running:
        await until(lambda: not running.held())


@each_fault
async def test_take_over_survives_any_lost_write(tmp_path: Path, fails_at: int, *, is_after: bool) -> None:
    """No Lease of an expired reservation goes before the pod's version moved after the last fence on that Lease."""

    def setup(server: InMemoryServer) -> None:
        put_pod(server)
        put_leases(server, 0, 1, **PAST)

    async with running_controllers(tmp_path, setup, fails_at=fails_at, is_after=is_after) as running:
        await running.settled(lambda: not running.held())
        writes = running.api.writes
        for device_id in (0, 1):
            path = f"{LEASES}/gpu-n1-{device_id}"
            gone = max(i for i, write in enumerate(writes) if write == ("DELETE", path))
            fence = max(i for i, write in enumerate(writes[:gone]) if write == ("PATCH", path))
            moved = [i for i, write in enumerate(writes) if write == ("PATCH", f"{PODS}/p")]
            assert any(fence < i < gone for i in moved)


@each_fault
async def test_repair_survives_any_lost_write(tmp_path: Path, fails_at: int, *, is_after: bool) -> None:
    """Both missing Leases of a bound pod come back once, under the pod's own identity."""

    def setup(server: InMemoryServer) -> None:
        put_bound(server, "p", 4, 5, phase="Running")

    async with running_controllers(tmp_path, setup, fails_at=fails_at, is_after=is_after) as running:
        await running.settled(lambda: running.held() == {"gpu-n1-4", "gpu-n1-5"})
        for device_id in (4, 5):
            lease = running.lease(device_id)
            assert lease is not None
            assert lease["spec"]["holderIdentity"] == str(HOLDER)


async def test_nobody_is_asked_about_a_pod_that_has_all_of_its_leases(tmp_path: Path) -> None:
    """Every change of every bound pod is looked at; the API server hears of it only where a Lease is missing."""

    def setup(server: InMemoryServer) -> None:
        put_bound(server, "p", 4, 5, phase="Running")
        put_leases(server, 4, 5)

    async with running_controllers(tmp_path, setup) as running:
        repair = running.reconciler("repair")
        assert await repair.reconcile(HOLDER.uid) is None

        assert running.server.count(f"GET {PODS}?") == 0


async def test_an_unreadable_lease_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    """It would be refused at every look, for as long as nobody can make it readable."""

    def setup(server: InMemoryServer) -> None:
        put_bound(server, "p", 4, phase="Running")
        put_leases(server, 4, **{names.LEASE_DEVICE_ID: "odd"})
        server.fail(answering(403, "Forbidden"), times=10_000, containing=f"PATCH {LEASES}/gpu-n1-4")

    async with running_controllers(tmp_path, setup) as running:
        await running.reconciler("repair").reconcile(HOLDER.uid)

        assert running.mirror.ledger.unreadable_leases
        assert ("POST", LEASES) not in running.api.writes


async def test_a_lease_is_written_again_for_a_pod_that_left_without_it(tmp_path: Path) -> None:
    """The Lease went while nobody looked, then the pod by force: its GPU is held in the API again until proof."""

    def asked(running: ControllerHarness) -> bool:
        return names.EVIDENCE_WANTED in running.server.objects[f"{REPORTS}/n1"]["metadata"].get("annotations", {})

    async with running_controllers(tmp_path) as running:
        put_bound(running.server, "p", 4, phase="Running")
        running.server.remove(f"{PODS}/p")
        await running.settled(lambda: running.held() == {"gpu-n1-4"} and asked(running))
        lease = running.lease(4)
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == str(HOLDER)
        counted = samples(running.metrics)
        assert counted[("atoll_controllers_leases_recreated_total",)] == 1
        assert counted[("atoll_controllers_evidence_requests_total",)] == 1
        for sequence in (1, 2):
            running.report(sequence)
        await running.settled(lambda: not running.held() and not running.mirror.ledger.lost.is_known(HOLDER.uid))


@pytest.mark.parametrize("has_report", [True, False], ids=["the report does not count", "there is no report"])
async def test_a_repaired_lease_names_its_machine(tmp_path: Path, *, has_report: bool) -> None:
    """Without the uid no declaration that the machine is gone could ever free the GPU."""

    def setup(server: InMemoryServer) -> None:
        boots = "11111111-2222-3333-4444-555555555555", "66666666-7777-8888-9999-000000000000"
        server.put(f"{REPORTS}/n1", strip_version(report_json("n1", boot=boots[0])))
        if not has_report:
            server.remove(f"{REPORTS}/n1")
        told = {"metadata": {"name": "n1", "uid": "uid-of-n1"}, "status": {"nodeInfo": {"bootID": boots[1]}}}
        server.put("/api/v1/nodes/n1", told)
        put_bound(server, "p", 4, phase="Running")

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: running.held() == {"gpu-n1-4"})
        lease = running.lease(4)
        assert lease is not None
        assert "n1" not in running.mirror.ledger.nodes
        assert lease["metadata"]["annotations"][names.LEASE_NODE_UID] == "uid-of-n1"


@each_fault
async def test_wake_survives_any_lost_write(tmp_path: Path, fails_at: int, *, is_after: bool) -> None:
    """The pod that fits is woken, the one that does not is not."""

    def setup(server: InMemoryServer) -> None:
        put_pod(server, "small", gpus=1, status={"conditions": [REJECTED]})
        put_pod(server, "large", gpus=8, status={"conditions": [REJECTED]})
        put_bound(server, "p", 0, phase="Running")
        put_leases(server, 0)

    async with running_controllers(tmp_path, setup, fails_at=fails_at, is_after=is_after) as running:
        await running.settled(lambda: names.WOKEN in running.server.objects[f"{PODS}/small"]["metadata"]["annotations"])
        assert names.WOKEN not in running.server.objects[f"{PODS}/large"]["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("code", "reason"), [(422, "Invalid"), (500, "InternalError")], ids=["full-annotations", "dead-webhook"]
)
async def test_a_pod_that_takes_no_write_keeps_no_other_from_being_woken(
    tmp_path: Path, code: int, reason: str
) -> None:
    """Full annotations, a policy or a dead webhook of its namespace: the pod is passed over, also in the next plan, and
    others wake, though there is room for one alone."""

    def setup(server: InMemoryServer) -> None:
        put_pod(server, "full", gpus=1, status={"conditions": [REJECTED]})
        put_pod(server, "good", gpus=1, status={"conditions": [REJECTED]})
        put_bound(server, "p", *range(7), phase="Running")
        put_leases(server, *range(7))

        def intercept(method: str, path: str, _body: Any) -> Any:
            if method == "PATCH" and path == f"{PODS}/full":
                return status(code, reason, "metadata.annotations: Too long: may not be more than 262144 bytes")
            return None

        server.intercept(intercept)

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: names.WOKEN in running.server.objects[f"{PODS}/good"]["metadata"]["annotations"])
        for loop in running.loops:
            await loop.run_once()
        tries = running.api.writes.count(("PATCH", f"{PODS}/full"))
        for loop in running.loops:
            await loop.run_once()
        assert running.api.writes.count(("PATCH", f"{PODS}/full")) == tries > 0


async def test_reservation_that_is_not_over_is_left_alone(tmp_path: Path) -> None:
    """A bind may be under way: neither the Lease nor the pod is touched, however often everything is looked at."""

    def setup(server: InMemoryServer) -> None:
        put_pod(server, status={"conditions": [REJECTED]})
        put_leases(server, 0, **FUTURE)
        put_bound(server, "done", 1, status=ENDED)
        put_leases(server, 1, holder=Holder("team", "done", "uid-of-done"))

    async with running_controllers(tmp_path, setup) as running:
        for _ in range(3):
            for loop in running.loops:
                loop.resync()
            await asyncio.sleep(0)
        await running.settled(lambda: not running.lease(1))
        assert running.lease(0)
        assert ("PATCH", f"{PODS}/p") not in running.api.writes


async def test_a_lease_of_other_gpus_than_the_bound_pod_names_ends_at_once(tmp_path: Path) -> None:
    """It was made late, by a bind or an admission without an answer, for ten minutes; what the pod names stays."""

    def setup(server: InMemoryServer) -> None:
        put_bound(server, "p", 0, phase="Running")
        put_leases(server, 0, 1, **FUTURE)

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: not running.lease(1))
        for loop in running.loops:
            await loop.run_once()
        assert running.held() == {"gpu-n1-0"}
        assert running.mirror.ledger.leases_of("uid-of-p")


@pytest.mark.parametrize(
    ("now", "ends"),
    [
        pytest.param("the same version", True, id="as it was seen"),
        pytest.param("another version", None, id="it has changed: the caller decides anew"),
        pytest.param("a successor", False, id="another Lease has the name"),
        pytest.param("nothing", False, id="it is gone"),
    ],
)
async def test_a_deletion_hits_the_very_lease_that_was_seen(tmp_path: Path, now: str, ends: bool | None) -> None:
    """Name alone is no identity, and a Lease that moved on is judged anew."""
    async with running_controllers(tmp_path, lambda server: put_bound(server, "p", 0, phase="Running")) as running:
        await running.settled(lambda: running.lease(0))
        body = running.lease(0) or {}
        seen = parse_lease(decode_lease(orjson.dumps(body)))
        path = f"{LEASES}/gpu-n1-0"
        if now in {"a successor", "nothing"}:
            running.is_leading[0] = False
            running.server.remove(path)
        if now in {"another version", "a successor"}:
            uid = {} if now == "a successor" else {"uid": body["metadata"]["uid"]}
            kept = {key: value for key, value in body["metadata"].items() if key not in {"uid", "resourceVersion"}}
            running.server.put(path, {**body, "metadata": {**kept, **uid}})
        if ends is None:
            with pytest.raises(Conflict):
                await delete_lease(running.api, seen)
        else:
            assert await delete_lease(running.api, seen) is ends


async def test_reservation_whose_pod_got_bound_is_kept(tmp_path: Path) -> None:
    """The cache still shows the pod unbound; the answer to the pod's own write shows the truth, and that counts."""

    def setup(server: InMemoryServer) -> None:
        put_pod(server)
        put_leases(server, 0, 1, **PAST)

    async with running_controllers(tmp_path, setup_bound_behind_our_back(setup)) as running:
        await running.settled(lambda: running.held() == {"gpu-n1-0"})
        await running.settled(lambda: names.LEASE_FENCED not in (running.lease(0) or {})["metadata"]["annotations"])


@pytest.mark.parametrize("is_bound", [False, True], ids=["a reservation that is over", "a Lease of another GPU"])
async def test_what_a_pod_held_that_goes_meanwhile_is_left_to_the_release(tmp_path: Path, *, is_bound: bool) -> None:
    """The cache still shows the pod; the API server knows of none: only proof of its end frees the GPU."""
    seen: list[str] = []

    def setup(server: InMemoryServer) -> None:
        if is_bound:
            put_bound(server, "p", 0, phase="Running")
        else:
            put_pod(server)
        put_leases(server, 1, **PAST)
        absent = {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []}

        def intercept(method: str, path: str, _body: Any) -> Any:
            if (method, path) == ("PATCH", f"{PODS}/p"):
                seen.append(path)
                return status(404, "NotFound", "it is gone")
            if (method, path) == ("GET", PODS):
                seen.append(path)
                return web.json_response(absent)
            return None

        server.intercept(intercept)

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: seen)
        for loop in running.loops:
            await loop.run_once()
        assert running.lease(1)
        assert (names.REASON_ORPHAN_LEASE, "p") not in running.notes.recorded


def setup_bound_behind_our_back(setup: Any) -> Any:
    """Return a set-up whose pod is bound to device 0 at the moment when somebody patches it."""

    def prepared(server: InMemoryServer) -> None:
        setup(server)

        def intercept(method: str, path: str, _body: Any) -> Any:
            pod = server.objects[f"{PODS}/p"]
            if method == "PATCH" and path == f"{PODS}/p" and "nodeName" not in pod["spec"]:
                bound = pod_json("p", node="n1", allocation=make_allocation("n1", 0))
                pod["spec"] = bound["spec"]
                pod["metadata"]["annotations"] = bound["metadata"]["annotations"]
            return None

        server.intercept(intercept)

    return prepared


@pytest.mark.parametrize("is_known", [True, False], ids=["a node with a report", "a node without one"])
async def test_an_agent_is_asked_where_there_is_one(tmp_path: Path, is_known: bool) -> None:
    """Each wish is asked for once; one for a node without a report is dropped, and is asked for when it has one."""
    async with running_controllers(tmp_path, lambda _server: None) as running:
        evidence = running.reconciler("evidence")
        node = "n1" if is_known else "n2"
        assert evidence.want(node, 7)
        assert evidence.want(node, 8)
        assert await evidence.reconcile(node) is None

        assert list(evidence.all_keys()) == []
        assert evidence.want(node, 8) is not is_known
        asked = running.server.objects[f"{REPORTS}/n1"]["metadata"].get("annotations", {}).get(names.EVIDENCE_WANTED)
        assert asked == ("8" if is_known else None)


async def test_a_key_whose_object_is_gone_is_no_fault(tmp_path: Path) -> None:
    """Between a change and its turn anything may be deleted."""
    async with running_controllers(tmp_path, lambda _server: None) as running:
        for loop in running.loops:
            reconciler: Any = loop._reconciler
            is_pair = any(isinstance(key, tuple) for key in reconciler.all_keys())
            await reconciler.reconcile(("team", "nobody") if is_pair else "nobody")
        assert running.api.writes == []


async def test_unknown_holder_needs_two_reports_from_beyond_the_look_up(tmp_path: Path) -> None:
    """Nobody knows the pod: it is looked up, the agent is asked once, and one report is not enough."""

    def setup(server: InMemoryServer) -> None:
        put_leases(server, 0)

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: wanted(running))
        asked = wanted(running)
        running.report(1)
        await running.settled(lambda: sequence(running) == 1)
        assert running.lease(0), "one report freed the GPU of a pod that the agent never saw"
        running.report(2)
        await running.settled(lambda: not running.held())
        assert wanted(running) == asked, "asked again although the answer was on its way"


async def test_gpus_that_stay_in_doubt_say_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the Lease, and in an event on the node for whoever looks there."""
    monkeypatch.setattr("controllers.leases.release.DOUBT_SECONDS", 0.0)

    async with running_controllers(tmp_path, lambda server: put_leases(server, 0)) as running:
        await running.settled(lambda: running.notes.notes_on(names.REASON_GPUS_IN_DOUBT, "n1"))
        lease = running.lease(0)
        assert lease is not None
        assert lease["metadata"]["annotations"][names.LEASE_IN_DOUBT]
        reconciler = running.reconciler("release")
        await running.settled(
            lambda: names.LEASE_IN_DOUBT in running.mirror.leases.store["atoll-system", "gpu-n1-0"].metadata.annotations
        )
        await reconciler.reconcile(lease["spec"]["holderIdentity"].rpartition("/")[2])

        assert len(running.notes.notes_on(names.REASON_GPUS_IN_DOUBT, "n1")) == 1


async def test_a_departure_whose_leases_somebody_deleted_is_in_doubt_no_more(tmp_path: Path) -> None:
    """Nothing is left to prove: the metric that an administrator watches goes back."""

    def setup(server: InMemoryServer) -> None:
        put_leases(server, 0)

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: samples(running.metrics)[("atoll_controllers_departures_in_doubt",)] == 1)
        running.server.remove(f"{LEASES}/gpu-n1-0")
        await running.settled(lambda: not running.mirror.ledger.leases)
        running.resync()
        assert any(
            name == "atoll_controllers_queue_keys" and value for (name, *_), value in samples(running.metrics).items()
        )
        await running.settled(lambda: samples(running.metrics)[("atoll_controllers_departures_in_doubt",)] == 0)


async def test_an_unreadable_lease_of_nobody_gets_its_device_from_its_name_once(tmp_path: Path) -> None:
    """Its annotations say another device, and its holder nothing: it is written once, and then left as it is."""
    path = f"{LEASES}/gpu-n1-3"

    def setup(server: InMemoryServer) -> None:
        put_leases(server, 3, **{names.LEASE_DEVICE_ID: "7"})
        server.put(path, strip_version({**server.objects[path], "spec": {"holderIdentity": "nonsense"}}))

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(
            lambda: running.server.objects[path]["metadata"]["annotations"][names.LEASE_DEVICE_ID] == "3"
        )
        version = running.server.objects[path]["metadata"]["resourceVersion"]
        await running.settled(
            lambda: running.mirror.leases.store["atoll-system", "gpu-n1-3"].metadata.resource_version == version
        )
        told = len(running.notes.notes_on(names.REASON_UNREADABLE_LEASE, "gpu-n1-3"))
        running.resync()
        await running.settled(lambda: len(running.notes.notes_on(names.REASON_UNREADABLE_LEASE, "gpu-n1-3")) > told)

        assert running.api.writes.count(("PATCH", path)) == 1


async def test_an_unreadable_lease_gets_no_holder_that_is_gone(tmp_path: Path) -> None:
    """The mirror shows a bound pod that names its GPU, the API server knows of none: only the device is written."""
    path = f"{LEASES}/gpu-n1-3"

    def setup(server: InMemoryServer) -> None:
        put_bound(server, "p", 3, phase="Running")
        put_leases(server, 3, **{names.LEASE_DEVICE_ID: "7"})
        server.put(path, strip_version({**server.objects[path], "spec": {"holderIdentity": "nonsense"}}))
        nobody = {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []}
        server.intercept(lambda _, asked, __: web.json_response(nobody) if asked == PODS else None)

    async with running_controllers(tmp_path, setup) as running:
        lease = lambda: running.server.objects[path]  # noqa: E731
        await running.settled(lambda: lease()["metadata"]["annotations"][names.LEASE_DEVICE_ID] == "3")

        assert lease()["spec"]["holderIdentity"] == "nonsense"


NIGHTLY = Holder(RESERVATION_NAMESPACE, "nightly", "uid-of-nightly")
OTHER = Holder("team", "q", "uid-of-q")


@pytest.mark.parametrize(
    ("found", "is_written", "is_told"),
    [
        pytest.param([{"holder": NIGHTLY}], True, False, id="a reservation keeps the card for pods"),
        pytest.param([{"holder": NIGHTLY, "uuid": "GPU-new"}] * 2, False, True, id="a reservation has another card"),
        pytest.param([{"holder": OTHER}] * 2, False, True, id="another pod has it"),
        pytest.param([{"holder": OTHER}, {"holder": HOLDER}], False, False, id="it is the pod's own by now"),
        pytest.param([{"annotations": {names.LEASE_DEVICE_ID: "odd"}}], False, False, id="it cannot be read"),
    ],
)
async def test_a_missing_lease_whose_name_is_taken(
    found: list[dict[str, Any]], *, is_written: bool, is_told: bool
) -> None:
    """What a reservation keeps becomes the pod's; any other holder is reported, as the API server shows him last."""
    pod = decode_pod(orjson.dumps(pod_json("p", node="n1", phase="Running", allocation=make_allocation("n1", 0))))
    ledger, api, events = Ledger(), AsyncMock(), Mock()
    ledger.put_pod(pod)
    api.list.return_value = SimpleNamespace(items=[pod], resource_version="1")
    api.create.side_effect = AlreadyExists("taken", status=409, reason="AlreadyExists", path="")
    api.get.side_effect = [orjson.dumps(lease_json("n1", 0, **one)) for one in found]
    mirror = SimpleNamespace(ledger=ledger, reports={}, nodes=SimpleNamespace(store={}))
    repair = MissingLeaseRepair(Context(api, cast("ClusterMirror", mirror), ManualClock(), events, Mock(), str))

    await repair.reconcile(HOLDER.uid)

    assert api.patch.await_count == is_written
    told = [call.kwargs["reason"] for call in events.record.call_args_list]
    assert (names.REASON_DOUBLE_USE in told) is is_told


async def test_no_lease_is_written_for_a_pod_that_only_our_cache_shows(tmp_path: Path) -> None:
    """The API server is asked first: a GPU of a pod that is gone would be held again."""

    def setup(server: InMemoryServer) -> None:
        put_bound(server, "p", 4, phase="Running")
        nobody = {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []}
        server.intercept(lambda _, asked, __: web.json_response(nobody) if asked == PODS else None)

    async with running_controllers(tmp_path, setup) as running:
        repair = running.reconciler("repair")
        await repair.reconcile(HOLDER.uid)

        assert running.server.count(f"GET {PODS}?")
        assert running.held() == set()


def wanted(running: ControllerHarness) -> str:
    """Return what the agent of n1 is asked for."""
    metadata = running.server.objects[f"{REPORTS}/n1"]["metadata"]
    return str(metadata.get("annotations", {}).get(names.EVIDENCE_WANTED, ""))


def sequence(running: ControllerHarness) -> int:
    """Return the sequence of the report that the mirror holds."""
    status = running.mirror.reports["n1"].status
    return status.evidence.sequence if status is not None else 0


async def test_namesake_of_a_deleted_pod_inherits_nothing(tmp_path: Path) -> None:
    """A pod of the same name is another pod: the Lease of the old uid is not its, and needs its own proof."""

    def setup(server: InMemoryServer) -> None:
        put_pod(server, "p", uid="uid-of-the-successor")
        put_leases(server, 0)

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: wanted(running))
        running.report(1)
        running.report(2)
        await running.settled(lambda: not running.held())
        assert ("PATCH", f"{PODS}/p") not in running.api.writes


async def test_two_bound_pods_on_one_gpu_are_told_and_nothing_is_released(tmp_path: Path) -> None:
    """Double use is an administrator's decision; taking a Lease away would only hide it."""

    def setup(server: InMemoryServer) -> None:
        put_bound(server, "p", 0, phase="Running")
        put_bound(server, "q", 0, phase="Running")
        put_leases(server, 0)

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: (names.REASON_DOUBLE_USE, "q") in running.notes.recorded)
        assert running.held() == {"gpu-n1-0"}
        assert not [write for write in running.api.writes if write[0] == "DELETE"]


async def test_nothing_is_written_after_leadership_is_lost(tmp_path: Path) -> None:
    """A term ends between two writes: whatever is queued stays unwritten."""

    async with running_controllers(tmp_path) as running:
        running.is_leading[0] = False
        put_bound(running.server, "p", 0, 1, status=ENDED)
        put_leases(running.server, 0, 1)
        await running.settled(lambda: len(running.mirror.ledger.leases) == 2)
        for loop in running.loops:
            loop.resync()
            await loop.run_once()
        assert running.api.writes == []
        assert running.held() == {"gpu-n1-0", "gpu-n1-1"}
        running.is_leading[0] = True
        await running.settled(lambda: not running.held())


async def test_claim_status_is_written_on_change_only(tmp_path: Path) -> None:
    """The status follows the pods, and looking again writes nothing."""

    def setup(server: InMemoryServer) -> None:
        server.put(f"{CLAIMS}/c", strip_version(claim_json("c")))
        put_pod(server, annotations={names.CLAIM: "c", names.CLAIM_UID: "uid-of-c"})

    def phase(running: ControllerHarness) -> str:
        return str(running.server.objects[f"{CLAIMS}/c"].get("status", {}).get("phase", ""))

    def seen_phase(running: ControllerHarness) -> str:
        status = running.mirror.claims.store["team", "c"].status
        return status.phase if status is not None else ""

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: phase(running) == "Waiting")
        keys = {names.CLAIM: "c", names.CLAIM_UID: "uid-of-c"}
        put_leases(running.server, 0)
        put_bound(running.server, "p", 0, annotations=keys, phase="Running")
        await until(lambda: phase(running) == "Allocated" and seen_phase(running) == "Allocated")
        written = [write for write in running.api.writes if "gpuclaims" in write[1]]
        for loop in running.loops:
            await loop.run_once()
        assert [write for write in running.api.writes if "gpuclaims" in write[1]] == written


@pytest.mark.parametrize(("after_seconds", "wait_seconds"), [(0.0, 10.0), (9.5, 0.5), (10.0, None)])
async def test_claim_status_is_written_at_most_once_in_ten_seconds(
    after_seconds: float, wait_seconds: float | None
) -> None:
    """What changes in between is written when the time is over."""
    claim, clock, patched = make_claim("c"), ManualClock(), AsyncMock()
    mirror = SimpleNamespace(ledger=Ledger(), claims=SimpleNamespace(store={("team", "c"): claim}))
    context = Context(AsyncMock(patch=patched), cast("ClusterMirror", mirror), clock, Mock(), Mock(), str)
    claims = ClaimReconciler(context, interval_seconds=10.0)
    await claims.reconcile(("team", "c"))
    await clock.advance(after_seconds)

    assert await claims.reconcile(("team", "c")) == wait_seconds
    assert patched.await_count == (2 if wait_seconds is None else 1)


async def test_nomination_that_led_to_no_bind_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nodes are sampled the wake-up names one, once; a node kept for a pod that never came is given back."""
    monkeypatch.setattr("atoll.cluster.wakeups.NOMINATION_NODES_MIN", 1)
    monkeypatch.setattr("controllers.requeue.NOMINATION_SECONDS", 5.0)

    def setup(server: InMemoryServer) -> None:
        put_pod(server, status={"conditions": [REJECTED]})

    def nominated(running: ControllerHarness) -> str:
        return str(running.server.objects[f"{PODS}/p"]["status"].get("nominatedNodeName", ""))

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: nominated(running) == "n1")
        woken = running.server.objects[f"{PODS}/p"]["metadata"]["annotations"][names.WOKEN]
        assert woken.endswith("@n1")
        assert ("PATCH", f"{PODS}/p/status") in running.api.writes
        await running.settled(lambda: not nominated(running))
        await running.settled(lambda: running.api.writes[-1] == ("PATCH", f"{PODS}/p"))
        assert not nominated(running), "named again after it was withdrawn"


async def test_successor_of_a_released_lease_is_left_alone(tmp_path: Path) -> None:
    """The Lease went and another pod has a new one under the name before we saw either: there is nothing to release."""

    def setup(server: InMemoryServer) -> None:
        put_bound(server, "p", 0, status=ENDED)
        put_leases(server, 0)
        stale = server.objects[f"{LEASES}/gpu-n1-0"]

        def intercept(method: str, path: str, _body: Any) -> Any:
            if method == "DELETE" and server.objects.get(path) is stale:
                successor = strip_version(lease_json("n1", 0, holder=Holder("team", "q", "uid-of-q")))
                successor["metadata"]["uid"] = "uid-of-the-successor"
                server.put(f"{PODS}/q", strip_version(pod_json("q", node="n1", allocation=make_allocation("n1", 0))))
                server.put(path, successor)
            return None

        server.intercept(intercept)

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: (running.lease(0) or {})["metadata"]["uid"] == "uid-of-the-successor")
        await running.settled(lambda: not running.mirror.ledger.leases_of("uid-of-p"))
        for loop in running.loops:
            await loop.run_once()
        assert running.held() == {"gpu-n1-0"}
