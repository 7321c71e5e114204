"""Foreign use: reported once per object, withdrawn at its end; meanwhile the GPU is never given out."""

from pathlib import Path
from typing import Any

from atoll.api import names
from atoll.cluster.foreign import ForeignUse
from atoll.cluster.foreign_mismatches import TOLD_MAX, Mismatch, complaint
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import WatchedKind
from tests.builders import make_allocation, make_pod, pod_json, report_json, uuid_of
from tests.controllers.harness import (
    PODS,
    REPORTS,
    ControllerHarness,
    InMemoryServer,
    running_controllers,
    strip_version,
)
from tests.fakes.clock import until
from tests.service.test_metrics import samples


def show(running: ControllerHarness, sequence: int, *, host: tuple[int, ...] = (), **users: tuple[int, ...]) -> None:
    """Publish a report of n1 on which these pods, and a process of the machine, use GPUs."""
    body = report_json("n1")
    body["status"]["evidence"] = {"sequence": sequence}
    body["status"]["pods"] = [
        {"uid": uid, "live": True, "uuids": [uuid_of("n1", number) for number in ids]} for uid, ids in users.items()
    ]
    body["status"]["hostUses"] = [{"uuid": uuid_of("n1", number), "pids": [4711]} for number in host]
    running.server.put(f"{REPORTS}/n1", strip_version(body))


def setup(server: InMemoryServer) -> None:
    """A pod of ours with GPU 0, and a plain one."""
    body = pod_json("ours", uid="ours", node="n1", phase="Running", allocation=make_allocation("n1", 0))
    server.put(f"{PODS}/ours", strip_version(body))
    server.put(f"{PODS}/plain", strip_version(pod_json("plain", uid="plain", gpus=None, node="n1", phase="Running")))


def condition(running: ControllerHarness, name: str) -> dict[str, Any]:
    """Return the pod's condition, empty where it has none."""
    conditions = running.server.objects[f"{PODS}/{name}"].get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == names.POD_AS_PROMISED), {})


def gpus_in_foreign_use(running: ControllerHarness) -> float:
    """Return what the metric says."""
    return samples(running.metrics)["atoll_controllers_foreign_gpus",]


async def test_holder_is_told_that_somebody_uses_its_gpu(tmp_path: Path) -> None:
    """Node, user and holder get an event, the holder a condition that names the user, the metric counts the GPUs; all
    of it ends with the use."""
    async with running_controllers(tmp_path, setup) as running:
        show(running, 1, ours=(0,), plain=(0, 3))
        await running.settled(lambda: condition(running, "ours").get("status") == "False")
        assert "is used by pod team/plain" in condition(running, "ours")["message"]
        assert condition(running, "plain") == {}
        told = {name for reason, name in running.notes.recorded if reason == names.REASON_FOREIGN_USE}
        assert told == {"n1", "plain", "ours"}
        assert gpus_in_foreign_use(running) == 2
        plain, elsewhere = running.mirror.pods.by_uid["plain"], make_pod("x", node="n2")
        affected = running.reconciler("foreign").affected
        assert tuple(affected(WatchedKind.POD, Change(ChangeKind.MODIFIED, plain, plain))) == ("n1",)
        assert tuple(affected(WatchedKind.POD, Change(ChangeKind.MODIFIED, elsewhere, elsewhere))) == ()
        count = len(running.notes.recorded)

        show(running, 2, ours=(0,), plain=(0, 3))
        for loop in running.loops:
            await loop.run_once()
        assert len(running.notes.recorded) == count, "told once"

        show(running, 3, ours=(0,))
        await running.settled(lambda: condition(running, "ours").get("status") == "True")
        assert gpus_in_foreign_use(running) == 0


async def test_pod_that_uses_more_than_it_holds_is_told(tmp_path: Path) -> None:
    """Its own condition names the GPU; a process of the machine is told of on the node."""
    async with running_controllers(tmp_path, setup) as running:
        show(running, 1, host=(7,), ours=(0, 5))
        await running.settled(lambda: condition(running, "ours").get("status") == "False")
        assert f"it uses GPU 5 ({uuid_of('n1', 5)})" in condition(running, "ours")["message"]
        await running.settled(lambda: (names.REASON_FOREIGN_USE, "n1") in running.notes.recorded)
        assert running.mirror.ledger.free("n1", now_seconds=0.0) == 0b01011110


async def test_waiting_pod_is_woken_when_a_foreign_use_ends(tmp_path: Path) -> None:
    """The end of a use is room like the end of a Lease: whoever waits for that GPU need not wait for a resync."""

    def crowd(server: InMemoryServer) -> None:
        body = pod_json("wants-all", gpus=8)
        refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        server.put(
            f"{PODS}/wants-all", strip_version({**body, "status": {"phase": "Pending", "conditions": [refused]}})
        )
        report = report_json("n1")
        report["status"]["hostUses"] = [{"uuid": uuid_of("n1", 7), "pids": [1]}]
        server.put(f"{REPORTS}/n1", strip_version(report))

    async with running_controllers(tmp_path, crowd) as running:
        await until(lambda: (names.REASON_WAITING, "wants-all") in running.notes.recorded)
        assert names.WOKEN not in running.server.objects[f"{PODS}/wants-all"]["metadata"]["annotations"]
        show(running, 2)
        await until(lambda: names.WOKEN in running.server.objects[f"{PODS}/wants-all"]["metadata"]["annotations"])


async def test_who_uses_what_it_holds_is_left_alone(tmp_path: Path) -> None:
    """No event, no condition, no write."""
    async with running_controllers(tmp_path, setup) as running:
        show(running, 1, ours=(0,))
        await running.settled(lambda: running.mirror.reports["n1"].status.evidence.sequence == 1)
        for loop in running.loops:
            await loop.run_once()
        assert condition(running, "ours") == {}
        assert names.REASON_FOREIGN_USE not in {reason for reason, _ in running.notes.recorded}


def test_condition_is_bounded() -> None:
    """However many GPUs are used, the text stays short, and says how many more there are."""
    found = [Mismatch(number, ForeignUse(f"GPU-{number}", "ours")) for number in range(TOLD_MAX + 3)]
    text = complaint("ours", found, {"ours": make_pod("ours", uid="ours")})
    assert text.count("GPU-") == TOLD_MAX
    assert text.endswith("and 3 more")
    assert complaint("other", found, {}) == ""
