"""The state of a job in the cluster, and the steps that lead to it from the recorded state.

Turns facts about the object that runs the pods, the pods, and Kueue's eviction into a JobObservation and steps.
Level-triggered: whatever was missed between two runs, the steps lead to the current state; each is a row of the table
in atoll.jobs.states.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from atoll.jobs.last_checkpoint import LastCheckpoint
from atoll.jobs.states import JobState, JobStep

PREEMPTED_REASON: Final = "Preempted"
NODE_REASON: Final = "NodeNotReady"
DEADLINE_REASON: Final = "DeadlineExceeded"
POLICY_REASON: Final = "PodFailurePolicy"
BACKOFF_REASON: Final = "BackoffLimitExceeded"
DISRUPTIONS: Final[Mapping[str, str]] = {
    "PreemptionByScheduler": PREEMPTED_REASON,
    "DeletionByTaintManager": NODE_REASON,
    "DeletionByPodGC": NODE_REASON,
}
"""Reasons of the condition DisruptionTarget, mapped to the names that retries use."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod. `reason`: why a container ended or waits, or why the pod was ended; `detail`: the message.
    `checkpoint`: the newest that one of its ended containers tells."""

    name: str
    phase: str = "Pending"
    is_leaving: bool = False
    is_gated: bool = False
    reason: str = ""
    detail: str = ""
    checkpoint: LastCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """The Job or Deployment. `failed`: the reason of its condition Failed, or empty. `wanted`: pods that should run;
    `ready`: pods that run, if the object counts them. `runs_whole`: it only runs when all pods run. `refused`: why the
    API server takes none of its pods; empty while it does."""

    kind: str
    uid: str
    is_leaving: bool = False
    is_suspended: bool = False
    is_complete: bool = False
    failed: str = ""
    failed_detail: str = ""
    wanted: int = 1
    ready: int | None = None
    runs_whole: bool = False
    backoff_limit: int = 0
    refused: str = ""

    @property
    def has_ended(self) -> bool:
        """Return whether it will run no more pods."""
        return self.is_complete or bool(self.failed)


@dataclass(frozen=True, slots=True)
class QuotaFacts:
    """Kueue's view of a job. `evicted`: why Kueue took its quota back; empty if it did not. `detail`: Kueue's message
    about that, or about what the job waits for. `flavors`: kinds of machines that its quota is for. `cluster`: to which
    MultiKueue sent it; empty for this one."""

    has_kueue: bool = True
    evicted: str = ""
    detail: str = ""
    flavors: tuple[str, ...] = ()
    cluster: str = ""

    @property
    def granted(self) -> str:
        """Return the quota of an admitted job in words; empty if nothing is known."""
        if not self.has_kueue:
            return "without quota: the cluster has no Kueue"
        sent = f", and sent it to cluster {self.cluster}" if self.cluster else ""
        return f"Kueue reserved quota of {', '.join(self.flavors)}{sent}" if self.flavors else ""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Everything observed about one job. `quota`: None if Kueue was not asked."""

    workload: WorkloadFacts | None
    pods: tuple[PodFacts, ...] = ()
    quota: QuotaFacts | None = None

    def last_checkpoint(self, job_id: str) -> LastCheckpoint | None:
        """Return the newest checkpoint of the job that its pods tell."""
        told = (pod.checkpoint for pod in self.pods if pod.checkpoint is not None)
        return max((one for one in told if one.job_id == job_id), key=lambda one: one.created_at, default=None)


class JobPhase(StrEnum):
    """Phase of a job in the cluster."""

    WAITS_FOR_QUOTA = "waits for quota"
    STARTS = "starts"
    RUNS = "runs"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    EVICTED = "evicted"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class JobObservation:
    """Phase of a job in the cluster, and why. `spent`: the cluster has used up its own retries. `is_final`: no retry,
    whatever the reason. `granted`: the quota that it started with, in words."""

    phase: JobPhase
    reason: str = ""
    spent: bool = False
    is_final: bool = False
    granted: str = ""


def observe(facts: JobFacts, *, workload_uid: str | None) -> JobObservation:
    """Derive the phase from the facts. `workload_uid`: uid of the object that was created for the job; another object
    of the same name is not the job's."""
    workload = facts.workload
    if workload is None or (workload_uid is not None and workload.uid != workload_uid):
        return JobObservation(
            JobPhase.GONE, "its objects are gone from the cluster and the service did not delete them: deleted by hand?"
        )
    if workload.is_complete:
        return JobObservation(JobPhase.SUCCEEDED)
    if workload.failed:
        return _failure(workload, facts.pods)
    if workload.is_leaving:
        return JobObservation(JobPhase.GONE, f"its {workload.kind} is being deleted, and the service did not delete it")
    if _waits_for_quota(workload, facts.pods):
        return _without_quota(facts.quota or QuotaFacts())
    return replace(_started(workload, facts.pods), granted=facts.quota.granted if facts.quota is not None else "")


def _started(workload: WorkloadFacts, pods: tuple[PodFacts, ...]) -> JobObservation:
    running = workload.ready if workload.ready is not None else _running(pods)
    waiting = _waiting(pods) or (f"its pods cannot be created: {workload.refused}" if workload.refused else "")
    if workload.wanted == 0:
        return JobObservation(JobPhase.RUNS, "runs with 0 replicas until a request arrives")
    if running >= (workload.wanted if workload.runs_whole else 1):
        partly = f"{running} of {workload.wanted} pods run" if running < workload.wanted else ""
        return JobObservation(JobPhase.RUNS, "; ".join(part for part in (partly, waiting) if part))
    return JobObservation(JobPhase.STARTS, waiting or f"{running} of {workload.wanted} pods run")


def _failure(workload: WorkloadFacts, pods: tuple[PodFacts, ...]) -> JobObservation:
    if workload.failed == DEADLINE_REASON:
        return JobObservation(JobPhase.EXPIRED, "its maximum run time is over")
    ended = [pod for pod in pods if pod.phase == "Failed" and pod.reason]
    if workload.failed == POLICY_REASON:
        why = f": pod {ended[0].name}: {ended[0].reason}" if ended else ""
        return JobObservation(JobPhase.FAILED, f"preempted, and retry_on_preemption is false{why}", is_final=True)
    last = f"pod {ended[-1].name}: {ended[-1].reason} {ended[-1].detail}".strip() if ended else ""
    told = ": ".join(part for part in (workload.failed, last or workload.failed_detail) if part)
    spent = workload.failed == BACKOFF_REASON and workload.backoff_limit > 0
    return JobObservation(JobPhase.FAILED, told, spent=spent)


def _waits_for_quota(workload: WorkloadFacts, pods: tuple[PodFacts, ...]) -> bool:
    """Return whether Kueue holds the job back: a Job by suspending it, a Deployment by gates on its pods."""
    if workload.is_suspended:
        return True
    return bool(pods) and all(pod.is_gated for pod in pods)


def _without_quota(quota: QuotaFacts) -> JobObservation:
    """Return why Kueue holds the job back."""
    if quota.evicted == PREEMPTED_REASON:
        return JobObservation(JobPhase.EVICTED, _joined(PREEMPTED_REASON, quota.detail))
    if quota.evicted:
        return JobObservation(JobPhase.WAITS_FOR_QUOTA, _joined(f"lost its quota: {quota.evicted}", quota.detail))
    if not quota.has_kueue:
        told = "its Job is suspended, and the cluster has no Kueue that would resume it"
        return JobObservation(JobPhase.WAITS_FOR_QUOTA, told)
    return JobObservation(JobPhase.WAITS_FOR_QUOTA, _joined("waits for quota", quota.detail))


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)


def _running(pods: tuple[PodFacts, ...]) -> int:
    return sum(pod.phase in ("Running", "Succeeded") and not pod.is_leaving for pod in pods)


def _waiting(pods: tuple[PodFacts, ...]) -> str:
    """Return why the first waiting pod waits."""
    for pod in pods:
        if pod.phase == "Pending" and not pod.is_leaving and pod.reason:
            return f"pod {pod.name}: {pod.reason} {pod.detail}".strip()
    return ""


_T = JobStep
FORWARD: Final[Mapping[tuple[JobState, JobPhase], tuple[JobStep, ...]]] = {
    (JobState.QUEUED, JobPhase.STARTS): (_T.ADMIT,),
    (JobState.QUEUED, JobPhase.RUNS): (_T.ADMIT, _T.RUN),
    (JobState.QUEUED, JobPhase.SUCCEEDED): (_T.ADMIT, _T.RUN, _T.SUCCEED),
    (JobState.QUEUED, JobPhase.FAILED): (_T.ADMIT,),
    (JobState.QUEUED, JobPhase.EXPIRED): (_T.EXPIRE,),
    (JobState.QUEUED, JobPhase.GONE): (_T.VANISH,),
    (JobState.ADMITTED, JobPhase.WAITS_FOR_QUOTA): (_T.UNADMIT,),
    (JobState.ADMITTED, JobPhase.EVICTED): (_T.PREEMPT,),
    (JobState.ADMITTED, JobPhase.RUNS): (_T.RUN,),
    (JobState.ADMITTED, JobPhase.SUCCEEDED): (_T.RUN, _T.SUCCEED),
    (JobState.ADMITTED, JobPhase.EXPIRED): (_T.EXPIRE,),
    (JobState.ADMITTED, JobPhase.GONE): (_T.VANISH,),
    (JobState.RUNNING, JobPhase.WAITS_FOR_QUOTA): (_T.UNADMIT,),
    (JobState.RUNNING, JobPhase.EVICTED): (_T.PREEMPT,),
    (JobState.RUNNING, JobPhase.SUCCEEDED): (_T.SUCCEED,),
    (JobState.RUNNING, JobPhase.EXPIRED): (_T.EXPIRE,),
    (JobState.RUNNING, JobPhase.GONE): (_T.VANISH,),
    (JobState.PREEMPTED, JobPhase.GONE): (_T.VANISH,),
}
"""Steps from a recorded state to an observed phase. A missing pair needs no step: a queued job that is evicted is
already queued, and a running job whose pods restart keeps running. atoll.jobs.retries decides about failures and
preemptions after these steps."""


def steps_to(state: JobState, phase: JobPhase) -> tuple[JobStep, ...]:
    """Return the steps from a recorded state to the observed phase, without the decision about a retry."""
    return FORWARD.get((state, phase), ())
