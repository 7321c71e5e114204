"""Triggers of a pipeline: what begins a run without a user, and whether it does so now.

Reads no clock and no network: instants, events and ends of runs are arguments.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum
from itertools import islice, takewhile
from typing import Annotated, Any, Final, Self
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from pydantic import Field, field_validator, model_validator

from atoll.jobs.base import Flag, JobPart
from atoll.pipelines.events import EVENT_NAMES, Event, topics_of
from atoll.pipelines.expressions import (
    ExpressionFailed,
    ExpressionInvalid,
    ValueType,
    compiled,
    filled,
    source_of,
)
from atoll.pipelines.model import ENTRIES_MAX, StepName
from atoll.pipelines.thresholds import Threshold
from atoll.pipelines.words import RunState

MADE_UP_MAX: Final = 100
"""Missed instants that are made up, the newest ones."""
TOLERANCE: Final = timedelta(minutes=1)
"""How late a run may begin whose instant is not missed."""
LOOK_BACK: Final = timedelta(hours=2)
WINDOWS_MAX: Final = 16
DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_CLOCK: Final = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"


class TriggerType(StrEnum):
    """What a trigger waits for. A run by hand needs none."""

    CRON = "cron"
    EVENT = "event"
    WEBHOOK = "webhook"
    DEPENDENCY = "dependency"
    THRESHOLD = "threshold"


class MissedRuns(StrEnum):
    """What happens with instants that passed while no service ran."""

    SKIP = "skip"
    """Nothing, except within a minute."""
    ONCE = "once"
    """One run for all of them, the newest."""
    ALL = "all"
    """One run for each, a bounded number."""


class WantedEnd(StrEnum):
    """Which ends of the other pipeline's runs a dependency waits for."""

    SUCCEEDED = "succeeded"
    ANY = "any"


class TimeWindow(JobPart):
    """When a trigger may begin runs, in its time zone. A window whose end is not after its start passes midnight, and
    belongs to the day on which it starts."""

    start: Annotated[str, Field(pattern=_CLOCK)]
    end: Annotated[str, Field(pattern=_CLOCK)]
    days: Annotated[tuple[Annotated[str, Field(pattern=f"^({'|'.join(DAYS)})$")], ...], Field(max_length=7)] = DAYS

    def holds(self, local: datetime) -> bool:
        """Return whether a local time is in the window."""
        start, end = time.fromisoformat(self.start), time.fromisoformat(self.end)
        now, today = local.time(), local.weekday()
        if start < end:
            return start <= now < end and DAYS[today] in self.days
        return (now >= start and DAYS[today] in self.days) or (now < end and DAYS[today - 1] in self.days)


class PipelineTrigger(JobPart):
    """One trigger."""

    trigger_type: TriggerType
    enabled: Flag = True
    inputs: Annotated[
        dict[StepName, Any], Field(max_length=ENTRIES_MAX, description="of its runs; an event's may use ${event.data}")
    ] = Field(default_factory=dict)
    windows: Annotated[tuple[TimeWindow, ...], Field(max_length=WINDOWS_MAX)] = ()
    timezone: Annotated[str, Field(max_length=64)] = "UTC"
    cron_expression: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    missed: MissedRuns = MissedRuns.SKIP
    event_topic: Annotated[
        str | None,
        Field(min_length=1, max_length=256, description="type of the event, or its beginning to a dot or colon and *"),
    ] = None
    event_filter: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    depends_on_pipeline_id: Annotated[str | None, Field(min_length=36, max_length=36)] = None
    depends_on_job_status: WantedEnd = WantedEnd.SUCCEEDED
    threshold: Threshold | None = None

    @field_validator("timezone")
    @classmethod
    def know_zone(cls, value: str) -> str:
        """Refuse unknown time zones."""
        try:
            ZoneInfo(value)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError("is no time zone; write one such as Europe/Berlin") from error
        return value

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse what the trigger's type does not have, expressions that cannot be used, and what it lacks."""
        for field, of in (
            ("cron_expression", TriggerType.CRON),
            ("depends_on_pipeline_id", TriggerType.DEPENDENCY),
            ("threshold", TriggerType.THRESHOLD),
        ):
            if (getattr(self, field) is not None) != (self.trigger_type is of):
                raise ValueError(f"{field} belongs to triggers of type {of}; give it to these alone")
        if (self.event_topic is not None) != self._takes_events():
            raise ValueError("event_topic belongs to events, and to thresholds of a value; give it to these alone")
        if self.cron_expression is not None:
            check_cron(self.cron_expression)
        if self.event_filter is not None:
            self._check_filter(self.event_filter)
        return self

    def _takes_events(self) -> bool:
        with_value = self.threshold is not None and self.threshold.value is not None
        return self.trigger_type is TriggerType.EVENT or with_value

    def _check_filter(self, text: str) -> None:
        if not self._takes_events():
            raise ValueError("event_filter belongs to triggers with an event_topic; give it to these alone")
        try:
            found = compiled(source_of(text), EVENT_NAMES)
        except ExpressionInvalid as error:
            raise ValueError(f"event_filter cannot be used: {error}; it may use {', '.join(EVENT_NAMES)}") from error
        if not found.accepts(ValueType.BOOLEAN):
            raise ValueError(f"event_filter must give a boolean, and gives a {found.type_name}; correct it")

    def may_begin(self, instant: datetime) -> bool:
        """Return whether its windows allow a run at an instant."""
        local = instant.astimezone(ZoneInfo(self.timezone))
        return not self.windows or any(one.holds(local) for one in self.windows)

    def next_instant(self, after: datetime) -> datetime | None:
        """Return the first instant of a cron trigger after a time, in UTC; None for other types."""
        return next(self._instants(after), None)

    def due(self, after: datetime, now: datetime) -> tuple[datetime, ...]:
        """Return the instants of a cron trigger after one time and until another that begin a run, oldest first.

        `after` is exclusive, `now` inclusive. Which of several are left follows from `missed`; windows are not looked
        at.
        """
        if self.missed is MissedRuns.ALL:
            return self._newest(after, now, MADE_UP_MAX)
        found = self._newest(after, now, 1)
        is_late = bool(found) and now - found[0] > TOLERANCE
        return () if is_late and self.missed is MissedRuns.SKIP else found

    def _newest(self, after: datetime, now: datetime, count: int) -> tuple[datetime, ...]:
        """Return the newest instants, looking back ever further: years may have passed, with a minute's instants."""
        span = LOOK_BACK
        while True:
            begin = max(after, now - span)
            found = tuple(takewhile(lambda instant: instant <= now, self._instants(begin)))
            if len(found) >= count or begin == after:
                return found[-count:]
            span *= 8

    def _instants(self, after: datetime) -> Iterator[datetime]:
        if self.cron_expression is None:
            return iter(())
        local = after.astimezone(ZoneInfo(self.timezone))
        return (one.astimezone(UTC) for one in CronSim(self.cron_expression, local))

    def takes(self, event: Event) -> bool:
        """Return whether an event is for this trigger; a filter without a value does not hold."""
        if self.event_topic not in topics_of(event["event.type"]):
            return False
        try:
            return self.event_filter is None or (
                compiled(source_of(self.event_filter), EVENT_NAMES).value(event) is True
            )
        except ExpressionFailed:
            return False

    def inputs_of(self, event: Event) -> dict[str, Any]:
        """Return the inputs of a run that an event begins. Raises ExpressionFailed, ExpressionInvalid."""
        return {name: filled(value, EVENT_NAMES, event) for name, value in self.inputs.items()}

    def follows(self, state: RunState) -> bool:
        """Return whether the end of a run of the other pipeline begins a run."""
        return state is RunState.SUCCEEDED or self.depends_on_job_status is WantedEnd.ANY


def check_cron(expression: str) -> None:
    """Refuse expressions that are no cron expression or have no instant. Raises ValueError."""
    try:
        found = list(islice(CronSim(expression, datetime(2026, 1, 1, tzinfo=UTC)), 1))
    except CronSimError as error:
        raise ValueError(f"cron_expression cannot be read: {error}; write five fields such as 0 2 * * 0") from error
    if not found:
        raise ValueError("cron_expression has no instant; correct it")
