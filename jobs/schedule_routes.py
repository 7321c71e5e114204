"""The schedule of a cluster: jobs with their times, estimated or actual, and the GPUs of each type."""

from collections import Counter
from datetime import datetime, timedelta
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query
from pydantic import AwareDatetime, BaseModel, Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from atoll.jobs.costs.spans import HELD, WHOLE_PPM
from atoll.jobs.permissions import seen_scopes
from atoll.jobs.states import IN_CLUSTER, JobState
from atoll.jobs.words import JobType
from jobs.api_parts import Caller, Cluster, Parts, check_cluster
from jobs.asking import PageNumber, PageSize
from jobs.problems import documented
from jobs.records import GpuSpanRecord, JobRecord
from jobs.store import JobFilter, conditions_of
from jobs.usage_routes import times_of

SCHEDULE: Final = "/api/clusters/{cluster}/schedule"


class ScheduledJob(BaseModel):
    """One job on the time line. A service has no end until it is stopped."""

    job_id: str
    name: str
    job_type: JobType
    status: JobState
    gpu_type: str
    gpu_count: int
    estimated_start: Annotated[datetime | None, Field(description="earliest start of a job that does not run")]
    estimated_end: datetime | None
    actual_start: datetime | None
    actual_end: datetime | None


class GpuTypeUse(BaseModel):
    """GPUs of one type now. Jobs that name no type are counted under an empty one."""

    total: float
    used: Annotated[float, Field(description="held by pods or reservations")]
    queued: Annotated[int, Field(description="asked for by jobs that wait")]


class ScheduleView(BaseModel):
    """One page of the time line, oldest first."""

    timeline: list[ScheduledJob]
    resources: Annotated[dict[str, GpuTypeUse], Field(description="by type of GPU")]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]


def add_schedule_routes(app: FastAPI) -> None:
    """Add the route to the application."""
    app.get(SCHEDULE, responses=documented(401, 404, 422, 429, 503))(show_schedule)


async def show_schedule(
    cluster: Cluster,
    parts: Parts,
    caller: Caller,
    start: Annotated[AwareDatetime | None, Query(description="a day ago by default")] = None,
    end: Annotated[AwareDatetime | None, Query(description="in a day by default")] = None,
    page: PageNumber = 1,
    page_size: PageSize = 50,
) -> ScheduleView:
    """Show the jobs of a time that the caller may see, and how many GPUs of each type are there, held and asked for."""
    await check_cluster(cluster, parts)
    now = parts.now()
    first, last = times_of(now, start or now - timedelta(days=1), end or now + timedelta(days=1))
    wanted = JobFilter(cluster, seen_scopes(caller))

    def read(session: Session) -> tuple[list[ScheduledJob], dict[str, GpuTypeUse], int]:
        where = (
            *conditions_of(wanted),
            JobRecord.created_at < last,
            JobRecord.ended_at.is_(None) | (JobRecord.ended_at > first),
        )
        total = session.scalar(select(func.count()).select_from(JobRecord).where(*where)) or 0
        oldest = select(JobRecord).where(*where).order_by(JobRecord.created_at, JobRecord.id)
        found = session.scalars(oldest.offset((page - 1) * page_size).limit(page_size)).all()
        return [scheduled(one, now) for one in found], gpu_types(session, cluster), total

    timeline, resources, total = await parts.database.read(read)
    return ScheduleView(timeline=timeline, resources=resources, page=page, page_size=page_size, total=total)


def scheduled(record: JobRecord, now: datetime) -> ScheduledJob:
    """Return a job on the time line."""
    estimate: dict[str, Any] = record.estimate or {}
    begins = None
    if record.started_at is None and record.ended_at is None:
        asked = (record.document.get("policy") or {}).get("scheduled_start")
        planned = datetime.fromisoformat(asked) if asked else now
        begins = max(now, planned, record.not_before or now)
    start, ends = record.started_at or begins, None
    if record.ended_at is None and start is not None and estimate.get("seconds") is not None:
        ends = start + timedelta(seconds=estimate["seconds"])
    return ScheduledJob(
        job_id=record.id,
        name=record.name,
        job_type=JobType(record.job_type),
        status=JobState(record.state),
        gpu_type=estimate.get("gpu_type", ""),
        gpu_count=estimate.get("gpu_count", 0),
        estimated_start=begins,
        estimated_end=ends,
        actual_start=record.started_at,
        actual_end=record.ended_at,
    )


def gpu_types(session: Session, cluster_id: str) -> dict[str, GpuTypeUse]:
    """Return the GPUs of each type: those of the cluster, those held, those that waiting jobs ask for."""
    spans = (GpuSpanRecord.cluster_id == cluster_id, GpuSpanRecord.ended_at.is_(None))
    grouped = select(GpuSpanRecord.model, GpuSpanRecord.use, func.sum(GpuSpanRecord.share_ppm))
    total: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for model, use, share in session.execute(grouped.where(*spans).group_by(GpuSpanRecord.model, GpuSpanRecord.use)):
        total[model] += int(share)
        used[model] += int(share) if use in HELD else 0
    waiting = {JobState.PENDING, *IN_CLUSTER} - {JobState.ADMITTED, JobState.RUNNING}
    where = (JobRecord.cluster_id == cluster_id, JobRecord.state.in_([state.value for state in waiting]))
    gpu, count = JobRecord.estimate["gpu_type"].as_string(), JobRecord.estimate["gpu_count"].as_integer()
    asked = select(gpu, func.sum(count)).where(*where, count > 0).group_by(gpu)
    queued = Counter({gpu_type: int(gpus) for gpu_type, gpus in session.execute(asked)})
    return {
        gpu: GpuTypeUse(total=total[gpu] / WHOLE_PPM, used=used[gpu] / WHOLE_PPM, queued=queued[gpu])
        for gpu in sorted({*total, *queued})
    }
