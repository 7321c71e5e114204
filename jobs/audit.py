"""The audit: every decision about a request, who asked, for what, and the answer.

A decision about anything but reading is stored before it takes effect: if the database cannot store it, the request
fails. Decisions about reading are stored within a second.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import structlog
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from atoll.jobs.permissions import AccessAnswer, JobPermission
from atoll.kube.clock import Clock
from jobs.database import Database
from jobs.records import AuditRecord, JobRecord

log = structlog.get_logger(__name__)

FLUSH_SECONDS: Final = 1.0
WAITING_MAX: Final = 1000
READING: Final = frozenset({"job:view", "job:list", "job:metrics", "pipeline:view"})
NAMES: Final[Mapping[JobPermission, str]] = {JobPermission.LOGS: "job:logs_access"}


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One decision. `extra`: what the action was about, such as the command of an exec; never a secret."""

    user: str
    action: str
    answer: AccessAnswer
    tenant: str
    resource_id: str
    resource_type: str = "job"
    project: str | None = None
    job_type: str | None = None
    source_type: str | None = None
    source_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def action_of(permission: JobPermission) -> str:
    """Return the name of a permission in the audit."""
    return NAMES.get(permission, f"job:{permission}")


def entry_of(
    record: JobRecord,
    user: str,
    permission: JobPermission,
    answer: AccessAnswer,
    extra: Mapping[str, Any] | None = None,
) -> AuditEntry:
    """Return the entry of a decision about a recorded job."""
    return AuditEntry(
        user,
        action_of(permission),
        answer,
        record.tenant_id,
        record.id,
        project=record.project_id,
        job_type=record.job_type,
        source_type=record.source_type,
        source_id=record.document.get("source_id"),
        extra=extra or {},
    )


class AuditTrail:
    """Stores decisions; `run` as one task in every replica."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._waiting: deque[tuple[AuditEntry, datetime]] = deque(maxlen=2 * WAITING_MAX)

    async def note(self, entry: AuditEntry) -> None:
        """Take a decision. Raises SQLAlchemy's errors if it is not about reading and cannot be stored."""
        log.info("Decided", action=entry.action, resource=entry.resource_id, user=entry.user, answer=entry.answer.value)
        self._waiting.append((entry, self._clock.now()))
        if entry.action not in READING or len(self._waiting) >= WAITING_MAX:
            await self.flush()

    async def flush(self) -> None:
        """Store what waits. Raises SQLAlchemy's errors; what was not stored waits on."""
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not taken:
            return
        try:
            await self._database.write(lambda session: session.add_all([_row(one, at) for one, at in taken]))
        except SQLAlchemyError:
            self._waiting.extendleft(reversed(taken))
            raise

    async def run(self) -> None:
        """Store until cancelled, and once more then."""
        try:
            while True:
                await self._clock.sleep(FLUSH_SECONDS)
                try:
                    await self.flush()
                except SQLAlchemyError as error:
                    log.warning("Could not store the audit", err=str(error).partition("\n")[0])
        finally:
            await self.flush()


def _row(entry: AuditEntry, at: datetime) -> AuditRecord:
    return AuditRecord(
        at=at,
        user=entry.user,
        action=entry.action,
        answer=entry.answer.value,
        resource_type=entry.resource_type,
        resource_id=entry.resource_id,
        tenant_id=entry.tenant,
        project_id=entry.project,
        job_type=entry.job_type,
        source_type=entry.source_type,
        source_id=entry.source_id,
        extra=dict(entry.extra),
    )


def list_audit(
    session: Session, tenants: Sequence[str] | None, *, page: int, page_size: int
) -> tuple[Sequence[AuditRecord], int]:
    """Return a page of the audit of some tenants, None for all, newest first, and the total count."""
    where = [] if tenants is None else [AuditRecord.tenant_id.in_(tenants)]
    total = session.scalar(select(func.count()).select_from(AuditRecord).where(*where)) or 0
    newest = select(AuditRecord).where(*where).order_by(AuditRecord.id.desc())
    return session.scalars(newest.offset((page - 1) * page_size).limit(page_size)).all(), total
