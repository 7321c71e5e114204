"""Incidents: the record of a device's faults."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.incidents import QUIET_SECONDS, fold, quiet_seconds
from agent.readings import DeviceFault
from atoll.api.node_status import INCIDENTS_MAX, Incident, IncidentKind

NOTHING: frozenset[IncidentKind] = frozenset()
STANDING = [kind for kind in IncidentKind if kind is not IncidentKind.XID]


def at(second: int) -> str:
    return f"2026-01-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}.000000Z"


def xid(code: int = 79, count: int = 1) -> DeviceFault:
    return DeviceFault(IncidentKind.XID, code, count, f"XID {code}", stands=False)


def play(
    *looks: tuple[int, list[DeviceFault]], boot_id: str = "b1", last: tuple[Incident, ...] = ()
) -> tuple[Incident, ...]:
    for second, signs in looks:
        last = fold(last, signs, unread=NOTHING, now=at(second), boot_id=boot_id)
    return last


def test_an_xid_stays_open_until_the_machine_boots() -> None:
    """No look without it ends an XID; another boot does."""
    last = play((0, [xid()]), (60, []), (86_399, []))
    assert [one.ended_time for one in last] == [""]

    (ended,) = play((86_000, []), boot_id="b2", last=last)
    assert (ended.ended_by, ended.first_time) == ("reboot", at(0))


def test_an_xid_that_comes_again_counts_once_a_minute() -> None:
    """A program that makes an error per second writes at most a report per minute."""
    looks = [(second, [xid(31)]) for second in range(0, 300, 10)]
    last: tuple[Incident, ...] = ()
    changes = 0
    for second, signs in looks:
        now = play((second, signs), last=last)
        changes += now != last
        last = now

    assert changes == 5
    assert last[0].count == 5


def test_what_stands_is_over_when_it_was_quiet_long_enough() -> None:
    """A sign that is gone is over after a minute without it, not at once."""
    lost = DeviceFault(IncidentKind.LOST, message="GPU is lost")
    (quiet,) = last = play((0, [lost]), (30, []))
    assert (quiet.quiet_since, quiet.ended_time) == (at(30), "")
    (quiet,) = last = play((60, []), last=last)
    assert quiet.ended_time == ""
    (over,) = play((30 + int(QUIET_SECONDS), []), last=last)
    assert over.ended_by == "recovered"


def test_each_return_makes_the_quiet_longer() -> None:
    """A minute, two, four, and never more than an hour and a bit."""
    assert [quiet_seconds(count) for count in (1, 2, 3, 4)] == [60, 120, 240, 480]
    assert quiet_seconds(1000) == quiet_seconds(7) == 3840


def test_a_reset_is_known_by_what_it_clears() -> None:
    """ECC counters that are back at zero mean a reset: it ends the XIDs, and not a card that is lost again."""
    ecc = DeviceFault(IncidentKind.ECC, count=4, message="errors")
    last = play((0, [xid(48), ecc]), (30, []))

    assert {(one.kind, one.ended_by) for one in last} == {(IncidentKind.XID, "reset"), (IncidentKind.ECC, "reset")}


def test_what_could_not_be_read_is_as_it_was() -> None:
    """Counters that do not answer are no proof of a reset, over any time."""
    ecc = DeviceFault(IncidentKind.ECC, count=4, message="errors")
    last = play((0, [xid(48), ecc]))
    later = fold(last, [], unread=frozenset({IncidentKind.ECC}), now=at(7200), boot_id="b1")

    assert later == last


def test_an_incident_of_an_earlier_boot_that_holds_again_stays_open() -> None:
    """A remap that failed is still failed after the reboot."""
    failed = DeviceFault(IncidentKind.ROW_REMAP, 1, message="failed")
    (one,) = play((100, [failed]), boot_id="b2", last=play((0, [failed])))

    assert (one.ended_time, one.boot_id, one.first_time) == ("", "b2", at(0))


def test_what_is_told_now_outlives_a_record_full_of_later_xids() -> None:
    """A card that is lost all the time stays on record, however many open XIDs came after it."""
    lost = DeviceFault(IncidentKind.LOST, message="GPU is lost")
    last: tuple[Incident, ...] = ()
    for second in range(40):
        last = play((second, [lost, xid(second)]), last=last)

    assert len(last) == INCIDENTS_MAX
    assert [one.ended_time for one in last if one.kind is IncidentKind.LOST] == [""]
    assert {one.code for one in last if one.kind is IncidentKind.XID} == set(range(9, 40))


signs = st.lists(
    st.one_of(
        st.builds(DeviceFault, kind=st.sampled_from(STANDING), code=st.integers(0, 3), count=st.integers(1, 1 << 20)),
        st.builds(xid, st.integers(0, 200), st.integers(1, 9)),
    ),
    max_size=60,
    unique_by=lambda sign: (sign.kind, sign.code),
)


@given(looks=st.lists(st.tuples(signs, st.sets(st.sampled_from(STANDING)), st.sampled_from(["b1", "b2"])), max_size=12))
def test_whatever_happens_the_record_is_bounded_and_true(
    looks: list[tuple[list[DeviceFault], set[IncidentKind], str]],
) -> None:
    """Over any history: at most so many entries, one per kind and code, what is told now is open, and telling the same
    once more changes nothing."""
    last: tuple[Incident, ...] = ()
    for number, (told, unread, boot_id) in enumerate(looks):
        now = at(number * 30)
        last = fold(last, told, unread=frozenset(unread), now=now, boot_id=boot_id)

        assert len(last) <= INCIDENTS_MAX
        assert len({(one.kind, one.code) for one in last}) == len(last)
        is_open = {(one.kind, one.code) for one in last if not one.ended_time}
        assert len(told) > INCIDENTS_MAX or {(sign.kind, sign.code) for sign in told} <= is_open
        assert fold(last, told, unread=frozenset(unread), now=now, boot_id=boot_id) == last


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        pytest.param(1, 4, False, id="another action is asked for: nobody has reset the card"),
        pytest.param(3, 0, False, id="the card's peers were drained, which is no reset"),
        pytest.param(1, 0, True, id="nothing is asked for any more: the card was reset"),
    ],
)
def test_what_is_a_reset_and_what_is_not(before: int, after: int, want: bool) -> None:
    """An error of the card ends with a reset alone, and a recovery action that changes is none."""
    error = DeviceFault(IncidentKind.XID, 48, stands=False)
    asked = [DeviceFault(IncidentKind.RECOVERY, code) for code in (before, after) if code]
    last = fold((), [error, asked[0]], unread=NOTHING, now=at(0), boot_id="b1")
    last = fold(last, asked[1:], unread=NOTHING, now=at(60), boot_id="b1")

    assert [bool(one.ended_time) for one in last if one.kind is IncidentKind.XID] == [want]


@pytest.mark.parametrize(("released", "want"), [(0, 0), (20, 40)], ids=["before the error", "between the two"])
def test_an_error_soon_after_a_release_is_not_hidden_by_it(released: int, want: int) -> None:
    """An XID counts once a minute; but what an administrator declared over at 20 s and comes again at 40 s is new."""
    error = DeviceFault(IncidentKind.XID, 79, stands=False)
    last = fold((), [error], unread=NOTHING, now=at(0), boot_id="b1")
    last = fold(last, [error], unread=NOTHING, now=at(40), boot_id="b1", released=at(released) if released else "")

    assert [one.last_time for one in last] == [at(want)]


def test_a_clock_that_is_set_back_hides_nothing_behind_an_old_release() -> None:
    """The error came after the administrator's word, and stays after it whatever the clock says."""
    (before,) = play((500, [xid()]))
    (after,) = fold((before,), [], unread=NOTHING, now=at(100), boot_id="b1", released=at(400))

    assert after.last_time > at(400)


def test_a_clock_that_is_set_back_keeps_no_card_ill_until_it_is_there_again() -> None:
    """Ten hours ahead, then right: what was quiet is over after its minute from now on, an error that comes again
    counts, and no time of the record lies ahead."""
    lost = DeviceFault(IncidentKind.LOST, message="GPU is lost")
    last = play((36_000, [lost, xid()]), (36_010, []))
    last = play((100, []), last=last)
    assert all(one.last_time <= at(100) and one.quiet_since <= at(100) for one in last)

    last = play((100 + int(QUIET_SECONDS), []), (300, [xid()]), last=last)
    assert {one.kind: (one.ended_by, one.count, one.last_time) for one in last} == {
        IncidentKind.LOST: ("recovered", 1, at(100)),
        IncidentKind.XID: ("", 2, at(300)),
    }
