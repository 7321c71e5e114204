"""Lifecycle of a job: every pair of state and step is a row or refused, and the diagram matches the table."""

import itertools
from pathlib import Path

import pytest

from atoll.jobs.states import (
    ENDED,
    FIRST,
    IN_CLUSTER,
    ROWS,
    TABLE,
    IllegalStep,
    JobState,
    JobStep,
    picture,
    step,
)

PAGE = Path(__file__).parents[2] / "docs" / "job-service.md"
S, T = JobState, JobStep
LIFE = {
    (S.PENDING, S.QUEUED): {T.SUBMIT},
    (S.PENDING, S.PENDING): {T.MOVE},
    (S.QUEUED, S.PENDING): {T.MOVE, T.PAUSE, T.ESCALATE},
    (S.PREEMPTED, S.PENDING): {T.MOVE, T.PAUSE},
    (S.PENDING, S.CANCELLED): {T.CANCEL},
    (S.PENDING, S.FAILED): {T.EXPIRE, T.FAIL},
    (S.QUEUED, S.ADMITTED): {T.ADMIT},
    (S.QUEUED, S.PREEMPTED): {T.PREEMPT},
    (S.QUEUED, S.CANCELLED): {T.CANCEL},
    (S.QUEUED, S.FAILED): {T.EXPIRE, T.VANISH},
    (S.ADMITTED, S.RUNNING): {T.RUN},
    (S.ADMITTED, S.QUEUED): {T.UNADMIT},
    (S.ADMITTED, S.PREEMPTED): {T.PREEMPT},
    (S.ADMITTED, S.PENDING): {T.RETRY, T.MOVE, T.PAUSE},
    (S.ADMITTED, S.CANCELLED): {T.CANCEL},
    (S.ADMITTED, S.FAILED): {T.FAIL, T.EXPIRE, T.VANISH},
    (S.RUNNING, S.SUCCEEDED): {T.SUCCEED},
    (S.RUNNING, S.QUEUED): {T.UNADMIT},
    (S.RUNNING, S.PREEMPTED): {T.PREEMPT},
    (S.RUNNING, S.PENDING): {T.RETRY, T.MOVE, T.PAUSE},
    (S.RUNNING, S.CANCELLED): {T.CANCEL},
    (S.RUNNING, S.FAILED): {T.FAIL, T.EXPIRE, T.VANISH},
    (S.PREEMPTED, S.QUEUED): {T.REQUEUE},
    (S.PREEMPTED, S.CANCELLED): {T.CANCEL},
    (S.PREEMPTED, S.FAILED): {T.FAIL, T.VANISH},
    (S.FAILED, S.PENDING): {T.RETRY},
}
"""Which states follow which, said a second time and the other way round: a changed row has to be meant."""
LEGAL = {(state, asked): following for (state, following), steps in LIFE.items() for asked in steps}
PAIRS = list(itertools.product(JobState, JobStep))


@pytest.mark.parametrize(("state", "asked"), PAIRS, ids=[f"{state}-{asked}" for state, asked in PAIRS])
def test_every_pair_leads_on_or_is_refused_in_words(state: JobState, asked: JobStep) -> None:
    """SM-1 to SM-16: a step that is possible leads where it should; any other names job, state, step, why not, and the
    history."""
    if (state, asked) in LEGAL:
        assert step("tune", state, asked) is LEGAL[state, asked]
        return
    with pytest.raises(IllegalStep) as refused:
        step("tune", state, asked, history=("pending", "queued"))

    told = str(refused.value)
    assert told.startswith(f"job tune is {state}, cannot {asked}: ")
    assert told.endswith("; its history: pending, queued")
    assert any(why in told for why in ("none, it has ended", "possible steps: ", "cancel", "be retried", "be paused"))


def test_a_history_is_told_in_part() -> None:
    """A refusal stays short however long a job has lived."""
    refused = IllegalStep("tune", S.SUCCEEDED, T.RUN, tuple(f"look-{number}" for number in range(1000)))

    assert len(str(refused)) < 250
    assert "look-999" in str(refused)


def test_no_row_stands_twice() -> None:
    """A state and a step lead to one state."""
    assert len(ROWS) == len(TABLE) == len(LEGAL)


def test_every_state_is_reached_from_the_first_and_can_end() -> None:
    """No job is caught in a state, and none is out of reach."""
    reached, ending = {FIRST}, set(ENDED)
    for _ in JobState:
        reached |= {row.following for row in ROWS if row.state in reached}
        ending |= {row.state for row in ROWS if row.following in ending}

    assert reached == ending == set(JobState)


def test_only_failed_jobs_come_back() -> None:
    """What succeeded or was cancelled stays so."""
    assert {row.state for row in ROWS if row.state in ENDED} == {S.FAILED}
    assert {FIRST} | IN_CLUSTER | ENDED == set(JobState)


def test_who_is_active_can_be_cancelled() -> None:
    """A job that has not ended can be cancelled, whatever it waits for."""
    assert {row.state for row in ROWS if row.step is T.CANCEL} == set(JobState) - ENDED


def test_what_is_in_the_cluster_can_vanish_from_it() -> None:
    """Objects that somebody deletes by hand are noticed in every state that has some."""
    assert {row.state for row in ROWS if row.step is T.VANISH} == IN_CLUSTER


def test_page_shows_the_table() -> None:
    """The picture on the page is drawn from the table, each step in it."""
    assert picture() in PAGE.read_text(encoding="utf-8")
    for state, _, following in ((row.state, row.step, row.following) for row in ROWS):
        assert state in picture()
        assert following in picture()
    assert sum(line.count(",") + ("──►" in line) for line in picture().splitlines()) == len(ROWS)
