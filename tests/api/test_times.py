"""MicroTime: always six digits, and every spelling is parsed."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api.times import format_microtime, parse_microtime

NOON = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        pytest.param(NOON, "2026-01-31T12:00:00.000000Z", id="zero microseconds, which Python would leave out"),
        pytest.param(NOON.replace(microsecond=1), "2026-01-31T12:00:00.000001Z", id="one microsecond"),
        pytest.param(NOON.replace(microsecond=120000), "2026-01-31T12:00:00.120000Z", id="trailing zeros"),
        pytest.param(
            NOON.replace(tzinfo=timezone(timedelta(hours=2))), "2026-01-31T10:00:00.000000Z", id="another zone"
        ),
        pytest.param(datetime(7, 1, 1, tzinfo=UTC), "0007-01-01T00:00:00.000000Z", id="a year of one digit"),
    ],
)
def test_six_digits_always(moment: datetime, expected: str) -> None:
    """The API server refuses a time with more or fewer."""
    assert format_microtime(moment) == expected


def test_naive_time_is_refused() -> None:
    """A time without a zone would be written hours off, so it is an error."""
    with pytest.raises(ValueError, match="time zone"):
        format_microtime(NOON.replace(tzinfo=None))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T12:00:00Z", NOON),
        ("2026-01-31T12:00:00.000000Z", NOON),
        ("2026-01-31T14:00:00+02:00", NOON),
        ("2026-01-31T06:30:00.5-05:30", NOON.replace(microsecond=500000)),
        ("2026-01-31T12:00:00.123456789Z", NOON.replace(microsecond=123456)),
    ],
)
def test_every_spelling_is_read(text: str, expected: datetime) -> None:
    """Other writers print none, three or nine digits, or an offset."""
    assert parse_microtime(text) == expected


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2026-01-31", "2026-13-31T12:00:00Z", "2026-01-31T12:00:00", "²026-01-31T12:00:00Z"]
)
def test_nonsense_is_a_value_error(text: str) -> None:
    """Anything else is refused, never guessed."""
    with pytest.raises(ValueError, match=r"."):
        parse_microtime(text)


@given(st.datetimes(timezones=st.just(UTC)))
def test_round_trip(moment: datetime) -> None:
    """What is written is read back exactly."""
    assert parse_microtime(format_microtime(moment)) == moment
