"""The same promises on a real API server: the fake one behaves like Kubernetes."""

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import msgspec
import orjson
import pytest

from atoll.api.times import format_microtime
from atoll.cluster.objects import decode_heartbeat
from atoll.cluster.reports import age_at_first_sight, stored_seconds
from atoll.kube import errors, patches, paths
from atoll.kube.cache import Change
from atoll.kube.client import ApiClient
from atoll.kube.election import LeaderElector
from atoll.kube.events import EventRecorder, ObjectReference
from atoll.kube.reflector import Reflector
from atoll.service.clock import SystemClock
from tests.fakes.clock import until
from tests.kube.test_reflector import WatchedPod as Thing
from tests.kube.test_reflector import decode_pod as decode

pytestmark = pytest.mark.e2e

MAPS = paths.core("configmaps", namespace="default")
WAIT_SECONDS = 120.0
DEEP = 2_000
"""Levels of managed fields, twice what Python's decoders follow by themselves. The API server takes 10,000, for each of
which it copies all that lie deeper."""


@pytest.fixture
async def real(control_plane: Path) -> AsyncIterator[ApiClient]:
    async with await ApiClient.connect(control_plane, requests_per_second=500, burst=500) as client:
        yield client


async def create(client: ApiClient, name: str) -> Thing:
    return decode(await client.create(MAPS, {"metadata": {"name": name, "labels": {"test": "yes"}}}))


@pytest.mark.parametrize("by_pages", [False, True], ids=["streaming list", "paged list"])
async def test_reflector_holds_what_the_server_holds(real: ApiClient, by_pages: bool) -> None:
    """After a hundred random writes the copy equals a fresh list, object by object, with nothing synthetic."""
    rng = random.Random(7)
    changes: list[Change[Thing]] = []
    prefix = uuid4().hex[:8]
    await create(real, f"{prefix}-before")
    reflector = Reflector(real, MAPS, decode, on_event=changes.append, clock=SystemClock(), label_selector="test=yes")
    reflector._page_next = by_pages
    task = asyncio.create_task(reflector.run())
    await asyncio.wait_for(reflector.synced.wait(), WAIT_SECONDS)
    for step in range(100):
        name = f"{prefix}-{rng.randrange(10)}"
        try:
            if rng.random() < 0.4:
                await real.delete(f"{MAPS}/{name}")
            else:
                await real.patch(f"{MAPS}/{name}", {"data": {"step": str(step)}})
        except errors.NotFound:
            await create(real, name)
    listing = await real.list(MAPS, decode, params={"labelSelector": "test=yes"}, page_size=3)
    last = await create(real, f"{prefix}-last")

    assert await reflector.wait_for_resource_version(last.metadata.resource_version, WAIT_SECONDS)
    held = {uid: thing.metadata.resource_version for uid, thing in reflector.by_uid.items()}
    assert held == {thing.metadata.uid: thing.metadata.resource_version for thing in (*listing.items, last)}
    assert reflector.listings_count == 1
    assert not any(change.synthetic for change in changes)
    task.cancel()


@pytest.mark.parametrize("by_pages", [False, True], ids=["streaming list", "paged list"])
async def test_an_object_as_deep_as_the_server_takes_ends_no_watch(real: ApiClient, by_pages: bool) -> None:
    """Whoever may write an object may nest its managed fields so deep that no decoder of Python's follows by itself."""
    prefix = uuid4().hex[:8]
    deep = await create(real, f"{prefix}-deep")
    fields = orjson.Fragment(b'{"f:a":' * DEEP + b"{}" + b"}" * DEEP)
    entry = {"manager": "mallory", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1"}
    body = {"metadata": {"managedFields": [{**entry, "fieldsV1": fields}]}}
    stored = await real.patch(f"{MAPS}/{deep.metadata.name}", body, timeout_seconds=WAIT_SECONDS)
    assert stored.count(b"f:a") >= DEEP, "the server keeps them"
    reflector = Reflector(real, MAPS, decode, on_event=lambda _change: None, clock=SystemClock())
    reflector._page_next = by_pages
    task = asyncio.create_task(reflector.run())
    await asyncio.wait_for(reflector.synced.wait(), WAIT_SECONDS)
    last = await create(real, f"{prefix}-last")

    assert await reflector.wait_for_resource_version(last.metadata.resource_version, WAIT_SECONDS)
    assert {deep.metadata.uid, last.metadata.uid} <= reflector.by_uid.keys()
    task.cancel()
    await real.delete(f"{MAPS}/{deep.metadata.name}", timeout_seconds=WAIT_SECONDS)


async def test_every_fence_that_does_not_hold_is_a_conflict(real: ApiClient) -> None:
    """Wrong uid or old resourceVersion, by merge patch or deletion: one class, and nothing changed."""
    thing = await create(real, f"fence-{uuid4().hex[:8]}")
    path = f"{MAPS}/{thing.metadata.name}"
    wrong = {"uid": "another"}, {"resource_version": "1"}

    for fence in wrong:
        with pytest.raises(errors.Conflict):
            await real.patch(path, patches.merge_patch(**fence, data={"a": "b"}))
        with pytest.raises(errors.Conflict):
            await real.delete(path, patches.delete_options(**fence))

    assert decode(await real.get(path)).metadata == thing.metadata
    with pytest.raises(errors.AlreadyExists):
        await create(real, thing.metadata.name)
    with pytest.raises(errors.Invalid):
        await create(real, "Not A Name")
    right = {"uid": thing.metadata.uid, "resource_version": thing.metadata.resource_version}
    await real.delete(path, patches.delete_options(**right))


async def test_lease_times_at_zero_microseconds_are_accepted(real: ApiClient) -> None:
    """The format with six digits is what the API server wants; it refuses the one Python prints by itself."""
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)

    def lease(renew_time: str) -> dict[str, object]:
        return {"metadata": {"name": f"t-{uuid4().hex[:8]}"}, "spec": {"renewTime": renew_time}}

    await real.create(paths.leases("default"), lease(format_microtime(moment)))
    with pytest.raises(errors.ApiError):
        await real.create(paths.leases("default"), lease(moment.isoformat()))


@pytest.mark.parametrize("ahead_hours", [-3, 3])
async def test_the_server_says_by_its_own_clock_when_it_stored_a_renewal(real: ApiClient, ahead_hours: int) -> None:
    """Whatever the agent's clock says: each renewal moves the server's time, and a label of somebody else does not."""
    path = paths.leases("default", f"beat-{uuid4().hex[:8]}")
    body = {"metadata": {"name": path.rpartition("/")[2]}, "spec": {"holderIdentity": "n1"}}
    await real.create(paths.leases("default"), body)
    stored: list[float] = []

    async def renew() -> None:
        moment = datetime.now(UTC) + timedelta(hours=ahead_hours)
        answer = await real.patch(path, {"spec": {"renewTime": format_microtime(moment)}})
        stored.append(stored_seconds(decode_heartbeat(answer)) or 0.0)

    await renew()
    async with asyncio.timeout(WAIT_SECONDS):
        while stored[-1] == stored[0]:
            await renew()
    await real.patch(path, {"metadata": {"labels": {"team": "vision"}}}, params={"fieldManager": "somebody"})
    found = decode_heartbeat(await real.get(path))

    assert stored_seconds(found) == stored[-1]
    assert age_at_first_sight(found, real.server_seconds()) < WAIT_SECONDS


async def test_leadership_passes_on(real: ApiClient) -> None:
    """Two contenders lead one after the other, the second as soon as the first has given the Lease back."""
    terms: list[int] = []
    name = f"leader-{uuid4().hex[:8]}"
    working = 0

    async def work(term: int) -> None:
        nonlocal working
        working += 1
        assert working == 1
        terms.append(term)
        await asyncio.sleep(0)
        working -= 1

    electors = [LeaderElector(real, "default", name, identity, clock=SystemClock()) for identity in ("a", "b")]
    await asyncio.wait_for(asyncio.gather(*(elector.lead(work) for elector in electors)), WAIT_SECONDS)

    assert terms == [1, 2]


async def test_events_are_accepted_with_their_series(real: ApiClient) -> None:
    """The API server takes new events and counts, for namespaced and cluster-scoped objects."""
    thing = await create(real, f"event-{uuid4().hex[:8]}")
    recorder = EventRecorder(real, "gpu.scheduling/test", "host", SystemClock())
    subject = ObjectReference("v1", "ConfigMap", thing.metadata.name, "default", thing.metadata.uid)
    node = ObjectReference("v1", "Node", thing.metadata.name)
    for regarding in (subject, node, subject):
        recorder.record(regarding, reason="Tested", note=thing.metadata.name, action="Testing")
    await recorder.flush()

    found = msgspec.json.decode(await real.get(paths.events("default")))["items"]
    ours = {event["regarding"]["kind"]: event for event in found if event["note"] == thing.metadata.name}
    assert recorder.dropped_count == 0
    assert ours["ConfigMap"]["series"]["count"] == 2
    assert "series" not in ours["Node"]


async def test_broken_watch_is_resumed_on_the_real_server(real: ApiClient) -> None:
    """When our own session drops every connection, reading goes on, and nothing is lost or told twice."""
    changes: list[Change[Thing]] = []
    reflector = Reflector(real, MAPS, decode, on_event=changes.append, clock=SystemClock(), silence_seconds=2.0)
    task = asyncio.create_task(reflector.run())
    await asyncio.wait_for(reflector.synced.wait(), WAIT_SECONDS)
    await until(lambda: reflector.last_error, timeout_seconds=WAIT_SECONDS)
    thing = await create(real, f"after-{uuid4().hex[:8]}")
    await until(lambda: thing.metadata.uid in reflector.by_uid, timeout_seconds=WAIT_SECONDS)

    assert [change.kind for change in changes if change.object.metadata.uid == thing.metadata.uid] == ["ADDED"]
    task.cancel()
