"""The runtime: orderly stop on signals within a time limit, and no partly running process."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from atoll.service import runtime
from atoll.service.clock import SystemClock
from atoll.service.errors import TaskEnded

PROGRAM = """
import asyncio, sys
from atoll.service.logs import configure
from atoll.service.runtime import run

configure("info", "test")

async def main():
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        {ending}

sys.exit(run(main, stop_seconds={stop_seconds}))
"""


def start(ending: str, *, stop_seconds: float = 30.0) -> subprocess.Popen[str]:
    program = PROGRAM.format(ending=ending, stop_seconds=stop_seconds)
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_cancels_and_waits_for_the_clean_up(number: signal.Signals) -> None:
    """What main gives back in its finally blocks is given back before the process ends with 0."""
    process = start('await asyncio.sleep(0.05); print("clean", flush=True)')
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)

    assert output == "clean\n"
    assert process.returncode == 0


def test_clean_up_that_hangs_is_cut_off() -> None:
    """A process that cannot stop ends anyway, with a status that says so."""
    process = start("await asyncio.Event().wait()", stop_seconds=0.2)
    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=20) == runtime.STATUS_STUCK


def test_clean_up_that_blocks_the_loop_is_cut_off() -> None:
    """The bound holds even when no task can run."""
    process = start("import time; time.sleep(60)", stop_seconds=0.2)
    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=20) == runtime.STATUS_STUCK


def test_second_signal_ends_at_once() -> None:
    """An impatient operator is obeyed."""
    process = start('print("stopping", flush=True); await asyncio.Event().wait()')
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=20) == runtime.STATUS_STUCK


def test_end_and_fault_have_their_status() -> None:
    """0 for a main that returns, 1 for one that fails."""

    async def succeed() -> None: ...

    async def fail() -> None:
        raise RuntimeError("bug")

    async def cancelled_by_itself() -> None:
        raise asyncio.CancelledError

    assert runtime.run(succeed) == 0
    assert runtime.run(fail) == 1
    assert runtime.run(cancelled_by_itself) == 1


async def test_critical_task_that_fails_ends_the_others() -> None:
    """Without its watch a part must not go on answering."""
    cancelled = asyncio.Event()

    async def server() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def watch() -> None:
        raise RuntimeError("lost")

    with pytest.raises(ExceptionGroup) as caught:
        await runtime.supervise(server=server(), watch=watch())

    assert caught.group_contains(RuntimeError, match="lost")
    assert cancelled.is_set()


async def test_critical_task_that_returns_is_a_fault() -> None:
    """A watch that merely ended is as bad as one that failed, and is named."""

    async def watch() -> None: ...

    with pytest.raises(ExceptionGroup) as caught:
        await runtime.supervise(watch=watch())

    assert caught.group_contains(TaskEnded, match="'watch'")


def test_frozen_garbage_is_not_looked_at_again() -> None:
    """After the initial lists their objects cost the collector nothing."""
    thresholds = gc.get_threshold()
    before = gc.get_freeze_count()
    try:
        runtime.freeze_garbage()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


async def test_system_clock_tells_aware_time_and_never_goes_back() -> None:
    """The real clock keeps the protocol's promises."""
    clock = SystemClock()
    first = clock.monotonic_seconds()
    await clock.sleep(-1)

    assert clock.monotonic_seconds() >= first
    assert clock.now().utcoffset() == timedelta(0)


def test_loop_works_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop is an extra, not a need."""
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda _name: None)

    async def main() -> None:
        assert os.getpid()

    assert runtime._loop_factory() is None
    assert runtime.run(main) == 0
