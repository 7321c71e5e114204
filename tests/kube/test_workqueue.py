"""The work queue: each key once and never twice at a time, delayed keys on time, failed keys with growing delays."""

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.kube.workqueue import WorkQueue
from tests.fakes.clock import ManualClock, settle


@pytest.fixture
async def queue(clock: ManualClock) -> WorkQueue[str]:
    return WorkQueue(clock)


async def test_keys_come_in_order_and_once(queue: WorkQueue[str]) -> None:
    """A burst of events about one object is one piece of work."""
    for key in "abab":
        queue.add(key)

    assert len(queue) == 2
    assert [await queue.get(), await queue.get()] == ["a", "b"]
    assert len(queue) == 0


async def test_key_added_while_worked_on_comes_back_after(queue: WorkQueue[str]) -> None:
    """News that arrives during the work is neither lost nor handled by a second worker meanwhile."""
    queue.add("a")
    key = await queue.get()
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0

    queue.done(key)

    assert len(queue) == 1
    assert await queue.get() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_get_waits_for_a_key(queue: WorkQueue[str]) -> None:
    """A worker that comes first sleeps until there is work."""
    getting = asyncio.create_task(queue.get())
    await settle()
    assert not getting.done()

    queue.add("a")

    assert await getting == "a"


async def test_delayed_key_comes_when_due(queue: WorkQueue[str], clock: ManualClock) -> None:
    """Not before its time, and without anybody asking."""
    queue.add_after("a", 10)
    getting = asyncio.create_task(queue.get())
    await clock.advance(9.9)
    assert not getting.done()
    await clock.advance(0.1)

    assert getting.done()


async def test_earliest_of_several_delays_counts(queue: WorkQueue[str], clock: ManualClock) -> None:
    """A nearer deadline replaces a farther one, a farther one changes nothing, and the key comes once."""
    queue.add_after("a", 10)
    queue.add_after("a", 5)
    queue.add_after("a", 20)
    getting = asyncio.create_task(queue.get())
    await clock.advance(5)
    assert getting.done()
    queue.done("a")
    again = asyncio.create_task(queue.get())
    await clock.advance(60)

    assert not again.done()
    assert queue.delayed_count == 0
    again.cancel()


async def test_adding_now_overrides_a_delay(queue: WorkQueue[str], clock: ManualClock) -> None:
    """Work that became urgent is done now and not once more at its old time."""
    queue.add_after("a", 10)
    queue.add("a")
    queue.done(await queue.get())
    getting = asyncio.create_task(queue.get())
    await clock.advance(60)

    assert not getting.done()
    getting.cancel()


async def test_failures_wait_ever_longer_until_forgotten(queue: WorkQueue[str], clock: ManualClock) -> None:
    """The wait doubles per key up to a bound, and a success starts it anew."""

    async def wait_after_failure() -> float:
        queue.retry("a")
        getting = asyncio.create_task(queue.get())
        before = clock.monotonic_seconds()
        while not getting.done():
            await clock.advance(clock.next_alarm_seconds() or 0)
        queue.done("a")
        return round(clock.monotonic_seconds() - before, 3)

    waits = [await wait_after_failure() for _ in range(12)]
    queue.forget("a")

    assert waits[:4] == [0.1, 0.2, 0.4, 0.8]
    assert waits[-1] == 60
    assert await wait_after_failure() == 0.1


async def test_worker_survives_faults_and_comes_back_when_told(queue: WorkQueue[str], clock: ManualClock) -> None:
    """A handler that raises is tried again; one that asks to come back comes back; the others go on."""
    seen: list[str] = []

    async def handle(key: str) -> float | None:
        seen.append(key)
        if seen == ["bad"]:
            raise RuntimeError("trouble")
        return 100.0 if key == "later" and seen.count("later") == 1 else None

    worker = asyncio.create_task(queue.work(handle))
    for key in ("bad", "fine", "later"):
        queue.add(key)
    await settle()
    assert seen == ["bad", "fine", "later"]
    await clock.advance(1)
    assert seen[3:] == ["bad"]
    await clock.advance(100)

    assert seen[4:] == ["later"]
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    assert clock.sleepers == 0


async def test_success_starts_the_back_off_anew(queue: WorkQueue[str], clock: ManualClock) -> None:
    """A key that failed often but recovered is tried again soon when it fails once more."""
    outcomes = [True, True, True, False, True, False]
    started: list[float] = []

    async def handle(_key: str) -> None:
        started.append(clock.monotonic_seconds())
        if outcomes[len(started) - 1]:
            raise RuntimeError("trouble")

    worker = asyncio.create_task(queue.work(handle))
    queue.add("a")
    await clock.advance(10)
    queue.add("a")
    await clock.advance(10)

    waits = [round(after - before, 3) for before, after in pairwise(started)]
    assert waits[:3] == [0.1, 0.2, 0.4]
    assert waits[-1] == 0.1
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "after", "retry", "advance"]), st.integers(0, 4), st.integers(0, 30)), max_size=40
)


@settings(deadline=None)
@given(ACTIONS)
def test_nothing_is_lost_and_nothing_runs_twice_at_a_time(actions: list[tuple[str, int, int]]) -> None:
    """Three workers, any mixture of requests: every request is followed by a run that started after it."""
    asyncio.run(_play(actions))


async def _play(actions: list[tuple[str, int, int]]) -> None:
    clock = ManualClock()
    queue: WorkQueue[int] = WorkQueue(clock)
    running: Counter[int] = Counter()
    requested: dict[int, int] = {}
    started: dict[int, int] = {}
    steps = 0

    async def handle(key: int) -> None:
        started[key] = steps
        running[key] += 1
        assert running[key] == 1, f"key {key} is worked on twice at a time"
        await clock.sleep(0.5)
        running[key] -= 1

    workers = [asyncio.create_task(queue.work(handle)) for _ in range(3)]
    for steps, (action, key, number) in enumerate(actions):
        if action == "advance":
            await clock.advance(number)
            continue
        requested[key] = steps
        queue.add(key) if action == "add" else queue.retry(key) if action == "retry" else queue.add_after(key, number)
    steps = len(actions)
    await clock.advance(1000)

    assert all(started[key] >= at for key, at in requested.items())
    assert (len(queue), queue.delayed_count) == (0, 0)
    for worker in workers:
        assert not worker.done()
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
