"""Durable tries, by DBOS: each is one workflow whose parts are kept, so that a restart continues where it was.

DBOS runs in a thread of its own with its own event loop, because it takes over the loop's threads and ends them when
it ends. Only the leader runs it, always under one executor id: whoever leads next continues what the last one began.
A workflow is one line of parts, and its decisions are in our own tables, so that DBOS never has to replay a branch.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, Final

import structlog
from dbos import DBOS, DBOSPortableJSONSerializer, SetWorkflowID
from sqlalchemy import create_engine

from jobs.database import IDLE_SECONDS, address_of
from pipelines.performing import Once
from pipelines.store import Try

log = structlog.get_logger(__name__)

EXECUTOR: Final = "atoll"
ENGINE_VERSION: Final = "1"
"""Raise it when the parts of a try change: tries of other versions are not continued."""
STEPS_SUFFIX: Final = "-steps"

ENDED: Final = ("SUCCESS", "ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED")
"""DBOS's words for a workflow that does not go on."""

Perform = Callable[[Try, Once], Awaitable[None]]


class _Current:
    """What the workflow performs with; DBOS knows functions by their names alone."""

    perform: Perform | None = None
    ended: Callable[[Try], None] | None = None


@DBOS.workflow(name="try", max_recovery_attempts=None)
async def _try(run_id: str, key: str, attempt: int) -> None:
    perform, ended = _Current.perform, _Current.ended
    assert perform is not None
    assert ended is not None
    await perform(Try(run_id, key, attempt), _once)
    ended(Try(run_id, key, attempt))


async def _once(name: str, part: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        return await part()

    return await DBOS.run_step_async({"name": name}, run)


async def start_try(one: Try) -> None:
    """Start a try; if it was started before, nothing happens."""
    with SetWorkflowID(f"{one.run_id}/{one.key}/{one.attempt}"):
        await DBOS.start_workflow_async(_try, one.run_id, one.key, one.attempt)


async def forget_tries(before: datetime, count: int) -> int:
    """Remove the rows of tries that ended before a time, a bounded number; return of how many.

    The end of such a try is recorded in our own tables, so it is never started again.
    """
    ended = await DBOS.list_workflows_async(
        status=list(ENDED), completed_before=before.isoformat(), limit=count, load_input=False, load_output=False
    )
    if ended:
        await DBOS.delete_workflows_async([one.workflow_id for one in ended])
    return len(ended)


def steps_url(url: str) -> str:
    """Return the URL of the database with DBOS's tables: beside a file of SQLite another one, else the same."""
    address = address_of(url)
    if address.get_backend_name() == "sqlite" and address.database:
        stem, dot, suffix = address.database.rpartition(".")
        name = f"{stem}{STEPS_SUFFIX}{dot}{suffix}" if dot else f"{address.database}{STEPS_SUFFIX}"
        address = address.set(database=name)
    return address.render_as_string(hide_password=False)


async def in_own_loop(
    url: str, serve: Callable[[], Awaitable[None]], perform: Perform, ended: Callable[[Try], None]
) -> None:
    """Launch DBOS in a thread with its own loop, and run `serve` there until cancelled or until it fails."""
    inner: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    begun = threading.Event()

    async def work() -> None:
        stop = asyncio.Event()
        inner.append((asyncio.get_running_loop(), stop))
        begun.set()
        _Current.perform, _Current.ended = perform, ended
        _launch(url)
        task, stopping = asyncio.ensure_future(serve()), asyncio.ensure_future(stop.wait())
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        DBOS.destroy()  # before the tasks of tries end, so that their end is not recorded
        if task.done():
            task.result()

    with ThreadPoolExecutor(1, thread_name_prefix="pipelines") as threads:
        working = asyncio.wrap_future(threads.submit(asyncio.run, work()))
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            begun.wait()
            inner[0][0].call_soon_threadsafe(inner[0][1].set)
            await asyncio.wait((working,))
            raise


def _launch(url: str) -> None:
    address = steps_url(url)
    if address.startswith("sqlite"):
        engine = create_engine(address)
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        engine.dispose()
    logging.getLogger("dbos").setLevel(logging.ERROR)
    DBOS(
        config={
            "name": "atoll",
            "system_database_url": address,
            "sys_db_idle_transaction_timeout_sec": IDLE_SECONDS,
            "application_version": ENGINE_VERSION,
            "executor_id": EXECUTOR,
            "serializer": DBOSPortableJSONSerializer(),
            "log_level": "ERROR",
        }
    )
    DBOS.launch()
