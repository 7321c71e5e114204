"""Only pods with wrong indices are evicted, whichever write is lost.

The tests also check the triggers of the reconciler: tests that wait with `until` run without resync.
"""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atoll.api import names
from atoll.cluster.allocations import ContainerDevices, allocation_annotations
from tests.builders import make_allocation, pod_json, report_json
from tests.controllers.harness import (
    PODS,
    REPORTS,
    ControllerHarness,
    InMemoryServer,
    running_controllers,
    strip_version,
)
from tests.fakes.api_server import answering
from tests.fakes.clock import until
from tests.service.test_metrics import samples

RENUMBERED = [3, 2, 1, 0, 4, 5, 6, 7]
EVICTION = ("POST", f"{PODS}/p/eviction")


def put_told(server: InMemoryServer, name: str, device_id: int, cuda: str, **options: Any) -> None:
    """Put a running pod with one GPU of n1 on the server whose container was told `cuda`."""
    allocation = make_allocation("n1", device_id)
    annotations = allocation_annotations(allocation, (ContainerDevices("main", cuda, allocation.uuids[0]),))
    body = pod_json(name, node="n1", phase="Running", annotations=annotations, **options)
    server.put(f"{PODS}/{name}", strip_version(body))


def renumber(server: InMemoryServer) -> None:
    """Report the machine as it is after the reboot."""
    server.put(f"{REPORTS}/n1", strip_version(report_json("n1", indices=RENUMBERED)))


def names_of_pods(running: ControllerHarness) -> set[str]:
    """Return the pods that are there."""
    return {path.rpartition("/")[2] for path in running.server.objects if path.startswith(PODS)}


@pytest.mark.parametrize(("fails_at", "is_after"), [(n, after) for n in range(7) for after in (False, True)])
async def test_eviction_survives_any_lost_write(tmp_path: Path, fails_at: int, *, is_after: bool) -> None:
    """After the reboot the pod with the wrong number goes; one by uuid, one behind the wall and a right one stay."""

    def setup(server: InMemoryServer) -> None:
        put_told(server, "p", 0, "0")
        put_told(server, "by-uuid", 1, make_allocation("n1", 1).uuids[0])
        put_told(server, "walled", 2, "0", runtimeClassName=names.RUNTIME_CLASS)
        put_told(server, "right", 4, "4")

    async with running_controllers(tmp_path, setup, fails_at=fails_at, is_after=is_after) as running:
        renumber(running.server)
        await until(lambda: names_of_pods(running) == {"by-uuid", "walled", "right"})
        assert (names.REASON_GPUS_RENUMBERED, "p") in running.notes.recorded
        assert {path for _, path in running.api.writes if path.endswith("/eviction")} == {EVICTION[1]}


async def test_pod_bound_by_a_report_from_before_the_reboot_is_evicted(tmp_path: Path) -> None:
    """The bind lands after the report that makes it wrong: the change of the pod is looked at too."""
    async with running_controllers(tmp_path, renumber) as running:
        put_told(running.server, "p", 0, "0")
        await until(lambda: not names_of_pods(running))
        await until(lambda: samples(running.metrics)[("atoll_controllers_pods_evicted_total",)] == 1)


async def test_disruption_budget_delays_the_eviction(tmp_path: Path) -> None:
    """429 is no fault: the eviction is asked for again later, until it is allowed."""

    def setup(server: InMemoryServer) -> None:
        put_told(server, "p", 0, "0")
        server.fail(answering(429, "TooManyRequests", {"Retry-After": "1"}), times=2, containing="/eviction")

    async with running_controllers(tmp_path, setup) as running:
        renumber(running.server)
        await until(lambda: not names_of_pods(running))
        assert running.api.writes.count(EVICTION) == 3


async def test_mirror_alone_evicts_nobody(tmp_path: Path) -> None:
    """The bind may have read a newer report than the mirror holds: the live one decides."""
    asked: list[str] = []

    async def live(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.json_response(report_json("n1"))

    def setup(server: InMemoryServer) -> None:
        renumber(server)
        put_told(server, "p", 0, "0")
        server.fail(live, times=100, containing=f"GET {REPORTS}/n1?")

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: asked)
        for loop in running.loops:
            await loop.run_once()
        assert EVICTION not in running.api.writes
        assert names_of_pods(running) == {"p"}


async def test_successor_of_the_name_is_left_alone(tmp_path: Path) -> None:
    """The pod goes and another takes its name before the eviction arrives: its uid is the fence."""

    def setup(server: InMemoryServer) -> None:
        put_told(server, "p", 0, "0")

        def intercept(method: str, path: str, _body: Any) -> Any:
            if path.endswith("/eviction"):
                put_told(server, "p", 4, "4", uid="uid-of-the-successor")
            return None

        server.intercept(intercept)

    async with running_controllers(tmp_path, setup) as running:
        renumber(running.server)
        await running.settled(lambda: EVICTION in running.api.writes)
        await running.settled(lambda: "uid-of-the-successor" in running.mirror.ledger.pods)
        for loop in running.loops:
            await loop.run_once()
        assert running.api.writes.count(EVICTION) == 1
        assert names_of_pods(running) == {"p"}
