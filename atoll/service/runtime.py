"""Start and end of a process.

The process stops on SIGTERM and SIGINT by cancelling
`main`, which has a bounded time to clean up; it also ends when any critical task ends, because a part without its watch
or its server is worse than a restarted one.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from importlib import import_module
from typing import Any

import structlog

from atoll.service.errors import TaskEnded

log = structlog.get_logger(__name__)

STOP_SECONDS = 20.0
STATUS_FAILED = 1
STATUS_STUCK = 70


def run(main: Callable[[], Awaitable[None]], *, stop_seconds: float = STOP_SECONDS) -> int:
    """Run `main` to its end or until a signal, and return the exit status: 0 after an orderly end, 1 after a fault.

    If stopping takes longer than `stop_seconds`, or a second signal comes, the process exits at once with 70.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run_until_signal(main, stop_seconds))


async def supervise(**tasks: Coroutine[Any, Any, None]) -> None:
    """Run critical tasks side by side. When one fails or returns, the others are cancelled and the fault is raised.

    Raises an ExceptionGroup; a task that merely returned appears in it as TaskEnded.
    """
    async with asyncio.TaskGroup() as group:
        for name, work in tasks.items():
            group.create_task(_forever(name, work), name=name)


async def until_first(*works: Coroutine[Any, Any, object]) -> None:
    """Run side by side until the first ends, and cancel the others; raise what it raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def freeze_garbage() -> None:
    """Exclude all current objects from garbage collection; call it once, after the initial lists.

    Thousands of cached objects otherwise cost tens of milliseconds in each full collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


async def _forever(name: str, work: Coroutine[Any, Any, None]) -> None:
    await work
    raise TaskEnded(f"task {name!r} ended although it should run for ever")


async def _run_until_signal(main: Callable[[], Awaitable[None]], stop_seconds: float) -> int:
    task = asyncio.ensure_future(main())
    stopping = threading.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, task, number, stopping, stop_seconds)
    try:
        await task
    except asyncio.CancelledError:
        return 0 if stopping.is_set() else STATUS_FAILED
    except Exception:
        log.exception("Ended by a fault")
        return STATUS_FAILED
    return 0


def _stop(task: asyncio.Future[None], number: signal.Signals, stopping: threading.Event, stop_seconds: float) -> None:
    if stopping.is_set():
        os._exit(STATUS_STUCK)
    log.info("Stopping", signal=number.name)
    stopping.set()
    watchdog = threading.Timer(stop_seconds, os._exit, args=(STATUS_STUCK,))
    watchdog.daemon = True
    watchdog.start()
    task.cancel()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Use uvloop if it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory
