"""Queries and changes of deployed use cases, and what removes those that are being deleted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import structlog
import yaml
from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from atoll.jobs.states import ENDED, JobState
from atoll.pipelines.model import Pipeline
from atoll.pipelines.usecases import UseCaseTemplate
from atoll.pipelines.words import ENDED_RUNS
from atoll.service.errors import SettingsError
from jobs.database import Database
from jobs.records import JobRecord
from pipelines.errors import DeploymentTaken, DeploymentUnknown
from pipelines.performing import StepClock
from pipelines.records import DeploymentRecord, PipelineRecord, StepRecord
from pipelines.store import (
    PipelinePage,
    RunRequest,
    apply_pipeline,
    cancel_job_of_step,
    cancel_run,
    create_run,
    get_run,
    page_by_name,
)

log = structlog.get_logger(__name__)

SHIPPED: Final = Path(__file__).parent / "templates"
TEMPLATES_MAX: Final = 100
LOOK_SECONDS: Final = 2.0
TOGETHER_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class DeploymentRequest:
    """A use case that somebody deploys."""

    template: UseCaseTemplate
    name: str
    tenant: str
    project: str | None
    parameters: Mapping[str, Any]
    created_by: str


@dataclass(frozen=True, slots=True)
class DeploymentJobs:
    """The jobs of a deployment: name and state by component. A component that is not begun has none."""

    names: Mapping[str, str]
    states: Mapping[str, JobState]
    ids: Mapping[str, str]


def read_templates(folder: Path | None) -> tuple[UseCaseTemplate, ...]:
    """Return the shipped templates and those of a folder, which come before shipped ones of their id.

    Raises SettingsError.
    """
    found: dict[str, UseCaseTemplate] = {}
    for place in (SHIPPED, folder):
        for file in sorted(place.glob("*.yaml"))[:TEMPLATES_MAX] if place is not None else ():
            try:
                one = UseCaseTemplate.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
            except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
                raise SettingsError(f"bad template {file}: {error}") from error
            found[one.id] = one
    return tuple(found.values())


def deploy(session: Session, asked: DeploymentRequest, pipeline: Pipeline, now: datetime) -> DeploymentRecord:
    """Record a deployment with its pipeline, and begin its run. Raises DeploymentTaken."""
    where = (PipelineRecord.tenant_id == asked.tenant, PipelineRecord.name == pipeline.name)
    if session.scalar(select(PipelineRecord.id).where(*where)) is not None:
        raise DeploymentTaken(asked.name)
    owner, _ = apply_pipeline(session, pipeline, tenant=asked.tenant, created_by=asked.created_by, now=now)
    inputs = asked.template.inputs(asked.parameters)
    run, _ = create_run(session, owner.id, RunRequest(inputs, asked.created_by, "deployment of a use case"), now)
    record = DeploymentRecord(
        id=str(uuid4()),
        tenant_id=asked.tenant,
        project_id=asked.project,
        name=asked.name,
        template=asked.template.model_dump(mode="json", by_alias=True),
        parameters=dict(asked.parameters),
        pipeline_id=owner.id,
        run_id=run.id,
        created_by=asked.created_by,
        created_at=now,
    )
    session.add(record)
    session.flush()
    return record


def get_deployment(session: Session, deployment_id: str) -> DeploymentRecord:
    """Return a deployment. Raises DeploymentUnknown."""
    record = session.get(DeploymentRecord, deployment_id)
    if record is None:
        raise DeploymentUnknown(deployment_id)
    return record


def list_deployments(
    session: Session, scopes: Sequence[tuple[str, str | None]] | None, *, name: str | None, page: int, page_size: int
) -> PipelinePage:
    """Return a page of deployments by name. `scopes`: what the caller may see, as of pipelines."""
    return page_by_name(session, DeploymentRecord, scopes, name=name, page=page, page_size=page_size)


def jobs_of(session: Session, record: DeploymentRecord) -> DeploymentJobs:
    """Return the jobs of a deployment."""
    found = session.execute(
        select(StepRecord.key, JobRecord.id, JobRecord.name, JobRecord.state)
        .join(JobRecord, JobRecord.id == StepRecord.job_id)
        .where(StepRecord.run_id == record.run_id)
    ).all()
    return DeploymentJobs(
        {key: name for key, _, name, _ in found},
        {key: JobState(state) for key, _, _, state in found},
        {key: job_id for key, job_id, _, _ in found},
    )


def delete_deployment(session: Session, deployment_id: str, *, now: datetime, actor: str) -> DeploymentRecord:
    """Ask for the deletion of a deployment: its run and its jobs are cancelled. Raises DeploymentUnknown."""
    record = get_deployment(session, deployment_id)
    if record.delete_requested_at is None:
        record.delete_requested_at, record.delete_requested_by = now, actor
        _cancel(session, record, now)
    session.flush()
    return record


def _cancel(session: Session, record: DeploymentRecord, now: datetime) -> bool:
    """Cancel what goes on; return whether nothing does any more."""
    actor = record.delete_requested_by or ""
    cancel_run(session, record.run_id, now=now, actor=actor)
    jobs = jobs_of(session, record)
    for job_id in jobs.ids.values():
        cancel_job_of_step(session, job_id, now=now, actor=actor)
    return get_run(session, record.run_id).state in ENDED_RUNS and all(one in ENDED for one in jobs.states.values())


def remove_deleted(session: Session, now: datetime) -> int:
    """Remove deployments that are being deleted and whose jobs have ended, with their pipelines; return how many."""
    asked = select(DeploymentRecord).where(DeploymentRecord.delete_requested_at.is_not(None))
    oldest = asked.order_by(DeploymentRecord.delete_requested_at).limit(TOGETHER_MAX)
    gone = [record for record in session.scalars(oldest.with_for_update()).all() if _cancel(session, record, now)]
    for record in gone:
        owner = session.get(PipelineRecord, record.pipeline_id)
        session.delete(record)
        session.flush()
        session.delete(owner)
    session.flush()
    return len(gone)


class DeploymentKeeper:
    """Removes deployments that are being deleted; `run` as one task, while this process leads."""

    def __init__(self, database: Database, clock: StepClock) -> None:
        self._database = database
        self._clock = clock

    async def run(self) -> None:
        """Remove until cancelled."""
        while True:
            now = self._clock.now()
            try:
                if count := await self._database.write(lambda session: remove_deleted(session, now)):  # noqa: B023
                    log.info("Removed deployments", count=count)
            except SQLAlchemyError as error:
                log.warning("Could not look at deployments", err=str(error).partition("\n")[0])
            await self._clock.sleep(LOOK_SECONDS)
