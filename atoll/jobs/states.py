"""The life of a job as one table: in which state what may happen, and what follows.

`step` returns the next state, or raises IllegalStep with the job's history and leaves everything as it was. Nothing
else decides what may follow what; `docs/job-service.md` shows the same table as a picture that `picture` draws, and a
test compares them. A wish to cancel is no state: it stands beside the record until the cluster proves that nothing of
the job is left, and only then the job is cancelled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class JobState(StrEnum):
    """Where a job is in its life."""

    PENDING = "pending"
    """Recorded, and not given to the cluster: waits for its start, or for the pause before a retry."""
    QUEUED = "queued"
    """Its objects are in the cluster and wait for quota."""
    ADMITTED = "admitted"
    """It has quota, or needs none; its pods are made and not all of them run."""
    RUNNING = "running"
    """Its containers run."""
    PREEMPTED = "preempted"
    """It gave way to others; its objects are kept."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobStep(StrEnum):
    """What happens to a job."""

    SUBMIT = "submit"
    """Its objects were created."""
    ADMIT = "admit"
    """Kueue reserved quota, or there is no Kueue that would have to."""
    RUN = "run"
    """Its pods run."""
    SUCCEED = "succeed"
    """It completed."""
    FAIL = "fail"
    """It failed and is not tried again."""
    CANCEL = "cancel"
    """Somebody cancelled it, and the cluster shows that nothing of it is left."""
    PREEMPT = "preempt"
    """It was evicted for others."""
    REQUEUE = "requeue"
    """A preempted job may be tried again."""
    UNADMIT = "unadmit"
    """It lost its quota for another reason than preemption."""
    RETRY = "retry"
    """It failed and is tried again: by the service's count, or because somebody asked."""
    EXPIRE = "expire"
    """Its deadline, or the time that it may run, is over."""
    VANISH = "vanish"
    """Its objects are gone, and nobody of us deleted them."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step that is possible."""

    state: JobState
    step: JobStep
    following: JobState


_S, _T = JobState, JobStep

ROWS: Final = (
    StepRow(_S.PENDING, _T.SUBMIT, _S.QUEUED),
    StepRow(_S.PENDING, _T.CANCEL, _S.CANCELLED),
    StepRow(_S.PENDING, _T.EXPIRE, _S.FAILED),
    StepRow(_S.PENDING, _T.FAIL, _S.FAILED),  # the cluster refuses its objects
    StepRow(_S.QUEUED, _T.ADMIT, _S.ADMITTED),
    StepRow(_S.QUEUED, _T.PREEMPT, _S.PREEMPTED),
    StepRow(_S.QUEUED, _T.CANCEL, _S.CANCELLED),
    StepRow(_S.QUEUED, _T.EXPIRE, _S.FAILED),
    StepRow(_S.QUEUED, _T.VANISH, _S.FAILED),
    StepRow(_S.ADMITTED, _T.RUN, _S.RUNNING),
    StepRow(_S.ADMITTED, _T.FAIL, _S.FAILED),
    StepRow(_S.ADMITTED, _T.PREEMPT, _S.PREEMPTED),
    StepRow(_S.ADMITTED, _T.UNADMIT, _S.QUEUED),
    StepRow(_S.ADMITTED, _T.RETRY, _S.PENDING),
    StepRow(_S.ADMITTED, _T.CANCEL, _S.CANCELLED),
    StepRow(_S.ADMITTED, _T.EXPIRE, _S.FAILED),
    StepRow(_S.ADMITTED, _T.VANISH, _S.FAILED),
    StepRow(_S.RUNNING, _T.SUCCEED, _S.SUCCEEDED),
    StepRow(_S.RUNNING, _T.FAIL, _S.FAILED),
    StepRow(_S.RUNNING, _T.PREEMPT, _S.PREEMPTED),
    StepRow(_S.RUNNING, _T.UNADMIT, _S.QUEUED),
    StepRow(_S.RUNNING, _T.RETRY, _S.PENDING),
    StepRow(_S.RUNNING, _T.CANCEL, _S.CANCELLED),
    StepRow(_S.RUNNING, _T.EXPIRE, _S.FAILED),
    StepRow(_S.RUNNING, _T.VANISH, _S.FAILED),
    StepRow(_S.PREEMPTED, _T.REQUEUE, _S.QUEUED),
    StepRow(_S.PREEMPTED, _T.FAIL, _S.FAILED),
    StepRow(_S.PREEMPTED, _T.CANCEL, _S.CANCELLED),
    StepRow(_S.PREEMPTED, _T.VANISH, _S.FAILED),
    StepRow(_S.FAILED, _T.RETRY, _S.PENDING),
)
"""Every step that is possible, in the order of a life."""

TABLE: Final[Mapping[tuple[JobState, JobStep], JobState]] = {(row.state, row.step): row.following for row in ROWS}
FIRST: Final = JobState.PENDING
ENDED: Final = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
"""States in which nothing of a job is in the cluster but what is kept to be looked at."""
IN_CLUSTER: Final = frozenset({JobState.QUEUED, JobState.ADMITTED, JobState.RUNNING, JobState.PREEMPTED})
"""States in which the objects of a job exist."""

REFUSALS: Final[Mapping[JobStep, str]] = {
    JobStep.CANCEL: "there is nothing left to cancel",
    JobStep.RETRY: "only a job that failed can be tried again",
}
"""What people ask for, and why it cannot be had in a state without such a row."""
HISTORY_SHOWN_MAX: Final = 8


class IllegalStep(ValueError):
    """A step that the table does not have. `history`: what happened to the job so far."""

    def __init__(self, job: str, state: JobState, asked: JobStep, history: tuple[str, ...] = ()) -> None:
        self.job, self.state, self.asked, self.history = job, state, asked, history
        why = REFUSALS.get(asked, f"possible are {', '.join(steps_of(state)) or 'none: it has ended'}")
        told = f"; its history: {', '.join(history[-HISTORY_SHOWN_MAX:])}" if history else ""
        super().__init__(f"job {job} is {state}, cannot {asked}: {why}{told}")


def step(job: str, state: JobState, asked: JobStep, *, history: tuple[str, ...] = ()) -> JobState:
    """Return the state that follows. `job`: how messages name it. Raises IllegalStep."""
    following = TABLE.get((state, asked))
    if following is None:
        raise IllegalStep(job, state, asked, history)
    return following


def steps_of(state: JobState) -> tuple[JobStep, ...]:
    """Return what may happen in a state, in the order of the table."""
    return tuple(row.step for row in ROWS if row.state is state)


def picture() -> str:
    """Return the table as text: a line for each state and each that may follow it, with the steps that lead there."""
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
