"""Retries: which failures, how often, after which pause; and a job's time limit."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.jobs.policy import JobPolicy
from atoll.jobs.retries import (
    MESSAGE_LENGTH_MAX,
    PAUSE_SECONDS_MAX,
    RETRYABLE,
    Due,
    GiveUp,
    TimeOver,
    TryAgain,
    after_failure,
    after_preemption,
    pause_seconds,
    start_of,
    time_left,
)
from atoll.jobs.words import JobType

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
SOON = timedelta(seconds=10)


@pytest.mark.parametrize("reason", RETRYABLE)
def test_a_passing_failure_is_tried_again_after_the_delay(reason: str) -> None:
    """RET-2, REG-3: a failure of one of the kinds, wherever its word stands, is tried again with its count and its
    reason told."""
    decided = after_failure(JobPolicy(), reason=f"container main: {reason} (exit code 137)", retries=0, now=NOW)

    assert isinstance(decided, TryAgain)
    assert (decided.count, decided.not_before) == (1, NOW + timedelta(seconds=30))
    assert decided.message.startswith("retry 1 of 3 in 30 s: ")
    assert reason in decided.message


@pytest.mark.parametrize("reason", ["Error (exit code 1)", "", "DeadlineExceeded", "oomkilled"])
def test_other_failures_end_the_job_at_once(reason: str) -> None:
    """A program's own mistake would be made again."""
    decided = after_failure(JobPolicy(), reason=reason, retries=0, now=NOW)

    assert isinstance(decided, GiveUp)
    assert decided.message == f"failed: {reason or 'no reason given'}"


@pytest.mark.parametrize(
    ("retries", "retries_max", "spent", "told"),
    [
        (3, 3, False, "failed, all 3 retries are used up: OOMKilled"),
        (7, 3, False, "failed, all 3 retries are used up: OOMKilled"),
        (0, 0, False, "failed, no retries are allowed: OOMKilled"),
        (0, 3, True, "failed, all 3 retries are used up: OOMKilled"),
    ],
)
def test_retries_are_used_up(retries: int, retries_max: int, spent: bool, told: str) -> None:
    """RET-1: after as many retries as the policy allows, by us or by the cluster, the job is over and says so."""
    policy = JobPolicy(max_retries=retries_max)

    assert after_failure(policy, reason="OOMKilled", retries=retries, now=NOW, spent=spent) == GiveUp(told)


def test_no_retry_begins_after_the_deadline() -> None:
    """A pause that reaches the deadline is not waited for."""
    policy = JobPolicy(deadline=NOW + SOON)

    decided = after_failure(policy, reason="OOMKilled", retries=0, now=NOW)

    assert isinstance(decided, GiveUp)
    assert "leaves no time for a retry: OOMKilled" in decided.message


@pytest.mark.parametrize(
    ("delay", "pauses"),
    [(30, [30, 60, 120, 240]), (0, [0, 0, 0]), (3000, [3000, 3600, 3600]), (86_400, [86_400, 86_400])],
)
def test_the_pause_doubles_up_to_an_hour(delay: int, pauses: list[int]) -> None:
    """The first pause is the policy's, each further one twice as long, none beyond an hour but the policy's own."""
    assert [pause_seconds(delay, retries) for retries in range(len(pauses))] == pauses


@given(delay=st.integers(0, 86_400), retries=st.integers(0, 1000))
def test_pauses_never_shrink_and_stay_bounded(delay: int, retries: int) -> None:
    """However often a job was tried, the next pause is no shorter than the last and no longer than the bound."""
    pause = pause_seconds(delay, retries)

    assert delay <= pause <= pause_seconds(delay, retries + 1) <= max(delay, PAUSE_SECONDS_MAX)


@pytest.mark.parametrize(
    ("times", "told"), [(1, "preempted once"), (3, "preempted 3 times"), (500, "preempted 500 times")]
)
def test_preemptions_do_not_count_as_failures(times: int, told: str) -> None:
    """EDGE-15, C-12: however often a job gives way, it is queued again at once."""
    decided = after_preemption(JobPolicy(max_retries=0), reason="Preempted", preemptions=times, now=NOW)

    assert decided == TryAgain(times, NOW, f"{told}, queued again: Preempted")


def test_whoever_wants_no_retry_on_preemption_fails() -> None:
    """retry_on_preemption false makes giving way a failure."""
    decided = after_preemption(JobPolicy(retry_on_preemption=False), reason="", preemptions=1, now=NOW)

    assert decided == GiveUp("preempted, and retry_on_preemption is false: other jobs needed its quota")


def test_foreign_reasons_are_cut() -> None:
    """What a cluster tells cannot fill a record."""
    for decided in (
        after_failure(JobPolicy(), reason="OOMKilled" * 10_000, retries=0, now=NOW),
        after_preemption(JobPolicy(), reason="x" * 100_000, preemptions=1, now=NOW),
    ):
        assert len(decided.message) == MESSAGE_LENGTH_MAX


@pytest.mark.parametrize(
    ("policy", "started", "seconds_max", "expected"),
    [
        pytest.param(JobPolicy(), NOW, None, Due(None), id="nothing limits it"),
        pytest.param(JobPolicy(deadline=NOW + SOON), None, None, Due(NOW + SOON), id="deadline ahead"),
        pytest.param(
            JobPolicy(deadline=NOW),
            None,
            None,
            TimeOver(f"its deadline {NOW.isoformat()} has passed"),
            id="deadline is now",
        ),
        pytest.param(JobPolicy(max_runtime=10), None, None, Due(None), id="runtime counts from the start"),
        pytest.param(JobPolicy(max_runtime=10), NOW, None, Due(NOW + SOON), id="runtime ahead"),
        pytest.param(
            JobPolicy(max_runtime=10),
            NOW - SOON,
            None,
            TimeOver("the training reached its maximum run time of 10 s"),
            id="runtime over",
        ),
        pytest.param(JobPolicy(max_runtime=5), NOW - SOON, 20, Due(NOW + SOON), id="the attribute replaces the policy"),
        pytest.param(
            JobPolicy(max_runtime=50, deadline=NOW + SOON), NOW, None, Due(NOW + SOON), id="the earlier of both"
        ),
    ],
)
def test_time_of_a_job(
    policy: JobPolicy, started: datetime | None, seconds_max: int | None, expected: TimeOver | Due
) -> None:
    """A job ends at its deadline, and when it ran as long as it may."""
    assert time_left(policy, JobType.TRAINING, started=started, now=NOW, seconds_max=seconds_max) == expected


@pytest.mark.parametrize(
    ("scheduled", "not_before", "expected"),
    [
        (None, None, NOW),
        (NOW + SOON, None, NOW + SOON),
        (None, NOW + SOON, NOW + SOON),
        (NOW - SOON, NOW + SOON, NOW + SOON),
    ],
)
def test_when_a_pending_job_starts(scheduled: datetime | None, not_before: datetime | None, expected: datetime) -> None:
    """Not before its scheduled start, nor before the pause of a retry is over; else now."""
    assert start_of(JobPolicy(scheduled_start=scheduled), not_before, NOW) == expected
