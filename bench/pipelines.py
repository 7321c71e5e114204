"""Load on pipelines: 200 runs of 20 steps at once, 1,000 cron triggers on one minute, and the price of a step.

In one process, with SQLite, or with a PostgreSQL of its own that does not wait for the disk (--postgresql). A step
calls a function that does nothing. DBOS alone runs a quarter as many chains of as many steps that do nothing: once as
steps of one workflow, and once as a workflow for each step, which is what survives that steps run side by side. Prints
one JSON object; a run that does not succeed fails the bench.

    python -m bench.pipelines --runs 200 --steps 20 --triggers 1000 [--postgresql]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import structlog
from dbos import DBOS
from sqlalchemy import create_engine, func, select, text
from sqlalchemy.orm import Session

from atoll.pipelines.words import RunState
from jobs.database import opened
from pipelines.api import PIPELINES, add_pipelines
from pipelines.durable import in_own_loop
from pipelines.engine import PipelineEngine
from pipelines.firing import TriggerKeeper
from pipelines.records import RunRecord, migrate_pipelines
from pipelines.serving import registered_functions
from pipelines.store import active_run_ids
from pipelines.trigger_api import add_triggers
from tests.fakes.postgres import postgres
from tests.jobservice.service import JobService
from tests.pipelines.made import step
from tests.pipelineservice.world import EngineWorld

SHARE = 4
"""DBOS alone runs this part of the chains."""
LOOK_SECONDS = 0.25
HOUR = 3600
Fresh = Callable[[str], str]
"""Returns the URL of an empty database of a name."""


@DBOS.workflow(name="bench-chain")
async def chain(steps: int) -> None:
    """Run steps one after the other, as DBOS does."""
    for number in range(steps):
        await DBOS.run_step_async({"name": f"s{number}"}, _nothing)


@DBOS.workflow(name="bench-one")
async def one() -> None:
    """Run one step."""
    await DBOS.run_step_async({"name": "act"}, _nothing)


@DBOS.workflow(name="bench-workflows")
async def workflows(steps: int) -> None:
    """Run a workflow for each step."""
    for _ in range(steps):
        await one()


async def _nothing() -> None:
    pass


async def timed(work: Awaitable[None], steps: int) -> dict[str, float]:
    """Return how long work took, in all and per step."""
    began, used = time.perf_counter(), time.process_time()
    await work
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "ms_per_step": 1000 * seconds / steps,
        "cpu_ms_per_step": 1000 * (time.process_time() - used) / steps,
    }


async def dbos_alone(url: str, work: Callable[[int], Awaitable[None]], runs: int, steps: int) -> dict[str, float]:
    """Return the figures of DBOS alone."""
    found: dict[str, float] = {}

    async def serve() -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(work(steps) for _ in range(runs)))

        found.update(await timed(all_of_them(), runs * steps))

    await in_own_loop(url, serve, _no_try, lambda _try: None)
    return found


async def _no_try(*_told: object) -> None:
    raise AssertionError("the bench starts no try")


async def pipelines_at_once(url: str, runs: int, steps: int) -> tuple[dict[str, float], int]:
    """Return the figures of runs that begin at once, and how many did not succeed."""
    database = opened(url)
    migrate_pipelines(url)
    world = EngineWorld(database, url)
    names = [f"s{number}" for number in range(steps)]
    line = [step(name, *names[max(0, number - 1) : number]) for number, name in enumerate(names)]
    for number in range(runs):
        await world.begin(*line, name=f"p{number}")
    engine = asyncio.ensure_future(PipelineEngine(world.parts, world.clock, url).run())

    async def until_ended() -> None:
        while not engine.done() and await database.read(active_run_ids):  # noqa: ASYNC110 - the database tells no event
            await asyncio.sleep(LOOK_SECONDS)

    found = await timed(until_ended(), runs * steps)
    engine.cancel()
    await asyncio.wait((engine,))
    succeeded = select(func.count()).select_from(RunRecord).where(RunRecord.state == RunState.SUCCEEDED.value)
    count = await database.read(lambda session: session.scalar(succeeded)) or 0
    database.close()
    return found, runs - count


async def triggers_of_one_minute(url: str, count: int) -> dict[str, float]:
    """Return how long one look takes that fires all cron triggers, up to two hours' seconds of them, and how many runs
    began."""
    database = opened(url)
    migrate_pipelines(url)
    async with JobService.of(database) as service:
        add_pipelines(service.app, registered_functions(), {})
        add_triggers(service.app)
        made = (await service.call("POST", PIPELINES, json={"name": "nightly", "steps": [step("a")]})).json()
        cron = {"trigger_type": "cron", "cron_expression": "0 14 * * *"}
        for _ in range(count):
            await service.clock.advance(1)  # below the limit of requests
            answer = await service.call("POST", f"{PIPELINES}/{made['id']}/triggers", json=cron)
            answer.raise_for_status()
        await service.clock.advance(2 * HOUR - count)
        began = time.perf_counter()
        await TriggerKeeper(database, service.clock).look()
        seconds = time.perf_counter() - began

        def begun(session: Session) -> int:
            return session.scalar(select(func.count()).select_from(RunRecord)) or 0

        runs = await database.read(begun)
    database.close()
    return {"seconds": seconds, "ms_per_trigger": 1000 * seconds / count, "runs_begun": float(runs)}


async def measure(fresh: Fresh, runs: int, steps: int, triggers: int) -> tuple[dict[str, dict[str, float]], int]:
    """Return all figures, and how many runs did not succeed or did not begin."""
    part = max(1, runs // SHARE)
    alone = await dbos_alone(fresh("steps"), chain, part, steps)
    workflow_each = await dbos_alone(fresh("workflows"), workflows, part, steps)
    ours, lost = await pipelines_at_once(fresh("runs"), runs, steps)
    fired = await triggers_of_one_minute(fresh("triggers"), triggers)
    ratios = {
        f"{key}_of_{name}": ours[key] / other[key]
        for key in ("ms_per_step", "cpu_ms_per_step")
        for name, other in (("a_dbos_step", alone), ("a_dbos_workflow", workflow_each))
    }
    found = {
        "dbos_steps": alone,
        "dbos_workflows": workflow_each,
        "pipelines": ours,
        "ratio": ratios,
        "triggers": fired,
    }
    return found, lost + abs(triggers - int(fired["runs_begun"]))


@contextmanager
def databases(*, postgresql: bool) -> Iterator[Fresh]:
    """Yield what makes databases."""
    if not postgresql:
        with tempfile.TemporaryDirectory() as folder:
            yield lambda name: f"sqlite:///{folder}/{name}.db"
        return
    with postgres() as server:
        engine = create_engine(server, isolation_level="AUTOCOMMIT")

        def fresh(name: str) -> str:
            with engine.connect() as connection:
                connection.execute(text(f"CREATE DATABASE {name}"))
            return server.replace("/postgres?", f"/{name}?")

        yield fresh
        engine.dispose()


def main() -> int:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--triggers", type=int, default=1000)
    parser.add_argument("--postgresql", action="store_true")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with databases(postgresql=options.postgresql) as fresh:
        figures, lost = asyncio.run(measure(fresh, options.runs, options.steps, options.triggers))
    print(
        json.dumps(
            {name: {key: round(one, 2) for key, one in part.items()} for name, part in figures.items()}, indent=1
        )
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
