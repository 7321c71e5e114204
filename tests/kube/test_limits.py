"""The limits: rates hold over any period, budgets end, waits grow and stay bounded."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.kube.limits import Backoff, RetryBudget, TokenBucket


class Hand:
    """A clock hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@given(st.floats(0.5, 100), st.integers(1, 20), st.lists(st.floats(0, 2), min_size=1, max_size=50))
def test_rate_holds_over_any_time(rate: float, burst: int, pauses: list[float]) -> None:
    """However callers come, by any moment no more than burst + rate * time have had their turn."""
    hand = Hand()
    bucket = TokenBucket(rate=rate, burst=burst, now=hand)
    turns = []
    for pause in pauses:
        hand.seconds += pause
        turns.append(hand.seconds + bucket.reserve())

    for moment in turns:
        assert sum(turn <= moment for turn in turns) <= burst + rate * moment + 1e-6


def test_try_take_never_goes_into_debt() -> None:
    """Who will not wait gets nothing and costs nothing; a token that was not used goes back."""
    hand = Hand()
    bucket = TokenBucket(rate=1, burst=1, now=hand)

    assert bucket.try_take()
    assert not bucket.try_take()
    bucket.give_back()
    assert bucket.try_take()
    hand.seconds = 1
    assert bucket.try_take()


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (1, 0)])
def test_limits_that_let_nothing_pass_are_refused(rate: float, burst: int) -> None:
    """A rate of nothing is a mistake in the settings."""
    with pytest.raises(ValueError, match="rate"):
        TokenBucket(rate=rate, burst=burst, now=Hand())


def test_budget_ends_and_is_earned_back() -> None:
    """Ten retries are free; after that every ten successes pay for one."""
    budget = RetryBudget()
    assert [budget.try_spend() for _ in range(11)] == [True] * 10 + [False]
    for _ in range(11):
        budget.earn()

    assert budget.try_spend()
    assert not budget.try_spend()


@given(st.integers(0, 10_000))
def test_waits_double_up_to_the_bound(seed: int) -> None:
    """The n-th wait lies in the upper half of its step; resetting starts anew."""
    backoff = Backoff(random.Random(seed), base_seconds=0.2, max_seconds=30)
    for number in range(100):
        step = min(30, 0.2 * 2**number)
        assert step / 2 <= backoff.next_seconds() <= step
    backoff.reset()

    assert backoff.next_seconds() <= 0.2
