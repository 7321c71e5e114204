"""An event loop without sockets whose time passes only if no callback is ready.

A history of minutes takes milliseconds, and the same seed gives the same interleaving: the order of callbacks depends
only on the delays that the simulation draws, not on the machine.
"""

import asyncio
import contextvars
import heapq
import sys
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


class Deadlock(Exception):
    """Every task waits for another one; no time will wake any of them."""


class Timer:
    """Fits TimerHandle as far as asyncio uses one."""

    __slots__ = ("arguments", "callback", "context", "is_cancelled")

    def __init__(self, callback: Callable[..., Any] | None, arguments: tuple[Any, ...], context: Any) -> None:
        self.callback = callback
        self.arguments = arguments
        self.context = context
        self.is_cancelled = False

    def cancel(self) -> None:
        """Do nothing when the time has come."""
        self.is_cancelled = True
        self.callback = None
        self.arguments = ()

    def cancelled(self) -> bool:
        """Tell whether it was cancelled."""
        return self.is_cancelled


class VirtualLoop(asyncio.BaseEventLoop):
    """Jumps from timer to timer. `time` is virtual seconds since the beginning.

    A whole loop of its own, because histories spend most of their time in it: no handles for what runs at once, no
    selector, no debugging. Timers of one moment run in the order in which they were set.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        self._count = 0
        self._soon: deque[tuple[Callable[..., Any], tuple[Any, ...], Any]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self.thread_seconds: Callable[[], float] = lambda: 0.0
        """How long the next work takes that is given to a thread."""

    def __del__(self) -> None:
        """Nothing was opened, and tasks that are thrown away may still look for their loop."""

    def time(self) -> float:
        """Return virtual seconds."""
        return self._seconds

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """Call after everything that was asked for before."""
        self._soon.append((callback, args, contextvars.copy_context() if context is None else context))

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """Call at a virtual time."""
        timer = Timer(callback, args, contextvars.copy_context() if context is None else context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, timer))
        return timer

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """Call after some virtual seconds."""
        return self.call_at(self._seconds + delay, callback, *args, context=context)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        """Begin a task; nobody complains when it is thrown away."""
        task = asyncio.Task(coro, loop=self, name=name or "", context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Work at once on what is there, and answer after a while: the world goes on meanwhile."""
        answer = self.create_future()
        try:
            result, fault = func(*args), None
        except Exception as error:  # noqa: BLE001 - the caller gets it, as from a thread
            result, fault = None, error

        def come_back() -> None:
            if not answer.done():
                answer.set_result(result) if fault is None else answer.set_exception(fault)

        self.call_later(self.thread_seconds(), come_back)
        return answer

    def run_until_complete(self, future: Any) -> Any:
        """Run until the work is done. Raises what it raises, and Deadlock when time cannot go on."""
        work = asyncio.ensure_future(future, loop=self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        events._set_running_loop(self)
        try:
            while not work.done():
                self._turn()
        finally:
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        return work.result()

    def clear(self) -> None:
        """Forget everything that was to be called."""
        self._soon.clear()
        self._timers.clear()

    def _turn(self) -> None:
        """Run what is to run now, or else what is due next."""
        soon = self._soon
        if not soon:
            self._pass_time()
        for _ in range(len(soon)):
            callback, arguments, context = soon.popleft()
            try:
                context.run(callback, *arguments)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 - as every loop does: the others go on
                self.call_exception_handler({"message": "a callback failed", "exception": error})

    def _pass_time(self) -> None:
        timers = self._timers
        while timers:
            when, _, timer = heapq.heappop(timers)
            if timer.callback is not None:
                self._seconds = max(self._seconds, when)
                self._soon.append((timer.callback, timer.arguments, timer.context))
                return
        raise Deadlock("all tasks wait for each other")

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.call_soon(self.create_task, generator.aclose())


class VirtualClock:
    """Fits the Clock protocols. Every process has its own idea of the wall time and its own zero of elapsed time."""

    def __init__(self, loop: VirtualLoop, *, skew_seconds: float = 0.0) -> None:
        self._loop = loop
        self._skew = skew_seconds

    def monotonic_seconds(self) -> float:
        """Seconds since an arbitrary moment."""
        return 1000.0 + self._loop.time()

    def now(self) -> datetime:
        """Wall time of this machine."""
        return START + timedelta(seconds=self._loop.time() + self._skew)

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await asyncio.sleep(max(0.0, seconds))
