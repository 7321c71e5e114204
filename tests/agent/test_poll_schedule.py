"""When readings are due; controllers rely on this to release GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.poll_schedule import READINGS_OWED, PollSchedule, start_wait_seconds

START = PollSchedule(poll_seconds=30.0, urgent_seconds=1.0)


def test_two_complete_readings_are_published_after_a_start_and_after_a_deletion() -> None:
    """Exactly two, at the urgent pace, and then only news."""
    schedule = START
    for _ in range(2):
        published = []
        for _ in range(4):
            published.append(
                (schedule.must_publish(is_complete=True, live_read=True), schedule.wait_seconds(has_terminating=False))
            )
            schedule = schedule.after_reading(is_complete=True, live_read=True)
        assert published == [(True, 1.0), (True, 1.0), (False, 30.0), (False, 30.0)]
        schedule = schedule.after_deletion()


@pytest.mark.parametrize("pattern", ["gpu-{}", "ip-10-0-{}.ec2.internal", "rack{}-node"])
def test_a_cluster_of_agents_starts_evenly_spread(pattern: str) -> None:
    """However regular the names: of a thousand agents no tenth of the time sees half again as many as its share, every
    wait is within the spread, and a node's is always the same."""
    waits = [start_wait_seconds(pattern.format(number), spread_seconds=30.0) for number in range(1000)]
    tenths = [sum(3.0 * tenth <= wait < 3.0 * (tenth + 1) for wait in waits) for tenth in range(10)]

    assert sum(tenths) == 1000
    assert max(tenths) < 150
    assert waits == [start_wait_seconds(pattern.format(number), spread_seconds=30.0) for number in range(1000)]
    assert start_wait_seconds("n1", spread_seconds=0.0) == 0.0


def test_an_incomplete_reading_pays_nothing_and_slows_down() -> None:
    """With the kubelet out of reach the agent keeps trying, ever more slowly, and never claims to have proof."""
    schedule = START
    waits = []
    for _ in range(8):
        assert not schedule.must_publish(is_complete=False, live_read=False)
        schedule = schedule.after_reading(is_complete=False, live_read=False)
        waits.append(schedule.wait_seconds(has_terminating=True))

    assert waits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    assert schedule.pending_reports == READINGS_OWED


def test_two_readings_that_lack_only_kubelets_list_are_published() -> None:
    """They prove together that a sandbox which was seen is gone; more would be load while kubelet is out of reach."""
    schedule = START.after_deletion()
    published = []
    for _ in range(4):
        published.append(schedule.must_publish(is_complete=False, live_read=True))
        schedule = schedule.after_reading(is_complete=False, live_read=True)

    assert published == [True, True, False, False]
    assert schedule.must_publish(is_complete=True, live_read=True)


def test_a_complete_reading_restores_the_pace() -> None:
    """One success ends the slow-down at once."""
    schedule = (
        START.after_reading(is_complete=False, live_read=False)
        .after_reading(is_complete=False, live_read=False)
        .after_reading(is_complete=True, live_read=True)
    )

    assert schedule.wait_seconds(has_terminating=True) == 1.0


@given(st.lists(st.sampled_from(["complete", "incomplete", "deletion"]), max_size=60))
def test_every_deletion_is_followed_by_two_published_readings(events: list[str]) -> None:
    """In any order of events, a deletion that is followed by two complete readings has both of them published."""
    schedule = START
    since_deletion = 0
    for event in events:
        if event == "deletion":
            schedule, since_deletion = schedule.after_deletion(), 0
            continue
        is_complete = event == "complete"
        if is_complete:
            since_deletion += 1
        assert schedule.must_publish(is_complete=is_complete, live_read=is_complete) == (
            is_complete and since_deletion <= READINGS_OWED
        )
        schedule = schedule.after_reading(is_complete=is_complete, live_read=is_complete)
        assert 0 < schedule.wait_seconds(has_terminating=True) <= 30.0


@pytest.mark.parametrize("has_terminating", [True, False])
def test_polling_faster_than_urgent_is_honoured(has_terminating: bool) -> None:
    """A poll interval below the urgent one is never lengthened by it."""
    assert PollSchedule(poll_seconds=0.2, urgent_seconds=1.0).wait_seconds(has_terminating=has_terminating) == 0.2
