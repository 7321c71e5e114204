"""Words of a pipeline: enumerations whose values stand in documents and records."""

from enum import StrEnum
from typing import Final


class StepType(StrEnum):
    """What a step does."""

    JOB = "job"
    API_CALL = "api_call"
    FUNCTION = "function"
    NOTIFICATION = "notification"
    CONDITION = "condition"
    WAIT = "wait"
    PARALLEL = "parallel"
    LOOP = "loop"


class StepState(StrEnum):
    """State of a step of a run."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"


class RunState(StrEnum):
    """State of a run of a pipeline."""

    PENDING = "pending"
    """Waits for an earlier run to be cancelled."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class FailureRule(StrEnum):
    """What a failed step means for the run."""

    FAIL = "fail"
    """The run fails, and steps that depend on this one are skipped."""
    CONTINUE = "continue"
    """Steps that depend on this one run as if it had succeeded; the run does not fail."""


class OverlapPolicy(StrEnum):
    """What happens when a run starts while another of the same pipeline is active."""

    ALLOW = "allow"
    FORBID = "forbid"
    """The new run is refused."""
    REPLACE = "replace"
    """The active run is cancelled first."""


class SkipCause(StrEnum):
    """Why a step is skipped."""

    NOT_SELECTED = "not selected"
    """A condition chose the other branch; joins ignore it."""
    UPSTREAM_FAILED = "a step that it depends on failed"
    FAIL_FAST = "another step failed"
    CANCELLED = "the run was cancelled"


ENDED_RUNS: Final = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED})
ENDED_STEPS: Final = frozenset({StepState.SUCCEEDED, StepState.FAILED, StepState.SKIPPED})
