"""The tables of the job service.

In: nothing. Out: SQLAlchemy's mapped classes, the same on SQLite and PostgreSQL. What somebody asked for stands in
`document`, word for word; beside it what became of it. Queries are in jobs.store, changes of the tables in
jobs.migrations.
"""

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import JSON, DateTime, ForeignKey, Index, MetaData, String, Text, UniqueConstraint, text
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
    """A moment, kept in UTC: SQLite forgets zones, so they are taken off on the way in and put back on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return what is stored."""
        if value is None:
            return None
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return what was stored."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


class RecordBase(DeclarativeBase):
    """Base of the tables."""

    metadata = MetaData(naming_convention=NAMING)


class JobRecord(RecordBase):
    """One job, and what became of it."""

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
    """Of what was asked for, so that a key that comes with another job is noticed."""
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(String(16))
    message: Mapped[str] = mapped_column(Text, default="")
    attempt: Mapped[int] = mapped_column(default=1)
    """Which try this is. Its objects bear the number, so that those of an earlier try are not taken for its own."""
    retry_count: Mapped[int] = mapped_column(default=0)
    preemption_count: Mapped[int] = mapped_column(default=0)
    not_before: Mapped[datetime | None] = mapped_column(UtcTime)
    cancel_requested_at: Mapped[datetime | None] = mapped_column(UtcTime)
    cancel_requested_by: Mapped[str | None] = mapped_column(String(256))
    workload_uid: Mapped[str | None] = mapped_column(String(64))
    """Of the Job or Deployment of this try, once it was seen."""
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    updated_at: Mapped[datetime] = mapped_column(UtcTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcTime)
    version: Mapped[int] = mapped_column()
    """Raised with each change; a change of an older version is refused."""

    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - as SQLAlchemy reads it


class JobEventRecord(RecordBase):
    """One thing that happened to a job."""

    __tablename__ = "job_events"
    __table_args__ = (Index("ix_job_events_job_id_id", "job_id", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(UtcTime)
    what: Mapped[str] = mapped_column(String(32))
    """create, the step of the state table, or what somebody asked for."""
    state: Mapped[str] = mapped_column(String(16))
    """The state afterwards."""
    message: Mapped[str] = mapped_column(Text, default="")
    actor: Mapped[str] = mapped_column(String(256), default="")
    """Who asked for it; empty for what the cluster did."""


class ServiceRecord(RecordBase):
    """Which service this database belongs to: one row, whose id is on every object that the service makes."""

    __tablename__ = "service"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
