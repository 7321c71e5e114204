"""Proof of release, rule by rule: what frees a GPU and what does not."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from atoll.api.node_status import DepartedDevice, Device, Evidence, GpuNodeStatusReport, PodEvidence
from atoll.cluster.objects import Pod
from atoll.cluster.release import Doubt, PodTermination, Proof, has_ended, judge, observe, version_number
from tests.builders import make_pod

TERMINATED = {"terminated": {"exitCode": 0}}
RUNNING = {"running": {}}
WAITING = {"waiting": {"reason": "CrashLoopBackOff"}}


def with_states(phase: str, *states: dict[str, Any], **options: Any) -> Pod:
    """Return a pod whose containers c0, c1, ... are in these states."""
    pod = make_pod(phase=phase, containers=[f"c{i}" for i in range(max(1, len(states)))], **options)
    statuses = [{"name": f"c{i}", "state": state} for i, state in enumerate(states)]
    return make_with_status(pod, statuses)


def make_with_status(pod: Pod, statuses: list[dict[str, Any]], *, ready_reason: str = "PodFailed") -> Pod:
    """Return the pod with container statuses and a Ready condition, decoded as the API server sends them."""
    raw = msgspec.to_builtins(pod)
    raw["status"]["containerStatuses"] = statuses
    raw["status"]["conditions"] = [{"type": "Ready", "status": "False", "reason": ready_reason}]
    return msgspec.convert(raw, Pod)


def departure(**facts: Any) -> PodTermination:
    """Return the departure of a pod that was deleted at version 100 on node n1, as the watch showed it."""
    pod = make_pod(node="n1", phase="Running", version="100")
    known = {"uid": pod.metadata.uid, "node": "n1", "pod": pod, "is_deleted": True, "deletion_seen": True}
    return PodTermination(**{**known, "version": 100, "boot_id": "boot-1", **facts})


def report(
    position: int = 200,
    *,
    sequence: int = 1,
    live: bool = False,
    listed: bool = False,
    boot: str = "boot-1",
    live_read: bool = True,
    kubelet_read: bool = True,
    node_uid: str = "",
    devices: tuple[str, ...] = (),
    departed: tuple[str, ...] = (),
) -> GpuNodeStatusReport:
    """Return a report; the pod has an entry when it is live or listed."""
    entries = (PodEvidence(uid="uid-of-p", live=live, kubelet=listed),) if live or listed else ()
    return GpuNodeStatusReport(
        boot_id=boot,
        node_uid=node_uid,
        pods=entries,
        devices=tuple(Device(id=i, uuid=uuid, model="m", index=i) for i, uuid in enumerate(devices)),
        departed=tuple(DepartedDevice(id=9 + i, uuid=uuid) for i, uuid in enumerate(departed)),
        evidence=Evidence(
            sequence=sequence,
            pod_resource_version=str(position),
            live_read=live_read,
            kubelet_read=kubelet_read,
        ),
    )


GRACEFUL = with_states("Succeeded", TERMINATED, node="n1")
VERDICTS: list[tuple[str, dict[str, Any], list[GpuNodeStatusReport], Proof | Doubt]] = [
    ("deleted before it was bound", {"pod": make_pod()}, [], Proof.UNBOUND),
    ("a relist did not show it, last seen unbound", {"pod": make_pod(), "deletion_seen": False}, [], Doubt.NO_REPORT),
    ("only a Lease remembers it", {"pod": None, "deletion_seen": False}, [], Doubt.NO_REPORT),
    ("bound to another node", {"pod": make_pod(node="n2")}, [], Proof.ELSEWHERE),
    ("still there and running", {"is_deleted": False}, [report(), report(sequence=2)], Doubt.NOT_DEPARTED),
    ("ended by kubelet", {"pod": GRACEFUL}, [], Proof.ENDED),
    ("ended by kubelet, still in the API", {"pod": GRACEFUL, "is_deleted": False}, [], Proof.ENDED),
    (
        "set Failed by hand while it runs",
        {"pod": with_states("Failed", RUNNING, node="n1"), "is_deleted": False},
        [report(live=True)],
        Doubt.STILL_LIVE,
    ),
    ("set Failed before any container", {"pod": with_states("Failed", node="n1")}, [], Doubt.NO_REPORT),
    ("force-deleted, no word of the agent", {}, [], Doubt.NO_REPORT),
    ("report from before the deletion", {"seen_live": True}, [report(99)], Doubt.NO_REPORT),
    ("sandbox is still there", {}, [report(live=True)], Doubt.STILL_LIVE),
    ("kubelet still lists it", {"seen_live": True}, [report(listed=True)], Doubt.STILL_LISTED),
    ("seen before, gone now", {}, [report(50, live=True), report(100)], Proof.VANISHED),
    (
        "its sandbox crashed, and kubelet, which cannot be asked, may start it again",
        {"seen_live": True},
        [report(kubelet_read=False)],
        Doubt.ONE_MORE_REPORT,
    ),
    (
        "gone twice, kubelet cannot be asked",
        {"seen_live": True},
        [report(kubelet_read=False), report(sequence=2, kubelet_read=False)],
        Proof.VANISHED,
    ),
    ("gone, then its sandbox again", {"seen_live": True}, [report(), report(live=True, sequence=2)], Doubt.STILL_LIVE),
    ("cgroups unreadable", {"seen_live": True}, [report(live_read=False)], Doubt.UNREADABLE),
    ("never seen, kubelet silent", {}, [report(kubelet_read=False)] * 3, Doubt.UNREADABLE),
    ("never seen, one list of kubelet", {}, [report()], Doubt.ONE_MORE_REPORT),
    ("never seen, one report twice", {}, [report(), report()], Doubt.ONE_MORE_REPORT),
    ("never seen, two lists of kubelet", {}, [report(), report(sequence=2)], Proof.UNLISTED),
    (
        "listed between two lists",
        {},
        [report(), report(sequence=2, listed=True), report(sequence=3)],
        Doubt.ONE_MORE_REPORT,
    ),
    (
        "machine restarted after the deletion",
        {},
        [report(live=True), report(300, boot="boot-2", kubelet_read=False)],
        Proof.REBOOTED,
    ),
    (
        "machine restarted, nobody knows whether before or after the deletion",
        {"seen_live": True},
        [report(boot="boot-2", kubelet_read=False)],
        Doubt.UNREADABLE,
    ),
    (
        "restarted machine runs the pod again",
        {"seen_live": True},
        [report(boot="boot-2", live=True)],
        Doubt.STILL_LIVE,
    ),
    (
        "terminal pod, machine restarted: kubelet may still have to be asked",
        {"pod": with_states("Failed", node="n1"), "is_deleted": False},
        [report(live=True), report(boot="boot-2", sequence=2)],
        Doubt.ONE_MORE_REPORT,
    ),
    (
        "another machine bears the node's name",
        {"node_uid": "old", "device_uuids": frozenset({"GPU-1"}), "seen_live": True},
        [report(node_uid="new", devices=("GPU-9",)), report(sequence=2, node_uid="new", devices=("GPU-9",))],
        Doubt.OTHER_MACHINE,
    ),
    (
        "another machine bore the node's name for a while: its own must be read twice again",
        {"node_uid": "old", "device_uuids": frozenset({"GPU-1"}), "seen_live": True},
        [report(node_uid="new", devices=("GPU-9",), boot="boot-9"), report(sequence=2, node_uid="old")],
        Doubt.ONE_MORE_REPORT,
    ),
    (
        "the Node was registered anew, the GPU is the same",
        {"node_uid": "old", "device_uuids": frozenset({"GPU-1"}), "seen_live": True},
        [report(node_uid="new", devices=("GPU-1",))],
        Proof.VANISHED,
    ),
    (
        "the GPU fell out of the machine, the Node is the same",
        {"node_uid": "old", "device_uuids": frozenset({"GPU-1"}), "seen_live": True},
        [report(node_uid="old")],
        Proof.VANISHED,
    ),
]


@pytest.mark.parametrize(
    ("facts", "reports", "verdict"), [row[1:] for row in VERDICTS], ids=[row[0] for row in VERDICTS]
)
def test_verdict(facts: dict[str, Any], reports: list[GpuNodeStatusReport], verdict: Proof | Doubt) -> None:
    """Each story of a pod's end gives this proof, or this doubt, and nothing more."""
    known = departure(**facts)
    for each in reports:
        known = observe(known, each)
    assert judge(known) is verdict


@pytest.mark.parametrize(
    ("pod", "ended"),
    [
        pytest.param(with_states("Succeeded", TERMINATED, TERMINATED), True, id="all terminated"),
        pytest.param(
            make_with_status(
                make_pod(phase="Failed", containers=("a",)),
                [{"name": "a", "state": TERMINATED}],
                ready_reason="ContainersNotReady",
            ),
            False,
            id="set Failed by a third party between two starts",
        ),
        pytest.param(with_states("Failed", TERMINATED, RUNNING), False, id="one runs"),
        pytest.param(with_states("Failed", TERMINATED, WAITING), False, id="one waits for its next start"),
        pytest.param(with_states("Failed", {}), False, id="no state at all"),
        pytest.param(with_states("Running", TERMINATED), False, id="between two starts"),
        pytest.param(
            make_with_status(make_pod(phase="Failed", containers=("a", "b")), [{"name": "a", "state": TERMINATED}]),
            False,
            id="one is not listed",
        ),
        pytest.param(
            make_with_status(
                make_pod(phase="Failed", containers=("c0",), init_containers=("i",)),
                [{"name": "c0", "state": TERMINATED}],
            ),
            False,
            id="an init container is not listed",
        ),
    ],
)
def test_end_of_a_pod_by_its_own_object(pod: Pod, *, ended: bool) -> None:
    """Only a terminal pod with every container listed as terminated has ended."""
    assert has_ended(pod) is ended


def test_observing_a_report_twice_changes_nothing() -> None:
    """Reports are folded again after a relist; the same one is no second witness."""
    known = observe(departure(), report())
    assert observe(known, report()) == known


@pytest.mark.parametrize(("text", "number"), [("12", 12), ("", 0), ("x1", 0), ("-3", 0), ("\u0661", 0)])
def test_version_number(text: str, number: int) -> None:
    """An odd resourceVersion is before everything, so a report that carries one proves nothing."""
    assert version_number(text) == number


def test_odd_position_proves_nothing() -> None:
    """An agent that does not know its position cannot end a departure."""
    odd = report().model_copy(update={"evidence": replace_position(report(), "unknown")})
    assert judge(observe(departure(seen_live=True), odd)) is Doubt.NO_REPORT


def replace_position(original: GpuNodeStatusReport, position: str) -> Evidence:
    """Return the report's evidence at another position."""
    return original.evidence.model_copy(update={"pod_resource_version": position})


def test_departure_is_a_value() -> None:
    """Folding never changes the departure that was passed in."""
    known = departure()
    before = replace(known)
    observe(known, report(live=True))
    assert known == before
