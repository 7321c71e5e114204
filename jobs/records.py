"""The tables of the job service.

SQLAlchemy's mapped classes, the same on SQLite and PostgreSQL. `document` holds the submitted job, word for word; the
other columns hold its state. Queries are in jobs.store, migrations in jobs.migrations.
"""

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import JSON, DateTime, Float, ForeignKey, Index, MetaData, String, Text, UniqueConstraint, text
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from atoll.jobs.states import ENDED

NAMING: Final = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
"""Constraints have names, so that migrations can change them on SQLite too."""
NOT_ENDED: Final = text(f"state NOT IN ({', '.join(repr(state.value) for state in sorted(ENDED))})")


class UtcTime(TypeDecorator[datetime]):
    """A time stored in UTC: SQLite drops zones, so they are removed when writing and added when reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the value to store, without its zone."""
        if value is None:
            return None
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the stored value, in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


class RecordBase(DeclarativeBase):
    """Base of the tables."""

    metadata = MetaData(naming_convention=NAMING)


class JobRecord(RecordBase):
    """One job and its state."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("tenant_id", "idempotency_key"),
        Index(
            "uq_jobs_active_name",
            "cluster_id",
            "namespace",
            "name",
            unique=True,
            sqlite_where=NOT_ENDED,
            postgresql_where=NOT_ENDED,
        ),
        Index("ix_jobs_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
        Index("ix_jobs_cluster_id_state", "cluster_id", "state"),
    )

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    cluster_id: Mapped[str] = mapped_column(String(63))
    tenant_id: Mapped[str] = mapped_column(String(63))
    project_id: Mapped[str | None] = mapped_column(String(63))
    namespace: Mapped[str] = mapped_column(String(63))
    name: Mapped[str] = mapped_column(String(63))
    job_type: Mapped[str] = mapped_column(String(16))
    source_type: Mapped[str] = mapped_column(String(16))
    created_by: Mapped[str] = mapped_column(String(256))
    idempotency_key: Mapped[str | None] = mapped_column(String(512))
    request_digest: Mapped[str] = mapped_column(String(64))
    """Digest of the request: detects an idempotency key that is used for another job."""
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(String(16))
    message: Mapped[str] = mapped_column(Text, default="")
    queue_name: Mapped[str | None] = mapped_column(String(63))
    """Queue that the service chose from the file of queues; None if the job names one, or the cluster has no file."""
    choice: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    """Score sheet of the choice of the cluster; None if the user named it."""
    attempt: Mapped[int] = mapped_column(default=1)
    """Number of the attempt. Its objects carry it, so objects of earlier attempts are told apart."""
    retry_count: Mapped[int] = mapped_column(default=0)
    preemption_count: Mapped[int] = mapped_column(default=0)
    not_before: Mapped[datetime | None] = mapped_column(UtcTime)
    cancel_requested_at: Mapped[datetime | None] = mapped_column(UtcTime)
    cancel_requested_by: Mapped[str | None] = mapped_column(String(256))
    workload_uid: Mapped[str | None] = mapped_column(String(64))
    """Uid of the Job or Deployment of this attempt, once it was seen."""
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    updated_at: Mapped[datetime] = mapped_column(UtcTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcTime)
    version: Mapped[int] = mapped_column()
    """Increases with each change; a write based on an older version is refused."""

    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - as SQLAlchemy reads it


class JobEventRecord(RecordBase):
    """One entry of a job's history."""

    __tablename__ = "job_events"
    __table_args__ = (Index("ix_job_events_job_id_id", "job_id", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(UtcTime)
    what: Mapped[str] = mapped_column(String(32))
    """create, a step of the state table, or a request of a user."""
    state: Mapped[str] = mapped_column(String(16))
    """State after the event."""
    message: Mapped[str] = mapped_column(Text, default="")
    actor: Mapped[str] = mapped_column(String(256), default="")
    """Who requested it; empty if the cluster did it."""


class ServiceRecord(RecordBase):
    """The service that owns this database: one row. Its id is on every object that the service creates."""

    __tablename__ = "service"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcTime)


class QueueFileRecord(RecordBase):
    """The file of queues of a cluster, and how far the cluster agrees with it."""

    __tablename__ = "queue_files"

    cluster_id: Mapped[str] = mapped_column(String(63), primary_key=True)
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    generation: Mapped[int] = mapped_column()
    """Increases with each applied file."""
    applied_by: Mapped[str] = mapped_column(String(256))
    applied_at: Mapped[datetime] = mapped_column(UtcTime)
    checked_generation: Mapped[int] = mapped_column(default=0)
    """The generation that the leader compared with the cluster; 0 before the first time."""
    has_kueue: Mapped[bool | None] = mapped_column()
    problems: Mapped[list[str]] = mapped_column(JSON)
    """What the leader could not create, change or remove."""


class RegisteredCluster(RecordBase):
    """A cluster that jobs may run in, and its health at the last look. Credentials are a reference, never stored."""

    __tablename__ = "clusters"

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    kubeconfig: Mapped[str] = mapped_column(String(512))
    """file:NAME, secret:NAMESPACE/NAME/KEY, or empty for the cluster of the service's own kubeconfig."""
    region: Mapped[str] = mapped_column(String(63))
    tenants: Mapped[list[str]] = mapped_column(JSON)
    prices: Mapped[dict[str, float]] = mapped_column(JSON)
    latency_ms: Mapped[float] = mapped_column(Float)
    state: Mapped[str] = mapped_column(String(16))
    """active or draining."""
    changed_by: Mapped[str] = mapped_column(String(256))
    """Who registered it, or asked to drain it."""
    changed_at: Mapped[datetime] = mapped_column(UtcTime)
    checked_at: Mapped[datetime | None] = mapped_column(UtcTime)
    trouble: Mapped[str] = mapped_column(Text)
    """Why it could not be read at the last look; empty if it could."""
    capacity: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    """GPUs by type: total, free, and how many islands have so many free ones."""
