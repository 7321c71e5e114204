"""Proof of release: may the GPUs of a pod that is gone or terminal be given to somebody else?

In: what is known of the pod's departure, and the reports of its node since. Out: a Proof that names the rule, or a Doubt
that says what is missing. Time is no argument here on purpose: waiting never frees a GPU.

    unbound    the watch showed the pod's deletion, and it had no node
    ended      the last object is terminal and kubelet listed every container as terminated
    vanished   the agent saw the pod's sandbox or cgroup and no longer does, past the departure, and kubelet, where it can
               be asked, no longer lists it as one to run (it would start the sandbox of such a pod again)
    unlisted   the agent never saw one, and kubelet's own pod list lacks the pod in two reports past the departure
    rebooted   the pod was deleted, and the machine's boot id has changed since

A deletion that was only inferred (a relist, a look-up that found nothing) says when at the latest the pod was gone, but
not whether it had a node; an agent's report that could not read its sources proves nothing.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from atoll.api.node_status import GpuNodeStatusReport
from atoll.cluster import pods
from atoll.cluster.objects import Pod

UNLISTED_REPORTS = 2


class Proof(StrEnum):
    """The rule that proves that the pod can no longer use its GPUs."""

    UNBOUND = "unbound"
    ENDED = "ended"
    VANISHED = "vanished"
    UNLISTED = "unlisted"
    REBOOTED = "rebooted"


class Doubt(StrEnum):
    """What is missing for a proof."""

    NOT_DEPARTED = "the pod still exists and is not terminal"
    NO_REPORT = "no report of the node past the pod's departure"
    UNREADABLE = "the agent could not read the node's pods"
    STILL_LIVE = "a sandbox or cgroup of the pod still exists on the node"
    STILL_LISTED = "kubelet still lists the pod"
    ONE_MORE_REPORT = "a second report without the pod is missing"


@dataclass(frozen=True, slots=True)
class Departure:
    """How a pod left, and what its node's reports said of it.

    `pod` is its last object, None where only a Lease remembers it. `version` is the resourceVersion at which it was gone
    or terminal at the latest. `deletion_seen` is true only for a DELETE event of the watch itself. `sequences_without`
    holds the evidence sequences of complete reports past `version` that neither showed nor listed the pod.
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
    doubt: Doubt = Doubt.NO_REPORT
    boot_changed: bool = False


def observe(departure: Departure, report: GpuNodeStatusReport) -> Departure:
    """Fold one report of the pod's node into what is known of the departure."""
    entry = next((pod for pod in report.pods if pod.uid == departure.uid), None)
    is_live = entry is not None and entry.live
    known = replace(departure, seen_live=departure.seen_live or is_live, boot_id=departure.boot_id or report.boot_id)
    if version_number(report.evidence.pod_resource_version) < departure.version:
        return known
    if known.boot_id and report.boot_id and report.boot_id != known.boot_id:
        return replace(known, boot_changed=True)
    if not report.evidence.live_read:
        return replace(known, doubt=Doubt.UNREADABLE)
    if is_live:
        return replace(known, doubt=Doubt.STILL_LIVE, sequences_without=())
    if entry is not None and entry.kubelet:
        return replace(known, doubt=Doubt.STILL_LISTED, sequences_without=())
    if known.seen_live:
        return replace(known, sequences_without=(*known.sequences_without, report.evidence.sequence)[-UNLISTED_REPORTS:])
    if not report.evidence.kubelet_read:
        return replace(known, doubt=Doubt.UNREADABLE)
    sequences = known.sequences_without
    if report.evidence.sequence not in sequences:
        sequences = (*sequences, report.evidence.sequence)[-UNLISTED_REPORTS:]
    return replace(known, doubt=Doubt.ONE_MORE_REPORT, sequences_without=sequences)


def judge(departure: Departure) -> Proof | Doubt:
    """Say which rule proves the release, or what is missing."""
    pod = departure.pod
    if not departure.is_deleted and (pod is None or not pods.is_terminal(pod)):
        return Doubt.NOT_DEPARTED
    if departure.deletion_seen and pod is not None and not pod.spec.node_name:
        return Proof.UNBOUND
    if pod is not None and has_ended(pod):
        return Proof.ENDED
    if departure.is_deleted and departure.boot_changed:
        return Proof.REBOOTED
    if departure.seen_live and departure.sequences_without:
        return Proof.VANISHED
    if len(departure.sequences_without) >= UNLISTED_REPORTS:
        return Proof.UNLISTED
    return departure.doubt


def has_ended(pod: Pod) -> bool:
    """Tell whether the pod's own object proves that no container of it runs: terminal, every container terminated.

    Waiting or an empty list is no proof: kubelet writes `terminated` for each container when it ends a pod gracefully,
    and only kubelet knows; a third party can set the phase alone.
    """
    statuses = pods.container_statuses(pod)
    listed = {status.name for status in statuses}
    return (
        pods.is_terminal(pod)
        and set(pods.all_container_names(pod)) <= listed
        and all(status.state.terminated is not None and status.state.running is None for status in statuses)
    )


def version_number(resource_version: str) -> int:
    """Return a resourceVersion as a number; 0 for an empty or odd one, which is before everything.

    The API server orders the versions of one resource; Kubernetes 1.35 made comparing them part of its contract.
    """
    return int(resource_version) if resource_version.isascii() and resource_version.isdigit() else 0
