"""Thresholds of a trigger: a number crosses a limit, and must come back over another one before it counts again."""

from enum import StrEnum
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from atoll.jobs.base import JobPart
from atoll.pipelines.events import EVENT_NAMES, Event
from atoll.pipelines.expressions import ExpressionFailed, ExpressionInvalid, ValueType, compiled, source_of

Limit = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NUMBERS: Final = (ValueType.INTEGER, ValueType.NUMBER)


class ServiceMetric(StrEnum):
    """A number that the service knows, over the jobs that the pipeline's tenant and project have."""

    QUEUED_JOBS = "queued_jobs"
    """Jobs that wait for quota."""
    RUNNING_JOBS = "running_jobs"
    LONGEST_WAIT_SECONDS = "longest_wait_seconds"
    """How long the job that waits for quota the longest has not changed."""


class Threshold(JobPart):
    """A number and its limits. Without `rearm` the number need only come back to the limit itself."""

    metric: ServiceMetric | None = None
    value: Annotated[str | None, Field(min_length=1, max_length=1024, description="expression over the event")] = None
    above: Limit | None = None
    below: Limit | None = None
    rearm: Annotated[Limit | None, Field(description="the number counts again once it is here or further back")] = None

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse two numbers or none, two limits or none, and a rearm on the wrong side."""
        if (self.metric is None) == (self.value is None):
            raise ValueError("threshold must have metric or value; give one of both")
        if (self.above is None) == (self.below is None):
            raise ValueError("threshold must have above or below; give one of both")
        if self.rearm is not None and self._excess(self.rearm) > 0:
            raise ValueError("rearm must not be beyond the limit; with above it is lower, with below it is higher")
        if self.value is not None:
            _check_value(self.value)
        return self

    def number_of(self, event: Event) -> float:
        """Return the number in an event. Raises ExpressionFailed."""
        found = compiled(source_of(self.value or ""), EVENT_NAMES).value(event)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ExpressionFailed(f"{self.value}: the event has no number there")
        return found

    def judged(self, number: float, *, is_armed: bool) -> tuple[bool, bool]:
        """Return whether a number crosses the limit now, and whether the next crossing will count."""
        if is_armed:
            crosses = self._excess(number) > 0
            return crosses, not crosses
        back = self._excess(self.rearm) if self.rearm is not None else 0.0
        return False, self._excess(number) <= back

    def _excess(self, number: float) -> float:
        """Return how far a number is beyond the limit; negative if it is not."""
        return number - self.above if self.above is not None else (self.below or 0.0) - number


def _check_value(text: str) -> None:
    try:
        found = compiled(source_of(text), EVENT_NAMES)
    except ExpressionInvalid as error:
        raise ValueError(f"value cannot be used: {error}; it may use {', '.join(EVENT_NAMES)}") from error
    if not any(found.accepts(kind) for kind in NUMBERS):
        raise ValueError(f"value must give a number, and gives a {found.type_name}; correct it")
