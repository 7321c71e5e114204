"""Routes of endpoints: a model or another service that answers at a port, deployed directly.

An endpoint is a job of type service that somebody submitted and no pipeline did; it has the id of that job, and the
routes of jobs work for it too.
"""

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Final
from uuid import UUID

from fastapi import FastAPI, Header, Request, Response
from pydantic import BaseModel, Field

from atoll.jobs.container import JobContainer
from atoll.jobs.model import Job
from atoll.jobs.permissions import AccessAnswer, JobCaller, JobPermission, seen_scopes
from atoll.jobs.servers import PORT as MODEL_PORT
from atoll.jobs.states import ENDED, JobState
from atoll.jobs.words import DeploymentType, JobType, SourceType
from atoll.ml.document import Document, read
from atoll.ml.problems import AttributeProblem
from jobs.api_parts import DOCUMENT_TYPES, ApiParts, Caller, Parts, check_any_cluster, check_media_type
from jobs.asking import Asked, PageNumber, PageSize, SoughtText
from jobs.audit import AuditEntry, action_of
from jobs.creating import created_job
from jobs.errors import RecordUnreadable
from jobs.problems import documented, mistaken, not_found
from jobs.records import JobRecord
from jobs.store import AUTO, JobFilter, ask_to_cancel, list_jobs
from jobs.submission import Submission
from jobs.views import job_of

ENDPOINTS: Final = "/api/endpoints"
ENDPOINT: Final = ENDPOINTS + "/{endpoint_id}"
ACTIVE: Final = tuple(state for state in JobState if state not in ENDED)
FIXED: Final = {"job_type": JobType.SERVICE.value, "source_type": SourceType.DIRECT.value}
"""What the body may leave out, and may not say otherwise."""


class EndpointView(BaseModel):
    """An endpoint."""

    id: Annotated[str, Field(description="that of its job")]
    name: str
    status: JobState
    message: Annotated[str, Field(description="why its job is in this state")]
    url: Annotated[str | None, Field(description="where it answers within its cluster; null without a port")]
    is_ready: Annotated[bool, Field(description="its pods run")]
    cluster_id: str
    tenant_id: str
    project_id: str | None
    created_by: str
    created_at: datetime


class EndpointListView(BaseModel):
    """One page of endpoints that have not ended, newest first."""

    items: list[EndpointView]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]


def add_endpoint_routes(app: FastAPI) -> None:
    """Add the routes to the application."""
    content = {one: {"schema": {"type": "object"}} for one in DOCUMENT_TYPES[:2]}
    app.post(
        ENDPOINTS,
        status_code=201,
        responses=documented(400, 401, 403, 404, 409, 413, 415, 422, 429, 503),
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )(deploy_endpoint)
    app.get(ENDPOINTS, responses=documented(401, 404, 422, 429, 503))(list_endpoints)
    app.get(ENDPOINT, responses=documented(401, 404, 422, 429, 503))(show_endpoint)
    app.delete(ENDPOINT, status_code=202, responses=documented(401, 403, 404, 409, 422, 429, 503))(delete_endpoint)


async def deploy_endpoint(
    request: Request,
    response: Response,
    parts: Parts,
    caller: Caller,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> EndpointView:
    """Deploy an endpoint: a job without job_type. `cluster_id` names its cluster; without it the service chooses."""
    check_media_type(request, what="endpoint")
    body, cluster = _service_job(await request.body())
    await check_any_cluster(cluster, parts)
    record, is_new = await created_job(parts, Submission(body, caller, idempotency_key), cluster)
    response.status_code = 201 if is_new else 200
    response.headers["Location"] = f"{ENDPOINTS}/{record.id}"
    return _view(record)


def _service_job(body: bytes) -> tuple[bytes | Document, str]:
    """Return the job of an endpoint and its cluster. A body that is no mapping is left to the checks of jobs."""
    found = read(body)
    if isinstance(found, AttributeProblem) or not isinstance(found.value, dict):
        return body, AUTO
    document = dict(found.value)
    for field, value in FIXED.items():
        if document.setdefault(field, value) != value:
            raise mistaken(field, document[field], f"of an endpoint it is {value}", "remove it")
    cluster = document.pop("cluster_id", None)
    if cluster is not None and not isinstance(cluster, str):
        raise mistaken("cluster_id", cluster, "must be the name of a cluster", "correct it")
    return replace(found, value=document), cluster or AUTO


async def list_endpoints(
    parts: Parts,
    caller: Caller,
    name: SoughtText = None,
    page: PageNumber = 1,
    page_size: PageSize = 20,
) -> EndpointListView:
    """List the endpoints that the caller may see."""
    wanted = JobFilter(
        None, seen_scopes(caller), ACTIVE, job_type=JobType.SERVICE, source_type=SourceType.DIRECT, name=name
    )
    found = await parts.database.read(lambda session: list_jobs(session, wanted, page=page, page_size=page_size))
    await parts.audit.note(AuditEntry(caller.name, action_of(JobPermission.LIST), AccessAnswer.ALLOWED, "", ""))
    items = [_view(record) for record in found.records]
    return EndpointListView(items=items, page=page, page_size=page_size, total=found.total)


async def show_endpoint(endpoint_id: UUID, parts: Parts, caller: Caller) -> EndpointView:
    """Show an endpoint, also one that has ended."""
    return _view(await _allowed(parts, caller, str(endpoint_id), JobPermission.VIEW))


async def delete_endpoint(endpoint_id: UUID, parts: Parts, caller: Caller) -> EndpointView:
    """Delete an endpoint: its job is cancelled once none of its objects is left in the cluster."""
    found = await _allowed(parts, caller, str(endpoint_id), JobPermission.CANCEL)
    now = parts.now()
    record = await parts.database.write(lambda session: ask_to_cancel(session, found.id, now=now, actor=caller.name))
    parts.wake(record.id)
    return _view(record)


async def _allowed(parts: ApiParts, caller: JobCaller, endpoint_id: str, permission: JobPermission) -> JobRecord:
    """Return the job of an endpoint if the caller has the permission. Raises JobUnknown, ApiRefusal."""
    asked = Asked(parts, caller, AUTO, endpoint_id)
    record = await asked.allowed(JobPermission.VIEW)
    if {"job_type": record.job_type, "source_type": record.source_type} != FIXED:
        raise not_found(f"job {record.name} ({record.id}) is no endpoint: use the routes of jobs")
    return await asked.allowed(permission)


def _port(job: Job) -> int | None:
    """Return the port at which a job answers: its first one, or that of the server of its model."""
    container = job.container or JobContainer()
    if container.ports:
        return container.ports[0].port
    is_served = job.deployment_type is DeploymentType.MODEL and not container.command and not container.args
    return MODEL_PORT if is_served else None


def _view(record: JobRecord) -> EndpointView:
    try:
        port = _port(job_of(record))
    except RecordUnreadable:
        port = None
    return EndpointView(
        id=record.id,
        name=record.name,
        status=JobState(record.state),
        message=record.message,
        url=f"http://{record.name}.{record.namespace}:{port}" if port is not None else None,
        is_ready=record.state == JobState.RUNNING,
        cluster_id=record.cluster_id,
        tenant_id=record.tenant_id,
        project_id=record.project_id,
        created_by=record.created_by,
        created_at=record.created_at,
    )
