"""The reflector: whatever a watch does, the copy becomes correct again, without losses or busy loops."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.client import ApiClient
from atoll.kube.reflector import Reflector
from tests.fakes.api_server import FakeApiServer, WatchStream, answering, cut_connection
from tests.fakes.clock import ManualClock, until


class PodMeta(msgspec.Struct, rename="camel", frozen=True):
    name: str
    uid: str
    resource_version: str
    namespace: str = ""


class Spec(msgspec.Struct, rename="camel", frozen=True):
    node_name: str = ""


class WatchedPod(msgspec.Struct, frozen=True):
    metadata: PodMeta
    spec: Spec = Spec()


decode_pod = msgspec.json.Decoder(WatchedPod).decode


@dataclass
class WatchedReflector:
    """A running reflector and what its consumer was told."""

    reflector: Reflector[WatchedPod]
    server: FakeApiServer
    clock: ManualClock
    changes: list[Change[WatchedPod]] = field(default_factory=list)
    rewinds: int = 0

    def note_rewind(self) -> None:
        self.rewinds += 1

    def told(self) -> list[tuple[str, str, bool]]:
        return [(change.kind.value, change.object.metadata.uid, change.synthetic) for change in self.changes]

    async def next_stream(self) -> WatchStream:
        """Let the back-off pass until the next watch is open."""
        while self.server.streams.empty():
            await until(lambda: self.clock.sleepers or not self.server.streams.empty())
            if self.server.streams.empty():
                await self.clock.advance(self.clock.next_alarm_seconds() or 0)
        return self.server.streams.get_nowait()


@asynccontextmanager
async def watching(
    server: FakeApiServer, client: ApiClient, clock: ManualClock, *, silence_seconds: float = 30.0, **selectors: str
) -> AsyncIterator[WatchedReflector]:
    changes: list[Change[WatchedPod]] = []
    watched: WatchedReflector
    reflector = Reflector(
        client,
        paths.pods(),
        decode_pod,
        on_event=changes.append,
        clock=clock,
        silence_seconds=silence_seconds,
        rng=random.Random(7),
        on_rewind=lambda: watched.note_rewind(),
        **selectors,
    )
    watched = WatchedReflector(reflector, server, clock, changes)
    task = asyncio.create_task(reflector.run())
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def pod(name: str, namespace: str = "team") -> str:
    return paths.pods(namespace, name)


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming list", "paged list"])
async def test_lists_then_follows(
    server: FakeApiServer, client: ApiClient, clock: ManualClock, streaming: bool
) -> None:
    """What is there is told as added, then every change, whichever way of listing the server offers."""
    server.accepts_streaming_list = streaming
    server.put(pod("a"), {"metadata": {"uid": "a1"}})
    server.put(pod("b"), {"metadata": {"uid": "b1"}})
    async with watching(server, client, clock) as watched:
        await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        assert sorted(watched.told()) == [("ADDED", "a1", False), ("ADDED", "b1", False)]

        server.put(pod("a"), {"metadata": {"uid": "a1"}, "spec": {"nodeName": "n1"}})
        server.remove(pod("b"))
        await until(lambda: len(watched.changes) == 4)

        assert watched.told()[2:] == [("MODIFIED", "a1", False), ("DELETED", "b1", False)]
        assert watched.changes[2].old is not None
        assert watched.changes[2].old.spec.node_name == ""
        assert {key: held.spec.node_name for key, held in watched.reflector.store.items()} == {("team", "a"): "n1"}
        assert set(watched.reflector.by_uid) == {"a1"}
        assert watched.reflector.resource_version == str(server.version)


async def test_asks_for_bookmarks_and_a_bounded_watch(
    server: FakeApiServer, client: ApiClient, clock: ManualClock
) -> None:
    """Each watch asks for bookmarks, ends by itself some day, and carries the selectors."""
    async with watching(server, client, clock, field_selector="spec.nodeName=n1", label_selector="x=y") as watched:
        stream = await watched.next_stream()

        assert stream.query["allowWatchBookmarks"] == "true"
        assert 300 <= int(stream.query["timeoutSeconds"]) <= 600
        assert stream.query["fieldSelector"] == "spec.nodeName=n1"
        assert stream.query["labelSelector"] == "x=y"


def close(stream: WatchStream) -> None:
    stream.close()


def cut(stream: WatchStream) -> None:
    stream.break_connection()


def fail_inside(stream: WatchStream) -> None:
    stream.send("ERROR", {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"})


def send_garbage(stream: WatchStream) -> None:
    stream.send_raw(b"<html>\n")


def send_unknown(stream: WatchStream) -> None:
    stream.send("SURPRISE", {"metadata": {"name": "x"}})


ENDS = [close, cut, fail_inside, send_garbage, send_unknown]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_watch_that_ends_goes_on_where_it_stopped(
    server: FakeApiServer, client: ApiClient, clock: ManualClock, end: Callable[[WatchStream], None]
) -> None:
    """However a watch ends, the next one starts at the last version seen: nothing is listed again, nothing lost."""
    async with watching(server, client, clock) as watched:
        stream = await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        server.put(pod("a"), {"metadata": {"uid": "a1"}})
        await until(lambda: watched.changes)
        seen = watched.reflector.resource_version

        end(stream)
        stream = await watched.next_stream()

        assert stream.query["resourceVersion"] == seen
        assert "sendInitialEvents" not in stream.query
        assert watched.reflector.listings_count == 1


async def test_bookmark_moves_the_position(server: FakeApiServer, client: ApiClient, clock: ManualClock) -> None:
    """A quiet collection does not fall behind: bookmarks move the point to go on from, and count as news."""
    async with watching(server, client, clock) as watched:
        stream = await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        await clock.advance(50)
        assert watched.reflector.seconds_since_heard() == 50
        server.version = 500
        stream.send("BOOKMARK", server.bookmark())
        await until(lambda: watched.reflector.resource_version == "500")

        assert watched.reflector.seconds_since_heard() == 0
        stream.close()
        assert (await watched.next_stream()).query["resourceVersion"] == "500"


async def test_silent_watch_is_given_up(server: FakeApiServer, client: ApiClient, clock: ManualClock) -> None:
    """A half-open connection never ends by itself: silence beyond the bound starts a new watch, with a list, since
    nobody knows what happened meanwhile."""
    async with watching(server, client, clock, silence_seconds=0.05) as watched:
        await watched.next_stream()
        await until(watched.reflector.synced.is_set)

        stream = await watched.next_stream()

        assert server.count("watch=true") == 2
        assert "sendInitialEvents" in stream.query


async def test_age_grows_while_blind(server: FakeApiServer, client: ApiClient, clock: ManualClock) -> None:
    """A consumer can refuse to decide on an old copy: the age is infinite before the first list, then truthful."""
    async with watching(server, client, clock) as watched:
        assert watched.reflector.seconds_since_heard() == float("inf")
        stream = await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        server.fail(answering(503), times=100)
        stream.close()

        for _ in range(5):
            await until(lambda: clock.sleepers)
            await clock.advance(20)

        assert watched.reflector.seconds_since_heard() == 100


def gone_event(server: FakeApiServer, stream: WatchStream) -> None:
    stream.send("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})


def gone_status(server: FakeApiServer, stream: WatchStream) -> None:
    server.fail(answering(410, "Expired"), containing="watch=true")
    stream.close()


@pytest.mark.parametrize("gone", [gone_event, gone_status], ids=lambda gone: gone.__name__)
@pytest.mark.parametrize("streaming", [True, False], ids=["streaming list", "paged list"])
async def test_too_old_version_lists_again_and_tells_what_was_missed(
    server: FakeApiServer,
    client: ApiClient,
    clock: ManualClock,
    gone: Callable[[FakeApiServer, WatchStream], None],
    streaming: bool,
) -> None:
    """A deletion, a change and a recreation during a gap are told after it; deletions as synthetic, once."""
    server.accepts_streaming_list = streaming
    for name in ("deleted", "changed", "recreated", "same"):
        server.put(pod(name), {"metadata": {"uid": name}})
    async with watching(server, client, clock) as watched:
        stream = await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        watched.changes.clear()
        server.sends_events = False
        server.remove(pod("deleted"))
        server.put(pod("changed"), {"metadata": {"uid": "changed"}, "spec": {"nodeName": "n1"}})
        server.remove(pod("recreated"))
        server.put(pod("recreated"), {"metadata": {"uid": "successor"}})
        server.sends_events = True

        gone(server, stream)
        await watched.next_stream()
        await until(lambda: watched.reflector.listings_count == 2)

        assert sorted(watched.told()) == [
            ("ADDED", "successor", False),
            ("DELETED", "deleted", True),
            ("DELETED", "recreated", True),
            ("MODIFIED", "changed", False),
        ]
        assert set(watched.reflector.by_uid) == {"changed", "successor", "same"}


async def test_successor_within_one_update_is_two_changes(
    server: FakeApiServer, client: ApiClient, clock: ManualClock
) -> None:
    """One MODIFIED with another UID, as seen after an interruption, ends the old pod and begins a new one."""
    server.put(pod("db-0"), {"metadata": {"uid": "u1"}, "spec": {"nodeName": "n1"}})
    async with watching(server, client, clock) as watched:
        await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        server.put(pod("db-0"), {"metadata": {"uid": "u2"}})
        await until(lambda: len(watched.changes) == 3)

        assert watched.told()[1:] == [("DELETED", "u1", True), ("ADDED", "u2", False)]
        assert watched.changes[1].object.spec.node_name == "n1"
        assert watched.changes[2].object.spec.node_name == ""


async def test_events_out_of_order_end_in_the_newest_state(
    server: FakeApiServer, client: ApiClient, clock: ManualClock
) -> None:
    """An old state that arrives late neither overwrites a newer one nor revives a deleted object."""
    server.sends_events = False

    def state(uid: str, version: int) -> dict[str, object]:
        return {"metadata": {"name": uid, "namespace": "team", "uid": uid, "resourceVersion": str(version)}}

    async with watching(server, client, clock) as watched:
        stream = await watched.next_stream()
        stream.send("BOOKMARK", server.bookmark(initial_events_end=True))
        for event_type, uid, version in [
            ("ADDED", "a", 203),
            ("MODIFIED", "a", 202),
            ("DELETED", "b", 205),
            ("ADDED", "b", 204),
            ("ADDED", "c", 206),
            ("ADDED", "d", 201),
        ]:
            stream.send(event_type, state(uid, version))
        stream.send("BOOKMARK", {"metadata": {"resourceVersion": "150"}})
        await until(lambda: "d" in watched.reflector.by_uid)

        assert {uid: held.metadata.resource_version for uid, held in watched.reflector.by_uid.items()} == {
            "a": "203",
            "c": "206",
            "d": "201",
        }
        server.version = 206
        stream.close()
        assert (await watched.next_stream()).query["resourceVersion"] == "206"


def restore(server: FakeApiServer, version: int, **objects: str) -> None:
    """Put a backup in the place of what the server holds: pods by name and uid, at an older version."""
    server.version = version - len(objects)
    server.objects.clear()
    for name, uid in objects.items():
        server.put(pod(name), {"metadata": {"uid": uid}})


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_a_restored_server_is_noticed_and_listed_anew(
    server: FakeApiServer, client: ApiClient, clock: ManualClock, end: Callable[[WatchStream], None]
) -> None:
    """A watch from a version that is yet to come would say nothing: the server is asked first, everything is listed,
    and what happens at versions that were there before is followed."""
    server.put(pod("a"), {"metadata": {"uid": "a1"}})
    async with watching(server, client, clock) as watched:
        stream = await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        server.put(pod("b"), {"metadata": {"uid": "b1"}})
        server.remove(pod("a"))
        await until(lambda: "a1" not in watched.reflector.by_uid and "b1" in watched.reflector.by_uid)
        server.sends_events = False
        restore(server, 50, a="a1", c="c1")
        server.sends_events = True
        end(stream)
        await watched.next_stream()
        await until(lambda: set(watched.reflector.by_uid) == {"a1", "c1"})
        server.put(pod("a"), {"metadata": {"uid": "a1"}, "spec": {"nodeName": "n1"}})
        await until(lambda: watched.reflector.by_uid["a1"].spec.node_name == "n1")

    assert watched.rewinds == 1
    assert watched.reflector.listings_count == 2


def stay_away(server: FakeApiServer, stream: WatchStream) -> None:
    server.fail(answering(503), times=6)
    stream.close()


def refuse_connections(server: FakeApiServer, stream: WatchStream) -> None:
    server.fail(cut_connection, times=12)
    stream.break_connection()


def compact(server: FakeApiServer, stream: WatchStream) -> None:
    """`etcdutl snapshot restore --bump-revision --mark-compacted`"""
    gone_status(server, stream)


RESTARTS = [stay_away, refuse_connections, compact]


@pytest.mark.parametrize("restart", RESTARTS, ids=lambda restart: restart.__name__)
@pytest.mark.parametrize("sign", ["older state", "deleted object"])
async def test_a_restored_server_that_is_ahead_is_known_by_an_object_of_the_past(
    server: FakeApiServer,
    client: ApiClient,
    clock: ManualClock,
    restart: Callable[[FakeApiServer, WatchStream], None],
    sign: str,
) -> None:
    """Its version says nothing: others wrote in the meantime, or the restore raised it."""
    server.put(pod("a"), {"metadata": {"uid": "a1"}})
    backup = dict(server.objects)
    async with watching(server, client, clock) as watched:
        stream = await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        if sign == "older state":
            server.put(pod("a"), {"metadata": {"uid": "a1"}, "spec": {"nodeName": "n1"}})
            await until(lambda: watched.reflector.by_uid["a1"].spec.node_name == "n1")
        else:
            server.remove(pod("a"))
            await until(lambda: not watched.reflector.by_uid)
        server.sends_events = False
        server.objects, server.version = backup, 5000
        server.sends_events = True
        restart(server, stream)
        await watched.next_stream()
        await until(lambda: watched.reflector.listings_count == 2)
        rewinds_count = watched.rewinds
        watched.reflector.relist()
        await watched.next_stream()
        await until(lambda: watched.reflector.listings_count == 3)

    assert (rewinds_count, watched.rewinds) == (1, 1)


@pytest.mark.parametrize("restart", RESTARTS, ids=lambda restart: restart.__name__)
async def test_a_server_that_comes_back_as_it_was_is_listed_again_and_no_more(
    server: FakeApiServer,
    client: ApiClient,
    clock: ManualClock,
    restart: Callable[[FakeApiServer, WatchStream], None],
) -> None:
    """Only a comparison shows that nothing went back; changes and successors of the time between are usual."""
    for name in ("same", "changed", "recreated"):
        server.put(pod(name), {"metadata": {"uid": name}})
    async with watching(server, client, clock) as watched:
        stream = await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        server.sends_events = False
        server.put(pod("changed"), {"metadata": {"uid": "changed"}, "spec": {"nodeName": "n1"}})
        server.put(pod("recreated"), {"metadata": {"uid": "successor"}})
        server.sends_events = True
        restart(server, stream)
        await watched.next_stream()
        await until(lambda: watched.reflector.listings_count == 2)

    assert watched.rewinds == 0
    assert set(watched.reflector.by_uid) == {"same", "changed", "successor"}


@pytest.mark.parametrize(
    ("version", "listings"), [(101, 1), (5000, 1), (50, 2)], ids=["as it was", "far ahead", "behind"]
)
async def test_a_server_that_is_not_behind_is_watched_on(
    server: FakeApiServer, client: ApiClient, clock: ManualClock, version: int, listings: int
) -> None:
    """Only a server that is behind what it has shown is listed anew."""
    server.version = 100
    async with watching(server, client, clock) as watched:
        stream = await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        server.version = version
        stream.break_connection()
        await watched.next_stream()
        await until(lambda: watched.reflector.listings_count == listings)

    assert watched.rewinds == listings - 1


async def test_a_watch_that_ends_in_time_asks_nothing(
    server: FakeApiServer, client: ApiClient, clock: ManualClock
) -> None:
    """The usual end of a watch costs no further request."""
    async with watching(server, client, clock) as watched:
        stream = await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        await clock.advance(float(stream.query["timeoutSeconds"]))
        stream.close()
        await watched.next_stream()

    assert server.count("limit=1") == 0


async def test_object_that_cannot_be_decoded_does_not_stop_the_rest(
    server: FakeApiServer, client: ApiClient, clock: ManualClock
) -> None:
    """An odd object is counted and marked; the others are seen, and it is itself again once it can be read."""
    server.put(pod("odd"), {"metadata": {"uid": "odd"}, "spec": "not an object"})
    server.put(pod("fine"), {"metadata": {"uid": "fine"}})
    async with watching(server, client, clock) as watched:
        stream = await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        assert set(watched.reflector.by_uid) == {"fine"}
        assert set(watched.reflector.untrusted) == {("team", "odd")}
        assert watched.reflector.undecodable_count == 1

        stream.send("MODIFIED", {"no": "metadata"})
        server.put(pod("odd"), {"metadata": {"uid": "odd"}, "spec": {"nodeName": "n1"}})
        await until(lambda: "odd" in watched.reflector.by_uid)

        assert not watched.reflector.untrusted
        assert watched.reflector.undecodable_count == 2


async def test_event_of_five_megabytes_passes(server: FakeApiServer, client: ApiClient, clock: ManualClock) -> None:
    """No line limit of the HTTP library applies to a big custom resource."""
    async with watching(server, client, clock) as watched:
        await watched.next_stream()
        server.put(pod("big"), {"metadata": {"uid": "big"}, "status": {"blob": "x" * 5_000_000}})

        await until(lambda: "big" in watched.reflector.by_uid)


async def test_failing_server_is_asked_ever_less_often(
    server: FakeApiServer, client: ApiClient, clock: ManualClock
) -> None:
    """500 on every call: a few dozen attempts in ten minutes, not thousands, and recovery when the server recovers."""
    server.fail(answering(500), times=10_000)
    async with watching(server, client, clock) as watched:
        while clock.monotonic_seconds() < 1600:
            await until(lambda: clock.sleepers)
            await clock.advance(clock.next_alarm_seconds() or 0)
        attempts = len(server.requests)
        server.faults.clear()
        await watched.next_stream()
        await until(watched.reflector.synced.is_set)

        assert 20 <= attempts <= 50


async def test_watch_that_closes_at_once_does_not_spin(
    server: FakeApiServer, client: ApiClient, clock: ManualClock
) -> None:
    """Watches that end immediately are opened with growing pauses, although each one succeeded."""
    async with watching(server, client, clock) as watched:
        for _ in range(12):
            (await watched.next_stream()).close()

        assert clock.monotonic_seconds() - 1000 > 60


async def test_long_watch_resets_the_pause(server: FakeApiServer, client: ApiClient, clock: ManualClock) -> None:
    """After a watch that lasted, the next one opens within a fraction of a second."""
    async with watching(server, client, clock) as watched:
        for _ in range(8):
            (await watched.next_stream()).close()
        stream = await watched.next_stream()
        await until(lambda: not clock.sleepers)
        await clock.advance(300)
        before = clock.monotonic_seconds()
        stream.close()
        await watched.next_stream()

        assert clock.monotonic_seconds() - before <= 0.2


async def test_stream_that_breaks_while_listing_falls_back_to_pages(
    server: FakeApiServer, client: ApiClient, clock: ManualClock
) -> None:
    """Half a list deletes nothing, and the next attempt goes by pages."""
    server.put(pod("a"), {"metadata": {"uid": "a1"}})
    server.sends_events = False
    async with watching(server, client, clock) as watched:
        stream = await watched.next_stream()
        assert "sendInitialEvents" in stream.query
        stream.close()
        await watched.next_stream()
        await until(watched.reflector.synced.is_set)

        assert server.count("limit=500") == 1
        assert set(watched.reflector.by_uid) == {"a1"}


async def test_page_token_that_expires_starts_the_list_over(
    server: FakeApiServer, client: ApiClient, clock: ManualClock
) -> None:
    """A 410 in the middle of a paged list is not taken for the end of the collection."""
    server.accepts_streaming_list = False
    for number in range(600):
        server.put(pod(f"p{number:03}"), {"metadata": {"uid": f"u{number}"}})
    server.fail(answering(410, "Expired"), containing="continue=500")
    async with watching(server, client, clock) as watched:
        await watched.next_stream()
        await until(watched.reflector.synced.is_set)

        assert len(watched.reflector.store) == 600
        assert len(watched.changes) == 600
        assert watched.reflector.listings_count == 1


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming list", "paged list"])
async def test_list_that_was_under_way_does_not_end_a_beginning_anew(
    server: FakeApiServer, client: ApiClient, clock: ManualClock, streaming: bool
) -> None:
    """Whoever wants everything listed anew because of what a list shows gets a list that begins after that."""
    server.accepts_streaming_list = streaming
    server.put(pod("a"), {"metadata": {"uid": "a1"}})
    wanted_at: list[int] = []

    def lists() -> int:
        return server.count("sendInitialEvents=true") + server.count("limit=")

    def on_event(_change: Change[WatchedPod]) -> None:
        if not wanted_at:
            wanted_at.append(lists())
            reflector.relist()

    reflector = Reflector(client, paths.pods(), decode_pod, on_event=on_event, clock=clock, rng=random.Random(7))
    task = asyncio.create_task(reflector.run())
    try:
        while not reflector.synced.is_set():
            await until(lambda: reflector.synced.is_set() or clock.sleepers)
            await clock.advance(clock.next_alarm_seconds() or 0)
        assert lists() > wanted_at[0]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_waits_for_a_version(server: FakeApiServer, client: ApiClient, clock: ManualClock) -> None:
    """A consumer can wait until its own write has come back through the watch, but not for ever."""
    async with watching(server, client, clock) as watched:
        await watched.next_stream()
        await until(watched.reflector.synced.is_set)
        version = str(server.version + 1)
        waiting = asyncio.create_task(watched.reflector.wait_for_resource_version(version, 60))
        server.put(pod("a"), {})
        assert await waiting
        assert await watched.reflector.wait_for_resource_version(version, 0)

        late = asyncio.create_task(watched.reflector.wait_for_resource_version("999999", 60))
        await clock.advance(61)
        assert not await late


async def test_fault_of_the_consumer_ends_the_run(server: FakeApiServer, client: ApiClient, clock: ManualClock) -> None:
    """A consumer that failed on a change may not go on as if it had seen it: the process must start again."""
    server.put(pod("a"), {})

    def fail(_change: Change[WatchedPod]) -> None:
        raise RuntimeError("bug")

    reflector = Reflector(client, paths.pods(), decode_pod, on_event=fail, clock=clock)

    with pytest.raises(RuntimeError, match="bug"):
        await reflector.run()


async def test_many_restarts_leave_nothing_behind(server: FakeApiServer, client: ApiClient, clock: ManualClock) -> None:
    """Hundreds of watch cycles add no tasks, no threads and no waiting alarms."""
    async with watching(server, client, clock) as watched:
        (await watched.next_stream()).close()
        tasks, threads = len(asyncio.all_tasks()), threading.active_count()
        for _ in range(200):
            (await watched.next_stream()).close()
        await until(lambda: len(asyncio.all_tasks()) <= tasks + 2)

        assert clock.sleepers <= 1
        assert threading.active_count() == threads
        assert all(change.kind is ChangeKind.ADDED for change in watched.changes)
