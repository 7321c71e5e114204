"""Pods that cannot restart because their GPUs are gone: found, reported, and evicted if that is the policy."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.consistency import Problem, audit
from atoll.cluster.stranded import gone_gpus
from tests.builders import make_allocation, make_pod, pod_json, report_json
from tests.controllers.harness import (
    PODS,
    REPORTS,
    ControllerHarness,
    InMemoryServer,
    running_controllers,
    strip_version,
)
from tests.fakes.api_server import Object
from tests.service.test_metrics import samples

READABLE = {"type": names.CONDITION_DEVICES_READABLE, "status": "True", "reason": "AllRead"}
UNREADABLE = {**READABLE, "status": "False"}
U3 = "GPU-n1-0003"


def report_without(*device_ids: int, condition: dict[str, str] = READABLE, departed: bool = False) -> dict[str, Any]:
    """Return a report of n1 that lacks some of its eight GPUs."""
    body = report_json("n1", ids=list(range(8)))
    status = body["status"]
    gone = [one for one in status["devices"] if one["id"] in device_ids]
    status["devices"] = [one for one in status["devices"] if one["id"] not in device_ids]
    status["links"] = {}
    status["conditions"] = [{**condition, "lastTransitionTime": "2026-01-31T12:00:00Z"}]
    status["departed"] = [{"id": one["id"], "uuid": one["uuid"]} for one in gone] if departed else []
    return body


@pytest.mark.parametrize(
    ("body", "ids", "gone"),
    [
        (report_without(), (3,), ()),
        (report_without(3), (3,), (U3,)),
        (report_without(3), (2, 3), (U3,)),
        (report_without(3), (2,), ()),
        (report_without(3, condition=UNREADABLE), (3,), ()),
        (report_without(3, condition=UNREADABLE, departed=True), (3,), (U3,)),
        (report_json("n1", devices={3: {"health": {"state": "unknown"}}}), (3,), ()),
        ({**report_json("n1"), "status": None}, (3,), ()),
        (report_json("n2"), (3,), ()),
    ],
    ids=[
        "all are there",
        "its card is gone",
        "one of two is gone",
        "another's card is gone",
        "the driver cannot be read",
        "the driver cannot be read, and the card had left",
        "its card is not seen",
        "no report",
        "another node's report",
    ],
)
def test_which_gpus_of_a_pod_are_gone(body: dict[str, Any], ids: tuple[int, ...], gone: tuple[str, ...]) -> None:
    """What a report that names everything lacks, or what is known to have left; never what only is not seen."""
    pod = make_pod(node="n1", phase="Running", allocation=make_allocation("n1", *ids))

    assert gone_gpus(pod, GpuNodeStatus.model_validate(body)) == gone


def test_a_pod_that_ended_lacks_nothing() -> None:
    """Nothing of it will start again."""
    pod = make_pod(node="n1", phase="Failed", allocation=make_allocation("n1", 3))

    assert gone_gpus(pod, GpuNodeStatus.model_validate(report_without(3))) == ()


def test_the_audit_names_a_pod_whose_gpu_is_gone() -> None:
    """Under the promise that what was promised is what is seen."""
    pod = make_pod(node="n1", phase="Running", allocation=make_allocation("n1", 3))
    status = GpuNodeStatus.model_validate(report_without(3))

    found = [one for one in audit([pod], [], [status]) if one.problem is Problem.GONE_GPU]

    assert [(one.subject, U3 in one.detail) for one in found] == [("pod team/p (uid-of-p)", True)]


AT_ONCE: dict[str, Any] = {"stranded_after_seconds": 0.0}


def settle_pods(server: InMemoryServer) -> None:
    """Two pods on n1, GPUs 3 and 4, the second of which is Ready, and one whose GPU stays."""
    for name, device_id, ready in (("down", 3, "False"), ("up", 4, "True"), ("whole", 5, "False")):
        pod = make_allocation("n1", device_id)
        body = strip_version(pod_json(name, node="n1", phase="Running", allocation=pod))
        body["status"]["conditions"] = [{"type": "Ready", "status": ready}]
        server.put(f"{PODS}/{name}", body)


def lose(running: ControllerHarness) -> None:
    current = running.server.objects[f"{REPORTS}/n1"]
    running.server.put(f"{REPORTS}/n1", {**report_without(3, 4), "metadata": current["metadata"]})


def is_down(pod: Object) -> bool:
    return bool(pod["metadata"]["name"] == "down")


def there(running: ControllerHarness) -> set[str]:
    return {path.rpartition("/")[2] for path in running.server.objects if path.startswith(PODS)}


async def test_a_pod_that_cannot_start_again_is_evicted_and_one_that_works_is_told(tmp_path: Path) -> None:
    """Both are told once, on the pod and on the node; a pod whose GPU is there is left alone."""
    async with running_controllers(tmp_path, settle_pods, settings=AT_ONCE) as running:
        lose(running)
        await running.settled(lambda: there(running) == {"up", "whole"})
        await running.settled(lambda: running.notes.notes_on(names.REASON_GPUS_GONE, "up"))
        for loop in running.loops:
            loop.resync()
        await running.settled(lambda: True)

        (evicted,) = running.notes.notes_on(names.REASON_GPUS_GONE, "down")
        (told,) = running.notes.notes_on(names.REASON_GPUS_GONE, "up")
        assert (evicted.endswith("the pod is evicted"), told.endswith("recreate the pod")) == (True, True)
        assert not running.notes.notes_on(names.REASON_GPUS_GONE, "whole")
        assert len(running.notes.notes_on(names.REASON_GPUS_GONE, "n1")) == 2


@pytest.mark.parametrize("is_gone", [False, True], ids=["is being deleted", "is gone"])
async def test_a_pod_that_leaves_meanwhile_is_left_alone(tmp_path: Path, *, is_gone: bool) -> None:
    """The mirror does not show it yet, the live look does."""
    looked: list[str] = []

    def leave(method: str, path: str, _body: object) -> web.Response | None:
        if method != "GET" or path != PODS:
            return None
        looked.append(path)
        found = [one for at, one in running.server.objects.items() if at.startswith(PODS)]
        leaving = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        items = [{**one, "metadata": {**one["metadata"], **leaving}} if is_down(one) else one for one in found]
        items = [one for one in items if not (is_gone and is_down(one))]
        return web.json_response({"metadata": {"resourceVersion": str(running.server.version)}, "items": items})

    async with running_controllers(tmp_path, settle_pods, settings=AT_ONCE) as running:
        running.server.intercept(leave)
        lose(running)
        await running.settled(lambda: looked and running.notes.notes_on(names.REASON_GPUS_GONE, "up"))
        stranded = running.reconciler("stranded")

        assert await stranded.reconcile("uid-of-down") is None
        assert there(running) == {"down", "up", "whole"}
        assert not running.notes.notes_on(names.REASON_GPUS_GONE, "down")


async def test_gpus_that_come_back_soon_after_a_boot_strand_nobody(tmp_path: Path) -> None:
    """The first look after a boot may lack what a driver, or whoever makes the MIG instances, is yet to bring back. A
    pod whose GPU goes again later has the whole time again."""
    async with running_controllers(tmp_path, settle_pods) as running:
        whole = running.server.objects[f"{REPORTS}/n1"]
        stranded = running.reconciler("stranded")
        waits = []
        for _ in range(2):
            lose(running)
            await running.settled(lambda: "uid-of-down" in stranded._since)
            waits.append(await stranded.reconcile("uid-of-down"))
            metadata = running.server.objects[f"{REPORTS}/n1"]["metadata"]
            running.server.put(f"{REPORTS}/n1", {**whole, "metadata": metadata})
            await running.settled(lambda: not stranded._seems_stranded("uid-of-down"))
            await stranded.reconcile("uid-of-down")

        assert there(running) == {"down", "up", "whole"}
        assert all(seconds is not None and seconds > 100 for seconds in waits), waits
        assert not running.notes.notes_on(names.REASON_GPUS_GONE, "down")


async def test_by_policy_nobody_is_evicted(tmp_path: Path) -> None:
    """`tell` leaves the pod to people."""
    async with running_controllers(tmp_path, settle_pods, settings={**AT_ONCE, "stranded_pods": "tell"}) as running:
        lose(running)
        await running.settled(lambda: running.notes.notes_on(names.REASON_GPUS_GONE, "down"))

        assert there(running) == {"down", "up", "whole"}
        assert samples(running.metrics)[("atoll_controllers_stranded_pods",)] == 2
        running.server.remove(f"{PODS}/up")
        await running.settled(lambda: samples(running.metrics)[("atoll_controllers_stranded_pods",)] == 1)
        assert not [path for _, path in running.api.writes if path.endswith("/eviction")]
