"""Which reports are trusted after a restore, and beside pods that nobody knows."""

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.api.times import format_microtime
from atoll.cluster.ledger import Ledger
from atoll.cluster.node_audit import UNLISTED_RENEWALS, NodeAudit
from atoll.cluster.objects import Pod
from atoll.kube.mirror import ClusterMirror
from tests.builders import make_pod, report_json
from tests.fakes.clock import ManualClock

UID = "11111111-2222-3333-4444-555555555555"


def shown(
    *, listed: bool = False, is_static: bool = False, kubelet_read: bool = True, processes_read: bool = True
) -> GpuNodeStatus:
    """Return a report that shows a live pod."""
    body = report_json("n1", "t4-4")
    evidence = {"sequence": 1, "liveRead": True, "kubeletRead": kubelet_read, "processesRead": processes_read}
    body["status"] |= {
        "evidence": evidence,
        "pods": [{"uid": UID, "live": True, "kubelet": listed, "static": is_static}],
    }
    return GpuNodeStatus.model_validate_json(json.dumps(body))


@pytest.mark.parametrize(
    ("report", "is_left_behind"),
    [
        pytest.param(shown(), True, id="it hangs, and the kubelet has done with it"),
        pytest.param(shown(listed=True), False, id="the kubelet runs it"),
        pytest.param(shown(kubelet_read=False), False, id="the kubelet cannot be asked"),
        pytest.param(shown(processes_read=False), False, id="its processes on cards would not be seen"),
    ],
)
def test_a_pod_that_is_left_behind_keeps_its_node_out_for_a_while_only(
    report: GpuNodeStatus, *, is_left_behind: bool
) -> None:
    """It was force-deleted long before this process started, which cannot tell it from one that etcd has forgotten."""
    audit = NodeAudit({}, Ledger())
    for _ in range(UNLISTED_RENEWALS):
        assert audit.refusal(report, pods_version="1") == names.REJECT_UNKNOWN_POD
        audit.note_renewal("n1")
    want = "" if is_left_behind else names.REJECT_UNKNOWN_POD
    assert audit.refusal(report, pods_version="1") == want


def test_a_pod_that_the_kubelet_lists_again_is_waited_for_anew() -> None:
    """A kubelet that starts reads its list from the API server: what it lacked meanwhile says nothing."""
    audit = NodeAudit({}, Ledger())
    for report in (shown(), shown(listed=True), shown()):
        assert audit.refusal(report, pods_version="1") == names.REJECT_UNKNOWN_POD
        for _ in range(UNLISTED_RENEWALS - 1):
            audit.note_renewal("n1")
    assert audit.refusal(shown(), pods_version="1") == names.REJECT_UNKNOWN_POD


@pytest.mark.parametrize(("is_static", "want"), [(True, ""), (False, names.REJECT_UNKNOWN_POD)])
def test_a_static_pod_is_known_without_its_mirror(*, is_static: bool, want: str) -> None:
    """The API server may refuse the mirror; the kubelet, which runs the pod from a file, says that it is one."""
    report = shown(listed=True, is_static=is_static)
    assert NodeAudit({}, Ledger()).refusal(report, pods_version="1") == want


def test_a_report_is_judged_without_a_search_of_all_pods() -> None:
    """Thousands of reports may come before their pods; the pods of all other nodes have no say."""

    class Pods(dict[str, Pod]):
        def values(self) -> NoReturn:
            raise AssertionError("searched")

    audit = NodeAudit(Pods(), Ledger())
    mirror = make_pod("mirror", node="n1", annotations={names.MIRROR: "x", names.STATIC_POD_UID: UID})
    refusals = [audit.refusal(shown(), pods_version="1")]
    audit.note_pod(mirror)
    refusals.append(audit.refusal(shown(), pods_version="1"))
    audit.note_missing(mirror)
    refusals.append(audit.refusal(shown(), pods_version="1"))

    assert refusals == [names.REJECT_UNKNOWN_POD, "", names.REJECT_UNKNOWN_POD]


def test_nothing_is_kept_of_a_pod_that_no_report_shows_any_more() -> None:
    """A node that is wiped and set up anew again and again shows other pods each time."""
    audit = NodeAudit({}, Ledger())
    audit.refusal(shown(), pods_version="1")
    assert audit.waits_for(UID) == ("n1",)
    audit.refusal(GpuNodeStatus.model_validate_json(json.dumps(report_json("n1", "t4-4"))), pods_version="1")
    assert audit.waits_for(UID) == ()
    audit.refusal(shown(), pods_version="1")
    audit.forget("n1")
    assert audit.waits_for(UID) == ()


def unread(sequence: int, *, unread_since_restore: bool) -> GpuNodeStatus:
    """Return the report of an agent that cannot read cgroups, as one without the right mount."""
    body = report_json("n1", "t4-4")
    evidence = {"sequence": sequence, "liveRead": False, "unreadSinceRestore": unread_since_restore}
    body["status"] |= {"evidence": evidence, "pods": []}
    return GpuNodeStatus.model_validate_json(json.dumps(body))


@pytest.mark.parametrize("is_restored", [True, False], ids=["since a restore", "there was no restore"])
def test_a_node_whose_pods_nobody_can_read_is_judged_alike_by_every_process(*, is_restored: bool) -> None:
    """One noticed the restore, the other started later: neither gives out GPUs of pods that the server forgot."""
    noticed, started_later = NodeAudit({}, Ledger()), NodeAudit({}, Ledger())
    if is_restored:
        noticed.begin({"n1": unread(7, unread_since_restore=False)})
    for _ in range(UNLISTED_RENEWALS):
        noticed.note_renewal("n1")
    want = names.REJECT_RESTORED if is_restored else ""
    report = unread(8, unread_since_restore=is_restored)
    assert [one.refusal(report, pods_version="5000") for one in (noticed, started_later)] == [want, want]


class Restore:
    """A mirror whose server is restored; the backup has report 5 and an older heartbeat."""

    def __init__(self, *, heard_seconds: float, silent_seconds: float = 0) -> None:
        self.clock = ManualClock()
        self.mirror = ClusterMirror(cast("Any", SimpleNamespace(server_seconds=lambda: None)), self.clock)
        self._list(100, self._report(7, 99), self.heartbeat(heard_seconds, 100))
        assert self.refusal() == ""
        now = self.clock.monotonic_seconds()
        self.mirror.ledger.put_heartbeat("n1", now - silent_seconds, 180.0)
        self._show(self.mirror.pods, 12)
        self._list(12, self._report(5, 6), self.heartbeat(600, 7))

    def _list(self, version: int, report: dict[str, Any], heartbeat: dict[str, Any]) -> None:
        held: dict[Any, dict[str, Any]] = {self.mirror.node_statuses: report, self.mirror.heartbeats: heartbeat}
        for reflector in self.mirror.reflectors.values():
            self._show(reflector, version, *([held[reflector]] if reflector in held else []))

    @staticmethod
    def _show(reflector: Any, version: int, *objects: dict[str, Any]) -> None:
        reflector._begin_listing()
        for one in objects:
            reflector._observe("ADDED", json.dumps(one).encode())
        reflector._finish_listing(str(version))

    @staticmethod
    def _report(sequence: int, version: int) -> dict[str, Any]:
        body = report_json("n1", "t4-4")
        body["metadata"] |= {"name": "n1", "uid": "r", "resourceVersion": str(version)}
        evidence = {"sequence": sequence, "liveRead": True, "podResourceVersion": "5"}
        body["status"] |= {"evidence": evidence, "pods": []}
        return body

    def heartbeat(self, age_seconds: float, version: int) -> dict[str, Any]:
        """Return the heartbeat as it was renewed so many seconds ago."""
        renewed = format_microtime(self.clock.now() - timedelta(seconds=age_seconds))
        metadata = {"name": "n1", "namespace": names.HEARTBEAT_NAMESPACE, "uid": "h", "resourceVersion": str(version)}
        return {"metadata": metadata, "spec": {"leaseDurationSeconds": 180, "renewTime": renewed}}

    def renew(self, version: int, *, age_seconds: float = 0) -> None:
        """Show a renewal of the heartbeat that was written so many seconds ago."""
        self.mirror.heartbeats._observe("MODIFIED", json.dumps(self.heartbeat(age_seconds, version)).encode())

    def report(self, sequence: int, version: int) -> None:
        """Show a report that is written now."""
        self.mirror.node_statuses._observe("MODIFIED", json.dumps(self._report(sequence, version)).encode())

    def refusal(self) -> str:
        """Return why the node's report does not count; empty if it does."""
        ledger = self.mirror.ledger
        return "" if "n1" in ledger.nodes else ledger.uncounted.get("n1", "none")


def test_one_renewal_after_a_restore_is_not_two_because_the_backups_is_listed() -> None:
    """The first renewal may be seen before the report that preceded it: the backup's report does not count yet."""
    restore = Restore(heard_seconds=5)
    assert restore.refusal() == names.REJECT_RESTORED
    restore.renew(13)
    assert restore.refusal() == names.REJECT_RESTORED


def test_heartbeats_of_a_node_that_counts_again_change_nothing() -> None:
    """Its report is not taken anew with each: what was derived of it would be void, for as long as we run."""
    restore = Restore(heard_seconds=5)
    restore.renew(13, age_seconds=1)
    restore.report(8, 14)
    ledger = restore.mirror.ledger
    assert (restore.refusal(), ledger.uncounted) == ("", {})
    revision = ledger.revision
    restore.renew(15)
    assert ledger.revision == revision


def test_the_backups_heartbeat_is_no_sign_of_life() -> None:
    """The agent has been dead for five minutes; a renewal of ten minutes ago comes back from the backup."""
    restore = Restore(heard_seconds=300, silent_seconds=300)
    assert restore.mirror.ledger.is_stale("n1", restore.clock.monotonic_seconds())
