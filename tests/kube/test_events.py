"""The event recorder: it never disturbs its caller and never floods the API server."""

import asyncio
from dataclasses import replace

import pytest

from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.events import (
    GOODBYE_SECONDS,
    KEYS_MAX,
    NAMESPACE_KEYS_MAX,
    RESERVED_KEYS,
    SIMILAR_MAX,
    SIMILAR_NOTE,
    EventRecorder,
    ObjectReference,
)
from tests.fakes.api_server import FakeApiServer, answering, hang
from tests.fakes.clock import ManualClock, until

POD = ObjectReference("v1", "Pod", "trainer-0", "team", "u1")
NODE = ObjectReference("v1", "Node", "n1", uid="u2")


@pytest.fixture
async def recorder(client: ApiClient, clock: ManualClock) -> EventRecorder:
    return EventRecorder(client, "gpu.scheduling/extender", "host-1", clock, events_per_second=1, burst=5)


def bound(recorder: EventRecorder, regarding: ObjectReference = POD, note: str = "Bound to 2 GPUs") -> None:
    recorder.record(regarding, reason="Bound", note=note, action="Binding")


async def test_event_has_everything_the_api_demands(server: FakeApiServer, recorder: EventRecorder) -> None:
    """An event names the object, who reports, why, and when with six digits."""
    recorder.record(POD, reason="Bound", note="Bound\nto 2 GPUs", action="Binding", type="Warning", related=NODE)
    await recorder.flush()

    (event,) = server.objects.values()
    assert event["regarding"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "trainer-0",
        "namespace": "team",
        "uid": "u1",
    }
    assert event["related"]["name"] == "n1"
    assert event["eventTime"] == "2026-01-31T12:00:00.000000Z"
    assert event["metadata"]["namespace"] == "team"
    assert event["metadata"]["name"].startswith("trainer-0.")
    assert (event["reportingController"], event["reportingInstance"]) == ("gpu.scheduling/extender", "host-1")
    assert (event["type"], event["reason"], event["action"]) == ("Warning", "Bound", "Binding")
    assert event["note"] == "Bound to 2 GPUs"


async def test_event_of_a_cluster_scoped_object_lives_in_default(
    server: FakeApiServer, recorder: EventRecorder
) -> None:
    """The API refuses any other namespace for it."""
    bound(recorder, NODE)
    await recorder.flush()

    assert next(iter(server.objects)).startswith(paths.events("default") + "/n1.")


async def test_repetitions_become_one_series(
    server: FakeApiServer, recorder: EventRecorder, clock: ManualClock
) -> None:
    """A thousand times the same is one event and, a minute later, one update with the count."""
    bound(recorder)
    await recorder.flush()
    for _ in range(999):
        bound(recorder)
    await recorder.flush()
    assert len(server.requests) == 1
    await clock.advance(61)
    await recorder.flush()
    await recorder.flush()

    (event,) = server.objects.values()
    assert event["series"]["count"] == 1000
    assert len(server.requests) == 2


async def test_messages_that_keep_changing_are_gathered(
    server: FakeApiServer, recorder: EventRecorder, clock: ManualClock
) -> None:
    """A pod whose message changes a thousand times gets a few events and one that counts the rest."""
    for number in range(1000):
        bound(recorder, note=f"0/{number} nodes are available")
    bound(recorder, NODE, note="another object")
    for _ in range(4):
        await recorder.flush()
        await clock.advance(5)

    events = {event["note"]: event for event in server.objects.values()}
    assert len(events) == SIMILAR_MAX + 2
    assert events[SIMILAR_NOTE]["series"]["count"] == 1000 - SIMILAR_MAX
    assert "another object" in events
    assert recorder.dropped_count == 0


async def test_gathering_ends_when_messages_are_forgotten(
    server: FakeApiServer, recorder: EventRecorder, clock: ManualClock
) -> None:
    """Long after a storm a message is an event of its own again."""
    for number in range(SIMILAR_MAX + 1):
        bound(recorder, note=f"note {number}")
    for _ in range(3):
        await recorder.flush()
        await clock.advance(5)
    await clock.advance(400)
    await recorder.flush()
    bound(recorder, note="much later")
    await recorder.flush()

    assert "much later" in {event["note"] for event in server.objects.values()}


async def test_rate_is_bounded_and_the_rest_comes_later(
    server: FakeApiServer, recorder: EventRecorder, clock: ManualClock
) -> None:
    """A storm is written at the agreed rate, in the order it happened."""
    for number in range(8):
        bound(recorder, note=f"note {number}")
    await recorder.flush()
    assert len(server.objects) == 5
    await clock.advance(3)
    await recorder.flush()

    assert sorted(event["note"] for event in server.objects.values()) == [f"note {number}" for number in range(8)]


@pytest.mark.parametrize("namespaces", [1, 3, 10_000])
async def test_memory_is_bounded_and_no_tenant_takes_the_room_of_nodes(
    recorder: EventRecorder, namespaces: int
) -> None:
    """Whatever tenants do, facts are bounded, those of one namespace too, and those of nodes find room."""
    for number in range(10_000):
        bound(recorder, replace(POD, name=f"p{number}", namespace=f"team-{number % namespaces}"))
    assert len(recorder._series) <= min(namespaces * NAMESPACE_KEYS_MAX, KEYS_MAX - RESERVED_KEYS)

    dropped = recorder.dropped_count
    for number in range(RESERVED_KEYS):
        bound(recorder, replace(NODE, name=f"n{number}"))
    assert recorder.dropped_count == dropped

    for number in range(10_000):
        bound(recorder, replace(NODE, name=f"x{number}"))
    assert len(recorder._series) <= KEYS_MAX


async def test_nodes_go_first_and_namespaces_take_turns(
    server: FakeApiServer, recorder: EventRecorder, clock: ManualClock
) -> None:
    """A flood of one tenant's facts delays neither a node's warning nor another tenant's first fact."""
    for number in range(50):
        bound(recorder, replace(POD, name=f"p{number}", namespace="flood"))
    bound(recorder, replace(POD, namespace="calm"))
    bound(recorder, NODE)

    await recorder.flush()

    told = [path.rpartition("/")[2].partition(".")[0] for path in server.objects]
    assert told == ["n1", "p0", "trainer-0", "p1", "p2"]


async def test_facts_are_forgotten(recorder: EventRecorder, clock: ManualClock, server: FakeApiServer) -> None:
    """Something that happens again much later is a new event, and old facts cost no memory."""
    bound(recorder)
    await recorder.flush()
    await clock.advance(400)
    await recorder.flush()
    bound(recorder)
    await recorder.flush()

    assert len(server.objects) == 2


async def test_refused_event_is_dropped(server: FakeApiServer, recorder: EventRecorder) -> None:
    """An event that the server does not want disturbs nobody and is not repeated for ever."""
    server.fail(answering(403, "Forbidden"))
    bound(recorder)
    await recorder.flush()
    await recorder.flush()

    assert recorder.dropped_count == 1
    assert len(server.requests) == 1


async def test_event_that_expired_is_created_anew(
    server: FakeApiServer, recorder: EventRecorder, clock: ManualClock
) -> None:
    """The server forgets events after an hour; the next occurrence starts over."""
    bound(recorder)
    await recorder.flush()
    server.objects.clear()
    bound(recorder)
    await clock.advance(61)
    await recorder.flush()
    bound(recorder)
    await recorder.flush()

    assert len(server.objects) == 1


async def test_name_and_note_are_cut(server: FakeApiServer, recorder: EventRecorder) -> None:
    """The longest object name and an endless note still make a valid event."""
    bound(recorder, ObjectReference("v1", "Pod", "p" * 253, "team"), note="x" * 5000)
    await recorder.flush()

    (event,) = server.objects.values()
    assert len(event["metadata"]["name"]) <= 253
    assert len(event["note"]) <= 1024


async def test_what_is_recorded_last_is_still_written(
    server: FakeApiServer, recorder: EventRecorder, clock: ManualClock
) -> None:
    """A process that stops says goodbye to its events."""
    task = asyncio.create_task(recorder.run())
    await until(lambda: clock.sleepers)
    bound(recorder)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert len(server.objects) == 1


async def test_a_server_that_does_not_answer_keeps_nobody_from_ending(
    server: FakeApiServer, recorder: EventRecorder, clock: ManualClock
) -> None:
    """A leader that lost its Lease must have ended before another may lead, or its process is ended by force."""
    server.fail(hang, times=3)
    task = asyncio.create_task(recorder.run())
    await until(lambda: clock.sleepers)
    for note in ("one", "two", "three"):
        bound(recorder, note=note)
    task.cancel()
    await until(lambda: server.requests)
    await clock.advance(GOODBYE_SECONDS)

    await until(task.done, timeout_seconds=3.0)
