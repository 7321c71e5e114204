"""The two state machines: every step is a row, nothing else is possible, and the ledger follows them."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api import names
from atoll.cluster.errors import IllegalTransition
from atoll.cluster.leases import Holder, lease_name
from atoll.cluster.ledger import Ledger
from atoll.cluster.transitions import (
    AVAILABILITY,
    OCCUPANCY,
    REPEATABLE,
    Availability,
    HealthSignal,
    Occupancy,
    Verb,
    health_signal_of,
    occupancy_of,
    step,
)
from tests.builders import make_allocation, make_lease, make_pod, make_report, uuid_of

PAGE = Path(__file__).parents[2] / "docs" / "ledger.md"
PAIRS = list(itertools.product(Occupancy, Verb))


@pytest.mark.parametrize(("state", "verb"), PAIRS, ids=[f"{state}-{verb}" for state, verb in PAIRS])
def test_every_pair_is_a_row_or_changes_nothing(state: Occupancy, verb: Verb) -> None:
    """News that is late or twice changes nothing; promising what another has is illegal, with its history."""
    if verb is Verb.ASSUME and state is not Occupancy.FREE:
        with pytest.raises(IllegalTransition, match="its history: reserve gpu-n1-0"):
            step("n1/0", state, verb, history=("reserve gpu-n1-0",))
        return
    expected = OCCUPANCY.get((state, verb), state)

    assert step("n1/0", state, verb) == expected
    assert (state, verb) in OCCUPANCY or verb in REPEATABLE


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("state", Occupancy)
def test_verbs_are_idempotent(state: Occupancy, verb: Verb) -> None:
    """To do or to see a thing twice is the same as once."""
    once = step("n1/0", state, verb, is_own=True)

    assert step("n1/0", once, verb, is_own=True) == once


def test_only_release_and_forget_make_a_device_free() -> None:
    """Nothing but the end of the Lease, or of a bind of ours that wrote none, leads to free; nobody skips the proof."""
    into_free = {(state, verb) for (state, verb), after in OCCUPANCY.items() if after is Occupancy.FREE}

    assert {verb for _, verb in into_free} == {Verb.RELEASE, Verb.FORGET}
    assert (Occupancy.BOUND, Verb.RELEASE) not in into_free
    assert {state for state, verb in into_free if verb is Verb.FORGET} == {Occupancy.ASSUMED}


def test_every_state_is_reached_and_left() -> None:
    """From free every state can be reached, and from every state free."""
    reached = {Occupancy.FREE}
    for _ in Occupancy:
        reached |= {after for (state, _), after in OCCUPANCY.items() if state in reached}
    leaving = {Occupancy.FREE}
    for _ in Occupancy:
        leaving |= {state for (state, _), after in OCCUPANCY.items() if after in leaving}

    assert reached == leaving == set(Occupancy)


def test_availability_forgets_the_past() -> None:
    """The newest evidence decides from every state, and every state can hear every news."""
    assert set(AVAILABILITY) == set(itertools.product(Availability, HealthSignal))
    for news in HealthSignal:
        assert len({AVAILABILITY[state, news] for state in Availability}) == 1


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ((False, True, True, True), HealthSignal.SILENCE),
        ((True, True, False, False), HealthSignal.CORDON),
        ((True, False, False, False), HealthSignal.SILENCE),
        ((True, False, True, False), HealthSignal.SICK),
        ((True, False, True, True), HealthSignal.SOUND),
    ],
    ids=["agent silent", "cordoned, sick and not to be read", "not to be read", "sick", "sound"],
)
def test_what_decides_first(facts: tuple[bool, bool, bool, bool], expected: HealthSignal) -> None:
    """What nobody vouches for is unknown, whatever it was said to be before; an administrator's word comes next."""
    is_heard, is_cordoned, is_readable, is_sound = facts

    found = health_signal_of(is_heard=is_heard, is_cordoned=is_cordoned, is_readable=is_readable, is_sound=is_sound)
    assert found is expected


def test_ledger_gives_out_what_the_second_table_calls_healthy() -> None:
    """What may be given out is the table's word, for each device of a report with every state in it."""
    ledger = Ledger()
    ledger.put_report(make_report("n1", "t4-4", sick=(0,), cordoned=(1,)))
    ledger.put_heartbeat("n1", 100.0, 30.0)
    for now in (110.0, 131.0):
        told = [ledger.availability("n1", number, now_seconds=now) for number in range(4)]
        cell = ledger.cells(now_seconds=now).get("n1")
        given = cell.free if cell is not None else 0

        assert [bool(given >> number & 1) for number in range(4)] == [one is Availability.HEALTHY for one in told]


def test_bound_device_can_be_quarantined_cordoned_or_unknown() -> None:
    """The two machines do not know each other: a sick or cordoned GPU stays its pod's."""
    ledger = Ledger()
    ledger.put_report(make_report("n1", "t4-4", sick=(0,), cordoned=(1,)))
    ledger.put_heartbeat("n1", 100.0, 30.0)
    for number in (0, 1, 2):
        ledger.put_pod(make_pod(f"p{number}", node="n1", allocation=make_allocation("n1", number)))
    states = [ledger.availability("n1", number, now_seconds=110.0) for number in range(5)]

    assert states == ["quarantined", "cordoned", "healthy", "healthy", "unknown"]
    assert [ledger.occupancy("n1", number, uuid_of("n1", number)) for number in range(4)] == ["bound"] * 3 + ["free"]
    assert ledger.availability("n1", 2, now_seconds=131.0) is Availability.UNKNOWN
    assert ledger.availability("n2", 0, now_seconds=110.0) is Availability.UNKNOWN


# The ledger derives states from evidence; the table says what may follow. Both must agree on every history.

moves = st.sampled_from([Verb.ASSUME, Verb.FORGET, Verb.RESERVE, Verb.CONFIRM, Verb.END, Verb.DOUBT, Verb.RELEASE])


def play(ledger: Ledger, verb: Verb) -> None:
    """Let one thing happen to device 0, for the one pod of these histories."""
    name = lease_name("n1", 0)
    holder = Holder("team", "p", "u1")
    match verb:
        case Verb.ASSUME:
            ledger.assume("u1", make_allocation("n1", 0), attempt="token")
        case Verb.FORGET:
            ledger.forget("u1", attempt="token")
        case Verb.RESERVE:
            ledger.put_lease(make_lease("n1", 0, holder=holder))
        case Verb.DOUBT:
            ledger.put_lease(make_lease("n1", 0, holder=holder, annotations={names.LEASE_IN_DOUBT: "why"}))
        case Verb.CONFIRM:
            ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 0)))
        case Verb.END:
            ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 0), phase="Failed"))
        case Verb.RELEASE:
            ledger.drop_lease(name)


def makes_sense(ledger: Ledger, verb: Verb) -> bool:
    """Tell whether the world can do this now: a Lease is marked, ends or guards a pod only while it exists."""
    is_leased = lease_name("n1", 0) in ledger.leases
    is_bound = ledger.allocation_of("u1") is not None
    if verb is Verb.ASSUME:
        return not is_bound and not ledger.has_left("u1")
    if verb is Verb.RESERVE:
        return not is_leased
    if verb is Verb.RELEASE:
        return is_leased and not is_bound and ledger.assumed("u1") is None
    return is_leased if verb in {Verb.DOUBT, Verb.CONFIRM, Verb.END} else True


def is_marked(ledger: Ledger) -> bool:
    """Tell whether the Lease bears the mark of doubt: set before or while a pod was bound, it counts when it ended."""
    record = ledger.leases.get(lease_name("n1", 0))
    return record is not None and bool(record.doubt)


@given(st.lists(moves, max_size=25))
def test_ledger_keeps_to_the_table(history: list[Verb]) -> None:
    """The state that the evidence amounts to is the one that the table leads to, step by step."""
    ledger = Ledger()
    ledger.put_report(make_report("n1", "t4-4"))
    for verb in history:
        if not makes_sense(ledger, verb):
            continue
        before = ledger.occupancy("n1", 0, uuid_of("n1", 0))
        play(ledger, verb)
        after = ledger.occupancy("n1", 0, uuid_of("n1", 0))

        expected = step("n1/0", before, verb, is_own=True)
        if expected is Occupancy.RELEASING and is_marked(ledger):
            expected = step("n1/0", expected, Verb.DOUBT)
        assert after == expected, (before, verb)
        assert (after is Occupancy.FREE) == bool(ledger.free("n1", now_seconds=0.0) & 1)


def test_evidence_outranks_in_order() -> None:
    """A bound pod outranks its Lease, a mark outranks what was seen of the holder, any Lease outranks an assumption."""
    for assumed, leased, bound, left, doubted in itertools.product((False, True), repeat=5):
        state = occupancy_of(assumed=assumed, leased=leased, bound=bound, holder_left=left, doubted=doubted)
        assert (state is Occupancy.BOUND) == bound
        assert (state is Occupancy.FREE) == (not assumed and not leased and not bound)
        if leased and not bound:
            assert state in {Occupancy.RESERVED, Occupancy.RELEASING, Occupancy.IN_DOUBT}


def test_page_shows_the_tables() -> None:
    """Every cell of the page's tables is a row that leads to another state, and no row is missing."""
    drawn: set[tuple[str, str, str]] = set()
    verbs: list[str] = []
    for line in PAGE.read_text().splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else [line]
        if not first and cells:
            verbs = cells
        elif verbs and len(cells) == len(verbs):
            drawn |= {(first, after, verb) for verb, after in zip(verbs, cells, strict=True) if after.strip("-")}
        elif not cells:
            verbs = []
    rows = {
        (str(state), str(after), str(verb))
        for table in (OCCUPANCY, AVAILABILITY)
        for (state, verb), after in table.items()  # type: ignore[attr-defined]
        if str(state) != str(after)
    }

    assert drawn == rows
