"""A GPU that becomes unhealthy is reported once, to its holder."""

from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus, Incident, IncidentKind
from atoll.cluster.allocations import allocation_annotations
from atoll.cluster.health import DeviceHealth, NodeHealth, judge
from atoll.cluster.transitions import Availability
from controllers.health import health_changes
from tests.builders import make_allocation, pod_json, report_json
from tests.controllers.harness import PODS, REPORTS, InMemoryServer, running_controllers, strip_version
from tests.fakes.clock import until

XID_79 = Incident(kind=IncidentKind.XID, code=79, last_time="2026-01-01T00:00:00.000000Z").to_json()
WELL = DeviceHealth(Availability.HEALTHY)
LOST = DeviceHealth(Availability.QUARANTINED, "XID 79: the card fell off the bus")
LOST_AGAIN = DeviceHealth(Availability.QUARANTINED, "XID 79: the card fell off the bus, again")
UNKNOWN = DeviceHealth(Availability.UNKNOWN, "not seen by the driver")
CORDONED = DeviceHealth(Availability.CORDONED, "fan")


def report(server: InMemoryServer, *, incidents: dict[int, list[Any]] | None = None) -> None:
    devices = {number: {"incidents": found} for number, found in (incidents or {}).items()}
    server.put(f"{REPORTS}/n1", strip_version(report_json("n1", devices=devices)))


async def test_the_pod_on_a_gpu_that_falls_ill_is_told_once(tmp_path: Path) -> None:
    """XID 79 under a running pod: an event on that pod and on the node; not on the pod beside it, and not again with
    the next report of the same; when the GPU is well again, that is told too."""

    def setup(server: InMemoryServer) -> None:
        report(server)
        for name, number in (("on-3", 3), ("on-4", 4)):
            annotations = allocation_annotations(make_allocation("n1", number), ())
            body = pod_json(name, node="n1", phase="Running", annotations=annotations)
            server.put(f"{PODS}/{name}", strip_version(body))

    async with running_controllers(tmp_path, setup) as running:
        report(running.server, incidents={3: [XID_79]})
        await until(lambda: (names.REASON_GPU_ILL, "on-3") in running.notes.recorded)
        report(running.server, incidents={3: [XID_79 | {"count": 2}]})
        report(running.server)
        await until(lambda: (names.REASON_GPU_WELL, "on-3") in running.notes.recorded)

        told = [one for one in running.notes.recorded if one[0] in {names.REASON_GPU_ILL, names.REASON_GPU_WELL}]
        assert sorted(told) == sorted(
            (reason, who) for reason in (names.REASON_GPU_ILL, names.REASON_GPU_WELL) for who in ("n1", "on-3")
        )


async def test_a_node_that_needs_draining_is_told_of_once(tmp_path: Path) -> None:
    """The driver asks for a reboot: its administrator is told, and not again with the next report of the same."""
    fatal = XID_79 | {"kind": IncidentKind.RECOVERY.value, "code": 2}
    async with running_controllers(tmp_path, report) as running:
        report(running.server, incidents={3: [fatal]})
        await until(lambda: (names.REASON_NODE_NEEDS_DRAIN, "n1") in running.notes.recorded)
        report(running.server, incidents={3: [fatal | {"count": 2}]})
        report(running.server)
        await until(lambda: (names.REASON_GPU_WELL, "n1") in running.notes.recorded)
        assert running.notes.recorded.count((names.REASON_NODE_NEEDS_DRAIN, "n1")) == 1


async def test_the_pod_on_a_gpu_that_the_report_names_no_more_is_told(tmp_path: Path) -> None:
    """A MIG instance that was undone, or a card that was replaced, under a running pod: its holder is told. Nobody is
    told of one that nobody holds."""

    def setup(server: InMemoryServer) -> None:
        server.put(f"{REPORTS}/n1", strip_version(report_json("n1")))
        annotations = allocation_annotations(make_allocation("n1", 3), ())
        server.put(f"{PODS}/on-3", strip_version(pod_json("on-3", node="n1", phase="Running", annotations=annotations)))

    async with running_controllers(tmp_path, setup) as running:
        server = running.server
        server.put(f"{REPORTS}/n1", strip_version(report_json("n1", uuids={3: "GPU-new", 4: "GPU-spare"})))
        await until(lambda: (names.REASON_GPU_ILL, "on-3") in running.notes.recorded)

        assert running.notes.recorded.count((names.REASON_GPU_ILL, "n1")) == 1


@pytest.mark.parametrize(
    ("before", "now", "want_ill", "want_well"),
    [
        pytest.param(None, WELL, False, False, id="first look, well"),
        pytest.param(None, LOST, True, False, id="first look, ill"),
        pytest.param(WELL, LOST, True, False, id="falls ill"),
        pytest.param(LOST, LOST, False, False, id="stays ill"),
        pytest.param(LOST, LOST_AGAIN, False, False, id="ill for the same cause, told otherwise"),
        pytest.param(UNKNOWN, LOST, True, False, id="from unknown to ill"),
        pytest.param(LOST, WELL, False, True, id="gets well"),
        pytest.param(WELL, CORDONED, False, False, id="an administrator knows what he did"),
        pytest.param(CORDONED, WELL, False, False, id="uncordoned"),
        pytest.param(LOST, CORDONED, False, False, id="cordoned while ill"),
    ],
)
def test_news_are_told_once(before: DeviceHealth | None, now: DeviceHealth, want_ill: bool, want_well: bool) -> None:
    """Only a change is news."""
    found = health_changes(NodeHealth({"g": before}) if before else None, NodeHealth({"g": now}))

    assert (bool(found.unhealthy), bool(found.recovered)) == (want_ill, want_well)


def test_a_reason_to_drain_is_told_once() -> None:
    """A node that must be rebooted says so when that becomes known."""
    drain = Incident(kind=IncidentKind.RECOVERY, code=2, message="the driver asks for: node reboot").to_json()
    status = GpuNodeStatus.model_validate(report_json("n1", devices={0: {"incidents": [drain]}}))
    judgement = judge(status)

    assert health_changes(NodeHealth(), judgement).drain
    assert not health_changes(judgement, judgement).drain
    assert not any(standing.may_be_given_out for standing in judgement.standings.values())
