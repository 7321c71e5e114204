"""The mirror: the ledger has the API server's objects by uid, and stale objects count as stale."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.api.times import format_microtime, text_of
from atoll.cluster.leases import Holder
from atoll.cluster.objects import decode_heartbeat
from atoll.cluster.reports import as_stored
from atoll.cluster.requests import request_of
from atoll.cluster.verdicts import FilterInput, judge_nodes
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.mirror import BLIND_SECONDS_MAX, ClusterMirror, WatchedKind
from tests.builders import claim_json, lease_json, make_allocation, make_pod, pod_json, report_json
from tests.fakes.api_server import FakeApiServer
from tests.fakes.clock import ManualClock, until
from tests.fakes.listening import kubeconfig

POD = paths.pods("team", "p")
REPORT = paths.gpunodestatuses("n1")


class WatchedMirror:
    """A mirror of a fake API server, and what its listeners were told."""

    def __init__(self, server: FakeApiServer, client: ApiClient) -> None:
        self.server = server
        self.clock = ManualClock()
        self.mirror = ClusterMirror(client, self.clock)
        self.told: list[tuple[WatchedKind, str]] = []
        self._changed = asyncio.Event()
        self.mirror.on_change(self._note)

    def _note(self, kind: WatchedKind, change: Any) -> None:
        self.told.append((kind, str(change.kind)))
        self._changed.set()

    async def until(self, question: Callable[[], bool]) -> None:
        """Wait until changes make the answer true."""
        async with asyncio.timeout(20):
            while not question():
                self._changed.clear()
                await self._changed.wait()

    def free(self) -> int:
        """Return how many devices of n1 are free."""
        return self.mirror.ledger.free("n1", now_seconds=self.clock.monotonic_seconds()).bit_count()

    def heartbeat(
        self, *, age_seconds: float, node: str = "n1", ahead_seconds: float = 0.0, is_told: bool = True, **spec: Any
    ) -> None:
        """Write a heartbeat that was renewed so long ago, by an agent whose clock is ahead. `is_told`: the server says
        when it stored the renewal, and that somebody wrote a label just now."""
        renewed = format_microtime(self.clock.now() + timedelta(seconds=ahead_seconds - age_seconds))
        now = datetime.now(UTC)
        written = [
            {"time": text_of(now.timestamp() - age_seconds), "fieldsV1": {"f:spec": {"f:renewTime": {}}}},
            {"time": text_of(now.timestamp()), "fieldsV1": {"f:metadata": {"f:labels": {"f:team": {}}}}},
        ]
        metadata = {"uid": node, **({"managedFields": written} if is_told else {})}
        body = {"metadata": metadata, "spec": {"leaseDurationSeconds": 180, "renewTime": renewed, **spec}}
        self.server.put(paths.leases(names.HEARTBEAT_NAMESPACE, node), body)

    def is_stale(self, node: str = "n1") -> bool:
        return self.mirror.ledger.is_stale(node, self.clock.monotonic_seconds())

    def refusal(self, node: str = "n1") -> str:
        """Return why the node is refused to a pod of one GPU; empty where it is not."""
        self.mirror.ledger.put_heartbeat(node, self.clock.monotonic_seconds(), 180.0)
        request = request_of(make_pod(gpus=1), None)
        question = FilterInput("uid-of-p", request, self.clock.monotonic_seconds())
        return judge_nodes([node], question, self.mirror.ledger).rejected.get(node, "")


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[WatchedMirror]:
    async with FakeApiServer().running() as server:
        server.put(REPORT, report_json("n1", "t4-4"))
        config = kubeconfig(tmp_path, server.url, {})
        async with await ApiClient.connect(config, requests_per_second=1000, burst=1000) as client:
            yield WatchedMirror(server, client)


async def running(watched: WatchedMirror) -> asyncio.Task[None]:
    """Start the mirror and wait until every collection was listed."""
    task = asyncio.create_task(watched.mirror.run())
    async with asyncio.timeout(20):
        await watched.mirror.synced()
    return task


@pytest.fixture
async def mirror(watched: WatchedMirror) -> AsyncIterator[WatchedMirror]:
    """A mirror that runs."""
    task = await running(watched)
    yield watched
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_nothing_may_be_decided_before_every_list_is_complete(watched: WatchedMirror) -> None:
    """Readiness names the collection that is missing, and comes when all are there."""
    assert "list of pod objects is not complete" in watched.mirror.unready_reason()

    task = await running(watched)
    assert watched.mirror.is_ready()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_blind_mirror_is_not_ready(mirror: WatchedMirror) -> None:
    """A watch that says nothing for too long cannot be decided on."""
    await mirror.clock.advance(BLIND_SECONDS_MAX + 1)

    assert "silent" in mirror.mirror.unready_reason()


async def test_objects_reach_the_ledger_and_leave_it(mirror: WatchedMirror) -> None:
    """Pods, Leases and reports come and go; listeners hear of each after the ledger has it. Of a pod that goes without
    a Lease and without a proof of its end, the GPUs stay."""
    mirror.server.put(POD, pod_json(uid="u1", node="n1", allocation=make_allocation("n1", 0, 1)))
    mirror.server.put(paths.leases(names.SYSTEM_NAMESPACE, "gpu-n1-2"), lease_json("n1", 2))
    await mirror.until(lambda: mirror.free() == 1)

    mirror.server.remove(POD)
    mirror.server.remove(paths.leases(names.SYSTEM_NAMESPACE, "gpu-n1-2"))
    await mirror.until(lambda: mirror.free() == 2)
    mirror.server.remove(REPORT)
    await mirror.until(lambda: "n1" not in mirror.mirror.ledger.nodes)

    assert {
        (WatchedKind.POD, "ADDED"),
        (WatchedKind.POD, "DELETED"),
        (WatchedKind.LEASE, "DELETED"),
        (WatchedKind.REPORT, "DELETED"),
    } <= {*mirror.told}


async def test_successor_under_the_name_replaces_the_predecessor(mirror: WatchedMirror) -> None:
    """One event with another uid is a deletion and an addition: the old pod's GPUs are free, the new one has none."""
    mirror.server.put(POD, pod_json(uid="u1", node="n1", allocation=make_allocation("n1", 0, 1)))
    await mirror.until(lambda: mirror.free() == 2)

    mirror.server.put(POD, pod_json(uid="u2"))
    await mirror.until(lambda: mirror.free() == 4)
    assert set(mirror.mirror.ledger.pods) == {"u2"}


async def test_late_news_of_a_predecessor_leave_its_successor_alone(mirror: WatchedMirror) -> None:
    """Names are used again: the end of another Lease or report of the name, told late, ends nothing that is there."""
    lease = paths.leases(names.SYSTEM_NAMESPACE, "gpu-n1-2")
    mirror.server.put(lease, lease_json("n1", 2))
    await mirror.until(lambda: mirror.free() == 3)

    for stream in mirror.server.open_streams:
        for path, body in ((lease, lease_json("n1", 2)), (REPORT, report_json("n1", "t4-4"))):
            if path.startswith(stream.query["path"] + "/"):
                metadata = {**mirror.server.objects[path]["metadata"], "uid": "before", "resourceVersion": "2"}
                stream.send("DELETED", {**body, "metadata": metadata})
    await mirror.until(lambda: {(WatchedKind.LEASE, "DELETED"), (WatchedKind.REPORT, "DELETED")} <= {*mirror.told})

    assert set(mirror.mirror.ledger.leases) == {"gpu-n1-2"}
    assert set(mirror.mirror.reports) == {"n1"}
    assert mirror.free() == 3


async def test_pod_that_loses_its_annotations_is_followed_to_the_end(mirror: WatchedMirror) -> None:
    """A pod that was a GPU pod is not forgotten in its old state when nothing of it says so any more."""
    mirror.server.put(POD, pod_json(uid="u1", gpus=None, node="n1", allocation=make_allocation("n1", 0)))
    await mirror.until(lambda: mirror.free() == 3)

    mirror.server.put(POD, pod_json(uid="u1", gpus=None, node="n1"))
    await mirror.until(lambda: mirror.free() == 4)


async def test_other_leases_of_the_namespace_are_none_of_our_business(mirror: WatchedMirror) -> None:
    """Leader elections live there too; a Lease with a GPU's name counts even if its label is gone."""
    mirror.server.put(paths.leases(names.SYSTEM_NAMESPACE, "atoll-controllers"), {"spec": {"holderIdentity": "x"}})
    unlabelled = lease_json("n1", 3, holder=Holder("team", "p", "u1"))
    del unlabelled["metadata"]["labels"]
    mirror.server.put(paths.leases(names.SYSTEM_NAMESPACE, "gpu-n1-3"), unlabelled)

    await mirror.until(lambda: mirror.free() == 3)
    assert mirror.mirror.ledger.unreadable_leases == {}


async def test_report_of_a_replaced_node_offers_nothing(mirror: WatchedMirror) -> None:
    """A machine registered anew under a name has none of its predecessor's GPUs, until its own agent reports."""
    mirror.server.put(paths.nodes("n1"), {"metadata": {"uid": "uid-of-n1"}})
    await mirror.until(lambda: (WatchedKind.NODE, "ADDED") in mirror.told)
    assert mirror.free() == 4

    mirror.server.put(paths.nodes("n1"), {"metadata": {"uid": "another"}})
    await mirror.until(lambda: "n1" not in mirror.mirror.ledger.nodes)
    assert mirror.refusal() == names.REJECT_PAST_NODE
    mirror.server.put(REPORT, report_json("n1", "l40s-8", node_uid="uid-of-n1"))
    mirror.server.put(REPORT, report_json("n1", "l40s-8", node_uid="another"))
    await mirror.until(lambda: mirror.free() == 8)
    assert mirror.mirror.reports["n1"].status is not None


async def test_why_a_report_does_not_count_is_told_until_it_does(mirror: WatchedMirror) -> None:
    """A report of before the reboot, one that contradicts itself, none at all: a node is refused for what is so."""
    was, is_now = "11111111-2222-3333-4444-555555555555", "66666666-2222-3333-4444-555555555555"
    mirror.server.put(REPORT, report_json("n1", "t4-4", boot=was))
    mirror.server.put(paths.nodes("n1"), {"metadata": {"uid": "uid-of-n1"}, "status": {"nodeInfo": {"bootID": is_now}}})
    await mirror.until(lambda: mirror.refusal() == names.REJECT_PAST_BOOT)

    mirror.server.put(REPORT, report_json("n1", "t4-4", boot=is_now, devices={1: {"id": 0}}))
    await mirror.until(lambda: mirror.refusal() == names.REJECT_BAD_REPORT)

    mirror.server.put(REPORT, report_json("n1", "t4-4", boot=is_now))
    await mirror.until(lambda: mirror.refusal() == "")

    mirror.server.remove(REPORT)
    await mirror.until(lambda: mirror.refusal() == names.REJECT_NO_REPORT)


async def test_report_that_cannot_be_read_any_more_offers_nothing(mirror: WatchedMirror) -> None:
    """An agent of a newer release may report what this one cannot read: what it said before counts no longer."""
    mirror.heartbeat(age_seconds=5)
    mirror.server.put(paths.nodes("n1"), {"metadata": {"uid": "uid-of-n1"}})
    await mirror.until(lambda: (WatchedKind.NODE, "ADDED") in mirror.told and mirror.refusal() == "")

    mirror.server.put(REPORT, report_json("n1", "t4-4", devices={0: {"health": {"state": "a state of tomorrow"}}}))
    mirror.heartbeat(age_seconds=0)
    await mirror.until(lambda: (WatchedKind.HEARTBEAT, "MODIFIED") in mirror.told)
    await mirror.until(lambda: mirror.refusal() == names.REJECT_BAD_REPORT)
    mirror.server.put(paths.nodes("n1"), {"metadata": {"uid": "uid-of-n1", "labels": {"a": "b"}}})
    await mirror.until(lambda: (WatchedKind.NODE, "MODIFIED") in mirror.told)
    assert mirror.refusal() == names.REJECT_BAD_REPORT

    mirror.server.put(REPORT, report_json("n1", "t4-4"))
    await mirror.until(lambda: mirror.refusal() == "")


async def test_claims_are_found_by_namespace_and_name(mirror: WatchedMirror) -> None:
    """A claim of the same name in another namespace is another one."""
    mirror.server.put(paths.gpuclaims("team", "c"), claim_json("c"))

    await mirror.until(lambda: mirror.mirror.claim("team", "c") is not None)
    assert mirror.mirror.claim("other", "c") is None


MINUTES = 600.0


@pytest.mark.parametrize(
    ("age_seconds", "heartbeat", "stale"),
    [
        pytest.param(10.0, {}, False, id="fresh"),
        pytest.param(89.0, {}, False, id="due"),
        pytest.param(91.0, {}, True, id="has missed a renewal, as that of a backup has"),
        pytest.param(190.0, {}, True, id="stale"),
        pytest.param(10.0, {"ahead_seconds": MINUTES}, False, id="lives, and its clock is ahead"),
        pytest.param(10.0, {"ahead_seconds": -MINUTES}, False, id="lives, and its clock is behind"),
        pytest.param(190.0, {"ahead_seconds": MINUTES}, True, id="is dead, and its clock was ahead"),
        pytest.param(190.0, {"ahead_seconds": -MINUTES}, True, id="is dead, and its clock was behind"),
        pytest.param(100.0, {"leaseDurationSeconds": 60}, True, id="a shorter promise"),
        pytest.param(10.0, {"renewTime": None}, True, id="never renewed"),
        pytest.param(10.0, {"renewTime": "yesterday"}, True, id="no time"),
    ],
)
async def test_a_restart_makes_no_dead_agent_look_alive_and_no_living_one_dead(
    watched: WatchedMirror, age_seconds: float, heartbeat: dict[str, Any], stale: bool
) -> None:
    """What was not seen happening is as old as the API server says by its own clock, whatever the agent's says."""
    watched.heartbeat(age_seconds=age_seconds, **heartbeat)

    task = await running(watched)
    assert watched.is_stale() is stale
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("ahead_seconds", [-MINUTES, 0.0, MINUTES])
async def test_an_agent_of_which_the_server_tells_no_time_has_half_of_its_own(
    watched: WatchedMirror, ahead_seconds: float
) -> None:
    """Whoever lives renews by then; whoever does not is silent soon after a restart, and not only much later."""
    watched.heartbeat(age_seconds=0, ahead_seconds=ahead_seconds, is_told=False)

    task = await running(watched)
    assert not watched.is_stale()
    await watched.clock.advance(91)
    assert watched.is_stale()
    watched.heartbeat(age_seconds=0, ahead_seconds=ahead_seconds + 1, is_told=False)
    await watched.until(lambda: not watched.is_stale())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("written", "renewed"),
    [
        pytest.param({"time": "2026-01-31T12:00:00Z", "fieldsV1": {"f:spec": {"f:renewTime": {}}}}, "12:00", id="told"),
        pytest.param({"time": "2026-01-31T12:00:00Z", "fieldsV1": {"f:metadata": {}}}, "09:00", id="of something else"),
        pytest.param({"fieldsV1": {"f:spec": {"f:renewTime": {}}}}, "09:00", id="no time"),
        pytest.param({}, "09:00", id="nothing"),
    ],
)
def test_people_are_shown_when_the_server_stored_a_heartbeat(written: dict[str, Any], renewed: str) -> None:
    """A saved snapshot and the page know the agent's time only where the server tells none."""
    body = {
        "metadata": {"name": "n1", "managedFields": [written]},
        "spec": {"renewTime": "2026-01-31T09:00:00.000000Z", "leaseDurationSeconds": 180},
    }

    shown = as_stored(decode_heartbeat(msgspec.json.encode(body)))

    assert (shown.spec.renew_time or "")[11:16] == renewed
    assert shown.spec.lease_duration_seconds == 180


async def test_renewal_that_we_see_counts_from_now(mirror: WatchedMirror) -> None:
    """The clock of a node may be wrong; a renewal that happens before our eyes is fresh all the same."""
    mirror.heartbeat(age_seconds=3600)
    await mirror.until(lambda: (WatchedKind.HEARTBEAT, "ADDED") in mirror.told)
    assert mirror.is_stale()

    mirror.heartbeat(age_seconds=3590)
    await mirror.until(lambda: not mirror.is_stale())
    await mirror.clock.advance(181)
    assert mirror.is_stale()


async def test_other_changes_of_a_heartbeat_are_no_sign_of_life(mirror: WatchedMirror) -> None:
    """Whoever labels the Lease of a dead agent does not make it look alive."""
    mirror.heartbeat(age_seconds=0)
    await mirror.until(lambda: (WatchedKind.HEARTBEAT, "ADDED") in mirror.told)
    await mirror.clock.advance(170)
    path = paths.leases(names.HEARTBEAT_NAMESPACE, "n1")
    stored = mirror.server.objects[path]
    mirror.server.put(path, {**stored, "metadata": {**stored["metadata"], "labels": {"team": "vision"}}})
    await mirror.until(lambda: (WatchedKind.HEARTBEAT, "MODIFIED") in mirror.told)

    await mirror.clock.advance(11)
    assert mirror.is_stale()


async def test_report_seen_before_its_new_node_counts_once_the_node_is_seen(mirror: WatchedMirror) -> None:
    """Nodes and reports come by two watches: a report of the successor is not lost when it is seen first."""
    mirror.server.put(paths.nodes("n1"), {"metadata": {"uid": "old"}})
    mirror.server.put(REPORT, report_json("n1", "t4-4", node_uid="new"))
    await mirror.until(lambda: "n1" not in mirror.mirror.ledger.nodes)

    mirror.server.remove(paths.nodes("n1"))
    mirror.server.put(paths.nodes("n1"), {"metadata": {"uid": "new"}})
    await mirror.until(lambda: "n1" in mirror.mirror.ledger.nodes)

    assert mirror.free() == 4


async def test_beginning_anew_is_over_only_with_lists_that_began_later(mirror: WatchedMirror) -> None:
    """A list from before does not make the mirror ready in the new term; its news count all the same."""
    await mirror.until(lambda: mirror.mirror.is_ready() and mirror.free() == 4)
    before = {kind: reflector.listings_count for kind, reflector in mirror.mirror.reflectors.items()}

    mirror.mirror.relist()
    assert "not complete" in mirror.mirror.unready_reason()
    mirror.mirror.relist()
    await mirror.clock.advance(5.0)
    async with asyncio.timeout(20):
        await mirror.mirror.synced()

    after = {kind: reflector.listings_count for kind, reflector in mirror.mirror.reflectors.items()}
    assert all(after[kind] > before[kind] for kind in before)
    assert mirror.mirror.is_ready()
    assert mirror.free() == 4


def restored(watched: WatchedMirror, *, sequence: int) -> None:
    """Put a backup in place: a report of that sequence and no pods; every watch is cut, as by the end of a server."""
    server = watched.server
    server.sends_events = False
    server.objects.clear()
    server.version = 10
    put_report(watched, sequence)
    server.sends_events = True
    for stream in server.open_streams:
        stream.break_connection()


def put_report(watched: WatchedMirror, sequence: int, *, position: str = "", **pod: Any) -> None:
    """Write a report of n1 that shows one pod, or none."""
    body = report_json("n1", "t4-4")
    evidence = {"sequence": sequence, "liveRead": True, "podResourceVersion": position}
    body["status"] |= {"evidence": evidence, "pods": [pod] if pod else []}
    watched.server.put(REPORT, body)


async def test_after_a_restore_a_node_offers_nothing_before_its_agent_has_reported(mirror: WatchedMirror) -> None:
    """The backup knows neither the pod that was bound after it nor its Leases, and its report is old. The agent's next
    one shows the pod; the one after its end makes the node free again."""
    put_report(mirror, 7)
    await mirror.until(lambda: mirror.refusal() == "")
    await until(lambda: len(mirror.server.open_streams) >= 6 and mirror.mirror.is_ready())
    restored(mirror, sequence=5)
    await pass_time(mirror, lambda: mirror.mirror.is_ready() and sequence_of(mirror) == 5)
    after = mirror.refusal()
    put_report(mirror, 8, uid="bound-after-the-backup", live=True, kubelet=True)
    await mirror.until(lambda: sequence_of(mirror) == 8)
    occupied = mirror.refusal()
    put_report(mirror, 9)
    await mirror.until(lambda: sequence_of(mirror) == 9)

    assert (after, occupied, mirror.refusal()) == (names.REJECT_RESTORED, names.REJECT_UNKNOWN_POD, "")


async def test_after_a_restore_a_report_made_before_it_does_not_count(mirror: WatchedMirror) -> None:
    """Its agent has not noticed yet: the number is new, but the position lies ahead of everything that is there."""
    put_report(mirror, 7)
    await mirror.until(lambda: mirror.refusal() == "")
    await until(lambda: len(mirror.server.open_streams) >= 6 and mirror.mirror.is_ready())
    restored(mirror, sequence=5)
    await pass_time(mirror, lambda: mirror.mirror.is_ready() and sequence_of(mirror) == 5)
    put_report(mirror, 8, position="1111")
    await mirror.until(lambda: sequence_of(mirror) == 8)
    late = mirror.refusal()
    put_report(mirror, 9, position="11")
    await mirror.until(lambda: sequence_of(mirror) == 9)

    assert (late, mirror.refusal()) == (names.REJECT_RESTORED, "")


async def test_after_a_restore_an_agent_that_began_anew_counts_too(mirror: WatchedMirror) -> None:
    """Its numbers go on from the backup's, below those from before the restore."""
    put_report(mirror, 70)
    await mirror.until(lambda: mirror.refusal() == "")
    await until(lambda: len(mirror.server.open_streams) >= 6 and mirror.mirror.is_ready())
    restored(mirror, sequence=5)
    await pass_time(mirror, lambda: mirror.mirror.is_ready() and sequence_of(mirror) == 5)
    put_report(mirror, 6)

    await mirror.until(lambda: mirror.refusal() == "")


async def test_after_a_restore_that_is_noticed_late_an_idle_node_counts_again(mirror: WatchedMirror) -> None:
    """Its agent has reported before we noticed, and has nothing more to say: it renews its heartbeat."""
    put_report(mirror, 8)
    mirror.heartbeat(age_seconds=5)
    await mirror.until(lambda: mirror.refusal() == "" and (WatchedKind.HEARTBEAT, "ADDED") in mirror.told)
    await until(lambda: len(mirror.server.open_streams) >= 6 and mirror.mirror.is_ready())
    restored(mirror, sequence=8)
    await pass_time(mirror, lambda: mirror.mirror.is_ready() and mirror.refusal() == names.REJECT_RESTORED)
    refusals = [mirror.refusal()]
    for age_seconds in (3, 2, 1):
        mirror.told.clear()
        mirror.heartbeat(age_seconds=age_seconds)
        await pass_time(mirror, lambda: any(kind is WatchedKind.HEARTBEAT for kind, _ in mirror.told))
        refusals.append(mirror.refusal())

    assert refusals == [names.REJECT_RESTORED, names.REJECT_RESTORED, names.REJECT_RESTORED, ""]


async def test_a_process_that_starts_after_a_restore_needs_no_memory(watched: WatchedMirror) -> None:
    """The report shows a pod that nobody knows, so its GPUs cannot be told from free ones. Once it has ended, or a
    Lease holds GPUs for it, the rest may be given out."""
    live = {"uid": "bound-after-the-backup", "live": True, "kubelet": True}
    put_report(watched, 5, position="11", **live)
    task = await running(watched)
    refusals = [watched.refusal()]
    lease = paths.leases(names.SYSTEM_NAMESPACE, "gpu-n1-2")
    watched.server.put(lease, lease_json("n1", 2, holder=Holder("team", "p", live["uid"])))
    await watched.until(lambda: watched.refusal() == "")
    refusals.append(watched.refusal())
    watched.server.remove(lease)
    put_report(watched, 6, position="11", **live)
    await watched.until(lambda: sequence_of(watched) == 6)
    refusals.append(watched.refusal())
    put_report(watched, 7, position="11")
    await watched.until(lambda: sequence_of(watched) == 7)
    refusals.append(watched.refusal())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert refusals == [names.REJECT_UNKNOWN_POD, "", names.REJECT_UNKNOWN_POD, ""]


KNOWN = {
    "a plain pod": ("u1", {"uid": "u1"}),
    "a static pod, by the kubelet's own uid": (
        "of-the-file",
        {"uid": "u1", "annotations": {names.MIRROR: "x", names.STATIC_POD_UID: "of-the-file"}},
    ),
}


@pytest.mark.parametrize("name", KNOWN)
async def test_a_pod_that_is_seen_after_its_report_is_known(mirror: WatchedMirror, name: str) -> None:
    """Pods and reports come by two watches: whichever is first, the node counts once both are there."""
    uid, metadata = KNOWN[name]
    put_report(mirror, 5, uid=uid, live=True)
    await mirror.until(lambda: mirror.refusal() == names.REJECT_UNKNOWN_POD)
    body = pod_json(gpus=None, node="n1")
    mirror.server.put(POD, {**body, "metadata": {**body["metadata"], **metadata}})
    mirror.heartbeat(age_seconds=1)

    await mirror.until(lambda: mirror.refusal() == "")


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "only missing in a list"])
async def test_the_end_of_a_pod_that_a_report_still_shows(mirror: WatchedMirror, is_seen: bool) -> None:
    """A deletion that the watch shows came from its kubelet, and the report is about to follow. A pod that is missing
    after a gap may be one that the server has forgotten, while it runs on."""
    mirror.server.put(POD, pod_json(uid="u1", node="n1", allocation=make_allocation("n1", 0)))
    put_report(mirror, 5, uid="u1", live=True)
    await mirror.until(lambda: sequence_of(mirror) == 5 and mirror.free() == 3)
    mirror.server.sends_events = is_seen
    mirror.server.remove(POD)
    mirror.server.sends_events = True
    if not is_seen:
        mirror.mirror.pods.relist()
        await pass_time(mirror, lambda: (WatchedKind.POD, "DELETED") in mirror.told)
    await mirror.until(lambda: (WatchedKind.POD, "DELETED") in mirror.told)
    refusals = [mirror.refusal()]
    put_report(mirror, 6, uid="u1", live=True)
    await mirror.until(lambda: sequence_of(mirror) == 6)
    refusals.append(mirror.refusal())

    assert refusals == (["", ""] if is_seen else [names.REJECT_UNKNOWN_POD] * 2)


def sequence_of(watched: WatchedMirror) -> int:
    status = watched.mirror.reports["n1"].status if "n1" in watched.mirror.reports else None
    return status.evidence.sequence if status is not None else 0


async def pass_time(watched: WatchedMirror, question: Callable[[], bool]) -> None:
    """Let back-offs pass until the answer is true."""
    async with asyncio.timeout(20):
        while not question():
            await watched.clock.advance(watched.clock.next_alarm_seconds() or 0)
            await asyncio.sleep(0)
