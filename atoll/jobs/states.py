"""The state machine of a job, as one table.

`step` returns the next state, or raises IllegalStep with the job's history and changes nothing. No other code decides
about transitions. `docs/job-service.md` shows the same table, drawn by `picture`; a test compares them. A request to
cancel is not a state: it is recorded beside the state, and the job is only cancelled when the cluster has none of its
objects left.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class JobState(StrEnum):
    """State of a job."""

    PENDING = "pending"
    """Recorded, but not in the cluster: waits for its start time, for the pause before a retry, or for somebody to
    resume it."""
    QUEUED = "queued"
    """Its objects are in the cluster and wait for quota."""
    ADMITTED = "admitted"
    """It has quota, or needs none; its pods are created, but not all of them run."""
    RUNNING = "running"
    """Its containers run."""
    PREEMPTED = "preempted"
    """Kueue gave its quota to other jobs; its objects are kept."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobStep(StrEnum):
    """Transition of a job."""

    SUBMIT = "submit"
    """Its objects were created."""
    ADMIT = "admit"
    """Kueue reserved quota, or the job needs none."""
    RUN = "run"
    """Its pods run."""
    SUCCEED = "succeed"
    """It completed."""
    FAIL = "fail"
    """It failed and is not retried."""
    CANCEL = "cancel"
    """A user cancelled it, and none of its objects is left in the cluster."""
    PREEMPT = "preempt"
    """Kueue evicted it for other jobs."""
    REQUEUE = "requeue"
    """A preempted job is queued again."""
    PAUSE = "pause"
    """A user or its budget paused it, and none of its objects is left in the cluster."""
    ESCALATE = "escalate"
    """It waited too long, moves up to another priority class, and none of its objects is left in the cluster."""
    UNADMIT = "unadmit"
    """It lost its quota for another reason than preemption."""
    RETRY = "retry"
    """It failed and is retried, by its retry policy or on request."""
    EXPIRE = "expire"
    """Its deadline or its maximum run time is over."""
    MOVE = "move"
    """Its cluster is drained: none of its objects is left there, and it starts again in another cluster."""
    VANISH = "vanish"
    """Its objects are gone, and the service did not delete them."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One possible step."""

    state: JobState
    step: JobStep
    following: JobState


_S, _T = JobState, JobStep

ROWS: Final = (
    StepRow(_S.PENDING, _T.SUBMIT, _S.QUEUED),
    StepRow(_S.PENDING, _T.CANCEL, _S.CANCELLED),
    StepRow(_S.PENDING, _T.EXPIRE, _S.FAILED),
    StepRow(_S.PENDING, _T.FAIL, _S.FAILED),  # the cluster refuses its objects
    StepRow(_S.PENDING, _T.MOVE, _S.PENDING),
    StepRow(_S.QUEUED, _T.ADMIT, _S.ADMITTED),
    StepRow(_S.QUEUED, _T.PREEMPT, _S.PREEMPTED),
    StepRow(_S.QUEUED, _T.CANCEL, _S.CANCELLED),
    StepRow(_S.QUEUED, _T.PAUSE, _S.PENDING),
    StepRow(_S.QUEUED, _T.ESCALATE, _S.PENDING),
    StepRow(_S.QUEUED, _T.EXPIRE, _S.FAILED),
    StepRow(_S.QUEUED, _T.VANISH, _S.FAILED),
    StepRow(_S.QUEUED, _T.MOVE, _S.PENDING),
    StepRow(_S.ADMITTED, _T.RUN, _S.RUNNING),
    StepRow(_S.ADMITTED, _T.FAIL, _S.FAILED),
    StepRow(_S.ADMITTED, _T.PREEMPT, _S.PREEMPTED),
    StepRow(_S.ADMITTED, _T.UNADMIT, _S.QUEUED),
    StepRow(_S.ADMITTED, _T.RETRY, _S.PENDING),
    StepRow(_S.ADMITTED, _T.CANCEL, _S.CANCELLED),
    StepRow(_S.ADMITTED, _T.PAUSE, _S.PENDING),
    StepRow(_S.ADMITTED, _T.EXPIRE, _S.FAILED),
    StepRow(_S.ADMITTED, _T.VANISH, _S.FAILED),
    StepRow(_S.ADMITTED, _T.MOVE, _S.PENDING),
    StepRow(_S.RUNNING, _T.SUCCEED, _S.SUCCEEDED),
    StepRow(_S.RUNNING, _T.FAIL, _S.FAILED),
    StepRow(_S.RUNNING, _T.PREEMPT, _S.PREEMPTED),
    StepRow(_S.RUNNING, _T.UNADMIT, _S.QUEUED),
    StepRow(_S.RUNNING, _T.RETRY, _S.PENDING),
    StepRow(_S.RUNNING, _T.CANCEL, _S.CANCELLED),
    StepRow(_S.RUNNING, _T.PAUSE, _S.PENDING),
    StepRow(_S.RUNNING, _T.EXPIRE, _S.FAILED),
    StepRow(_S.RUNNING, _T.VANISH, _S.FAILED),
    StepRow(_S.RUNNING, _T.MOVE, _S.PENDING),
    StepRow(_S.PREEMPTED, _T.REQUEUE, _S.QUEUED),
    StepRow(_S.PREEMPTED, _T.FAIL, _S.FAILED),
    StepRow(_S.PREEMPTED, _T.CANCEL, _S.CANCELLED),
    StepRow(_S.PREEMPTED, _T.PAUSE, _S.PENDING),
    StepRow(_S.PREEMPTED, _T.VANISH, _S.FAILED),
    StepRow(_S.PREEMPTED, _T.MOVE, _S.PENDING),
    StepRow(_S.FAILED, _T.RETRY, _S.PENDING),
)
"""Every possible step, in the order of a job's states."""

TABLE: Final[Mapping[tuple[JobState, JobStep], JobState]] = {(row.state, row.step): row.following for row in ROWS}
FIRST: Final = JobState.PENDING
ENDED: Final = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
"""States in which the cluster has no objects of a job, except those kept for inspection."""
IN_CLUSTER: Final = frozenset({JobState.QUEUED, JobState.ADMITTED, JobState.RUNNING, JobState.PREEMPTED})
"""States in which the objects of a job exist."""

REFUSALS: Final[Mapping[JobStep, str]] = {
    JobStep.CANCEL: "there is nothing left to cancel",
    JobStep.RETRY: "only a failed job can be retried",
    JobStep.PAUSE: "only a job in the cluster can be paused",
}
"""Requests of users, and why they are refused in a state without such a row."""
HISTORY_SHOWN_MAX: Final = 8


class IllegalStep(ValueError):
    """A step that is not in the table. `history`: the job's events so far."""

    def __init__(self, job: str, state: JobState, asked: JobStep, history: tuple[str, ...] = ()) -> None:
        self.job, self.state, self.asked, self.history = job, state, asked, history
        why = REFUSALS.get(asked, f"possible steps: {', '.join(steps_of(state)) or 'none, it has ended'}")
        told = f"; its history: {', '.join(history[-HISTORY_SHOWN_MAX:])}" if history else ""
        super().__init__(f"job {job} is {state}, cannot {asked}: {why}{told}")


def step(job: str, state: JobState, asked: JobStep, *, history: tuple[str, ...] = ()) -> JobState:
    """Return the next state. `job`: its name in messages. Raises IllegalStep."""
    following = TABLE.get((state, asked))
    if following is None:
        raise IllegalStep(job, state, asked, history)
    return following


def steps_of(state: JobState) -> tuple[JobStep, ...]:
    """Return the possible steps of a state, in the order of the table."""
    return tuple(row.step for row in ROWS if row.state is state)


def picture() -> str:
    """Return the table as text: a line for each state and each next state, with the steps between them."""
    width = max(len(state) for state in JobState)
    lines = []
    for state in JobState:
        ways: dict[JobState, list[JobStep]] = {}
        for row in ROWS:
            if row.state is state:
                ways.setdefault(row.following, []).append(row.step)
        for number, (following, steps) in enumerate(ways.items()):
            name = state if number == 0 else ""
            lines.append(f"{name:<{width}}  ──► {following:<{width}}  {', '.join(steps)}")
        if not ways:
            lines.append(f"{state:<{width}}  (the end)")
    return "\n".join(lines)
