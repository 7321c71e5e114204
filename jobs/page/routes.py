"""The HTTP interface of a page: static files, open to everybody who can connect, and one stream of what it shows.

The stream asks for the same token as the API. Everything about one job or run comes from the API's own routes.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import structlog
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from atoll.jobs.permissions import AccessAnswer, JobCaller, JobPermission
from atoll.service.pages import PAGE_HEADERS, STREAM_SECONDS_MAX, PageFiles, event, page_files
from jobs.api_parts import ApiParts, Caller, Parts
from jobs.audit import AuditEntry, action_of
from jobs.page.board import board_mark, read_board
from jobs.problems import ApiRefusal, problem

log = structlog.get_logger(__name__)

STATIC: Final = Path(__file__).parent / "static"
FILES: Final = page_files(STATIC, "jobs.html")
EVENTS: Final = "/page/events"
LOOK_SECONDS: Final = 2.0
"""How often a stream looks for changes."""
GPUS_SECONDS: Final = 15.0
"""How often it tells everything without one: GPUs are held and freed without a change of a job, and a watcher wants to
know that the stream is alive."""
WATCHERS_MAX: Final = 32
"""Of each page."""


@dataclass(frozen=True, slots=True)
class PageBoard:
    """What a stream tells a caller: `mark_of` is cheap, and differs after any change of what `read` returns."""

    mark_of: Callable[[Session, JobCaller], object]
    read: Callable[[Session, JobCaller, datetime], BaseModel]


JOBS_BOARD: Final = PageBoard(board_mark, read_board)


def add_page_routes(app: FastAPI) -> None:
    """Add the page of jobs to the application."""
    add_page(app, FILES, EVENTS, JOBS_BOARD)


def add_page(app: FastAPI, files: PageFiles, events: str, board: PageBoard) -> None:
    """Add a page to the application. `events`: path of its stream."""
    for path, (file, kind) in files.items():
        app.get(path, include_in_schema=False)(_file(file, kind))
    app.get(events, include_in_schema=False)(Watchers(board).stream)


class Watchers:
    """The open streams of a page."""

    def __init__(self, board: PageBoard) -> None:
        self.board = board
        self.count = 0

    async def stream(self, parts: Parts, caller: Caller) -> StreamingResponse:
        """Tell what the caller may see, again after each change, until they go or their time is over."""
        if self.count >= WATCHERS_MAX:
            told = f"{self.count} others watch already; close one of them, or use the command line"
            raise ApiRefusal(problem(503, "unavailable", "Too many watchers", told), headers={"Retry-After": "10"})
        await parts.audit.note(AuditEntry(caller.name, action_of(JobPermission.LIST), AccessAnswer.ALLOWED, "", ""))
        headers = {**PAGE_HEADERS, "X-Accel-Buffering": "no"}
        return StreamingResponse(self._counted(parts, caller), media_type="text/event-stream", headers=headers)

    async def _counted(self, parts: ApiParts, caller: JobCaller) -> AsyncGenerator[bytes, None]:
        self.count += 1
        try:
            async for message in looks(parts, caller, self.board):
                yield message
        finally:
            self.count -= 1


async def looks(parts: ApiParts, caller: JobCaller, board: PageBoard) -> AsyncGenerator[bytes, None]:
    """Yield a look at the board, then one after each change."""
    began = read = time.monotonic()
    mark: object = None
    trouble = b""
    while time.monotonic() - began < STREAM_SECONDS_MAX:
        before, trouble, now = trouble, b"", time.monotonic()
        try:
            seen = await parts.database.read(lambda session: board.mark_of(session, caller))
            if seen != mark or now - read >= GPUS_SECONDS:
                look = await parts.database.read(lambda session: board.read(session, caller, parts.now()))
                mark, read = seen, now
                yield event("look", look.model_dump_json().encode())
        except SQLAlchemyError as error:
            log.warning("Cannot read what a page shows", err=str(error).partition("\n")[0])
            mark, trouble = None, b"The database does not answer; trying again."
        if trouble != before:
            yield event("trouble", trouble)
        await asyncio.sleep(LOOK_SECONDS)


def _file(path: Path, kind: str) -> Callable[[], Awaitable[Response]]:
    content = path.read_bytes()

    async def handle() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=dict(PAGE_HEADERS))

    return handle
