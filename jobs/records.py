"""The tables of the job service.

SQLAlchemy's mapped classes, the same on SQLite and PostgreSQL. `document` holds the submitted job, word for word; the
other columns hold its state. Queries are in jobs.store, migrations in jobs.migrations.
"""

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Float,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
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
OPEN: Final = text("ended_at IS NULL")
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
    pause_requested_at: Mapped[datetime | None] = mapped_column(UtcTime)
    """Since when the job is to be out of the cluster until somebody resumes it."""
    pause_requested_by: Mapped[str | None] = mapped_column(String(256))
    estimate: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    """The estimate of the cost when the job was submitted, with its reasons."""
    estimated_micros: Mapped[int | None] = mapped_column(BigInteger)
    """Estimated cost in millionths of a dollar."""
    actual_micros: Mapped[int | None] = mapped_column(BigInteger)
    """Cost of an ended job, once no GPU is held for it any more."""
    budget_mark: Mapped[str] = mapped_column(String(64), default="", server_default="")
    """The budget that was spent and acted; see atoll.jobs.costs.spending."""
    last_checkpoint: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    """The newest checkpoint that the job's containers told; see atoll.jobs.last_checkpoint."""
    topology_wait: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    """Since when it waits for its topology, and the weaker one that it was offered; see atoll.jobs.relaxing."""
    log_archive: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON)
    """Which logs are in the archive, by attempt; see jobs.log_keeping."""
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


class GpuSpanRecord(RecordBase):
    """A time in which one GPU was in one state; without `ended_at` it goes on. See atoll.jobs.costs.spans."""

    __tablename__ = "gpu_spans"
    __table_args__ = (
        Index("uq_gpu_spans_open", "cluster_id", "gpu", unique=True, sqlite_where=OPEN, postgresql_where=OPEN),
        Index("ix_gpu_spans_cluster_id_ended_at", "cluster_id", "ended_at"),
        Index("ix_gpu_spans_job_id", "job_id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    cluster_id: Mapped[str] = mapped_column(String(63))
    gpu: Mapped[str] = mapped_column(String(96))
    node: Mapped[str] = mapped_column(String(253))
    model: Mapped[str] = mapped_column(String(63))
    use: Mapped[str] = mapped_column(String(16))
    tenant: Mapped[str] = mapped_column(String(63))
    project: Mapped[str] = mapped_column(String(63))
    user: Mapped[str] = mapped_column(String(256))
    namespace: Mapped[str] = mapped_column(String(63))
    job_id: Mapped[str] = mapped_column(String(36))
    pod_uid: Mapped[str] = mapped_column(String(64))
    share_ppm: Mapped[int] = mapped_column()
    price_micros: Mapped[int | None] = mapped_column(BigInteger)
    held_since: Mapped[datetime | None] = mapped_column(UtcTime)
    started_at: Mapped[datetime] = mapped_column(UtcTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcTime)


class UsageClockRecord(RecordBase):
    """The last look at the GPUs of a cluster."""

    __tablename__ = "usage_clocks"

    cluster_id: Mapped[str] = mapped_column(String(63), primary_key=True)
    seen_at: Mapped[datetime] = mapped_column(UtcTime)


class EstimateErrorRecord(RecordBase):
    """How far the estimate of an ended job was off."""

    __tablename__ = "estimate_errors"
    __table_args__ = (
        Index("ix_estimate_errors_kind", "cluster_id", "job_type", "gpu_type", "gpu_count", "recorded_at"),
    )

    job_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    cluster_id: Mapped[str] = mapped_column(String(63))
    job_type: Mapped[str] = mapped_column(String(16))
    gpu_type: Mapped[str] = mapped_column(String(63))
    gpu_count: Mapped[int] = mapped_column()
    seconds: Mapped[int] = mapped_column()
    estimated_micros: Mapped[int] = mapped_column(BigInteger)
    actual_micros: Mapped[int] = mapped_column(BigInteger)
    error_ppm: Mapped[int] = mapped_column(BigInteger)
    """(actual - estimated) / estimated, in millionths."""
    is_far: Mapped[bool] = mapped_column()
    recorded_at: Mapped[datetime] = mapped_column(UtcTime)


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


class WebhookRecord(RecordBase):
    """A place that is told of jobs. `secret`: encrypted; see jobs.secrets."""

    __tablename__ = "webhooks"
    __table_args__ = (Index("ix_webhooks_cluster_id_tenant_id", "cluster_id", "tenant_id"),)

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    cluster_id: Mapped[str] = mapped_column(String(63))
    tenant_id: Mapped[str] = mapped_column(String(63))
    url: Mapped[str] = mapped_column(String(1024))
    secret: Mapped[str] = mapped_column(Text)
    events: Mapped[list[str]] = mapped_column(JSON)
    job_types: Mapped[list[str]] = mapped_column(JSON)
    labels: Mapped[dict[str, str]] = mapped_column(JSON)
    created_by: Mapped[str] = mapped_column(String(256))
    created_at: Mapped[datetime] = mapped_column(UtcTime)


class DeliveryRecord(RecordBase):
    """One event for one webhook, written with the event itself. Without `next_at` nothing is tried any more."""

    __tablename__ = "deliveries"
    __table_args__ = (
        Index("ix_deliveries_next_at", "next_at"),
        Index("ix_deliveries_webhook_id_created_at", "webhook_id", "created_at"),
    )

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    job_id: Mapped[str] = mapped_column(String(36))
    event: Mapped[str] = mapped_column(String(32))
    payload: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    next_at: Mapped[datetime | None] = mapped_column(UtcTime)
    attempts: Mapped[int] = mapped_column(default=0)
    status: Mapped[int | None] = mapped_column()
    """HTTP status of the last answer."""
    told: Mapped[str] = mapped_column(Text, default="")
    """Why the last attempt failed."""
    delivered_at: Mapped[datetime | None] = mapped_column(UtcTime)


class AuditRecord(RecordBase):
    """One decision about a request: who asked for what, and the answer."""

    __tablename__ = "audit"
    __table_args__ = (
        Index("ix_audit_tenant_id_id", "tenant_id", "id"),
        Index("ix_audit_resource_id", "resource_id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[datetime] = mapped_column(UtcTime)
    user: Mapped[str] = mapped_column(String(256))
    action: Mapped[str] = mapped_column(String(64))
    answer: Mapped[str] = mapped_column(String(16))
    resource_type: Mapped[str] = mapped_column(String(16))
    resource_id: Mapped[str] = mapped_column(String(64))
    tenant_id: Mapped[str] = mapped_column(String(63))
    project_id: Mapped[str | None] = mapped_column(String(63))
    job_type: Mapped[str | None] = mapped_column(String(16))
    source_type: Mapped[str | None] = mapped_column(String(16))
    source_id: Mapped[str | None] = mapped_column(String(63))
    extra: Mapped[dict[str, Any]] = mapped_column(JSON)
