"""The HTTP API of the job service: a FastAPI application (OpenAPI 3.1), its routes and the checks before them.

Every response is a record, a page, a stream, or problem details (RFC 9457). The checks always run in this order:
authenticate the caller, find the job and check that the caller may see it, check that the caller may do this.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final

import structlog
from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from fastapi.openapi.utils import get_openapi
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from atoll import VERSION
from atoll.api.forms import message_of
from atoll.jobs.model import Job
from atoll.jobs.permissions import AccessAnswer, JobOwnership, JobPermission, seen_scopes
from atoll.jobs.queue_file import QueueFile
from atoll.jobs.states import IllegalStep, JobState
from atoll.jobs.words import JobType, Priority, SourceType
from atoll.ml.problems import shown
from jobs.accounts import resume_within
from jobs.api_parts import (
    DOCUMENT_TYPES,
    ApiParts,
    Caller,
    Cluster,
    Parts,
    check_any_cluster,
    check_media_type,
    parts_of,
)
from jobs.asking import OneJob, PageNumber, PageSize, SoughtText
from jobs.audit import AuditEntry, action_of
from jobs.audit_routes import add_audit_routes
from jobs.changing import JobChanges, apply_changes, changed_job
from jobs.cluster_api import add_cluster_routes
from jobs.creating import created_job
from jobs.endpoint_routes import add_endpoint_routes
from jobs.errors import JobServiceError
from jobs.exec_routes import add_exec_routes
from jobs.log_routes import add_log_routes
from jobs.offer_routes import add_offer_routes
from jobs.page.gpus import add_gpu_routes
from jobs.page.routes import add_page_routes
from jobs.problems import (
    ApiRefusal,
    FieldFault,
    ProblemDetails,
    documented,
    problem,
    problem_of,
    response_of,
)
from jobs.queue_api import QUEUES, add_queue_routes
from jobs.queue_store import queue_file_of, queues_in
from jobs.schedule_routes import add_schedule_routes
from jobs.store import (
    AUTO,
    JobFilter,
    ask_to_cancel,
    ask_to_pause,
    list_events,
    list_jobs,
    retry_job,
)
from jobs.submission import Submission, check_critical, count_submission
from jobs.usage_routes import add_usage_routes
from jobs.views import JobEventListView, JobListView, JobView, event_views, view_of
from jobs.webhook_routes import add_webhook_routes

log = structlog.get_logger(__name__)

JOBS: Final = "/api/clusters/{cluster}/jobs"
JOB: Final = JOBS + "/{job_id}"
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


def build_api(parts: ApiParts) -> FastAPI:
    """Return the application."""
    app = FastAPI(title="Atoll job service", version=VERSION, docs_url=None, redoc_url=None)
    app.state.parts = parts
    app.post(JOBS, status_code=201, responses=documented(400, 401, 403, 404, 409, 413, 415, 422, 429, 503))(submit)
    app.get(JOBS, responses=documented(401, 404, 422, 429, 503))(list_all)
    app.get(JOB, responses=documented(401, 404, 422, 429, 503))(show)
    app.delete(JOB, status_code=202, responses=documented(401, 403, 404, 409, 422, 429, 503))(cancel)
    app.post(JOB + "/retry", responses=documented(401, 403, 404, 409, 422, 429, 503))(retry)
    app.patch(JOB, responses=documented(400, 401, 403, 404, 409, 422, 429, 503))(change)
    app.post(JOB + "/pause", responses=documented(401, 403, 404, 409, 422, 429, 503))(pause)
    app.post(JOB + "/resume", responses=documented(401, 403, 404, 409, 422, 429, 503))(resume)
    app.get(JOB + "/events", responses=documented(401, 404, 422, 429, 503))(show_events)
    add_log_routes(app)
    add_usage_routes(app)
    add_exec_routes(app)
    add_audit_routes(app)
    add_schedule_routes(app)
    add_webhook_routes(app)
    add_queue_routes(app)
    add_cluster_routes(app)
    add_gpu_routes(app)
    add_endpoint_routes(app)
    add_offer_routes(app)
    add_page_routes(app)
    app.middleware("http")(_refuse_other_sites)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


# Routes


async def submit(
    cluster: Cluster,
    request: Request,
    response: Response,
    parts: Parts,
    caller: Caller,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> JobView:
    """Record a job. A repeated idempotency key returns the job recorded before, with status 200.

    In cluster auto the service chooses the cluster, and the job shows the score sheet of that choice.
    """
    await check_any_cluster(cluster, parts)
    check_media_type(request, what="job")
    submission = Submission(await request.body(), caller, idempotency_key)
    record, is_new = await created_job(parts, submission, cluster)
    response.status_code = 201 if is_new else 200
    response.headers["Location"] = f"{JOBS.format(cluster=record.cluster_id)}/{record.id}"
    return view_of(record)


async def list_all(
    cluster: Cluster,
    parts: Parts,
    caller: Caller,
    status: Annotated[list[JobState] | None, Query(max_length=len(JobState))] = None,
    job_type: JobType | None = None,
    source_type: SourceType | None = None,
    project_id: SoughtText = None,
    name: SoughtText = None,
    page: PageNumber = 1,
    page_size: PageSize = 20,
) -> JobListView:
    """List the jobs that the caller may see, newest first; those of cluster auto are the jobs of all clusters."""
    await check_any_cluster(cluster, parts)
    wanted = JobFilter(
        cluster if cluster != AUTO else None,
        seen_scopes(caller),
        status or (),
        job_type=job_type,
        source_type=source_type,
        project_id=project_id,
        name=name,
    )
    found = await parts.database.read(lambda session: list_jobs(session, wanted, page=page, page_size=page_size))
    await parts.audit.note(AuditEntry(caller.name, action_of(JobPermission.LIST), AccessAnswer.ALLOWED, "", ""))
    items = [view_of(record) for record in found.records]
    return JobListView(items=items, page=page, page_size=page_size, total=found.total)


async def show(asked: OneJob) -> JobView:
    """Show a job and its state."""
    return view_of(await asked.allowed(JobPermission.VIEW))


async def change(asked: OneJob, changes: JobChanges) -> JobView:
    """Change policy, intent or labels of a job. Its objects keep what they have until the next attempt."""
    record = await asked.allowed(JobPermission.PRIORITY)
    now, actor, rendering = asked.parts.now(), asked.caller.name, asked.parts.rendering
    file = await asked.parts.database.read(lambda session: queue_file_of(session, record.cluster_id))
    changed = changed_job(record, changes, rendering, queues_in(file), now_seconds=now.timestamp())
    if changed.needs.priority is Priority.CRITICAL:
        check_critical(asked.caller, JobOwnership(record.tenant_id, record.project_id, record.created_by))
    if changed.moved_to is not None:
        count_submission(changed.moved_to, changed.needs, asked.parts, record.cluster_id)
    done = await asked.parts.database.write(
        lambda session: apply_changes(session, record, changed, asked.parts.prices, now, actor=actor)
    )
    asked.parts.wake(done.id)
    return view_of(done)


async def cancel(asked: OneJob) -> JobView:
    """Cancel a job: it is cancelled once none of its objects is left in the cluster."""
    await asked.allowed(JobPermission.CANCEL)
    now, actor = asked.parts.now(), asked.caller.name
    record = await asked.parts.database.write(
        lambda session: ask_to_cancel(session, asked.job_id, now=now, actor=actor)
    )
    asked.parts.wake(record.id)
    return view_of(record)


async def retry(asked: OneJob) -> JobView:
    """Retry a failed job, with its retry count reset."""
    await asked.allowed(JobPermission.RETRY)
    now, actor = asked.parts.now(), asked.caller.name
    record = await asked.parts.database.write(lambda session: retry_job(session, asked.job_id, now=now, actor=actor))
    asked.parts.wake(record.id)
    return view_of(record)


async def pause(asked: OneJob) -> JobView:
    """Pause a job: its objects are removed, its checkpoints stay, and it is pending until it is resumed."""
    await asked.allowed(JobPermission.CANCEL)
    now, actor = asked.parts.now(), asked.caller.name
    record = await asked.parts.database.write(lambda session: ask_to_pause(session, asked.job_id, now=now, actor=actor))
    asked.parts.wake(record.id)
    return view_of(record)


async def resume(asked: OneJob) -> JobView:
    """Resume a paused job: it is submitted again, from its last checkpoint if it has one."""
    await asked.allowed(JobPermission.RETRY)
    now, actor = asked.parts.now(), asked.caller.name
    record = await asked.parts.database.write(lambda session: resume_within(session, asked.job_id, now, actor=actor))
    asked.parts.wake(record.id)
    return view_of(record)


async def show_events(asked: OneJob, page: PageNumber = 1, page_size: PageSize = 50) -> JobEventListView:
    """Show the history of a job, oldest first."""
    await asked.allowed(JobPermission.VIEW)
    records, total = await asked.parts.database.read(
        lambda session: list_events(session, asked.job_id, page=page, page_size=page_size)
    )
    return JobEventListView(items=event_views(records), page=page, page_size=page_size, total=total)


# Errors


async def _refuse_other_sites(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse cross-site requests and, without tokens, requests whose Host is not a loopback name."""
    if request.headers.get("Sec-Fetch-Site", "none") == "cross-site":
        return response_of(problem(403, "other-site", "Cross-site request", "call the API from its own site"))
    if parts_of(request).settings.insecure_local and _host_name(request) not in LOOPBACK_NAMES:
        told = problem(421, "wrong-name", "Unknown host name", "call the API as localhost or 127.0.0.1")
        return response_of(told)
    return await call_next(request)


def _host_name(request: Request) -> str:
    host = request.headers.get("Host", "")
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0].lower()


async def _on_refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiRefusal)
    return response_of(error.problem, error.headers)


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, JobServiceError | IllegalStep)
    told = problem_of(error)
    return response_of(told, {"Retry-After": "5"} if told.status in (429, 503) else None)


async def _on_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError | WebSocketRequestValidationError)
    faults = [
        FieldFault(field=".".join(map(str, one["loc"][1:])), value=_shown_input(one), limit=message_of(one))
        for one in error.errors()
    ]
    detail = "; ".join(f"{one.field}{f' is {one.value}' if one.value else ''}: {one.limit}" for one in faults[:3])
    return response_of(problem(422, "invalid-request", "The request has mistakes", detail, faults))


def _shown_input(fault: Mapping[str, Any]) -> str:
    """Return the refused value; not that of a secret, nor a whole body, which may hold one."""
    is_open = len(fault["loc"]) > 1 and "secret" not in fault["loc"]
    return shown(fault.get("input")) if is_open else ""


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {404: "not-found", 405: "method"}.get(error.status_code, "refused")
    told = problem(error.status_code, kind, str(error.detail), str(error.detail))
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request))
    return response_of(told, headers)


def _methods(request: Request) -> list[str]:
    """Return every method of the path of a request; the framework names those of one route alone."""
    routes = [one for one in request.app.routes if isinstance(one, Route)]
    fitting = [one for one in routes if one.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for one in fitting for method in one.methods or ()})


async def _on_database(_request: Request, error: Exception) -> Response:
    log.warning("Cannot reach the database", err=str(error).partition("\n")[0])
    told = problem(503, "unavailable", "The database is unavailable", "the database does not answer; try again")
    return response_of(told, {"Retry-After": "2"})


_HANDLERS: Final = {
    ApiRefusal: _on_refused,
    JobServiceError: _on_error,
    IllegalStep: _on_error,
    RequestValidationError: _on_invalid,
    WebSocketRequestValidationError: _on_invalid,
    HTTPException: _on_http,
    OperationalError: _on_database,
}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description, with the schemas of submitted jobs and of problem responses."""
    if app.openapi_schema:
        return app.openapi_schema
    told = get_openapi(
        title=app.title, version=app.version, routes=app.routes, description="Records jobs and runs them."
    )
    schemas = told.setdefault("components", {}).setdefault("schemas", {})
    for model in (ProblemDetails, Job, QueueFile):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    schemas["Job"]["patternProperties"] = {"^ext_ml_": {"description": "an attribute, which may also be given here"}}
    for path, method, model in ((JOBS, "post", Job), (QUEUES, "put", QueueFile)):
        body = {"$ref": f"#/components/schemas/{model.__name__}"}
        content = {media_type: {"schema": body} for media_type in DOCUMENT_TYPES[:2]}
        told["paths"][path][method]["requestBody"] = {"required": True, "content": content}
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    told["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    told["security"] = [{"token": []}]
    app.openapi_schema = told
    return told
