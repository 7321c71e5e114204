"""Log lines and metrics of binds: one line per bind, with pod, uid, node and attempt."""

import asyncio
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
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.mirror import ClusterMirror
from extender.binder import Binder, BinderSettings, CompletedBind
from extender.wire import BindCall
from tests.builders import make_pod, make_report
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


async def test_a_node_without_a_report_is_a_line_too(bench: BindBench) -> None:
    """Also what is refused before anything is written can be found by the pod's uid."""
    bench.mirror.ledger.drop_report("n1", why=names.REJECT_PAST_BOOT)
    with capture_logs() as logs:
        assert f"node n1: {names.REJECT_PAST_BOOT}" in await bench.binder.bind(CALL)

    assert lines(logs) == [("Did not bind a pod", "team/p", "u1", "n1", "attempt-1")]
