"""What the page shows of all jobs: those that have not ended, the last that have, and the GPUs of each cluster.

One read per watcher and look; a cheap mark tells whether anything changed. A caller sees what the API lists for them.
"""

from datetime import datetime, timedelta
from typing import Annotated, Final

from pydantic import BaseModel, Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from atoll.jobs.permissions import JobCaller, seen_scopes
from atoll.jobs.states import ENDED, JobState
from jobs.cluster_api import sees_cluster
from jobs.cluster_store import list_clusters
from jobs.records import JobRecord
from jobs.schedule_routes import GpuTypeUse, gpu_types
from jobs.store import JobFilter, conditions_of

ACTIVE_MAX: Final = 500
ENDED_MAX: Final = 100
ENDED_HOURS: Final = 24
MESSAGE_LENGTH: Final = 300

Mark = tuple[int, int]


class BoardJob(BaseModel):
    """One job in the queue and on the time line."""

    id: str
    name: str
    cluster: str
    tenant: str
    queue: str
    type: str
    status: JobState
    message: str
    gpu_type: str
    gpu_count: int
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    not_before: Annotated[datetime | None, Field(description="earliest start of a job that waits for a time")]
    seconds: Annotated[int | None, Field(description="expected run time")]


class Board(BaseModel):
    """The whole answer. `left_out`: active jobs beyond ACTIVE_MAX."""

    now: datetime
    active: list[BoardJob]
    ended: list[BoardJob]
    left_out: int
    clusters: dict[str, dict[str, GpuTypeUse]]


def board_mark(session: Session, caller: JobCaller) -> Mark:
    """Return what differs after any change of a job that the caller sees."""
    where = conditions_of(JobFilter(None, seen_scopes(caller)))
    versions = func.coalesce(func.sum(JobRecord.version), 0)  # times may go back
    count, version = session.execute(select(func.count(), versions).where(*where)).one()
    return count, version


def read_board(session: Session, caller: JobCaller, now: datetime) -> Board:
    """Return what a caller sees."""
    where = conditions_of(JobFilter(None, seen_scopes(caller)))
    is_ended = JobRecord.state.in_([state.value for state in ENDED])
    oldest = select(JobRecord).where(*where, ~is_ended).order_by(JobRecord.created_at, JobRecord.id)
    active = session.scalars(oldest.limit(ACTIVE_MAX + 1)).all()
    count = len(active)
    if count > ACTIVE_MAX:
        count = session.scalar(select(func.count()).select_from(JobRecord).where(*where, ~is_ended)) or 0
    lately = JobRecord.ended_at > now - timedelta(hours=ENDED_HOURS)
    newest = select(JobRecord).where(*where, is_ended, lately).order_by(JobRecord.ended_at.desc(), JobRecord.id)
    seen = [one for one in list_clusters(session) if sees_cluster(caller, one)]
    return Board(
        now=now,
        active=[_entry(one) for one in active[:ACTIVE_MAX]],
        ended=[_entry(one) for one in session.scalars(newest.limit(ENDED_MAX)).all()],
        left_out=max(0, count - ACTIVE_MAX),
        clusters={one.id: gpu_types(session, one.id) for one in seen},
    )


def _entry(record: JobRecord) -> BoardJob:
    estimate, policy = record.estimate or {}, record.document.get("policy") or {}
    starts = policy.get("scheduled_start")
    times = [one for one in (record.not_before, datetime.fromisoformat(starts) if starts else None) if one is not None]
    return BoardJob(
        id=record.id,
        name=record.name,
        cluster=record.cluster_id,
        tenant=record.tenant_id,
        queue=policy.get("queue_name") or record.queue_name or "",
        type=record.job_type,
        status=JobState(record.state),
        message=record.message[:MESSAGE_LENGTH],
        gpu_type=estimate.get("gpu_type", ""),
        gpu_count=estimate.get("gpu_count", 0),
        created_at=record.created_at,
        updated_at=record.updated_at,
        started_at=record.started_at,
        ended_at=record.ended_at,
        not_before=max(times) if times and record.started_at is None else None,
        seconds=estimate.get("seconds"),
    )
