"""The tables of pipelines, in the job service's database; their migrations are in pipelines.migrations."""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from sqlalchemy import JSON, BigInteger, ForeignKey, Index, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from atoll.pipelines.graph import PipelineGraph
from atoll.pipelines.model import Pipeline
from jobs.database import Migrations, migrate
from jobs.errors import RecordUnreadable
from jobs.records import NAMING, UtcTime

GRAPHS_KEPT: Final = 256
PIPELINE_TABLES: Final = Migrations(Path(__file__).parent / "migrations", "pipelines_version")


def migrate_pipelines(url: str) -> None:
    """Bring the tables of pipelines to this version. Raises DatabaseUnfit."""
    migrate(url, migrations=PIPELINE_TABLES)


class PipelineBase(DeclarativeBase):
    """Base of the tables."""

    metadata = MetaData(naming_convention=NAMING)


class PipelineRecord(PipelineBase):
    """A pipeline, as it was applied last."""

    __tablename__ = "pipelines"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(63))
    project_id: Mapped[str | None] = mapped_column(String(63))
    name: Mapped[str] = mapped_column(String(63))
    created_by: Mapped[str] = mapped_column(String(256))
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    runs_begun: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    updated_at: Mapped[datetime] = mapped_column(UtcTime)


class RunRecord(PipelineBase):
    """One run. `document`: the pipeline as it was when the run began; later changes do not touch it."""

    __tablename__ = "pipeline_runs"
    __table_args__ = (
        UniqueConstraint("pipeline_id", "idempotency_key"),
        UniqueConstraint("pipeline_id", "number"),
        Index("ix_pipeline_runs_state", "state"),
        Index("ix_pipeline_runs_ended_at", "ended_at"),
        Index("ix_pipeline_runs_pipeline_id_ended_at", "pipeline_id", "ended_at"),
    )

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    pipeline_id: Mapped[str] = mapped_column(ForeignKey("pipelines.id", ondelete="CASCADE"))
    number: Mapped[int] = mapped_column()
    cause: Mapped[str] = mapped_column(String(256))
    created_by: Mapped[str] = mapped_column(String(256))
    idempotency_key: Mapped[str | None] = mapped_column(String(512))
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    inputs: Mapped[dict[str, Any]] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(String(16))
    message: Mapped[str] = mapped_column(Text, default="")
    rerun_of: Mapped[str | None] = mapped_column(String(36))
    cancel_requested_at: Mapped[datetime | None] = mapped_column(UtcTime)
    cancel_requested_by: Mapped[str | None] = mapped_column(String(256))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcTime)
    version: Mapped[int] = mapped_column()

    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - as SQLAlchemy reads it


class StepRecord(PipelineBase):
    """One step of a run; the bodies of a loop have records of their own."""

    __tablename__ = "pipeline_steps"

    run_id: Mapped[str] = mapped_column(ForeignKey("pipeline_runs.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(63), primary_key=True)
    position: Mapped[int] = mapped_column()
    state: Mapped[str] = mapped_column(String(16))
    attempt: Mapped[int] = mapped_column(default=0)
    output: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    error: Mapped[str] = mapped_column(Text, default="")
    skip_cause: Mapped[str | None] = mapped_column(String(64))
    is_stopping: Mapped[bool] = mapped_column(default=False)
    job_id: Mapped[str | None] = mapped_column(String(36))
    not_before: Mapped[datetime | None] = mapped_column(UtcTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcTime)


class MessageRecord(PipelineBase):
    """What a notification step sent to one recipient at last. `number`: of the recipient."""

    __tablename__ = "pipeline_messages"

    run_id: Mapped[str] = mapped_column(ForeignKey("pipeline_runs.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(63), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column()
    channel: Mapped[str] = mapped_column(String(16))
    recipient: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    error: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime] = mapped_column(UtcTime)


class TriggerRecord(PipelineBase):
    """One trigger. `looked_at`: instants and ends until then were dealt with."""

    __tablename__ = "pipeline_triggers"
    __table_args__ = (
        Index("ix_pipeline_triggers_enabled_next_run", "enabled", "next_run"),
        Index("ix_pipeline_triggers_topic", "topic"),
    )

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    pipeline_id: Mapped[str] = mapped_column(ForeignKey("pipelines.id", ondelete="CASCADE"))
    created_by: Mapped[str] = mapped_column(String(256))
    trigger_type: Mapped[str] = mapped_column(String(16))
    topic: Mapped[str | None] = mapped_column(String(256))
    """Topic of an event trigger, or the pipeline that a dependency waits for."""
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    secret: Mapped[str | None] = mapped_column(String(128))
    memory: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict, server_default="{}")
    """Of a threshold: whether it is armed, its crossings, and digests of the last events; see pipelines.thresholds."""
    enabled: Mapped[bool] = mapped_column()
    looked_at: Mapped[datetime] = mapped_column(UtcTime)
    next_run: Mapped[datetime | None] = mapped_column(UtcTime)
    last_run: Mapped[datetime | None] = mapped_column(UtcTime)
    last_message: Mapped[str] = mapped_column(Text, default="")
    created_at: Mapped[datetime] = mapped_column(UtcTime)


class HistoryMarkRecord(PipelineBase):
    """How far the histories of jobs were read for triggers: one row. `dealt_with`: later entries that were read too."""

    __tablename__ = "pipeline_history_mark"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(BigInteger)
    dealt_with: Mapped[list[int]] = mapped_column(JSON)


class DeploymentRecord(PipelineBase):
    """A use case that was deployed. `template`: as it was then. Its pipeline cannot be removed before it."""

    __tablename__ = "usecase_deployments"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(63))
    project_id: Mapped[str | None] = mapped_column(String(63))
    name: Mapped[str] = mapped_column(String(63))
    template: Mapped[dict[str, Any]] = mapped_column(JSON)
    parameters: Mapped[dict[str, Any]] = mapped_column(JSON)
    pipeline_id: Mapped[str] = mapped_column(ForeignKey("pipelines.id"))
    run_id: Mapped[str] = mapped_column(String(36))
    created_by: Mapped[str] = mapped_column(String(256))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    delete_requested_at: Mapped[datetime | None] = mapped_column(UtcTime)
    delete_requested_by: Mapped[str | None] = mapped_column(String(256))


def graph_in(document: Mapping[str, Any], what: str) -> PipelineGraph:
    """Return the graph of a recorded pipeline. Raises RecordUnreadable."""
    try:
        return _graph_of(json.dumps(document))
    except ValidationError as error:
        raise RecordUnreadable(what, error) from error


@lru_cache(maxsize=GRAPHS_KEPT)
def _graph_of(document: str) -> PipelineGraph:
    """Return the graph of a document, kept because every step of every run asks for it twice."""
    return PipelineGraph(Pipeline.model_validate(json.loads(document)))
