"""Pauses of keys whose writes are refused."""

import pytest

from controllers.pauses import FORGET_SECONDS, LONGEST_SECONDS, Pauses
from tests.fakes.clock import ManualClock

pytestmark = pytest.mark.asyncio


async def test_pauses_grow_while_a_key_is_refused_and_begin_anew_afterwards() -> None:
    """Each key by itself; a second wake-up within the pause finds how much is left of it."""
    clock = ManualClock()
    pauses: Pauses[str] = Pauses(clock)
    told = []
    for _ in range(7):
        told.append(pauses.begin("g"))
        await clock.advance(0.5)
        assert pauses.left_seconds("g") == told[-1] - 0.5
        await clock.advance(told[-1])
        assert pauses.left_seconds("g") == 0

    assert told == [1, 2, 4, 8, 16, LONGEST_SECONDS, LONGEST_SECONDS]
    assert pauses.begin("other") == 1
    await clock.advance(LONGEST_SECONDS + FORGET_SECONDS)
    assert pauses.begin("g") == 1
