"""A threshold fires once for each crossing, and not again before the number has come back far enough."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.pipelines.expressions import ExpressionFailed
from atoll.pipelines.thresholds import Threshold
from atoll.pipelines.triggers import PipelineTrigger

NUMBERS = st.lists(st.integers(0, 6), max_size=30)


def crossings(threshold: Threshold, numbers: list[int]) -> list[int]:
    """Return at which numbers it fires."""
    is_armed, found = True, []
    for at, number in enumerate(numbers):
        fires, is_armed = threshold.judged(number, is_armed=is_armed)
        found += [at] * fires
    return found


@given(NUMBERS, st.integers(2, 4), st.integers(0, 2))
def test_between_two_crossings_the_number_was_back(numbers: list[int], limit: int, back: int) -> None:
    """Against the definition: a number beyond the limit fires, if since the last one that fired one was back."""
    wanted: list[int] = []
    for at, number in enumerate(numbers):
        since = numbers[wanted[-1] + 1 : at] if wanted else None
        if number > limit and (since is None or any(one <= limit - back for one in since)):
            wanted.append(at)
    rearm = {"rearm": float(limit - back)} if back else {}

    assert (
        crossings(Threshold.model_validate({"metric": "queued_jobs", "above": float(limit), **rearm}), numbers)
        == wanted
    )
    mirrored = {"rearm": float(back - limit)} if back else {}
    below = Threshold.model_validate({"metric": "queued_jobs", "below": float(-limit), **mirrored})
    assert crossings(below, [-number for number in numbers]) == wanted


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"above": 1}, "metric or value"),
        ({"metric": "queued_jobs", "value": "event.data", "above": 1}, "metric or value"),
        ({"metric": "queued_jobs"}, "above or below"),
        ({"metric": "queued_jobs", "above": 1, "below": 1}, "above or below"),
        ({"metric": "queued_jobs", "above": 1, "rearm": 2}, "beyond the limit"),
        ({"metric": "queued_jobs", "below": 2, "rearm": 1}, "beyond the limit"),
        ({"metric": "queued_jobs", "above": float("nan")}, "finite"),
        ({"value": "event.dota", "above": 1}, "cannot be used"),
        ({"value": "event.id", "above": 1}, "must give a number"),
    ],
)
def test_a_threshold_that_makes_no_sense_is_refused(fields: dict[str, Any], told: str) -> None:
    """With what is wrong."""
    with pytest.raises(ValidationError, match=told):
        Threshold.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"trigger_type": "threshold"}, "threshold belongs to"),
        ({"trigger_type": "cron", "cron_expression": "* * * * *", "event_topic": "a"}, "event_topic belongs to"),
        ({"trigger_type": "threshold", "threshold": {"value": "event.data", "above": 1}}, "event_topic belongs to"),
        (
            {"trigger_type": "threshold", "threshold": {"metric": "queued_jobs", "above": 1}, "event_topic": "a"},
            "event_topic belongs to",
        ),
    ],
)
def test_a_threshold_has_a_topic_if_its_number_is_an_events(fields: dict[str, Any], told: str) -> None:
    """And none if it is the service's."""
    with pytest.raises(ValidationError, match=told):
        PipelineTrigger.model_validate(fields)


def test_a_number_that_is_none_is_told() -> None:
    """Texts and truth values are no numbers."""
    threshold = Threshold.model_validate({"value": "event.data.load", "above": 1})
    event = {f"event.{name}": "" for name in ("id", "source", "type", "subject")}

    assert threshold.number_of(event | {"event.data": {"load": 2.5}}) == 2.5
    for load in ("3", True, None, {}):
        with pytest.raises(ExpressionFailed, match="no number"):
            threshold.number_of(event | {"event.data": {"load": load}})
