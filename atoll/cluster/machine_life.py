"""The phases of a machine as a table: what happens to its objects in each, and what ends the phase. Pure.

Derives the phase from the Node, the GpuNodeStatus, its refusal and whether the agent is alive, and finds a valid
declaration that the machine is gone. docs/operations.md has the same table; a test compares them.

A declaration counts for one machine, the one that had the Node's uid of that time, and only while nothing contradicts
it: no kubelet is ready under that uid, and no report has come from the machine since. A machine that reports again is
not gone; if it becomes silent again, it needs a new declaration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from atoll.api import names
from atoll.api.node_status import GoneMachine, GpuNodeStatus, GpuNodeStatusReport
from atoll.cluster.driver_hold import release_reason
from atoll.cluster.objects import Node
from atoll.cluster.reports import reason_of_the_past

OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
"""Kubernetes' own taint: an administrator declares that a machine is off."""


class MachinePhase(StrEnum):
    """Phase of a machine."""

    JOINING = "joining"
    WORKING = "working"
    CORDONED = "cordoned"
    DRIVER_RELEASED = "driver released"
    REFUSED = "refused"
    SILENT = "silent"
    REBOOTED = "rebooted"
    REPLACED = "replaced"
    DECLARED_GONE = "declared gone"
    DELETED = "deleted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PhaseRules:
    """Rules of a phase, as text: for the report, for Leases of pods that left, and what ends the phase."""

    report: str
    leases: str
    moves_on: str


MACHINE_LIFE: Final[Mapping[MachinePhase, PhaseRules]] = {
    MachinePhase.JOINING: PhaseRules("none yet; nothing is placed", "kept", "the first report of its agent"),
    MachinePhase.WORKING: PhaseRules("counts", "freed on proof", "an event below"),
    MachinePhase.CORDONED: PhaseRules("counts; kube-scheduler places nothing", "freed on proof", "`kubectl uncordon`"),
    MachinePhase.DRIVER_RELEASED: PhaseRules(
        "its cards are unknown; nothing is placed; AtollDriverReleased after 2 hours",
        "freed on proof",
        "the label `gpu.scheduling/driver-hold` is removed, or the operator's upgrade ends",
    ),
    MachinePhase.REFUSED: PhaseRules(
        "does not count; nothing is placed; AtollReportsRefused after 10 minutes",
        "freed on proof",
        "a report that counts; `atoll node list` shows the reason",
    ),
    MachinePhase.SILENT: PhaseRules(
        "kept; nothing is placed; AtollNodesSilent after 10 minutes", "kept, in doubt", "its agent's next heartbeat"
    ),
    MachinePhase.REBOOTED: PhaseRules(
        "of the boot before; nothing is placed; AtollReportsOld after 10 minutes",
        "kept",
        "a report of this boot: cards that are gone leave it",
    ),
    MachinePhase.REPLACED: PhaseRules(
        "of an earlier Node; nothing is placed; AtollReportsOld after 10 minutes",
        "kept, in doubt, unless a card or the boot shows that it is the same machine",
        "a report of this Node; `atoll node release` for the machine that was",
    ),
    MachinePhase.DECLARED_GONE: PhaseRules(
        "kept while its Node is", "freed: declared", "a report or kubelet of it takes the word back"
    ),
    MachinePhase.DELETED: PhaseRules(
        "deleted with its heartbeat after `--forget-nodes-after-seconds`, and its alerts with them; one with "
        "cordons or open XIDs is kept, AtollMachinesGone after 2 hours",
        "kept, in doubt",
        "its Node comes back; `atoll node forget`",
    ),
    MachinePhase.UNKNOWN: PhaseRules(
        "none, no heartbeat, no Node; AtollMachinesGone after 2 hours", "kept, in doubt", "`atoll node forget`"
    ),
}


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about the machine with a name. is_heard: its agent's heartbeat is fresh; refusal: why its report does not
    count, if known."""

    node: Node | None
    status: GpuNodeStatus | None
    is_heard: bool
    refusal: str = ""


def phase_of(facts: MachineFacts) -> MachinePhase:
    """Return the phase of the machine that has the name now."""
    node, report = facts.node, facts.status.status if facts.status is not None else None
    if node is None:
        uid = report.node_uid if report is not None else ""
        if uid and declaration_on(uid, facts) is not None:
            return MachinePhase.DECLARED_GONE
        return MachinePhase.DELETED if report is not None else MachinePhase.UNKNOWN
    if declaration_on(node.metadata.uid, facts) is not None:
        return MachinePhase.DECLARED_GONE
    if facts.status is None or report is None:
        return MachinePhase.JOINING
    past = {names.REJECT_PAST_NODE: MachinePhase.REPLACED, names.REJECT_PAST_BOOT: MachinePhase.REBOOTED}
    if why := reason_of_the_past(facts.status, node):
        return past[why]
    if facts.refusal:
        return MachinePhase.REFUSED
    if not facts.is_heard:
        return MachinePhase.SILENT
    if release_reason(node):
        return MachinePhase.DRIVER_RELEASED
    return MachinePhase.CORDONED if node.spec.unschedulable else MachinePhase.WORKING


def declaration_on(node_uid: str, facts: MachineFacts) -> GoneMachine | None:
    """Return the valid declaration that the machine with this Node's uid is gone for good; None if there is none, or
    something contradicts it."""
    if sign_of_life(node_uid, facts):
        return None
    node, status = facts.node, facts.status
    sequence = sequence_of(node_uid, facts)
    declarations = status.spec.gone if status is not None else ()
    found = next((one for one in declarations if one.node_uid == node_uid and one.sequence >= sequence), None)
    if found is None and node is not None and node.metadata.uid == node_uid and is_out_of_service(node):
        return GoneMachine(
            node_uid=node_uid, by=f"taint {OUT_OF_SERVICE}", reason="out of service", sequence=newest_sequence(facts)
        )
    return found


def sign_of_life(node_uid: str, facts: MachineFacts) -> str:
    """Return what shows that the machine with this Node's uid is not gone; empty if nothing does."""
    if facts.node is not None and facts.node.metadata.uid == node_uid and _kubelet_answers(facts.node):
        return "its kubelet answers: the Node is Ready"
    if facts.is_heard and _report_of(node_uid, facts) is not None:
        return "its agent is alive: the heartbeat is fresh"
    return ""


def sequence_of(node_uid: str, facts: MachineFacts) -> int:
    """Return the sequence of the last report of the machine with this Node's uid, also after another Node got its name;
    0 without one."""
    report = facts.status.status if facts.status is not None else None
    if report is None:
        return 0
    former = {one.node_uid: one.sequence for one in report.former_nodes}
    return report.evidence.sequence if report.node_uid == node_uid else former.get(node_uid, 0)


def newest_sequence(facts: MachineFacts) -> int:
    """Return the sequence of the last report under the name, of whichever machine; 0 without one."""
    report = facts.status.status if facts.status is not None else None
    return report.evidence.sequence if report is not None else 0


def _report_of(node_uid: str, facts: MachineFacts) -> GpuNodeStatusReport | None:
    report = facts.status.status if facts.status is not None else None
    return report if report is not None and report.node_uid == node_uid else None


def _kubelet_answers(node: Node) -> bool:
    """Return whether the Node says True of Ready; `host_fit.is_ready` also takes a Node that says nothing for ready."""
    return any(one.type == "Ready" and one.status == "True" for one in node.status.conditions)


def is_out_of_service(node: Node) -> bool:
    """Return whether the Node has the out-of-service taint."""
    return any(taint.key == OUT_OF_SERVICE for taint in node.spec.taints)
