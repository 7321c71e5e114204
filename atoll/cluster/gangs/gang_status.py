"""Changes of a gang's status: each function returns the status with one consistent change. Pure.

`lifecycle` decides which changes to make.
"""

from collections.abc import Sequence

from atoll.api import names
from atoll.api.gangs import GpuGangStatus
from atoll.cluster.gangs import conditions
from atoll.cluster.gangs.membership import GangMember, MemberStage, is_of_stateful_set, without_pod_set
from atoll.cluster.gangs.readiness import QuorumCount


def in_phase(status: GpuGangStatus, phase: str) -> GpuGangStatus:
    """Return the status with another phase."""
    return status.model_copy(update={"phase": phase})


def wait_for(status: GpuGangStatus, reason: str, message: str, now_seconds: float) -> GpuGangStatus:
    """Return the status of a gang that has no place yet, or may not have one yet."""
    return in_phase(fail(status, names.CONDITION_ADMITTED, reason, message, now_seconds), "Waiting")


def open_admission(status: GpuGangStatus, admission: str, message: str, now_seconds: float) -> GpuGangStatus:
    """Return the status of a gang whose members are, or were, ungated in the admission with that id."""
    status = meet(status, names.CONDITION_ADMITTED, "Admitted", message, now_seconds)
    status = fail(status, names.CONDITION_EVICTED, "NotEvicted", "", now_seconds)
    status = fail(status, names.CONDITION_PODS_READY, "WaitForStart", "", now_seconds)
    update = {"admission": admission, "was_ready": False, "losses": 0, "assignment": None}
    return in_phase(status.model_copy(update=update), "Starting")


def close_admission(status: GpuGangStatus) -> GpuGangStatus:
    """Return the status of a gang that is no longer admitted. Succeeded members of owners still count."""
    update = {
        "admission": "",
        "was_ready": False,
        "losses": 0,
        "assignment": None,
        "succeeded": tuple(entry for entry in status.succeeded if entry.owner),
        "conditions": conditions.drop(status.conditions, names.CONDITION_PODS_READY),
    }
    return status.model_copy(update=update)


IN_ORDER = "; a StatefulSet creates its pods one after the other unless its podManagementPolicy is Parallel"


def with_quorum(
    status: GpuGangStatus, members: Sequence[GangMember], present: QuorumCount, now_seconds: float
) -> GpuGangStatus:
    """Return the status with the condition that shows which members exist."""
    held_back = sum(member.stage is MemberStage.HELD_BACK for member in members)
    reason = "QuorumReached" if present.is_enough else "ForeignGates" if held_back else "WaitForMembers"
    lost = len(without_pod_set(members))
    message = str(present) + (f"; {held_back} wait behind gates of others" if held_back else "")
    message += f"; {lost} name no pod set of this gang" if lost else ""
    message += IN_ORDER if not present.is_enough and any(map(is_of_stateful_set, members)) else ""
    return put(
        status,
        names.CONDITION_QUORUM,
        is_met=present.is_enough,
        reason=reason,
        message=message,
        now_seconds=now_seconds,
    )


def with_readiness(status: GpuGangStatus, tallied: QuorumCount, now_seconds: float) -> GpuGangStatus:
    """Return the status with the condition that shows which members are ready."""
    before = conditions.find(status.conditions, names.CONDITION_PODS_READY)
    if tallied.is_enough:
        was_lost = before is not None and before.reason in {"WaitForRecovery", "Recovered"}
        status = status.model_copy(update={"was_ready": True})
        reason = "Recovered" if was_lost else "Started"
        return meet(status, names.CONDITION_PODS_READY, reason, str(tallied), now_seconds)
    if status.was_ready and before is not None and before.status == "True":
        status = status.model_copy(update={"losses": status.losses + 1})
    reason = "WaitForRecovery" if status.was_ready else "WaitForStart"
    return fail(status, names.CONDITION_PODS_READY, reason, str(tallied), now_seconds)


def meet(status: GpuGangStatus, kind: str, reason: str, message: str, now_seconds: float) -> GpuGangStatus:
    """Return the status with one condition True."""
    return put(status, kind, is_met=True, reason=reason, message=message, now_seconds=now_seconds)


def fail(status: GpuGangStatus, kind: str, reason: str, message: str, now_seconds: float) -> GpuGangStatus:
    """Return the status with one condition False."""
    return put(status, kind, is_met=False, reason=reason, message=message, now_seconds=now_seconds)


def put(
    status: GpuGangStatus, kind: str, *, is_met: bool, reason: str, message: str, now_seconds: float
) -> GpuGangStatus:
    """Return the status with one condition set."""
    entries = conditions.put(
        status.conditions, kind, is_met=is_met, reason=reason, message=message, now_seconds=now_seconds
    )
    return status.model_copy(update={"conditions": entries})
