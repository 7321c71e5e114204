"""Routes of use cases: their templates, and what is deployed of them.

A deployment belongs to a tenant as a pipeline does, with the same roles and the same order of checks.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from atoll.jobs.permissions import AccessAnswer, JobCaller, JobOwnership, JobPermission, decide, seen_scopes
from atoll.jobs.states import JobState
from atoll.pipelines.documents import parse_pipeline
from atoll.pipelines.model import ENTRIES_MAX
from atoll.pipelines.usecases import DeploymentState, UseCaseTemplate, deployment_state, endpoint, template_of
from atoll.pipelines.words import RunState
from jobs.api_parts import ApiParts, Caller, Parts
from jobs.asking import PageNumber, PageSize, SoughtText
from jobs.problems import ApiRefusal, documented, invalid, mistaken, problem
from jobs.settings import Project, Tenant
from pipelines.api import note
from pipelines.errors import DeploymentUnknown
from pipelines.records import DeploymentRecord, PipelineRecord
from pipelines.store import get_pipeline, get_run
from pipelines.usecases import (
    DeploymentRequest,
    delete_deployment,
    deploy,
    get_deployment,
    jobs_of,
    list_deployments,
)

TEMPLATES: Final = "/api/usecases/templates"
DEPLOY: Final = "/api/usecases/deploy"
DEPLOYMENTS: Final = "/api/usecases/deployments"
DEPLOYMENT: Final = DEPLOYMENTS + "/{deployment_id}"


class DeployBody(BaseModel):
    """A use case to deploy."""

    model_config = ConfigDict(extra="forbid")

    template_id: Annotated[str, Field(max_length=63)]
    name: Annotated[str, Field(max_length=37, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
    tenant_id: Tenant | None = None
    project_id: Project | None = None
    cluster_id: Annotated[str | None, Field(max_length=63)] = None
    parameters: Annotated[dict[str, Any], Field(max_length=ENTRIES_MAX)] = Field(default_factory=dict)


class TemplateView(BaseModel):
    """A template."""

    id: str
    description: str
    components: list[str]
    entrypoint: str
    parameters: Annotated[dict[str, Any], Field(description="JSON Schema of the parameters")]


class TemplateListView(BaseModel):
    """All templates."""

    items: list[TemplateView]


class ComponentView(BaseModel):
    """One service of a deployment."""

    name: str
    job_id: str | None
    status: JobState
    endpoint: Annotated[str | None, Field(description="where it answers within the cluster, once its job is recorded")]


class DeploymentView(BaseModel):
    """A deployment."""

    deployment_id: str
    name: str
    template_id: str
    tenant_id: str
    project_id: str | None
    status: DeploymentState
    message: Annotated[str, Field(description="why it could not be deployed")]
    pipeline_id: str
    parameters: dict[str, Any]
    components: list[ComponentView]
    entrypoint: str | None
    created_by: str
    created_at: datetime


class DeploymentListView(BaseModel):
    """One page of deployments, by name."""

    items: list[DeploymentView]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]


def add_usecases(app: FastAPI, templates: Sequence[UseCaseTemplate]) -> None:
    """Add the routes."""
    app.state.templates = templates
    app.get(TEMPLATES, responses=documented(401, 422, 429, 503))(list_templates)
    app.post(DEPLOY, status_code=202, responses=documented(401, 403, 409, 422, 429, 503))(deploy_usecase)
    app.get(DEPLOYMENTS, responses=documented(401, 422, 429, 503))(list_all_deployments)
    app.get(DEPLOYMENT, responses=documented(401, 404, 422, 429, 503))(show_deployment)
    app.delete(DEPLOYMENT, status_code=202, responses=documented(401, 403, 404, 422, 429, 503))(delete_usecase)


async def list_templates(request: Request, _caller: Caller) -> TemplateListView:
    """List the templates, with the schema of their parameters."""
    return TemplateListView(
        items=[
            TemplateView(
                id=one.id,
                description=one.description,
                components=[part.name for part in one.components],
                entrypoint=one.entrypoint,
                parameters=one.parameter_schema(),
            )
            for one in request.app.state.templates
        ]
    )


async def deploy_usecase(body: DeployBody, request: Request, parts: Parts, caller: Caller) -> DeploymentView:
    """Deploy a use case: its pipeline begins, and its components follow."""
    template = template_of(request.app.state.templates, body.template_id)
    if template is None:
        known = ", ".join(one.id for one in request.app.state.templates)
        raise mistaken("template_id", body.template_id, "there is no such template", f"name one of {known}")
    if body.cluster_id not in (None, parts.settings.cluster):
        told = f"use cases run in cluster {parts.settings.cluster}"
        raise mistaken("cluster_id", body.cluster_id, told, "remove it")
    asked = DeploymentRequest(template, body.name, _tenant(body, caller), body.project_id, body.parameters, caller.name)
    answer = decide(caller, JobPermission.CREATE, JobOwnership(asked.tenant, asked.project, caller.name))
    if answer is not AccessAnswer.ALLOWED:
        await note(parts, caller, JobPermission.CREATE, answer, None)
        detail = f"{caller.name} may not deploy use cases in tenant {asked.tenant}"
        raise ApiRefusal(problem(403, "not-allowed", "Not allowed", detail))
    problems = template.mistakes(body.parameters)
    if problems:
        raise invalid(problems)
    namespace = parts.settings.namespace_of(asked.tenant)
    document = template.pipeline(body.name, tenant=asked.tenant, project=asked.project, namespace=namespace)
    document["inputs"] |= template.inputs(body.parameters)
    parsed = parse_pipeline(json.dumps(document).encode(), functions=frozenset(), policy=parts.rendering.policy())
    pipeline = parsed.pipeline
    if pipeline is None:
        raise invalid(parsed.problems)

    def write(session: Session) -> tuple[DeploymentView, PipelineRecord]:
        record = deploy(session, asked, pipeline, parts.now())
        return _view(session, record, parts), get_pipeline(session, record.pipeline_id)

    view, owner = await parts.database.write(write)
    await note(parts, caller, JobPermission.CREATE, answer, owner)
    return view


def _tenant(body: DeployBody, caller: JobCaller) -> str:
    mine = caller.tenants(JobPermission.CREATE)
    if body.tenant_id is not None or len(mine) == 1:
        return body.tenant_id or mine[0]
    hint = f"name one of {', '.join(mine)}" if mine else "name one"
    raise mistaken("tenant_id", None, "must say whose use case it is", hint)


async def list_all_deployments(
    parts: Parts,
    caller: Caller,
    name: SoughtText = None,
    page: PageNumber = 1,
    page_size: PageSize = 20,
) -> DeploymentListView:
    """List the deployments that the caller may see, by name."""
    scopes = seen_scopes(caller)

    def read(session: Session) -> DeploymentListView:
        found = list_deployments(session, scopes, name=name, page=page, page_size=page_size)
        items = [_view(session, one, parts) for one in found.records]
        return DeploymentListView(items=items, page=page, page_size=page_size, total=found.total)

    return await parts.database.read(read)


async def show_deployment(deployment_id: UUID, parts: Parts, caller: Caller) -> DeploymentView:
    """Show a deployment, its components and where they answer."""
    await _allowed(parts, caller, str(deployment_id), JobPermission.VIEW)
    return await parts.database.read(lambda session: _view(session, get_deployment(session, str(deployment_id)), parts))


async def delete_usecase(deployment_id: UUID, parts: Parts, caller: Caller) -> DeploymentView:
    """Delete a deployment: its jobs are cancelled, and it is gone once they have ended."""
    await _allowed(parts, caller, str(deployment_id), JobPermission.DELETE)
    now = parts.now()

    def write(session: Session) -> DeploymentView:
        record = delete_deployment(session, str(deployment_id), now=now, actor=caller.name)
        return _view(session, record, parts)

    return await parts.database.write(write)


async def _allowed(parts: ApiParts, caller: JobCaller, deployment_id: str, permission: JobPermission) -> None:
    """Check that the caller may do this. Raises DeploymentUnknown, ApiRefusal."""

    def read(session: Session) -> tuple[DeploymentRecord, PipelineRecord]:
        record = get_deployment(session, deployment_id)
        return record, get_pipeline(session, record.pipeline_id)

    record, owner = await parts.database.read(read)
    whose = JobOwnership(record.tenant_id, record.project_id, record.created_by)
    is_seen = decide(caller, JobPermission.VIEW, whose) is AccessAnswer.ALLOWED
    answer = decide(caller, permission if is_seen else JobPermission.VIEW, whose)
    await note(parts, caller, permission, answer, owner)
    if not is_seen:
        raise DeploymentUnknown(deployment_id)
    if answer is not AccessAnswer.ALLOWED:
        detail = f"{caller.name} may not {permission} use case {record.name}"
        raise ApiRefusal(problem(403, "not-allowed", "Not allowed", detail))


def _view(session: Session, record: DeploymentRecord, parts: ApiParts) -> DeploymentView:
    template = UseCaseTemplate.model_validate(record.template)
    run, jobs = get_run(session, record.run_id), jobs_of(session, record)
    namespace = parts.settings.namespace_of(record.tenant_id)
    components = [
        ComponentView(
            name=one.name,
            job_id=jobs.ids.get(one.name),
            status=jobs.states.get(one.name, JobState.PENDING),
            endpoint=endpoint(jobs.names[one.name], namespace, one.port) if one.name in jobs.names else None,
        )
        for one in template.components
    ]
    states = [one.status for one in components]
    is_deleting = record.delete_requested_at is not None
    return DeploymentView(
        deployment_id=record.id,
        name=record.name,
        template_id=template.id,
        tenant_id=record.tenant_id,
        project_id=record.project_id,
        status=deployment_state(RunState(run.state), states, is_deleting=is_deleting),
        message=run.message,
        pipeline_id=record.pipeline_id,
        parameters=record.parameters,
        components=components,
        entrypoint=next(one.endpoint for one in components if one.name == template.entrypoint),
        created_by=record.created_by,
        created_at=record.created_at,
    )
