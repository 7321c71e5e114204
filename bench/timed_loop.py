"""Runs a part of Atoll with a clock in its event loop, which writes down each time that the loop was kept busy.

Run as `ATOLL_BENCH_PART=extender ATOLL_BENCH_LOG=FILE python -m bench.timed_loop ARGUMENTS`. The log has one line
`part seconds` for each time that the loop's thread spent `TOLD_SECONDS` of CPU between two ticks. CPU, not time passed:
the machine may be busy. Up to one tick of it may be other steps.
"""

import asyncio
import os
import runpy
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from atoll.service import runtime

TICK_SECONDS = 0.002
TOLD_SECONDS = 0.005


async def _tick(part: str, log: Path) -> None:
    with log.open("a", buffering=1) as lines:
        while True:
            before = time.thread_time()
            await asyncio.sleep(TICK_SECONDS)
            spent = time.thread_time() - before
            if spent >= TOLD_SECONDS:
                lines.write(f"{part} {spent:.6f}\n")


def main() -> None:
    """Run the part as its own `python -m` would."""
    part, log, run = os.environ["ATOLL_BENCH_PART"], Path(os.environ["ATOLL_BENCH_LOG"]), runtime.run

    def run_ticking(main: Callable[[], Awaitable[None]], *, stop_seconds: float = runtime.STOP_SECONDS) -> int:
        async def ticking() -> None:
            clock = asyncio.create_task(_tick(part, log))
            try:
                await main()
            finally:
                clock.cancel()

        return run(ticking, stop_seconds=stop_seconds)

    runtime.run = run_ticking
    runpy.run_module(part, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
