"""Conditions of a gang: set one, read one. The time of a condition is when its status changed last, never its reason.

Functions return new tuples; nothing is changed in place.
"""

from atoll.api.base import Condition
from atoll.api.times import seconds_of, text_of

MESSAGE_LENGTH_MAX = 1024


def find(conditions: tuple[Condition, ...], kind: str) -> Condition | None:
    """Return the condition of that type."""
    return next((condition for condition in conditions if condition.type == kind), None)


def is_true(conditions: tuple[Condition, ...], kind: str) -> bool:
    """Tell whether the condition is there and True."""
    condition = find(conditions, kind)
    return condition is not None and condition.status == "True"


def since_seconds(conditions: tuple[Condition, ...], kind: str) -> float | None:
    """Return when the condition's status changed last, in seconds since 1970; None where that cannot be told."""
    condition = find(conditions, kind)
    return None if condition is None else seconds_of(condition.last_transition_time)


def put(
    conditions: tuple[Condition, ...], kind: str, *, is_met: bool, reason: str, message: str, now_seconds: float
) -> tuple[Condition, ...]:
    """Return the conditions with one of them set, in the order of their types. A time in the future (another clock
    wrote it) becomes now, so that no time-out lasts longer than it should by the clock of whoever leads."""
    old, status = find(conditions, kind), "True" if is_met else "False"
    since = since_seconds(conditions, kind)
    is_kept = old is not None and old.status == status and (since is None or since <= now_seconds)
    time = old.last_transition_time if old is not None and is_kept else text_of(now_seconds)
    new = Condition(
        type=kind, status=status, reason=reason, message=message[:MESSAGE_LENGTH_MAX], last_transition_time=time
    )
    others = [condition for condition in conditions if condition.type != kind]
    return tuple(sorted((*others, new), key=lambda condition: condition.type))


def drop(conditions: tuple[Condition, ...], kind: str) -> tuple[Condition, ...]:
    """Return the conditions without one of them."""
    return tuple(condition for condition in conditions if condition.type != kind)
