"""The route of the logs of a job: from its pods while they are there, else from the archive of logs."""

from collections.abc import AsyncGenerator
from typing import Annotated, Final

import structlog
from fastapi import FastAPI, Query
from fastapi.responses import Response, StreamingResponse

from atoll.jobs.permissions import JobPermission
from atoll.kube.errors import ApiError, KubeError
from jobs.asking import OneJob
from jobs.log_archive import ArchiveUnavailable, LogArchive, LogMissing, last_lines
from jobs.log_keeping import kept_logs, place_in_archive
from jobs.pod_logs import NoPods
from jobs.problems import ApiRefusal, ProblemDetails, documented, problem
from jobs.records import JobRecord

log = structlog.get_logger(__name__)

LOGS: Final = "/api/clusters/{cluster}/jobs/{job_id}/logs"
TAIL_MAX: Final = 100_000
ARCHIVE: Final = "Atoll-Log-Archive"
"""Header with the place of a log that is from the archive."""
TEXT: Final = "text/plain; charset=utf-8"
ANSWER: Final = {
    "description": "the output of the containers",
    "content": {"text/plain": {"schema": {"type": "string"}}},
    "headers": {ARCHIVE: {"description": "where the log is, if it is from the archive", "schema": {"type": "string"}}},
}


def add_log_routes(app: FastAPI) -> None:
    """Add the route to the application."""
    refusals = documented(401, 403, 404, 409, 422, 429, 503)
    app.get(LOGS, response_class=StreamingResponse, responses=refusals | {200: ANSWER})(show_logs)


async def show_logs(
    asked: OneJob,
    tail: Annotated[int, Query(ge=0, le=TAIL_MAX, description="lines to return, from the end")] = 100,
    follow: Annotated[bool, Query(description="keep streaming new lines")] = False,  # noqa: FBT002
    pod: Annotated[
        str | None, Query(max_length=253, description="name of a pod of the job; its first pod by default")
    ] = None,
) -> Response:
    """Stream the logs of a pod of a job; from the archive if it has them and the cluster does not."""
    record = await asked.allowed(JobPermission.LOGS)
    chunks = asked.parts.logs.read(record, pod=pod, tail=tail, follow=follow)
    try:
        first = await anext(chunks, b"")
    except (NoPods, KubeError) as error:
        place = place_in_archive(record, pod)
        if asked.parts.archive is None or place is None:
            raise ApiRefusal(_refusal(error, record)) from error
        text = last_lines(await _archived(asked.parts.archive, place), tail)
        return Response(text, media_type=TEXT, headers={ARCHIVE: place})
    return StreamingResponse(_chained(first, chunks), media_type=TEXT)


async def _archived(archive: LogArchive, place: str) -> bytes:
    """Return a log of the archive. Raises ApiRefusal."""
    try:
        return await archive.read(place)
    except LogMissing as error:
        raise ApiRefusal(problem(409, "no-logs", "No logs", str(error))) from error
    except ArchiveUnavailable as error:
        told = problem(503, "unavailable", "The archive of logs does not answer", str(error))
        raise ApiRefusal(told, headers={"Retry-After": "5"}) from error


def _refusal(error: NoPods | KubeError, record: JobRecord) -> ProblemDetails:
    """Return why there is no log; also why there is none in the archive, if it was tried."""
    if isinstance(error, NoPods):
        newest = kept_logs(record)[-1:]
        whys = [why for one in newest for why in (one.message, *one.pods.values()) if why]
        archived = f"; not archived: {whys[0]}" if whys else ""
        return problem(409, "no-pods", "No pods", f"{error}{archived}")
    if isinstance(error, ApiError):
        return problem(409, "no-logs", "No logs", f"the cluster returns no logs: {error.message}")
    return problem(503, "unavailable", "The cluster does not answer", str(error))


async def _chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield a stream whose first chunk was read ahead. A lost connection ends it: its status was sent already."""
    try:
        yield first
        async for chunk in rest:
            yield chunk
    except KubeError as error:
        log.info("Lost the logs of a pod", err=str(error))
    finally:
        await rest.aclose()
