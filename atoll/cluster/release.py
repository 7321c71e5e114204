"""Proof of release: may the GPUs of a pod that is gone or terminal be given to somebody else?

`judge` takes what is known of the pod's end (PodTermination, with the reports of its node since) and returns a Proof
that names the rule, or a Doubt that says what is missing. Time is deliberately no argument: waiting never frees a GPU.

    unbound    the watch showed the pod's deletion, and it had no node
    elsewhere  the pod was bound to another node, which never changes: it never could use this one
    ended      the last object is terminal by kubelet's own word, and lists every container as terminated
    vanished   the agent saw the pod's sandbox or cgroup in this boot and no longer does, past the end, and kubelet no
               longer lists it as one to run (it would start its sandbox again); where kubelet cannot be asked, in
               two reports, because kubelet may not know of the end yet and start a sandbox anew that crashed
    unlisted   the agent never saw one, and kubelet's own pod list lacks the pod in two reports past the end
    rebooted   the pod was deleted, a report past that came from one boot of the machine, and a later one from the next
    removed    a report past the end says that every card of the Leases has left the machine
    declared   somebody declared that the machine is gone for good; see atoll.cluster.machine_life

A deletion that was only inferred (a relist, a look-up that found nothing) says when at the latest the pod was gone,
but not whether it had a node; an agent's report that could not read its sources proves nothing. Nor does a report of
another machine that bears the node's name: it must have the Node's uid of the Lease, or one of its devices.

Two reports are asked of kubelet's list because one may be read just before kubelet hears of a pod that was bound and
deleted in quick succession; the agent takes them apart from each other.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from atoll.api.node_status import GpuNodeStatusReport, PodEvidence
from atoll.cluster import pods
from atoll.cluster.objects import Pod

UNLISTED_REPORTS = 2
VERSION_DIGITS_MAX = 32
"""Longer texts on annotations are no versions, and Python would refuse to read them as numbers."""


class Proof(StrEnum):
    """The rule that proves that the pod can no longer use its GPUs."""

    UNBOUND = "unbound"
    ELSEWHERE = "elsewhere"
    ENDED = "ended"
    VANISHED = "vanished"
    UNLISTED = "unlisted"
    REBOOTED = "rebooted"
    REMOVED = "removed"
    DECLARED = "declared"


class Doubt(StrEnum):
    """What is missing for a proof."""

    NOT_DEPARTED = "the pod still exists and is not terminal"
    NO_REPORT = "no report of the node past the pod's departure"
    OTHER_MACHINE = "the reports under the node's name come from another machine"
    UNREADABLE = "the agent could not read the node's pods"
    STILL_LIVE = "a sandbox or cgroup of the pod still exists on the node"
    STILL_LISTED = "kubelet still lists the pod"
    ONE_MORE_REPORT = "a second report without the pod is missing"


ANSWERED_BY_A_REPORT = (Doubt.NO_REPORT, Doubt.UNREADABLE, Doubt.ONE_MORE_REPORT)
"""Doubts that the agent can settle by reading its machine once more."""


@dataclass(frozen=True, slots=True)
class PodTermination:
    """How a pod left, and what the reports of one node said of it.

    `pod` is its last object, None where only a Lease remembers it. `version` is the resourceVersion at which it was
    gone or terminal at the latest. `deletion_seen` is true only for a DELETE event of the watch itself. `seen_live`
    holds for the boot `boot_id`, of which `boot_is_past` says whether a report past `version` came from it.
    `sequences_without` holds the evidence sequences of complete reports past `version` that neither showed nor listed
    the pod; `kubelet_agrees`: kubelet's list was read for the last of them. `node_uid` and `device_uuids` stand on the
    Leases; where both are empty any report of the node counts. `is_of_machine`: `boot_id` is from a report of the
    machine that the Leases name. `is_declared`: the machine is declared gone for good, and nothing contradicts that.
    `has_lost_cards`: a report past the end lists all devices as departed.
    """

    uid: str
    node: str
    pod: Pod | None
    is_deleted: bool
    deletion_seen: bool
    version: int
    boot_id: str = ""
    seen_live: bool = False
    sequences_without: tuple[int, ...] = ()
    kubelet_agrees: bool = False
    doubt: Doubt = Doubt.NO_REPORT
    boot_changed: bool = False
    boot_is_past: bool = False
    node_uid: str = ""
    device_uuids: frozenset[str] = frozenset()
    is_of_machine: bool = False
    is_declared: bool = False
    has_lost_cards: bool = False


def observe(termination: PodTermination, report: GpuNodeStatusReport) -> PodTermination:
    """Fold one report of the pod's node into what is known of the pod's end."""
    if not _is_same_machine(termination, report):
        return replace(
            termination,
            doubt=Doubt.OTHER_MACHINE,
            sequences_without=(),
            seen_live=False,
            boot_is_past=False,
            is_of_machine=False,
            has_lost_cards=False,
        )
    known = replace(_fold_boot(termination, report.boot_id), is_of_machine=True)
    entry = next((pod for pod in report.pods if pod.uid == termination.uid), None)
    if entry is not None and entry.live:
        known = replace(known, seen_live=True)
    if version_number(report.evidence.pod_resource_version) < termination.version:
        return known
    left = {card.uuid for card in report.departed} - {device.uuid for device in report.devices}
    has_lost_cards = bool(known.device_uuids) and known.device_uuids <= left
    known = replace(known, boot_is_past=bool(known.boot_id), has_lost_cards=has_lost_cards)
    return _fold_evidence(known, report, entry)


def judge(termination: PodTermination) -> Proof | Doubt:
    """Say which rule proves the release, or what is missing."""
    pod = termination.pod
    if not termination.is_deleted and (pod is None or not pods.is_terminal(pod)):
        return Doubt.NOT_DEPARTED
    if pod is not None and pod.spec.node_name not in {"", termination.node}:
        return Proof.ELSEWHERE
    if termination.deletion_seen and pod is not None and not pod.spec.node_name:
        return Proof.UNBOUND
    if pod is not None and has_ended(pod):
        return Proof.ENDED
    if termination.is_deleted and termination.boot_changed:
        return Proof.REBOOTED
    is_confirmed = len(termination.sequences_without) >= UNLISTED_REPORTS
    if termination.seen_live and termination.sequences_without and (termination.kubelet_agrees or is_confirmed):
        return Proof.VANISHED
    if is_confirmed:
        return Proof.UNLISTED
    if termination.has_lost_cards:
        return Proof.REMOVED
    if termination.is_declared:
        return Proof.DECLARED
    return termination.doubt


def has_ended(pod: Pod) -> bool:
    """Tell whether the pod's own object proves that no container of it runs: terminal, every container terminated.

    Waiting or an empty list is no proof: kubelet writes `terminated` for each container when it ends a pod gracefully,
    and only kubelet knows; a third party can set the phase alone. It may do so between two starts of a container, of
    which a kubelet that is cut off cannot tell: then the Ready condition is still that of a pod that goes on.
    """
    statuses = pods.container_statuses(pod)
    listed = {status.name for status in statuses}
    goes_on = any(one.type == "Ready" and one.reason not in pods.ENDED_BY_KUBELET for one in pod.status.conditions)
    return (
        pods.is_terminal(pod)
        and not goes_on
        and bool(statuses)
        and set(pods.all_container_names(pod)) <= listed
        and all(status.state.terminated is not None and status.state.running is None for status in statuses)
    )


def version_number(resource_version: str) -> int:
    """Return a resourceVersion as a number; 0 for an empty or odd one, which is before everything.

    The API server orders the versions of one resource; Kubernetes 1.35 made comparing them part of its contract.
    """
    is_number = (
        resource_version.isascii() and resource_version.isdigit() and len(resource_version) <= VERSION_DIGITS_MAX
    )
    return int(resource_version) if is_number else 0


def _is_same_machine(termination: PodTermination, report: GpuNodeStatusReport) -> bool:
    """Return whether the report comes from the machine of the Leases: by one of their devices, present or departed, by
    the Node's uid, or by the boot id of such a report. A new Node object or a lost card does not make it another
    machine."""
    if not termination.node_uid and not termination.device_uuids:
        return True
    if termination.node_uid and termination.node_uid == report.node_uid:
        return True
    if termination.is_of_machine and termination.boot_id and termination.boot_id == report.boot_id:
        return True
    known = {device.uuid for device in report.devices} | {card.uuid for card in report.departed}
    return not known.isdisjoint(termination.device_uuids)


def _fold_boot(termination: PodTermination, boot_id: str) -> PodTermination:
    """Note the boot of a report. What was seen live in another boot says nothing about this one.

    A new boot counts as one after the end only if the boot before it reported past the end: otherwise the
    machine may have been restarted first, and kubelet the still-bound pod with it.
    """
    if not boot_id or boot_id == termination.boot_id:
        return termination
    changed = termination.boot_changed or termination.boot_is_past
    return replace(
        termination, boot_id=boot_id, boot_changed=changed, boot_is_past=False, seen_live=False, sequences_without=()
    )


def _fold_evidence(known: PodTermination, report: GpuNodeStatusReport, entry: PodEvidence | None) -> PodTermination:
    """Fold what a report past the end says of the pod."""
    if not report.evidence.live_read:
        return replace(known, doubt=Doubt.UNREADABLE)
    if entry is not None and entry.live:
        return replace(known, doubt=Doubt.STILL_LIVE, sequences_without=())
    if entry is not None and entry.kubelet:
        return replace(known, doubt=Doubt.STILL_LISTED, sequences_without=())
    if not known.seen_live and not report.evidence.kubelet_read:
        return replace(known, doubt=Doubt.UNREADABLE)
    sequence = report.evidence.sequence
    if sequence in known.sequences_without:
        return known
    sequences = (*known.sequences_without, sequence)[-UNLISTED_REPORTS:]
    agrees = report.evidence.kubelet_read
    return replace(known, doubt=Doubt.ONE_MORE_REPORT, sequences_without=sequences, kubelet_agrees=agrees)
