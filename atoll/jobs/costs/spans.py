"""The ledger of GPU time: spans in which a GPU was in one state, held by one pod, at one price.

`advance` takes the open span of every GPU, what is seen now, and when the last look was. It returns which spans end and
begin. The spans of one GPU follow each other without gap or overlap from the first look at it to the last, so their
sum is the capacity that existed, to the second.

* A hold begins when its Lease was created, even if it was seen later.
* Between two looks that are far apart, as after a restart, a GPU counts as held only if the same pod held it before
  and after. Any other time is unseen: nobody pays for it.
* A clock that was set back records nothing until it passes the last look.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

WHOLE_PPM: Final = 1_000_000
"""Share of a whole GPU; a MIG instance has the share of the card's memory that it has."""


class TimeUse(StrEnum):
    """What the time of a GPU went into."""

    USED = "used"
    """A running pod holds it, and its processes use it."""
    IDLE = "idle"
    """A running pod holds it, and the agent sees no process of it there."""
    RESERVED = "reserved"
    """Held, and no container runs: the pod starts or ends, its end is not proven, or a GpuReservation holds it."""
    FREE = "free"
    """Nobody holds it."""
    STRANDED = "stranded"
    """Free, and a pod waits that the free GPUs would serve if they were on one machine."""
    UNAVAILABLE = "unavailable"
    """It may not be given out: unhealthy, cordoned, silent, in foreign use, or the rest of a partitioned card."""
    UNSEEN = "unseen"
    """The service did not run, and nothing proves who held it."""


HELD: Final = frozenset({TimeUse.USED, TimeUse.IDLE, TimeUse.RESERVED})


@dataclass(frozen=True, slots=True)
class GpuAccount:
    """Who pays for a held GPU; all empty for a GPU that nobody holds."""

    tenant: str = ""
    project: str = ""
    user: str = ""
    namespace: str = ""
    job_id: str = ""
    pod_uid: str = ""


NOBODY: Final = GpuAccount()


@dataclass(frozen=True, slots=True)
class GpuFact:
    """One GPU as it is seen. `price_micros`: millionths of a dollar per hour of a whole GPU, None without a price.
    `held_since`: creation of its Lease, None where there is none."""

    gpu: str
    node: str
    model: str
    use: TimeUse
    account: GpuAccount = NOBODY
    share_ppm: int = WHOLE_PPM
    price_micros: int | None = None
    held_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span that goes on."""

    fact: GpuFact
    started: datetime

    def until(self, end: datetime) -> "GpuSpan":
        """Return the span as it ends."""
        return GpuSpan(self.fact, self.started, end)


@dataclass(frozen=True, slots=True)
class GpuSpan:
    """A time in which nothing about a GPU changed; `end` is the first second after it."""

    fact: GpuFact
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class SpanChanges:
    """`ended`: open spans and others that are complete. `begun`: new open spans, by GPU."""

    ended: tuple[GpuSpan, ...] = ()
    begun: tuple[OpenSpan, ...] = ()


def whole_seconds(moment: datetime) -> datetime:
    """Return the second in which a moment is: the ledger counts whole seconds."""
    return moment.replace(microsecond=0)


def advance(
    spans: Mapping[str, OpenSpan],
    facts: Mapping[str, GpuFact],
    *,
    seen: datetime | None,
    now: datetime,
    gap_seconds: float,
) -> SpanChanges:
    """Return how the spans change. `seen`: the last look, None if this is the first; `now`: both in whole seconds.
    `gap_seconds`: looks further apart than this prove nothing of the time between them."""
    if seen is not None and now <= seen:
        return SpanChanges()
    ended: list[GpuSpan] = []
    begun: list[OpenSpan] = []
    is_gap = seen is not None and now - seen > timedelta(seconds=gap_seconds)
    for gpu in sorted(spans.keys() | facts.keys()):
        was, fact = spans.get(gpu), facts.get(gpu)
        if was is None:
            assert fact is not None
            begun.append(OpenSpan(fact, now))
            continue
        assert seen is not None
        one = _changed(was, fact, seen, now, is_gap=is_gap)
        ended += one.ended
        begun += one.begun
    return SpanChanges(tuple(span for span in ended if span.start < span.end), tuple(begun))


def _changed(was: OpenSpan, fact: GpuFact | None, seen: datetime, now: datetime, *, is_gap: bool) -> SpanChanges:
    if fact is None:
        return SpanChanges((was.until(seen if is_gap else now),))
    is_same_hold = fact.use in HELD and was.fact.use in HELD and fact.account == was.fact.account
    if is_gap and not is_same_hold:
        start = _hold_start(fact, seen, now)
        unseen = GpuSpan(_unseen(was.fact), seen, start)
        return SpanChanges((was.until(seen), unseen), (OpenSpan(fact, start),))
    if _is_same(was.fact, fact):
        return SpanChanges()
    start = now if is_same_hold else _hold_start(fact, seen, now)
    return SpanChanges((was.until(start),), (OpenSpan(fact, start),))


def _hold_start(fact: GpuFact, seen: datetime, now: datetime) -> datetime:
    """Return when the state began: at the creation of its Lease if that is after the last look, else now."""
    if fact.use not in HELD or fact.held_since is None:
        return now
    return min(max(whole_seconds(fact.held_since), seen), now)


def _is_same(one: GpuFact, other: GpuFact) -> bool:
    return replace(one, held_since=None) == replace(other, held_since=None)


def _unseen(fact: GpuFact) -> GpuFact:
    return replace(fact, use=TimeUse.UNSEEN, account=NOBODY, held_since=None)
