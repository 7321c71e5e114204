"""Routes of pipelines and their runs, in the job service's API, with its callers, permissions and problems.

The checks always run in this order: authenticate the caller, find the pipeline and check that the caller may see it,
check that the caller may do this. A pipeline belongs to a tenant as a job does, and the same roles apply.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final
from uuid import UUID

import structlog
from fastapi import Body, Depends, FastAPI, Header, Request, Response
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from atoll.jobs.permissions import AccessAnswer, JobCaller, JobOwnership, JobPermission, decide, seen_scopes
from atoll.ml.envelope import WorkflowEnvelope, parse
from atoll.pipelines.documents import parse_pipeline
from atoll.pipelines.model import ENTRIES_MAX, Pipeline
from atoll.pipelines.workflows import Runners, WorkflowMistake, pipeline_of_workflow
from jobs.api_parts import DOCUMENT_TYPES, ApiParts, Caller, Parts, check_media_type
from jobs.asking import PageNumber, PageSize, SoughtText
from jobs.audit import AuditEntry
from jobs.problems import ApiRefusal, documented, invalid, mistaken, problem, response_of
from jobs.submission import KEY_LENGTH_MAX
from pipelines.errors import (
    DeploymentTaken,
    DeploymentUnknown,
    KeyTaken,
    PipelineDeployed,
    PipelineError,
    PipelineUnknown,
    RunActive,
    RunNotEnded,
    RunUnknown,
    TriggerUnknown,
)
from pipelines.inputs import checked_inputs
from pipelines.notifying import messages_of
from pipelines.performing import Function
from pipelines.records import PipelineRecord, RunRecord, graph_in
from pipelines.store import (
    RunRequest,
    apply_pipeline,
    cancel_run,
    create_run,
    get_pipeline,
    get_run,
    list_pipelines,
    list_runs,
    remove_pipeline,
    rerun_run,
    steps_of,
)
from pipelines.views import (
    MessageListView,
    PipelineListView,
    PipelineView,
    RunListView,
    RunView,
    message_view,
    pipeline_view,
    run_view,
)

log = structlog.get_logger(__name__)

PIPELINES: Final = "/api/pipelines"
PIPELINE: Final = PIPELINES + "/{pipeline_id}"
RUNS: Final = PIPELINE + "/executions"
RUN: Final = RUNS + "/{run_id}"
NOTE_LENGTH_MAX: Final = 512


class RunBody(BaseModel):
    """Inputs of a run; those that are not given have their defaults."""

    inputs: Annotated[dict[str, Any], Field(max_length=ENTRIES_MAX)] = Field(default_factory=dict)


def add_pipelines(app: FastAPI, functions: Mapping[str, Function], runners: Runners) -> None:
    """Add the routes. `functions`: the registered ones; `runners`: what runs each type of envelope."""
    app.state.functions, app.state.runners = frozenset(functions), runners
    content = {one: {"schema": {"type": "object"}} for one in DOCUMENT_TYPES[:2]}
    app.post(
        PIPELINES,
        status_code=201,
        responses=documented(400, 401, 403, 413, 415, 422, 429, 503),
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )(apply)
    app.get(PIPELINES, responses=documented(401, 422, 429, 503))(list_all_pipelines)
    app.get(PIPELINE, responses=documented(401, 404, 422, 429, 503))(show_pipeline)
    app.delete(PIPELINE, status_code=204, responses=documented(401, 403, 404, 409, 422, 429, 503))(delete_pipeline)
    app.post(PIPELINE + "/execute", status_code=201, responses=documented(401, 403, 404, 409, 422, 429, 503))(execute)
    app.get(RUNS, responses=documented(401, 404, 422, 429, 503))(list_pipeline_runs)
    app.get(RUN, responses=documented(401, 404, 422, 429, 503))(show_run)
    app.get(RUN + "/deliveries", responses=documented(401, 404, 422, 429, 503))(list_messages)
    app.delete(RUN, status_code=202, responses=documented(401, 403, 404, 422, 429, 503))(cancel_pipeline_run)
    app.post(RUN + "/rerun", status_code=201, responses=documented(401, 403, 404, 409, 422, 429, 503))(run_again)
    app.add_exception_handler(PipelineError, _on_error)


@dataclass(frozen=True, slots=True)
class AskedPipeline:
    """A request about one pipeline."""

    parts: ApiParts
    caller: JobCaller
    pipeline_id: str

    async def allowed(self, permission: JobPermission, owner: str | None = None) -> PipelineRecord:
        """Return the record if the caller has the permission. `owner`: who began the run in question.

        Raises PipelineUnknown, ApiRefusal.
        """
        record = await self.parts.database.read(lambda session: get_pipeline(session, self.pipeline_id))
        whose = JobOwnership(record.tenant_id, record.project_id, owner or record.created_by)
        answers = [decide(self.caller, one, whose) for one in (JobPermission.VIEW, permission)]
        answer = answers[0] if answers[0] is not AccessAnswer.ALLOWED else answers[1]
        await note(self.parts, self.caller, permission, answer, record)
        if answers[0] is not AccessAnswer.ALLOWED:
            raise PipelineUnknown(self.pipeline_id)
        if answers[1] is not AccessAnswer.ALLOWED:
            raise _refused(self.caller, permission, record.name)
        return record

    async def run(self, run_id: str, permission: JobPermission) -> RunRecord:
        """Return a run of the pipeline if the caller has the permission. Raises RunUnknown, ApiRefusal."""
        await self.allowed(JobPermission.VIEW)
        record = await self.parts.database.read(lambda session: get_run(session, run_id))
        if record.pipeline_id != self.pipeline_id:
            raise RunUnknown(run_id)
        await self.allowed(permission, record.created_by)
        return record

    async def write_run(self, change: Callable[[Session], RunRecord]) -> RunView:
        """Change a run, and return its view."""

        def work(session: Session) -> RunView:
            record = change(session)
            return run_view(record, steps_of(session, record.id))

        return await self.parts.database.write(work)


async def note(
    parts: ApiParts,
    caller: JobCaller,
    permission: JobPermission,
    answer: AccessAnswer,
    record: PipelineRecord | None,
) -> None:
    """Audit a decision."""
    tenant, found, project = ("", "", None) if record is None else (record.tenant_id, record.id, record.project_id)
    action = f"pipeline:{permission}"
    await parts.audit.note(AuditEntry(caller.name, action, answer, tenant, found, "pipeline", project))


async def asked_for_pipeline(pipeline_id: UUID, parts: Parts, caller: Caller) -> AskedPipeline:
    """Return the request about one pipeline."""
    return AskedPipeline(parts, caller, str(pipeline_id))


OnePipeline = Annotated[AskedPipeline, Depends(asked_for_pipeline)]


def _refused(caller: JobCaller, permission: JobPermission, name: str) -> ApiRefusal:
    detail = f"{caller.name} may not {permission} pipeline {name}"
    return ApiRefusal(problem(403, "not-allowed", "Not allowed", detail))


# Routes


async def apply(request: Request, response: Response, parts: Parts, caller: Caller) -> PipelineView:
    """Record a pipeline, or change the one of that name in the tenant. An envelope of a workflow becomes a pipeline."""
    check_media_type(request, what="pipeline")
    pipeline = _parsed(await request.body(), request, parts)
    tenant = _tenant(pipeline, caller)
    whose = JobOwnership(tenant, pipeline.project_id, caller.name)
    answer = decide(caller, JobPermission.CREATE, whose)
    if answer is not AccessAnswer.ALLOWED:
        await note(parts, caller, JobPermission.CREATE, answer, None)
        detail = f"{caller.name} may not create pipelines in tenant {tenant}"
        raise ApiRefusal(problem(403, "not-allowed", "Not allowed", detail))
    known = await parts.database.read(lambda session: list_pipelines(session, [(tenant, None)], name=pipeline.name))
    if known.records:
        await AskedPipeline(parts, caller, known.records[0].id).allowed(JobPermission.DELETE)
    record, is_new = await parts.database.write(
        lambda session: apply_pipeline(session, pipeline, tenant=tenant, created_by=caller.name, now=parts.now())
    )
    await note(parts, caller, JobPermission.CREATE, answer, record)
    response.status_code = 201 if is_new else 200
    response.headers["Location"] = f"{PIPELINES}/{record.id}"
    return pipeline_view(record)


def _parsed(body: bytes, request: Request, parts: ApiParts) -> Pipeline:
    policy = parts.rendering.policy()
    envelope = parse(body, policy)
    if isinstance(envelope.envelope, WorkflowEnvelope):
        notes = [str(one)[:NOTE_LENGTH_MAX] for one in envelope.notes[:ENTRIES_MAX]]
        try:
            document = pipeline_of_workflow(envelope.envelope, request.app.state.runners)
            body = json.dumps(document | {"notes": notes}).encode()
        except WorkflowMistake as mistake:
            raise invalid((mistake.problem,)) from mistake
    parsed = parse_pipeline(body, functions=request.app.state.functions, policy=policy)
    if parsed.pipeline is not None:
        return parsed.pipeline
    refused = invalid(parsed.problems)
    changes = {"type": "urn:atoll:invalid-pipeline", "title": "The pipeline has mistakes"}
    if not parsed.is_readable:
        changes |= {"title": "The body cannot be read"}
    refused.problem = refused.problem.model_copy(update={**changes, "status": 422 if parsed.is_readable else 400})
    raise refused


def _tenant(pipeline: Pipeline, caller: JobCaller) -> str:
    """Return the tenant that the pipeline names, or the only one in which the caller may create jobs."""
    if pipeline.tenant_id is not None:
        return pipeline.tenant_id
    mine = caller.tenants(JobPermission.CREATE)
    if len(mine) == 1:
        return mine[0]
    raise mistaken(
        "tenant_id", None, "must say whose pipeline it is", f"name one of {', '.join(mine)}" if mine else "name one"
    )


async def list_all_pipelines(
    parts: Parts,
    caller: Caller,
    name: SoughtText = None,
    page: PageNumber = 1,
    page_size: PageSize = 50,
) -> PipelineListView:
    """List the pipelines that the caller may see, by name."""
    scopes = seen_scopes(caller)
    found = await parts.database.read(
        lambda session: list_pipelines(session, scopes, name=name, page=page, page_size=page_size)
    )
    items = [pipeline_view(one) for one in found.records]
    return PipelineListView(items=items, page=page, page_size=page_size, total=found.total)


async def show_pipeline(asked: OnePipeline) -> PipelineView:
    """Show a pipeline."""
    return pipeline_view(await asked.allowed(JobPermission.VIEW))


async def delete_pipeline(asked: OnePipeline) -> Response:
    """Delete a pipeline with its runs and triggers, once no run is active; jobs keep their records."""
    await asked.allowed(JobPermission.DELETE)
    await asked.parts.database.write(lambda session: remove_pipeline(session, asked.pipeline_id))
    return Response(status_code=204)


async def execute(
    asked: OnePipeline,
    response: Response,
    body: Annotated[RunBody | None, Body()] = None,
    idempotency_key: Annotated[str | None, Header(max_length=KEY_LENGTH_MAX)] = None,
) -> RunView:
    """Begin a run. A repeated idempotency key returns the run begun before, with status 200."""
    owner = await asked.allowed(JobPermission.CREATE)
    inputs = checked_inputs(
        graph_in(owner.document, f"pipeline {owner.name}").pipeline, body.inputs if body is not None else {}
    )
    request = RunRequest(inputs, asked.caller.name, f"{asked.caller.name}, by hand", idempotency_key)
    now, is_new = asked.parts.now(), False

    def change(session: Session) -> RunRecord:
        nonlocal is_new
        record, is_new = create_run(session, owner.id, request, now)
        return record

    view = await asked.write_run(change)
    response.status_code = 201 if is_new else 200
    return view


async def list_pipeline_runs(asked: OnePipeline, page: PageNumber = 1, page_size: PageSize = 20) -> RunListView:
    """List the runs of a pipeline, newest first."""
    await asked.allowed(JobPermission.VIEW)
    found = await asked.parts.database.read(
        lambda session: list_runs(session, asked.pipeline_id, page=page, page_size=page_size)
    )
    items = [run_view(one) for one in found.records]
    return RunListView(items=items, page=page, page_size=page_size, total=found.total)


async def show_run(asked: OnePipeline, run_id: UUID) -> RunView:
    """Show a run and its steps."""
    record = await asked.run(str(run_id), JobPermission.VIEW)
    return run_view(record, await asked.parts.database.read(lambda session: steps_of(session, record.id)))


async def list_messages(asked: OnePipeline, run_id: UUID) -> MessageListView:
    """List what the notification steps of a run sent, and to whom."""
    await asked.run(str(run_id), JobPermission.VIEW)
    found = await asked.parts.database.read(lambda session: messages_of(session, str(run_id)))
    return MessageListView(items=[message_view(one) for one in found])


async def cancel_pipeline_run(asked: OnePipeline, run_id: UUID) -> RunView:
    """Cancel a run and the jobs of its steps."""
    await asked.run(str(run_id), JobPermission.CANCEL)
    now, actor = asked.parts.now(), asked.caller.name
    return await asked.write_run(lambda session: cancel_run(session, str(run_id), now=now, actor=actor))


async def run_again(
    asked: OnePipeline,
    run_id: UUID,
    response: Response,
    idempotency_key: Annotated[str | None, Header(max_length=KEY_LENGTH_MAX)] = None,
) -> RunView:
    """Begin a run that keeps what succeeded in an ended one. A repeated idempotency key returns the run begun before,
    with status 200."""
    await asked.run(str(run_id), JobPermission.RETRY)
    now, actor, is_new = asked.parts.now(), asked.caller.name, False

    def change(session: Session) -> RunRecord:
        nonlocal is_new
        record, is_new = rerun_run(session, str(run_id), now=now, actor=actor, key=idempotency_key)
        return record

    view = await asked.write_run(change)
    response.status_code = 201 if is_new else 200
    return view


# Errors

_KINDS: Final[tuple[tuple[type[PipelineError], int, str, str], ...]] = (
    (PipelineUnknown, 404, "not-found", "Not found"),
    (RunUnknown, 404, "not-found", "Not found"),
    (TriggerUnknown, 404, "not-found", "Not found"),
    (DeploymentUnknown, 404, "not-found", "Not found"),
    (DeploymentTaken, 409, "name-taken", "The name is taken"),
    (PipelineDeployed, 409, "deployed", "The pipeline belongs to a use case"),
    (RunActive, 409, "run-active", "Another run is active"),
    (RunNotEnded, 409, "run-not-ended", "The run cannot be run again"),
    (KeyTaken, 409, "key-reused", "The idempotency key belongs to another run"),
)


async def _on_error(_request: Request, error: Exception) -> Response:
    for kind, status, name, title in _KINDS:
        if isinstance(error, kind):
            return response_of(problem(status, name, title, str(error)))
    raise error
