"""What triggers learn from the records of jobs: numbers over them, and the states that they enter."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from atoll.jobs.states import JobState
from atoll.pipelines.events import ENTERS, Event, event_of_job
from atoll.pipelines.thresholds import ServiceMetric
from jobs.records import JobEventRecord, JobRecord
from pipelines.records import HistoryMarkRecord, PipelineRecord

ENTRIES_TOGETHER_MAX: Final = 500
"""Entries that one transaction deals with."""
SLACK: Final = timedelta(minutes=1)
"""How much later than a newer entry one may appear: transactions end out of order."""
MARK: Final = 1
WAITING: Final = (JobState.QUEUED, JobState.PREEMPTED)
COUNTED: Final = {
    ServiceMetric.QUEUED_JOBS: WAITING,
    ServiceMetric.RUNNING_JOBS: (JobState.RUNNING,),
    ServiceMetric.LONGEST_WAIT_SECONDS: WAITING,
}
"""The states of the jobs that a metric is about."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A job that entered a state."""

    job: JobRecord
    at: datetime
    event: Event


def metric_of(session: Session, metric: ServiceMetric, owner: PipelineRecord, now: datetime) -> float:
    """Return a number over the jobs of a pipeline's tenant, and of its project if it has one."""
    states = [state.value for state in COUNTED[metric]]
    where = [JobRecord.tenant_id == owner.tenant_id, JobRecord.state.in_(states)]
    if owner.project_id is not None:
        where.append(JobRecord.project_id == owner.project_id)
    if metric is not ServiceMetric.LONGEST_WAIT_SECONDS:
        return session.scalar(select(func.count()).select_from(JobRecord).where(*where)) or 0
    oldest = session.scalar(select(func.min(JobRecord.updated_at)).where(*where))
    return max(0.0, (now - oldest).total_seconds()) if oldest is not None else 0.0


def new_entries(session: Session, after: int, now: datetime) -> tuple[Sequence[StateEntry], int | None]:
    """Return jobs that entered a state and were not read before, and where to go on; None: there are no more.

    `after`: where the last call of this look said to go on; 0 for the first one. Entries of the last minute are looked
    at again, because an older one may still appear between them.
    """
    mark = session.scalars(select(HistoryMarkRecord).with_for_update()).one_or_none() or _new_mark(session, now)
    begin = max(mark.position, after)
    found = session.execute(
        select(JobEventRecord, JobRecord)
        .join(JobRecord, JobRecord.id == JobEventRecord.job_id)
        .where(JobEventRecord.id > begin)
        .order_by(JobEventRecord.id)
        .limit(ENTRIES_TOGETHER_MAX)
    ).all()
    dealt_with = set(mark.dealt_with)
    fresh = [(entry, job) for entry, job in found if entry.id not in dealt_with]
    if begin == mark.position:
        for entry, _ in takewhile(lambda one: one[0].at < now - SLACK, found):
            mark.position = entry.id
    dealt_with |= {entry.id for entry, _ in fresh}
    mark.dealt_with = sorted(one for one in dealt_with if one > mark.position)
    session.flush()
    entries = [StateEntry(job, entry.at, _event(entry, job)) for entry, job in fresh if entry.what in ENTERS]
    return entries, found[-1][0].id if len(found) == ENTRIES_TOGETHER_MAX else None


def forget_mark(session: Session) -> None:
    """Forget how far histories were read, when no trigger waits for them."""
    session.execute(delete(HistoryMarkRecord))


def _new_mark(session: Session, now: datetime) -> HistoryMarkRecord:
    older = select(JobEventRecord.id).where(JobEventRecord.at < now - SLACK).order_by(JobEventRecord.id.desc())
    mark = HistoryMarkRecord(id=MARK, position=session.scalar(older.limit(1)) or 0, dealt_with=[])
    session.add(mark)
    return mark


def _event(entry: JobEventRecord, job: JobRecord) -> Event:
    state = JobState(entry.state)
    told = {
        "id": job.id,
        "name": job.name,
        "cluster_id": job.cluster_id,
        "project_id": job.project_id,
        "job_type": job.job_type,
        "status": state.value,
        "message": entry.message,
        "attempt": job.attempt,
        "labels": job.document.get("labels") or {},
        "time": entry.at.isoformat(),
        "step": entry.what,
        "last_checkpoint": job.last_checkpoint,
    }
    return event_of_job(entry.id, state, job.cluster_id, told)
