"""Load on the job service: many recorded jobs, on SQLite and a real PostgreSQL.

Jobs are submitted through the API without a socket, several at a time; then pages are listed and jobs shown. Prints the
time of each call (p50, p99), the memory of the process, and the share of refused requests, which must be 0.

    python -m bench.job_records --jobs 10000
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable

import structlog

from jobs.database import opened
from jobs.settings import JobServiceSettings
from tests.fakes.postgres import postgres
from tests.jobservice.service import JOBS, JobService

AT_ONCE = 16
READS = 300
UNLIMITED = JobServiceSettings.model_validate(
    {"access": "/nowhere", "requests_per_second": 10_000, "requests_burst": 100_000}
)


async def timed(work: Callable[[], Awaitable[bool]], times: list[float]) -> bool:
    """Run a call and note its time; return whether it succeeded."""
    start = time.perf_counter()
    done = await work()
    times.append(time.perf_counter() - start)
    return done


async def measure(url: str, jobs: int) -> dict[str, float]:
    """Return the figures of one database."""
    database = opened(url)
    async with JobService.of(database, settings=UNLIMITED) as service:
        submits, lists, shows = list[float](), list[float](), list[float]()
        numbers, refused, ids = iter(range(jobs)), 0, list[str]()

        async def submit_some() -> None:
            nonlocal refused
            for number in numbers:

                async def submit(number: int = number) -> bool:
                    fields = {"ext_ml_gpu_count": 1, "intent": {"expected_duration_hint": 60}}
                    answer = await service.submit(f"job-{number}", **fields)
                    ids.append(answer.json().get("id", ""))
                    return answer.status_code == 201

                refused += not await timed(submit, submits)

        began = time.perf_counter()
        await asyncio.gather(*(submit_some() for _ in range(AT_ONCE)))
        took = time.perf_counter() - began

        async def read(path: str) -> bool:
            return (await service.call("GET", path)).status_code == 200

        for number in range(READS):
            page = f"{JOBS}?page={1 + number * 7 % max(1, jobs // 50)}&page_size=50"
            refused += not await timed(lambda page=page: read(page), lists)
            one = f"{JOBS}/{ids[number * 31 % len(ids)]}"
            refused += not await timed(lambda one=one: read(one), shows)
    database.close()
    figures = {"jobs": float(jobs), "submits_per_second": jobs / took, "refused": float(refused)}
    for name, times in (("submit", submits), ("list", lists), ("show", shows)):
        times.sort()
        figures |= {
            f"{name}_p50_ms": 1000 * times[len(times) // 2],
            f"{name}_p99_ms": 1000 * times[len(times) * 99 // 100],
        }
    return figures | {"memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> int:
    """Measure both databases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    jobs = parser.parse_args().jobs
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory() as folder, postgres() as server:
        for name, url in (("sqlite", f"sqlite:///{folder}/jobs.db"), ("postgresql", server)):
            figures = asyncio.run(measure(url, jobs))
            print(name, json.dumps({key: round(value, 1) for key, value in figures.items()}))
            if figures["refused"]:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
