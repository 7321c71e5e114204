"""Log lines and metrics of binds: one line per bind, with pod, uid, node and attempt."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from atoll.api import names
from atoll.api.claims import VisibleDevices
from atoll.cluster.leases import Holder, Reservation, lease_body
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.mirror import ClusterMirror
from extender.binder import Binder, BinderSettings, CompletedBind
from extender.posting import DOUBT_SECONDS_MAX, PAUSE_SECONDS_MAX
from extender.wire import BindCall
from tests.builders import make_pod, make_report, make_reservation, uuid_of
from tests.extender.test_app import FakeMirror
from tests.fakes.api_server import FakeApiServer, answering, status
from tests.fakes.clock import ManualClock, until
from tests.fakes.listening import kubeconfig

BORN_SECONDS_AGO = 90.0
ANSWER_SECONDS = 8.0


@dataclass
class BindBench:
    """A binder before an API server that can be spoiled, and what it told."""

    server: FakeApiServer
    mirror: FakeMirror
    binder: Binder
    told: list[CompletedBind]
    clock: ManualClock

    def free_count(self) -> int:
        """Return how many GPUs of n1 other pods may have."""
        return self.mirror.ledger.free("n1", now_seconds=self.clock.monotonic_seconds()).bit_count()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[BindBench]:
    """One node of eight GPUs, and one pod that asks for two of them."""
    clock, mirror, told = ManualClock(), FakeMirror(), list[CompletedBind]()
    mirror.ledger.put_report(make_report("n1"))
    mirror.ledger.put_heartbeat("n1", clock.monotonic_seconds(), 180.0)
    pod = make_pod("p", uid="u1", gpus=2)
    born = clock.now().timestamp() - BORN_SECONDS_AGO
    created = type(clock.now()).fromtimestamp(born, tz=clock.now().tzinfo).strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata = msgspec.structs.replace(pod.metadata, creation_timestamp=created)
    mirror.ledger.put_pod(msgspec.structs.replace(pod, metadata=metadata))
    async with (
        FakeApiServer().running() as server,
        await ApiClient.connect(kubeconfig(tmp_path, server.url)) as client,
    ):
        settings = BinderSettings(ANSWER_SECONDS, 60.0, VisibleDevices.UUID)
        binder = Binder(client, cast("ClusterMirror", mirror), clock, settings, new_token=lambda: "attempt-1")
        binder.observer = told.append
        yield BindBench(server, mirror, binder, told, clock)


CALL = BindCall("p", "team", "u1", "n1")


def lines(logs: list[Any]) -> list[tuple[str, str, str, str, str]]:
    """Return message, pod, uid, node and attempt of every line."""
    return [(line["event"], line["pod"], line["uid"], line["node"], line["attempt"]) for line in logs]


async def test_a_bind_is_one_line_and_one_observation(bench: BindBench) -> None:
    """The attempt of the line is that of the Leases; the pod's age and the quality of its set are told."""
    with capture_logs() as logs:
        assert await bench.binder.bind(CALL) == ""

    assert lines(logs) == [("Bound a pod", "team/p", "u1", "n1", "attempt-1")]
    leases = [body for path, body in bench.server.objects.items() if "/leases/" in path]
    assert [lease["metadata"]["annotations"][names.LEASE_ATTEMPT] for lease in leases] == ["attempt-1"] * 2
    assert [(bound.policy, bound.relative_quality) for bound in bench.told] == [("contiguous", 1.0)]
    assert bench.told[0].waited_seconds == pytest.approx(BORN_SECONDS_AGO, abs=1.0)


async def test_what_a_bind_gave_out_is_spoken_for_until_the_watch_shows_it(bench: BindBench) -> None:
    """For as long as an answer may take: a watch that stands still keeps nothing for ever."""
    assert await bench.binder.bind(CALL) == ""

    assert bench.free_count() == 6
    await bench.clock.advance(ANSWER_SECONDS - 1.0)
    assert bench.free_count() == 6
    await bench.clock.advance(2.0)
    assert bench.free_count() == 8


async def test_a_refused_bind_is_one_line_with_its_reason(bench: BindBench) -> None:
    """Nothing is counted as placed, and the line says why."""
    bench.server.fail(answering(422, "Invalid"), containing=paths.binding("team", "p"))
    with capture_logs() as logs:
        assert await bench.binder.bind(CALL)

    assert lines(logs) == [("Did not bind a pod", "team/p", "u1", "n1", "attempt-1")]
    assert logs[0]["err"]
    assert bench.told == []


async def test_a_refused_bind_whose_pod_cannot_be_read_is_over(bench: BindBench) -> None:
    """The API server said no, and no copy of the Binding is under way: nothing is to be waited for."""
    bench.server.fail(answering(422, "Invalid"), containing=paths.binding("team", "p"))
    bench.server.fail(answering(403, "Forbidden"), containing=f"GET {paths.pods('team', 'p')}")

    assert "cannot be bound" in await bench.binder.bind(CALL)
    assert not any("/leases/" in path for path in bench.server.objects)


@pytest.mark.parametrize("are_in_the_backup", [False, True], ids=["its Leases are gone", "its Leases are there"])
async def test_after_a_restore_a_binding_is_repeated_only_while_its_leases_are_there(
    bench: BindBench, *, are_in_the_backup: bool
) -> None:
    """etcd was restored while the API server did not answer: somebody else may get the GPUs by now."""
    binding = paths.binding("team", "p")
    bench.server.put(paths.pods("team", "p"), {"metadata": {"name": "p", "namespace": "team", "uid": "u1"}})
    asked = asyncio.Event()

    async def be_away(_request: web.Request) -> web.StreamResponse:
        asked.set()
        return status(429, "TooManyRequests", "wait")

    bench.server.fail(be_away, containing=binding)
    with capture_logs() as logs:
        bind = asyncio.create_task(bench.binder.bind(CALL))
        await asked.wait()
        bench.mirror.restores_count += 1
        for path in [path for path in bench.server.objects if "/leases/" in path and not are_in_the_backup]:
            bench.server.remove(path)
        await until(lambda: bench.clock.next_alarm_seconds() is not None)
        while not bind.done():
            await bench.clock.advance(1.0)
            await asyncio.sleep(0.001)

    assert bench.server.count(f"POST {binding}") == (2 if are_in_the_backup else 1)
    assert ("Leases are gone since etcd was restored" in str(logs)) != are_in_the_backup


@pytest.mark.parametrize(
    ("unanswered", "said"),
    [
        pytest.param(10_000, "nobody answered whether", id="no Binding is answered"),
        pytest.param(1, "cannot be read to see whether it is bound", id="the next is refused, and the pod not shown"),
    ],
)
async def test_a_bind_that_nobody_can_judge_ends_in_doubt_and_keeps_its_leases(
    bench: BindBench, unanswered: int, said: str
) -> None:
    """The first Binding may have landed. Nobody waits for ever, and nobody else gets the GPUs."""
    bench.server.fail(answering(500, "InternalError"), times=unanswered, containing=paths.binding("team", "p"))
    bench.server.fail(answering(422, "Invalid"), containing=paths.binding("team", "p"))
    bench.server.fail(answering(403, "Forbidden"), times=10_000, containing=f"GET {paths.pods('team', 'p')}")
    give_up_at = bench.clock.monotonic_seconds() + 2 * DOUBT_SECONDS_MAX
    with capture_logs() as logs:
        bind = asyncio.create_task(bench.binder.bind(CALL))
        while not bind.done() and bench.clock.monotonic_seconds() < give_up_at:
            await until(lambda: bind.done() or bench.clock.next_alarm_seconds() is not None)
            await bench.clock.advance(PAUSE_SECONDS_MAX)

    assert bind.done()
    assert said in await bind
    assert [line["event"] for line in logs] == ["Left a bind in doubt"]
    assert sum("/leases/" in path for path in bench.server.objects) == 2


async def test_a_node_without_a_report_is_a_line_too(bench: BindBench) -> None:
    """Also what is refused before anything is written can be found by the pod's uid."""
    bench.mirror.ledger.drop_report("n1", why=names.REJECT_PAST_BOOT)
    with capture_logs() as logs:
        assert f"node n1: {names.REJECT_PAST_BOOT}" in await bench.binder.bind(CALL)

    assert lines(logs) == [("Did not bind a pod", "team/p", "u1", "n1", "attempt-1")]


OWN = make_reservation("n1", holder=Holder("team", "p", "u1"), attempt="of a process that ended")
OTHERS = make_reservation("n1", holder=Holder("team", "q", "u2"))
KEPT = make_reservation("n1", holder=Holder("@reservation", "r", "u3"))


@pytest.mark.parametrize(
    ("written", "uuids", "annotations", "is_taken_over"),
    [
        pytest.param(OWN, "n1", {}, True, id="its own, of an earlier attempt"),
        pytest.param(OTHERS, "n1", {}, False, id="another pod's"),
        pytest.param(OWN, "a machine before", {}, False, id="its own, but another GPU stands there now"),
        pytest.param(OWN, "n1", {names.LEASE_FENCED: "true"}, False, id="its own, but the controllers take it back"),
        pytest.param(KEPT, "n1", {names.RESERVATION: "r/u3"}, False, id="a GpuReservation's that it does not use"),
    ],
)
async def test_a_bind_takes_over_only_leases_that_are_its_own(
    bench: BindBench, written: Reservation, uuids: str, annotations: dict[str, str], *, is_taken_over: bool
) -> None:
    """The watch is behind: the binder meets the Lease that is there only when it creates its own. All eight GPUs have
    one, so that a bind that relies on none of them finds no GPU, and leaves them as they are."""
    for number in range(8):
        body = lease_body(written, number, uuid_of(uuids, number))
        body["metadata"]["annotations"] |= annotations
        bench.server.put(paths.leases(names.SYSTEM_NAMESPACE, body["metadata"]["name"]), body)
    before = dict(bench.server.objects)

    refusal = await bench.binder.bind(CALL)

    changed = [path for path, body in bench.server.objects.items() if before.get(path) != body]
    leases = [bench.server.objects[path] for path in changed if "/leases/" in path]
    attempts = [lease["metadata"]["annotations"][names.LEASE_ATTEMPT] for lease in leases]
    if is_taken_over:
        assert (refusal, attempts) == ("", ["attempt-1"] * 2)
    else:
        assert ("too few free GPUs" in refusal, attempts) == (True, [])


@pytest.mark.parametrize("is_confirmed", [True, False], ids=["the Binding is refused", "the take-over is in doubt"])
async def test_leases_of_an_earlier_attempt_outlive_a_bind_that_took_them_over(
    bench: BindBench, *, is_confirmed: bool
) -> None:
    """The earlier attempt may be under way elsewhere, and its Binding may yet land."""
    taken_over: set[str] = set()

    def lose_answers(method: str, path: str, body: Any) -> web.Response | None:
        if method == "PUT":
            taken_over.add(body["metadata"]["name"])
            bench.server.respond(method, path, {}, body)
            return status(409, "Conflict", "a repeat of a write that arrived")
        is_next_try = method == "POST" and body["metadata"]["name"] in taken_over
        return status(403, "Forbidden", "who knows") if is_next_try else None

    for number in range(8):
        body = lease_body(OWN, number, uuid_of("n1", number))
        bench.server.put(paths.leases(names.SYSTEM_NAMESPACE, body["metadata"]["name"]), body)
    bench.server.fail(answering(422, "Invalid"), containing=paths.binding("team", "p"))
    if not is_confirmed:
        bench.server.intercept(lose_answers)

    assert await bench.binder.bind(CALL)

    leases = [body for path, body in bench.server.objects.items() if "/leases/" in path]
    attempts = [lease["metadata"]["annotations"][names.LEASE_ATTEMPT] for lease in leases]
    assert (len(attempts), attempts.count("attempt-1")) == (8, 2)


@pytest.mark.parametrize(
    ("meanwhile", "is_held"),
    [
        pytest.param("nothing", True, id="nothing happened to it"),
        pytest.param("gone", False, id="it was deleted"),
        pytest.param("anew", False, id="it was deleted and made anew"),
        pytest.param("passed on", False, id="another pod has it"),
        pytest.param("fenced", False, id="the controllers take it back"),
    ],
)
async def test_a_changed_pod_is_bound_only_while_every_lease_is_its_own(
    bench: BindBench, meanwhile: str, *, is_held: bool
) -> None:
    """The first Binding met a newer version of the pod; before the next one the Leases are looked at, live."""
    binding = paths.binding("team", "p")
    bench.server.put(paths.pods("team", "p"), {"metadata": {"name": "p", "namespace": "team", "uid": "u1"}})

    async def change(_request: web.Request) -> web.StreamResponse:
        path = max(path for path in bench.server.objects if "/leases/" in path)
        lease = bench.server.objects[path]
        metadata, spec = lease["metadata"], lease["spec"]
        if meanwhile in {"gone", "anew"}:
            bench.server.remove(path)
            metadata = {key: value for key, value in metadata.items() if key != "uid"}
        if meanwhile == "passed on":
            spec = {**spec, "holderIdentity": "team/q/u2"}
        if meanwhile == "fenced":
            metadata = {**metadata, "annotations": {**metadata["annotations"], names.LEASE_FENCED: "true"}}
        if meanwhile not in {"nothing", "gone"}:
            bench.server.put(path, {**lease, "metadata": metadata, "spec": spec})
        return status(409, "Conflict", "the pod has changed")

    bench.server.fail(change, containing=binding)

    refusal = await bench.binder.bind(CALL)

    assert ("were taken back" in refusal, bench.server.count(f"POST {binding}")) == (not is_held, 2 if is_held else 1)


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours arrived after all", "another pod was faster"])
async def test_only_the_own_lease_goes_back_when_its_creation_was_not_confirmed(
    bench: BindBench, *, is_ours: bool
) -> None:
    """Nobody knows whether the write arrived: the token on the Lease tells."""
    leases = paths.leases(names.SYSTEM_NAMESPACE)

    async def lose(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        annotations = body["metadata"]["annotations"]
        device_id, uuid = int(annotations[names.LEASE_DEVICE_ID]), annotations[names.LEASE_DEVICE_UUID]
        written = body if is_ours else lease_body(OTHERS, device_id, uuid)
        bench.server.put(f"{leases}/{body['metadata']['name']}", written)
        return status(403, "Forbidden", "who knows")

    bench.server.fail(lose, times=2, containing=f"POST {leases}")

    assert await bench.binder.bind(CALL)

    assert sum("/leases/" in path for path in bench.server.objects) == (0 if is_ours else 2)
