"""Table of doubt and quarantine: what happened to a pod, node, card or agent, and the resulting state of the GPU.

Each row describes a situation in plain words. docs/ledger.md has the same rows; a test compares them.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.api.node_status import GpuNodeStatusReport
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Node
from atoll.cluster.release import Doubt, PodTermination, Proof, judge, observe
from atoll.cluster.reports import reason_of_the_past
from tests.builders import make_pod, make_report, uuid_of
from tests.cluster.test_release import RUNNING, TERMINATED, departure, report, with_states

PAGE = Path(__file__).parents[2] / "docs" / "ledger.md"
LEASED = {"node_uid": "uid-of-n1", "device_uuids": frozenset({"GPU-a"})}
SAME = {"node_uid": "uid-of-n1", "devices": ("GPU-a", "GPU-b")}
RENEWED = {"node_uid": "another", "devices": ("GPU-a", "GPU-b")}
OTHER = {"node_uid": "another", "devices": ("GPU-x",)}
FAILED_BY_HAND = with_states("Failed", RUNNING, node="n1", version="100")
ENDED = with_states("Succeeded", TERMINATED, node="n1", version="100")
BOUND_FAILED = make_pod(node="n1", phase="Failed", version="100")
LEAVING = {"is_deleted": False, "deletion_seen": False}

Row = tuple[dict[str, Any], list[GpuNodeStatusReport], Proof | Doubt]

SITUATIONS: dict[str, Row] = {
    "kubelet ended the pod": ({"pod": ENDED, **LEAVING}, [], Proof.ENDED),
    "deleted before it was bound": ({"pod": make_pod(version="100")}, [], Proof.UNBOUND),
    "force-deleted, agent has not looked": ({}, [], Doubt.NO_REPORT),
    "force-deleted, containers still run": ({}, [report(live=True)], Doubt.STILL_LIVE),
    "force-deleted, containers are gone": ({"seen_live": True}, [report()], Proof.VANISHED),
    "force-deleted, kubelet paused": ({}, [report(kubelet_read=False)], Doubt.UNREADABLE),
    "force-deleted, report from before it": ({"seen_live": True}, [report(position=99)], Doubt.NO_REPORT),
    "set Failed by somebody else": ({"pod": FAILED_BY_HAND, **LEAVING}, [report(live=True)], Doubt.STILL_LIVE),
    "refused by kubelet after a reboot": ({"pod": BOUND_FAILED, **LEAVING}, [report(sequence=1), report(sequence=2)],
                                          Proof.UNLISTED),
    "node unreachable": ({**LEASED, "seen_live": True}, [], Doubt.NO_REPORT),
    "node deleted, machine runs on": (LEASED, [report(live=True, **RENEWED)], Doubt.STILL_LIVE),
    "node deleted and made anew, containers gone": ({**LEASED, "seen_live": True}, [report(**RENEWED)], Proof.VANISHED),
    "node replaced by another machine": (LEASED, [report(boot="b9", **OTHER)], Doubt.OTHER_MACHINE),
    "machine rebooted after the deletion": (LEASED, [report(live=True, **SAME), report(boot="boot-2", **SAME)],
                                            Proof.REBOOTED),
    "machine rebooted before the deletion": (LEASED, [report(position=99, **SAME),
                                                      report(boot="boot-2", live=True, **SAME)], Doubt.STILL_LIVE),
    "card replaced in the same machine": ({**LEASED, "seen_live": True},
                                          [report(node_uid="uid-of-n1", devices=("GPU-new",))], Proof.VANISHED),
    "card fell out of a node that was made anew": ({**LEASED, "seen_live": True}, [report(position=99, **SAME),
                                                   report(node_uid="another", devices=("GPU-b",))], Proof.VANISHED),
    "card taken out over a reboot of a node that was made anew":
        (LEASED, [report(boot="boot-2", node_uid="another", devices=("GPU-b",), departed=("GPU-a",), live=True)],
         Proof.REMOVED),
    "card taken out, report from before the deletion":
        (LEASED, [report(position=99, node_uid="another", devices=("GPU-b",), departed=("GPU-a",), live=True)],
         Doubt.NO_REPORT),
    "one of two cards taken out": ({**LEASED, "device_uuids": frozenset({"GPU-a", "GPU-b"})},
                                   [report(devices=("GPU-b",), departed=("GPU-a",), live=True)], Doubt.STILL_LIVE),
    "card taken out and put back": (LEASED, [report(devices=("GPU-a",), departed=("GPU-a",), live=True)],
                                    Doubt.STILL_LIVE),
    "machine declared gone for good": ({**LEASED, "is_declared": True}, [], Proof.DECLARED),
    "machine declared gone, pod not deleted": ({**LEASED, "is_declared": True, "is_deleted": False}, [],
                                               Doubt.NOT_DEPARTED),
    "only a Lease remembers the pod": ({"pod": None, "deletion_seen": False}, [report(sequence=1)],
                                       Doubt.ONE_MORE_REPORT),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_becomes_of_the_gpus_of_a_pod_that_left(name: str) -> None:
    """Free only on the proof that the row names; in doubt for the reason that the row names."""
    facts, reports, expected = SITUATIONS[name]
    known: PodTermination = departure(**facts)
    for each in reports:
        known = observe(known, each)

    assert judge(known) is expected


BOOT = "11111111-2222-3333-4444-555555555555"
NEXT_BOOT = "66666666-2222-3333-4444-555555555555"


def node(uid: str = "uid-of-n1", boot: str = BOOT) -> Node:
    """Return a Node as kubelet keeps it."""
    body = {"metadata": {"name": "n1", "uid": uid}, "status": {"nodeInfo": {"bootID": boot}}}
    return msgspec.convert(body, Node)


@pytest.mark.parametrize(
    ("found", "boot", "expected"),
    [
        (node(), BOOT, ""),
        (node(boot=NEXT_BOOT), BOOT, names.REJECT_PAST_BOOT),
        (node("another"), BOOT, names.REJECT_PAST_NODE),
        (node("another", NEXT_BOOT), BOOT, names.REJECT_PAST_NODE),
        (node(boot=""), BOOT, ""),
        (node(boot="fake"), BOOT, ""),
        (node(), "played", ""),
        (None, BOOT, ""),
    ],
    ids=[
        "as reported",
        "rebooted since",
        "node replaced",
        "node replaced and rebooted",
        "kubelet is silent",
        "fake node",
        "played machine",
        "no Node",
    ],
)
def test_report_of_the_past_offers_nothing(found: Node | None, boot: str, expected: str) -> None:
    """A fresh heartbeat is not enough: the report must be of this Node and of this boot, and says which it is not."""
    status = make_report("n1", "t4-4")
    assert status.status is not None
    status = status.model_copy(update={"status": status.status.model_copy(update={"boot_id": boot})})

    assert reason_of_the_past(status, found) == expected


def test_silence_is_measured_by_our_own_clock() -> None:
    """What counts is when we heard of the agent; a silent node offers nothing, and what is bound there stays bound."""
    ledger = Ledger()
    ledger.put_report(make_report("n1", "t4-4"))
    ledger.put_heartbeat("n1", 1000.0, 180.0)

    assert ledger.availability("n1", 0, now_seconds=1180.0) == "healthy"
    assert "n1" in ledger.cells(now_seconds=1180.0)
    assert ledger.availability("n1", 0, now_seconds=1180.1) == "unknown"
    assert "n1" not in ledger.cells(now_seconds=1180.1)


def test_missing_card_is_offered_to_nobody_and_keeps_its_lease() -> None:
    """A card that fell out is not in the report: nobody gets it, and when it is back it is still its holder's."""
    from tests.builders import make_lease

    ledger = Ledger()
    ledger.put_report(make_report("n1", "t4-4"))
    ledger.put_lease(make_lease("n1", 3))
    ledger.put_report(make_report("n1", "t4-4", ids=(0, 1, 2, 7)))

    assert ledger.availability("n1", 3, now_seconds=0.0) == "unknown"
    assert ledger.free("n1", now_seconds=0.0) == 0b1111
    ledger.put_report(make_report("n1", "t4-4"))
    assert ledger.free("n1", now_seconds=0.0) == 0b0111
    assert ledger.holds("n1", 3, uuid_of("n1", 3))


def test_page_carries_every_row() -> None:
    """The page's table names each situation with its verdict."""
    text = PAGE.read_text()
    rows = {f"| {name} | {_words(verdict)} |" for name, (_, _, verdict) in SITUATIONS.items()}

    assert {row for row in rows if row not in text} == set()


def _words(verdict: Proof | Doubt) -> str:
    return f"free: {verdict}" if isinstance(verdict, Proof) else f"in doubt: {verdict}"
