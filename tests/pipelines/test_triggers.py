"""When triggers begin runs: cron against a calendar walked minute by minute, windows, events."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import takewhile
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.pipelines.triggers import PipelineTrigger, TimeWindow

ZONES = ("Europe/Berlin", "America/New_York", "Pacific/Auckland", "Africa/Cairo", "America/Santiago")
YEARS = range(2021, 2031)
MINUTE = timedelta(minutes=1)
FIXED = ("30 2 * * *", "0 0 * * *", "15,45 1-3 * * *", "59 23 * * *")
WILD = ("30 * * * *", "*/20 2 * * *", "0 */6 * * *")


def cron(expression: str, zone: str = "UTC", **fields: Any) -> PipelineTrigger:
    """Return a cron trigger."""
    return PipelineTrigger.model_validate(
        {"trigger_type": "cron", "cron_expression": expression, "timezone": zone} | fields
    )


def changes(zone: ZoneInfo) -> Iterator[datetime]:
    """Yield the minutes, in UTC, at which the clock of a zone is changed."""
    moment, end = datetime(YEARS[0], 1, 1, tzinfo=UTC), datetime(YEARS[-1] + 1, 1, 1, tzinfo=UTC)
    while moment < end:
        later = moment + timedelta(hours=12)
        if moment.astimezone(zone).utcoffset() != later.astimezone(zone).utcoffset():
            low, high = moment, later
            while high - low > MINUTE:
                middle = low + ((high - low) // 2 // MINUTE) * MINUTE
                same = middle.astimezone(zone).utcoffset() == moment.astimezone(zone).utcoffset()
                low, high = (middle, high) if same else (low, middle)
            yield high
        moment = later


def field_values(field: str, count: int) -> set[int]:
    """Return the values of one field of a cron expression."""
    found: set[int] = set()
    for part in field.split(","):
        span, _, every = part.partition("/")
        first, _, last = ("0", "", str(count - 1)) if span == "*" else span.partition("-")
        found |= set(range(int(first), int(last or first) + 1, int(every or 1)))
    return found


def walked(expression: str, zone: ZoneInfo, begin: datetime, end: datetime) -> list[datetime]:
    """Return the instants after `begin` and until `end`, minute by minute. Jobs at fixed times run once a day, in the
    minute after the clock was put forward over them; the others follow the clock on the wall."""
    minutes, hours = (field_values(one, count) for one, count in zip(expression.split()[:2], (60, 24), strict=True))
    is_fixed = not any(one.startswith("*") for one in expression.split()[:2])
    found: list[datetime] = []
    done: set[tuple[date, int, int]] = set()
    moment = begin + MINUTE
    before = begin.astimezone(zone)
    while moment <= end:
        now = moment.astimezone(zone)
        jumped = now.replace(tzinfo=None) - before.replace(tzinfo=None)
        walls = (
            [now.replace(tzinfo=None) - MINUTE * back for back in range(int(jumped / MINUTE))] if is_fixed else [now]
        )
        matching = [one for one in walls if one.minute in minutes and one.hour in hours]
        fresh = [one for one in matching if (one.date(), one.hour, one.minute) not in done]
        if fresh if is_fixed else matching:
            found.append(moment)
        done |= {(one.date(), one.hour, one.minute) for one in matching}
        before, moment = now, moment + MINUTE
    return found


@pytest.mark.parametrize("name", ZONES)
def test_cron_follows_every_change_of_the_clock(name: str) -> None:
    """Ten years of five zones: a day before each change until a day after it."""
    zone = ZoneInfo(name)
    moments = list(changes(zone))
    assert len(moments) >= len(YEARS)
    for number, moment in enumerate(moments):
        expressions = (*FIXED, *WILD)
        for expression in (expressions[number % len(expressions)], expressions[(number + 3) % len(expressions)]):
            begin, end = moment - timedelta(hours=24), moment + timedelta(hours=24)
            trigger = cron(expression, name, missed="all")

            assert list(trigger.due(begin, end)) == walked(expression, zone, begin, end), (expression, moment)


@given(st.integers(0, 60 * 24 * 14), st.integers(0, 60 * 24), st.sampled_from([*FIXED, *WILD]))
def test_however_often_it_is_asked_no_instant_is_lost_or_told_twice(begin: int, span: int, expression: str) -> None:
    """Two looks give together what one look gives."""
    trigger = cron(expression, "Europe/Berlin", missed="all")
    start = datetime(2026, 3, 22, tzinfo=UTC) + begin * MINUTE
    middle, end = start + span * MINUTE // 2, start + span * MINUTE

    assert trigger.due(start, middle) + trigger.due(middle, end) == trigger.due(start, end)


@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("once", 1), ("all", 8)])
def test_missed_instants_follow_the_policy(missed: str, count: int) -> None:
    """The service was away from 00:00 until 08:30; runs were due every hour."""
    begin = datetime(2026, 1, 31, tzinfo=UTC)

    assert len(cron("0 * * * *", missed=missed).due(begin, begin + timedelta(hours=8, minutes=30))) == count


@pytest.mark.parametrize("expression", ["* * * * *", "*/20 2 * * *", "30 2 * * *", "0 0 * * 7"])
def test_the_newest_missed_instants_are_found_however_long_the_service_was_away(expression: str) -> None:
    """As one walk over all of them finds them, in Berlin over a change of the clock."""
    begin = datetime(2026, 3, 1, tzinfo=UTC)
    end = begin + timedelta(days=40, hours=3)
    local = CronSim(expression, begin.astimezone(ZoneInfo("Europe/Berlin")))
    every = [one.astimezone(UTC) for one in takewhile(lambda one: one <= end, local)]

    in_time = [one for one in every[-1:] if end - one <= MINUTE]
    for missed, wanted in (("all", every[-100:]), ("once", every[-1:]), ("skip", in_time)):
        assert list(cron(expression, "Europe/Berlin", missed=missed).due(begin, end)) == wanted, missed


def test_years_of_missed_instants_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database would be held meanwhile."""
    walked_over: list[datetime] = []

    def counted(expression: str, begin: datetime) -> Iterator[datetime]:
        for one in CronSim(expression, begin):
            walked_over.append(one)
            yield one

    trigger = cron("* * * * *", missed="all")
    monkeypatch.setattr("atoll.pipelines.triggers.CronSim", counted)
    end = datetime(2026, 1, 31, tzinfo=UTC)
    found = trigger.due(end - timedelta(days=2000), end)

    assert found == tuple(end - MINUTE * back for back in reversed(range(100)))
    assert len(walked_over) < 1000


def test_an_instant_of_this_minute_is_not_missed() -> None:
    """A leader that looks some seconds late still begins the run."""
    begin = datetime(2026, 1, 31, tzinfo=UTC)

    assert len(cron("0 * * * *").due(begin, begin + timedelta(hours=1, seconds=20))) == 1


@pytest.mark.parametrize(
    ("moment", "holds"),
    [
        ("2026-02-06T22:00", True),  # a Friday
        ("2026-02-07T05:59", True),  # its window goes on into Saturday
        ("2026-02-07T06:00", False),
        ("2026-02-07T22:30", False),  # Saturday has none of its own
        ("2026-02-06T05:00", False),  # Thursday has none that could go on
    ],
)
def test_windows_pass_midnight(moment: str, holds: bool) -> None:
    """A window belongs to the day on which it starts."""
    window = TimeWindow.model_validate({"start": "22:00", "end": "06:00", "days": ["fri"]})

    assert window.holds(datetime.fromisoformat(moment)) is holds


EVENT = {
    "event.id": "1",
    "event.source": "/models",
    "event.type": "model.pushed",
    "event.subject": "",
    "event.data": {"name": "llama", "version": 3},
}


@pytest.mark.parametrize(
    ("fields", "takes"),
    [
        ({}, True),
        ({"event_filter": "event.data.version > 2"}, True),
        ({"event_filter": "event.data.version > 3"}, False),
        ({"event_filter": "event.data.missing == 1"}, False),
        ({"event_topic": "other"}, False),
    ],
)
def test_an_event_begins_a_run_if_topic_and_filter_hold(fields: dict[str, Any], takes: bool) -> None:
    """A filter without a value does not hold."""
    trigger = PipelineTrigger.model_validate(
        {"trigger_type": "event", "event_topic": "model.pushed", "inputs": {"model": "${event.data.name}"}} | fields
    )

    assert trigger.takes(EVENT) is takes
    assert trigger.inputs_of(EVENT) == {"model": "llama"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"trigger_type": "cron"}, "cron_expression belongs to triggers of type cron"),
        ({"trigger_type": "cron", "cron_expression": "61 * * * *"}, "cron_expression cannot be read"),
        ({"trigger_type": "cron", "cron_expression": "0 0 30 2 *"}, "cron_expression"),
        ({"trigger_type": "cron", "cron_expression": "0 0 * * *", "timezone": "Mars/Base"}, "is no time zone"),
        ({"trigger_type": "cron", "cron_expression": "0 0 * * *", "timezone": "../../etc/passwd"}, "is no time zone"),
        ({"trigger_type": "webhook", "event_topic": "x"}, "event_topic belongs to events"),
        ({"trigger_type": "event", "event_topic": "x", "event_filter": "1 + 1"}, "must give a boolean"),
        ({"trigger_type": "event", "event_topic": "x", "event_filter": "steps.a.x"}, "undeclared reference"),
    ],
)
def test_triggers_that_cannot_fire_are_refused(fields: dict[str, Any], told: str) -> None:
    """When they are created, with the reason."""
    with pytest.raises(ValidationError, match=told):
        PipelineTrigger.model_validate(fields)
