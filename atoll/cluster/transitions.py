"""The two state machines of a device, as tables: who has it (occupancy), may it be given out (availability).

`step` returns the next state, or raises IllegalTransition with the device's history. All rules of what may follow what
are in this module; `docs/ledger.md` shows the same tables as pictures, and a test compares them. The ledger derives a
device's state from its holds (`occupancy_of`) and stores none, so that news in any order lead to the same state.

    free ──assume──► assumed ──reserve──► reserved ──bind──► bound ──end──► releasing ──release──► free
      ▲                 │                    │                ▲  │             │  ▲
      └────forget───────┘   ◄────release─────┘                │  └─lose Lease──┘  │ (bind: kubelet took a phase back)
                                                              │                doubt ──► in doubt ──release──► free
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from atoll.cluster.errors import IllegalTransition


class Occupancy(StrEnum):
    """Who has the device."""

    FREE = "free"
    ASSUMED = "assumed"
    RESERVED = "reserved"
    BOUND = "bound"
    RELEASING = "releasing"
    IN_DOUBT = "in doubt"


class Verb(StrEnum):
    """What happens to a device: our own acts (assume, forget), and what the API server shows."""

    ASSUME = "assume"
    """A bind of ours chose the device, before its first request."""
    RESERVE = "reserve"
    """Its Lease was seen, new or changed."""
    CONFIRM = "confirm"
    """A bound pod names it."""
    FORGET = "forget"
    """The bind that assumed it has ended."""
    END = "end"
    """The pod that names it, or holds its Lease, ended or is gone."""
    DOUBT = "doubt"
    """The controllers marked its Lease: nothing proves yet that the containers are gone."""
    RELEASE = "release"
    """Its Lease was deleted."""


_O, _V = Occupancy, Verb

OCCUPANCY: Final[Mapping[tuple[Occupancy, Verb], Occupancy]] = {
    (_O.FREE, _V.ASSUME): _O.ASSUMED,
    (_O.FREE, _V.RESERVE): _O.RESERVED,
    (_O.FREE, _V.CONFIRM): _O.BOUND,
    (_O.ASSUMED, _V.ASSUME): _O.ASSUMED,
    (_O.ASSUMED, _V.RESERVE): _O.RESERVED,
    (_O.ASSUMED, _V.CONFIRM): _O.BOUND,
    (_O.ASSUMED, _V.FORGET): _O.FREE,
    (_O.RESERVED, _V.ASSUME): _O.RESERVED,
    (_O.RESERVED, _V.RESERVE): _O.RESERVED,
    (_O.RESERVED, _V.CONFIRM): _O.BOUND,
    (_O.RESERVED, _V.FORGET): _O.RESERVED,
    (_O.RESERVED, _V.END): _O.RELEASING,
    (_O.RESERVED, _V.DOUBT): _O.IN_DOUBT,
    (_O.RESERVED, _V.RELEASE): _O.FREE,
    (_O.BOUND, _V.RESERVE): _O.BOUND,
    (_O.BOUND, _V.CONFIRM): _O.BOUND,
    (_O.BOUND, _V.FORGET): _O.BOUND,
    (_O.BOUND, _V.DOUBT): _O.BOUND,
    (_O.BOUND, _V.RELEASE): _O.BOUND,
    (_O.BOUND, _V.END): _O.RELEASING,
    (_O.RELEASING, _V.RESERVE): _O.RELEASING,
    (_O.RELEASING, _V.CONFIRM): _O.BOUND,
    (_O.RELEASING, _V.FORGET): _O.RELEASING,
    (_O.RELEASING, _V.END): _O.RELEASING,
    (_O.RELEASING, _V.DOUBT): _O.IN_DOUBT,
    (_O.RELEASING, _V.RELEASE): _O.FREE,
    (_O.IN_DOUBT, _V.RESERVE): _O.IN_DOUBT,
    (_O.IN_DOUBT, _V.CONFIRM): _O.BOUND,
    (_O.IN_DOUBT, _V.FORGET): _O.IN_DOUBT,
    (_O.IN_DOUBT, _V.END): _O.IN_DOUBT,
    (_O.IN_DOUBT, _V.DOUBT): _O.IN_DOUBT,
    (_O.IN_DOUBT, _V.RELEASE): _O.FREE,
}
"""What follows on what. A pair that is missing is illegal for `assume`, a repetition without effect for what is seen:
news come late, twice and in any order. A bound device that loses its Lease stays bound: the annotation outranks it."""

REPEATABLE: Final = frozenset(Verb) - {Verb.ASSUME}
"""Verbs that change nothing where the table has no row for them: each of them is idempotent."""


def step(
    device: str, state: Occupancy, verb: Verb, *, is_own: bool = False, history: tuple[str, ...] = ()
) -> Occupancy:
    """Return the state after `verb`. `is_own`: whoever assumes the device is the one who holds it already.

    Raises IllegalTransition, with nothing changed, when somebody assumes a device that another one has.
    """
    following = OCCUPANCY.get((state, verb))
    if verb is Verb.ASSUME and state is not Occupancy.FREE and not is_own:
        following = None
    if following is None and (verb in REPEATABLE or is_own):
        return state
    if following is None:
        raise IllegalTransition(device, str(state), str(verb), history)
    return following


def occupancy_of(*, assumed: bool, leased: bool, bound: bool, holder_left: bool, doubted: bool) -> Occupancy:
    """Return the state that the evidence of a device amounts to.

    `bound`: a bound pod that has not ended names it. `leased`: its Lease exists; `holder_left` and `doubted` say of its
    holder that it was seen to end, and of the Lease that it bears the mark.
    """
    if bound:
        return Occupancy.BOUND
    if leased:
        if doubted:
            return Occupancy.IN_DOUBT
        return Occupancy.RELEASING if holder_left else Occupancy.RESERVED
    return Occupancy.ASSUMED if assumed else Occupancy.FREE


class Availability(StrEnum):
    """Whether a device may be given to a pod that has none yet. A bound one keeps its pod in every state."""

    HEALTHY = "healthy"
    QUARANTINED = "quarantined"
    CORDONED = "cordoned"
    UNKNOWN = "unknown"


class HealthSignal(StrEnum):
    """What was learnt of a device last."""

    SOUND = "reported sound"
    SICK = "reported sick"
    CORDON = "cordoned"
    SILENCE = "not reported"
    """Its card is not in the report, cannot be read, or the agent was silent for too long."""


_A, _N = Availability, HealthSignal

AVAILABILITY: Final[Mapping[tuple[Availability, HealthSignal], Availability]] = {
    (_A.HEALTHY, _N.SOUND): _A.HEALTHY,
    (_A.HEALTHY, _N.SICK): _A.QUARANTINED,
    (_A.HEALTHY, _N.CORDON): _A.CORDONED,
    (_A.HEALTHY, _N.SILENCE): _A.UNKNOWN,
    (_A.QUARANTINED, _N.SOUND): _A.HEALTHY,
    (_A.QUARANTINED, _N.SICK): _A.QUARANTINED,
    (_A.QUARANTINED, _N.CORDON): _A.CORDONED,
    (_A.QUARANTINED, _N.SILENCE): _A.UNKNOWN,
    (_A.CORDONED, _N.SOUND): _A.HEALTHY,
    (_A.CORDONED, _N.SICK): _A.QUARANTINED,
    (_A.CORDONED, _N.CORDON): _A.CORDONED,
    (_A.CORDONED, _N.SILENCE): _A.UNKNOWN,
    (_A.UNKNOWN, _N.SOUND): _A.HEALTHY,
    (_A.UNKNOWN, _N.SICK): _A.QUARANTINED,
    (_A.UNKNOWN, _N.CORDON): _A.CORDONED,
    (_A.UNKNOWN, _N.SILENCE): _A.UNKNOWN,
}
"""The newest report decides, from every state: what was sick and is reported sound may be given out again. How long a
sickness lasts is the agent's to say, because only it sees the errors."""


def health_signal_of(*, is_heard: bool, is_cordoned: bool, is_readable: bool, is_sound: bool) -> HealthSignal:
    """Return what the evidence of a device amounts to: the first that applies, as an administrator asks for it.

    `is_heard`: it is in a report whose agent's heartbeat is younger than its bound, by our own clock and from when we
    received it; an older one says nothing. An administrator's cordon outranks what is wrong with the card, and a card
    that cannot be read is not judged.
    """
    if not is_heard:
        return HealthSignal.SILENCE
    if is_cordoned:
        return HealthSignal.CORDON
    if not is_readable:
        return HealthSignal.SILENCE
    return HealthSignal.SOUND if is_sound else HealthSignal.SICK


def availability_of(news: HealthSignal) -> Availability:
    """Return the state after this news, which is the same from every state."""
    return AVAILABILITY[Availability.UNKNOWN, news]
