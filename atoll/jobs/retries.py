"""Whether and when a failed or preempted job is retried, and whether its time is over.

Decides from the job's policy, the number of attempts, the reason of the end, and the time. Preemptions are counted
separately from failures: a job that is preempted three times and then succeeds has no failures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from atoll.jobs.policy import JobPolicy
from atoll.jobs.words import JobType

MODEL_UNAVAILABLE: Final = "ModelUnavailable"
"""The library in the container says so of a model that it could not resolve or fetch."""
RETRYABLE: Final = (
    "OOMKilled",
    "Preempted",
    "NodeNotReady",
    "ImagePullBackOff",
    "ContainerCreating",
    MODEL_UNAVAILABLE,
)
"""A failure whose reason contains one of these may be transient; all others end the job at once."""
PAUSE_SECONDS_MAX: Final = 3600
"""The pause doubles with each retry, up to this; a longer `retry_delay_seconds` is not shortened."""
MESSAGE_LENGTH_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Retry the job, not before a time."""

    count: int
    not_before: datetime
    message: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not retry the job."""

    message: str


RetryDecision = TryAgain | GiveUp


def after_failure(
    policy: JobPolicy,
    *,
    reason: str,
    retries: int,
    now: datetime,
    spent: bool = False,
    retryable: Sequence[str] = RETRYABLE,
) -> RetryDecision:
    """Decide about a failed job. `retries`: number of earlier retries. `spent`: the cluster has retried single pods as
    often as the policy allows."""
    told = reason or "no reason given"
    if not any(one in reason for one in retryable):
        return GiveUp(bounded(f"failed: {told}"))
    if spent or retries >= policy.max_retries:
        used = f"all {policy.max_retries} retries are used up" if policy.max_retries else "no retries are allowed"
        return GiveUp(bounded(f"failed, {used}: {told}"))
    pause = pause_seconds(policy.retry_delay_seconds, retries)
    start = now + timedelta(seconds=pause)
    if policy.deadline is not None and start >= policy.deadline:
        return GiveUp(
            bounded(f"failed, and its deadline {policy.deadline.isoformat()} leaves no time for a retry: {told}")
        )
    message = f"retry {retries + 1} of {policy.max_retries} in {pause} s: {told}"
    return TryAgain(retries + 1, start, bounded(message))


def after_preemption(policy: JobPolicy, *, reason: str, preemptions: int, now: datetime) -> RetryDecision:
    """Decide about a preempted job. `preemptions`: how often it was preempted, including this time."""
    told = reason or "other jobs needed its quota"
    if not policy.retry_on_preemption:
        return GiveUp(bounded(f"preempted, and retry_on_preemption is false: {told}"))
    times = "once" if preemptions == 1 else f"{preemptions} times"
    return TryAgain(preemptions, now, bounded(f"preempted {times}, queued again: {told}"))


def pause_seconds(delay_seconds: int, retries: int) -> int:
    """Return the pause before the next retry, seconds: the delay, doubled for each of the earlier `retries`."""
    most = max(delay_seconds, PAUSE_SECONDS_MAX)
    return min(most, delay_seconds << min(retries, 32))


@dataclass(frozen=True, slots=True)
class TimeOver:
    """A job's time is over, and why."""

    message: str


@dataclass(frozen=True, slots=True)
class Due:
    """When the job's time will be over; None without a limit."""

    at: datetime | None


def time_left(
    policy: JobPolicy, job_type: JobType, *, started: datetime | None, now: datetime, seconds_max: int | None = None
) -> TimeOver | Due:
    """Decide whether a job may continue. `started`: when its containers started, or None. `seconds_max`: maximum run
    time from an attribute, which replaces the policy's `max_runtime`.

    The cluster also ends a batch or training at that time; only this ends a service.
    """
    running_max = policy.max_runtime if seconds_max is None else seconds_max
    if policy.deadline is not None and now >= policy.deadline:
        return TimeOver(f"its deadline {policy.deadline.isoformat()} has passed")
    ends = [policy.deadline] if policy.deadline is not None else []
    if started is not None and running_max is not None:
        until = started + timedelta(seconds=running_max)
        if now >= until:
            return TimeOver(f"the {job_type} reached its maximum run time of {running_max} s")
        ends.append(until)
    return Due(min(ends) if ends else None)


def start_of(policy: JobPolicy, not_before: datetime | None, now: datetime) -> datetime:
    """Return when a pending job may be submitted to the cluster: at its scheduled start, after a pause, or now."""
    return max(one for one in (policy.scheduled_start, not_before, now) if one is not None)


def bounded(message: str) -> str:
    """Return the message, truncated to what a record can store."""
    return message if len(message) <= MESSAGE_LENGTH_MAX else message[: MESSAGE_LENGTH_MAX - 3] + "..."
