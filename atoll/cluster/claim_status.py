"""The status of a GpuClaim: which pods that name it have which GPUs, and how many wait.

The status is written only when it differs from what is stored; `now` is used only where a condition changes.
"""

from collections.abc import Iterable

from atoll.api import names
from atoll.api.base import Condition
from atoll.api.claims import ALLOCATIONS_MAX, ClaimAllocation, ClaimPhase, GpuClaim, GpuClaimStatus
from atoll.cluster import pods
from atoll.cluster.allocations import bound_allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.objects import Pod

CONDITION_ALLOCATED = "Allocated"
_REASONS = {
    ClaimPhase.UNUSED: ("False", "NoPods", "no pod names this claim"),
    ClaimPhase.WAITING: ("False", "PodsWaiting", "some pods wait for their GPUs"),
    ClaimPhase.ALLOCATED: ("True", "AllPodsHaveGpus", "every pod that names this claim has its GPUs"),
}


def claim_status(claim: GpuClaim, candidates: Iterable[Pod], now: str) -> GpuClaimStatus:
    """Return the status of `claim`; pods of another namespace, of another claim or already ended do not count."""
    users = [pod for pod in candidates if uses(pod, claim) and not pods.is_terminal(pod)]
    allocations = sorted(
        (entry for pod in users if (entry := _allocation(pod)) is not None), key=lambda entry: (entry.pod, entry.uid)
    )
    waiting = sum(1 for pod in users if not pod.spec.node_name)
    phase = ClaimPhase.WAITING if waiting else ClaimPhase.ALLOCATED if allocations else ClaimPhase.UNUSED
    return GpuClaimStatus(
        phase=phase,
        allocations=tuple(allocations[:ALLOCATIONS_MAX]),
        allocated_pods=len(allocations),
        waiting_pods=waiting,
        observed_generation=claim.metadata.generation,
        conditions=(_condition(claim, phase, now),),
    )


def uses(pod: Pod, claim: GpuClaim) -> bool:
    """Tell whether the pod was made for this very claim and not for a namesake that existed before it."""
    metadata = pod.metadata
    return (
        metadata.namespace == claim.metadata.namespace
        and pods.claim_name(pod) == claim.metadata.name
        and metadata.annotations.get(names.CLAIM_UID, claim.metadata.uid) == claim.metadata.uid
    )


def _allocation(pod: Pod) -> ClaimAllocation | None:
    try:
        allocation = bound_allocation(pod)
    except MalformedValue:
        return None
    if allocation is None:
        return None
    return ClaimAllocation(
        pod=pod.metadata.name,
        uid=pod.metadata.uid,
        node=allocation.node,
        ids=allocation.device_ids,
        uuids=allocation.uuids,
    )


def _condition(claim: GpuClaim, phase: ClaimPhase, now: str) -> Condition:
    status, reason, message = _REASONS[phase]
    old = next((c for c in claim.status.conditions if c.type == CONDITION_ALLOCATED), None) if claim.status else None
    return Condition(
        type=CONDITION_ALLOCATED,
        status=status,
        reason=reason,
        message=message,
        observed_generation=claim.metadata.generation,
        last_transition_time=old.last_transition_time if old is not None and old.status == status else now,
    )
