"""Plans what to record about a job after an observation: steps with messages, including decisions about retries.

Turns the recorded state and counts and a JobObservation into PlannedSteps for one transaction. Separate from the
reconciler, so that every case is a row of a test.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from atoll.jobs.facts import JobObservation, JobPhase, steps_to
from atoll.jobs.policy import JobPolicy
from atoll.jobs.retries import GiveUp, TryAgain, after_failure, after_preemption, bounded
from atoll.jobs.states import JobState, JobStep, step


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step, its message, and the fields of the record that change with it."""

    step: JobStep
    message: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobHistory:
    """The past of a job that affects the next decision."""

    state: JobState
    retries: int = 0
    preemptions: int = 0


def plan_steps(
    history: JobHistory, seen: JobObservation, *, policy: JobPolicy, now: datetime
) -> tuple[PlannedStep, ...]:
    """Return the steps from the record to the observation; none if they agree."""
    state = history.state
    planned: list[PlannedStep] = []
    if state is JobState.PREEMPTED and seen.phase is not JobPhase.GONE:
        planned.append(PlannedStep(JobStep.REQUEUE, "queued again"))
        state = JobState.QUEUED
    for one in steps_to(state, seen.phase):
        told = seen.granted if one is JobStep.ADMIT and seen.granted else seen.reason
        planned.append(PlannedStep(one, bounded(told)))
        state = step("", state, one)
    if seen.phase is JobPhase.FAILED:
        planned.append(_after_failure(history, seen, policy, now))
    elif state is JobState.PREEMPTED and seen.phase is JobPhase.EVICTED:
        planned.append(_after_preemption(history, seen, policy, now))
    return tuple(planned)


def _after_failure(history: JobHistory, seen: JobObservation, policy: JobPolicy, now: datetime) -> PlannedStep:
    if seen.is_final:
        return PlannedStep(JobStep.FAIL, bounded(seen.reason))
    decided = after_failure(policy, reason=seen.reason, retries=history.retries, now=now, spent=seen.spent)
    if isinstance(decided, GiveUp):
        return PlannedStep(JobStep.FAIL, decided.message)
    changes = {"retry_count": decided.count, "not_before": decided.not_before}
    return PlannedStep(JobStep.RETRY, decided.message, changes)


def _after_preemption(history: JobHistory, seen: JobObservation, policy: JobPolicy, now: datetime) -> PlannedStep:
    count = history.preemptions + 1
    decided = after_preemption(policy, reason=seen.reason, preemptions=count, now=now)
    asked = JobStep.REQUEUE if isinstance(decided, TryAgain) else JobStep.FAIL
    return PlannedStep(asked, decided.message, {"preemption_count": count})
