"""The extender's first answer costs no more than later ones, and is the same."""

import asyncio
import time

from atoll.cluster.requests import request_of
from atoll.cluster.verdicts import FilterInput, judge_nodes
from atoll.service.clock import SystemClock
from bench.extender_calls import body, fill, node_name
from extender.warm_up import NODES_AT_ONCE, warm_up
from extender.wire import read_filter

NODES = 4 * NODES_AT_ONCE + 1
NAMES = [node_name(number) for number in range(NODES)]


def question() -> FilterInput:
    """A pod that wants two GPUs."""
    return FilterInput("u", request_of(read_filter(body([], "u", 2)).pod, None), time.monotonic())


def test_nothing_is_left_for_the_first_call() -> None:
    """Every node is in the arrays, and the first answer is that of a ledger which was not prepared."""
    ledger = fill(NODES)
    assert ledger.renew(time.monotonic(), nodes_max=0), "a new ledger has not placed its nodes yet"

    asyncio.run(warm_up(ledger, SystemClock()))

    assert not ledger.renew(time.monotonic(), nodes_max=0)
    assert judge_nodes(NAMES, question(), ledger) == judge_nodes(NAMES, question(), fill(NODES))


def test_others_have_their_turn_meanwhile() -> None:
    """The nodes are placed a few at a time: whoever asks in between is answered, and loses no node."""
    ledger, turns = fill(NODES), 0

    async def ask() -> None:
        nonlocal turns
        while ledger.renew(time.monotonic(), nodes_max=0):
            turns += 1
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(warm_up(ledger, SystemClock()), ask())

    asyncio.run(both())

    assert turns >= NODES // NODES_AT_ONCE
    assert judge_nodes(NAMES, question(), ledger).feasible == judge_nodes(NAMES, question(), fill(NODES)).feasible
