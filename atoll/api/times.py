"""Times in Kubernetes' format, RFC 3339 in UTC. Only this module parses and prints them; it reads no clock.

The API server refuses a Lease whose time has not exactly six digits, and Python's isoformat() prints none when the
microseconds happen to be zero. Conditions and creation timestamps have whole seconds.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta, timezone

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PATTERN = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:[Zz]|([+-])(\d\d):(\d\d))", re.ASCII
)


def format_microtime(moment: datetime) -> str:
    """Print an aware datetime as `2026-01-31T12:00:00.000000Z`; ValueError for a naive one."""
    if moment.tzinfo is None:
        raise ValueError(f"time without a time zone: {moment!r}; pass an aware datetime")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").rjust(27, "0")


def parse_microtime(text: str) -> datetime:
    """Read any RFC 3339 time (0 to 9 fraction digits, any offset) as UTC; ValueError if it is not one."""
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise ValueError(f"not an RFC 3339 time: {text[:64]!r}")
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    microsecond = int((found[7] or "").ljust(6, "0")[:6])
    offset = timedelta(hours=int(found[9] or 0), minutes=int(found[10] or 0))
    zone = timezone(-offset if found[8] == "-" else offset)
    return datetime(year, month, day, hour, minute, second, microsecond, tzinfo=zone).astimezone(UTC)


def seconds_of(text: str) -> float | None:
    """Return the seconds since 1970 of an RFC 3339 time such as 2026-01-31T12:00:00Z; None for other text."""
    try:
        return parse_microtime(text).timestamp()
    except (ValueError, OverflowError):
        return None


def text_of(seconds: float) -> str:
    """Return the time of whole seconds since 1970, rounded down, as in conditions. OverflowError after 9999."""
    return (_EPOCH + timedelta(seconds=math.floor(seconds))).strftime("%Y-%m-%dT%H:%M:%SZ").rjust(20, "0")
