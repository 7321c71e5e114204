"""Queries and changes of the records.

Each function is the work of one transaction. Every change of a state goes through the table in atoll.jobs.states.
Errors are those of jobs.errors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, Final
from uuid import uuid4

from sqlalchemy import ColumnElement, false, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from atoll.jobs.costs.estimates import CostEstimate
from atoll.jobs.costs.prices import MICROS
from atoll.jobs.model import Job
from atoll.jobs.retries import bounded
from atoll.jobs.states import ENDED, FIRST, IN_CLUSTER, IllegalStep, JobState, JobStep, step
from atoll.ml.queue_rules import QueueUsage
from jobs.errors import JobUnknown, KeyReused, NameTaken, NotPaused, RecordChanged
from jobs.records import JobEventRecord, JobRecord, ServiceRecord
from jobs.webhook_store import queue_deliveries

PAGE_SIZE_MAX: Final = 200
HISTORY_READ_MAX: Final = 32
IDS_MAX: Final = 500
"""In one query."""
CREATE: Final = "create"
AUTO: Final = "auto"
"""In place of a cluster's name: the service chooses one."""
CANCEL_ASKED: Final = "ask to cancel"
PAUSE_ASKED: Final = "ask to pause"
RESUMED: Final = "resume"
BUDGET_SPENT: Final = "budget"
PAUSABLE: Final = frozenset({FIRST, *IN_CLUSTER})


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job that the caller may submit, with its tenant and namespace. `asked`: without the defaults of its queue."""

    job: Job
    cluster_id: str
    tenant_id: str
    namespace: str
    created_by: str
    idempotency_key: str | None
    queue_name: str | None = None
    choice: dict[str, Any] | None = None
    estimate: CostEstimate | None = None
    asked: Job | None = None


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs to list. `cluster_id`: None means all clusters. `scopes`: what the caller may see, as
    (tenant, project), project None for all projects; None means every tenant."""

    cluster_id: str | None
    scopes: Sequence[tuple[str, str | None]] | None
    states: Sequence[JobState] = ()
    job_type: str | None = None
    source_type: str | None = None
    project_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class JobPage:
    """One page of a list, newest first, and the total count."""

    records: Sequence[JobRecord]
    total: int


def service_id(session: Session, now: datetime) -> str:
    """Return the id of the service that owns this database; the first call chooses it."""
    known = session.scalar(select(ServiceRecord.id).limit(1))
    if known is not None:
        return known
    session.add(ServiceRecord(id=str(uuid4()), created_at=now))
    session.flush()
    return session.scalars(select(ServiceRecord.id).order_by(ServiceRecord.created_at, ServiceRecord.id)).first() or ""


def create_job(session: Session, new: NewJob, now: datetime, *, job_id: str) -> tuple[JobRecord, bool]:
    """Record a job under an id; return it and whether it is new: a repeated idempotency key returns the earlier job,
    and so does an identical request within the job's `unique_seconds`.

    Raises KeyReused, NameTaken.
    """
    digest = digest_of(new)
    known = _by_key(session, new)
    if known is not None:
        return _same(known, new, digest), False
    known = _identical(session, new, digest, now)
    if known is not None:
        return known, False
    record = JobRecord(
        id=job_id,
        cluster_id=new.cluster_id,
        tenant_id=new.tenant_id,
        project_id=new.job.project_id,
        namespace=new.namespace,
        name=new.job.name,
        job_type=new.job.job_type.value,
        source_type=new.job.source_type.value,
        created_by=new.created_by,
        idempotency_key=new.idempotency_key,
        request_digest=digest,
        document=new.job.model_dump(mode="json", exclude_unset=True),
        state=FIRST.value,
        message="",
        estimate=estimate_document(new.estimate) if new.estimate is not None else None,
        estimated_micros=new.estimate.micros if new.estimate is not None else None,
        queue_name=new.queue_name,
        choice=new.choice,
        created_at=now,
        updated_at=now,
    )
    try:
        with session.begin_nested():
            session.add(record)
    except IntegrityError as error:
        known = _by_key(session, new)  # another request with the same key was faster
        if known is not None:
            return _same(known, new, digest), False
        raise NameTaken(new.job.name, new.namespace) from error
    _note(session, record, CREATE, now=now, actor=new.created_by)
    return record, True


def estimate_document(estimate: CostEstimate) -> dict[str, Any]:
    """Return an estimate as it is stored and shown; money in US dollars."""

    def usd(micros: int | None) -> float | None:
        return None if micros is None else micros / MICROS

    return {
        "usd": usd(estimate.micros),
        "usd_per_hour": usd(estimate.micros_per_hour),
        "seconds": estimate.seconds,
        "gpu_type": estimate.kind.gpu_type,
        "gpu_count": estimate.kind.gpu_count,
        "advice": estimate.advice,
        "reasons": list(estimate.reasons),
    }


def digest_of(new: NewJob) -> str:
    """Return the digest of a request, independent of the order of its fields and of how long it is unique. Fields with
    their defaults are left out: a field that a later version adds must not make recorded requests different ones."""
    is_chosen = new.choice is not None  # the service's own choice is no part of the request
    job = new.asked or new.job
    job = job.model_copy(update={"cluster_id": None}) if is_chosen else job
    cluster = AUTO if is_chosen else new.cluster_id
    document = job.model_dump(mode="json", exclude_defaults=True, exclude={"policy": {"unique_seconds"}})
    asked = {"cluster": cluster, "namespace": new.namespace, "job": document}
    return sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _by_key(session: Session, new: NewJob) -> JobRecord | None:
    if new.idempotency_key is None:
        return None
    same = (JobRecord.tenant_id == new.tenant_id, JobRecord.idempotency_key == new.idempotency_key)
    return session.scalars(select(JobRecord).where(*same)).one_or_none()


def _identical(session: Session, new: NewJob, digest: str, now: datetime) -> JobRecord | None:
    """Return the first job of an identical request, if the new one counts as that: it was submitted lately, and its
    result is or may still be there."""
    seconds = new.job.policy.unique_seconds
    if seconds is None:
        return None
    if session.get_bind().dialect.name == "postgresql":  # SQLite writes one transaction at a time anyway
        session.execute(select(func.pg_advisory_xact_lock(int(digest[:15], 16))))
    where = (
        JobRecord.tenant_id == new.tenant_id,
        JobRecord.created_at > now - timedelta(seconds=seconds),
        JobRecord.request_digest == digest,
        JobRecord.state.not_in((JobState.FAILED.value, JobState.CANCELLED.value)),
        JobRecord.cancel_requested_at.is_(None),
    )
    return session.scalars(select(JobRecord).where(*where).order_by(JobRecord.created_at).limit(1)).one_or_none()


def _same(known: JobRecord, new: NewJob, digest: str) -> JobRecord:
    if known.request_digest != digest:
        raise KeyReused(new.idempotency_key or "", known.id)
    return known


def get_job(session: Session, job_id: str) -> JobRecord:
    """Return the record of a job. Raises JobUnknown."""
    record = session.get(JobRecord, job_id)
    if record is None:
        raise JobUnknown(job_id)
    return record


def list_jobs(session: Session, wanted: JobFilter, *, page: int, page_size: int) -> JobPage:
    """Return a page of jobs, newest first; pages count from 1."""
    where = conditions_of(wanted)
    total = session.scalar(select(func.count()).select_from(JobRecord).where(*where)) or 0
    size = min(page_size, PAGE_SIZE_MAX)
    newest = select(JobRecord).where(*where).order_by(JobRecord.created_at.desc(), JobRecord.id.desc())
    return JobPage(session.scalars(newest.offset((page - 1) * size).limit(size)).all(), total)


def conditions_of(wanted: JobFilter) -> list[ColumnElement[bool]]:
    """Return what holds for the wanted jobs."""
    where: list[ColumnElement[bool]] = []
    if wanted.scopes is not None:
        seen = [
            JobRecord.tenant_id == tenant
            if project is None
            else (JobRecord.tenant_id == tenant) & (JobRecord.project_id == project)
            for tenant, project in wanted.scopes
        ]
        where.append(or_(false(), *seen))
    if wanted.states:
        where.append(JobRecord.state.in_([state.value for state in wanted.states]))
    for column, value in (
        (JobRecord.cluster_id, wanted.cluster_id),
        (JobRecord.job_type, wanted.job_type),
        (JobRecord.source_type, wanted.source_type),
        (JobRecord.project_id, wanted.project_id),
        (JobRecord.name, wanted.name),
    ):
        if value is not None:
            where.append(column == value)
    return where


def list_events(session: Session, job_id: str, *, page: int, page_size: int) -> tuple[Sequence[JobEventRecord], int]:
    """Return a page of a job's history, oldest first, and the total count."""
    of_job = JobEventRecord.job_id == job_id
    total = session.scalar(select(func.count()).select_from(JobEventRecord).where(of_job)) or 0
    size = min(page_size, PAGE_SIZE_MAX)
    oldest = select(JobEventRecord).where(of_job).order_by(JobEventRecord.id).offset((page - 1) * size).limit(size)
    return session.scalars(oldest).all(), total


def queued_since(session: Session, job_id: str) -> datetime | None:
    """Return when a job last entered its queue; None if it never did."""
    entered = (JobStep.SUBMIT.value, JobStep.REQUEUE.value, JobStep.UNADMIT.value)
    of_job = (JobEventRecord.job_id == job_id, JobEventRecord.what.in_(entered))
    return session.scalar(select(func.max(JobEventRecord.at)).where(*of_job))


def queue_usage(session: Session, cluster_id: str, queue: str) -> QueueUsage:
    """Return how many jobs with GPUs of a queue are in the cluster, and their GPUs."""
    named = JobRecord.document[("policy", "queue_name")].as_string()
    gpus = JobRecord.estimate["gpu_count"].as_integer()
    where = (
        JobRecord.cluster_id == cluster_id,
        JobRecord.state.in_([state.value for state in IN_CLUSTER]),
        (JobRecord.queue_name == queue) | (JobRecord.queue_name.is_(None) & (named == queue)),
        gpus > 0,
    )
    jobs, total = session.execute(select(func.count(), func.coalesce(func.sum(gpus), 0)).where(*where)).one()
    return QueueUsage(jobs, total)


def active_ids(session: Session, cluster_id: str) -> Sequence[str]:
    """Return the jobs of a cluster that have not ended, oldest first."""
    where = (JobRecord.cluster_id == cluster_id, JobRecord.state.not_in([state.value for state in ENDED]))
    return session.scalars(select(JobRecord.id).where(*where).order_by(JobRecord.created_at, JobRecord.id)).all()


def recorded_ids(session: Session, cluster_id: str, wanted: Sequence[str]) -> frozenset[str]:
    """Return which of the ids are those of jobs of a cluster, ended ones included."""
    found: set[str] = set()
    for first in range(0, len(wanted), IDS_MAX):
        some = JobRecord.id.in_(wanted[first : first + IDS_MAX])
        found.update(session.scalars(select(JobRecord.id).where(JobRecord.cluster_id == cluster_id, some)))
    return frozenset(found)


def jobs_without_room(session: Session, cluster_id: str) -> Sequence[JobRecord]:
    """Return the jobs of a cluster whose pods wait for machines, oldest first; not those that are to leave it."""
    where = (
        JobRecord.cluster_id == cluster_id,
        JobRecord.state == JobState.ADMITTED.value,
        JobRecord.cancel_requested_at.is_(None),
        JobRecord.pause_requested_at.is_(None),
    )
    return session.scalars(select(JobRecord).where(*where).order_by(JobRecord.created_at, JobRecord.id)).all()


def waiting_jobs(session: Session, cluster_id: str) -> Sequence[tuple[str, int]]:
    """Return the jobs of a cluster that wait to be created, paused or cancelled, with the version of each record. The
    leader finds requests to other replicas here."""
    asked = (
        (JobRecord.state == FIRST.value)
        | JobRecord.cancel_requested_at.is_not(None)
        | JobRecord.pause_requested_at.is_not(None)
    )
    where = (JobRecord.cluster_id == cluster_id, JobRecord.state.not_in([state.value for state in ENDED]), asked)
    return [
        (job_id, version) for job_id, version in session.execute(select(JobRecord.id, JobRecord.version).where(*where))
    ]


def take_step(
    session: Session,
    job_id: str,
    asked: JobStep,
    *,
    now: datetime,
    message: str = "",
    actor: str = "",
    changes: Mapping[str, Any] | None = None,
    version: int | None = None,
) -> JobRecord:
    """Move a job by one step and add it to the history. `version`: of the record that the decision is based on.
    `changes`: other fields to change with it.

    Raises JobUnknown, IllegalStep, RecordChanged, each with nothing changed.
    """
    record = _locked(session, job_id)
    if version is not None and record.version != version:
        raise RecordChanged(job_id)
    state = JobState(record.state)
    following = step(record.name, state, asked, history=_history(session, job_id))
    record.state = following.value
    record.message = bounded(message)
    record.updated_at = now
    if following is JobState.RUNNING and record.started_at is None:
        record.started_at = now
    if following in ENDED:
        record.ended_at = now
    if following not in (JobState.ADMITTED, JobState.FAILED):
        record.topology_wait = None
    if asked in (JobStep.RETRY, JobStep.PAUSE, JobStep.ESCALATE, JobStep.MOVE):
        record.attempt += 1
        record.workload_uid = record.started_at = record.ended_at = record.actual_micros = None
    for field, value in (changes or {}).items():
        setattr(record, field, value)
    _flush(session, record)
    _note(session, record, asked.value, now=now, message=message, actor=actor)
    queue_deliveries(session, record, now)
    return record


def change_job(session: Session, job_id: str, *, version: int, now: datetime, changes: Mapping[str, Any]) -> JobRecord:
    """Change fields other than the state, such as the message. Raises JobUnknown, RecordChanged."""
    record = _locked(session, job_id)
    if record.version != version:
        raise RecordChanged(job_id)
    for field, value in changes.items():
        setattr(record, field, value)
    record.updated_at = now
    _flush(session, record)
    return record


def ask_to_cancel(session: Session, job_id: str, *, now: datetime, actor: str) -> JobRecord:
    """Record the request to cancel a job; a repeated request changes nothing. Raises JobUnknown, IllegalStep."""
    record = _locked(session, job_id)
    is_asked = record.cancel_requested_at is not None and record.state not in ENDED
    if is_asked or record.state == JobState.CANCELLED:
        return record
    step(record.name, JobState(record.state), JobStep.CANCEL, history=_history(session, job_id))
    record.cancel_requested_at, record.cancel_requested_by, record.updated_at = now, actor, now
    record.message = "cancelling: waiting until no object of the job is left in the cluster"
    _flush(session, record)
    _note(session, record, CANCEL_ASKED, now=now, actor=actor)
    return record


def ask_to_pause(session: Session, job_id: str, *, now: datetime, actor: str, message: str = "") -> JobRecord:
    """Record the request to pause a job; a repeated request changes nothing. Raises JobUnknown, IllegalStep."""
    record = _locked(session, job_id)
    if JobState(record.state) not in PAUSABLE:
        raise IllegalStep(record.name, JobState(record.state), JobStep.PAUSE, _history(session, job_id))
    if record.pause_requested_at is not None or record.cancel_requested_at is not None:
        return record
    record.pause_requested_at, record.pause_requested_by, record.updated_at = now, actor, now
    record.message = bounded(message or f"paused by {actor}")
    _flush(session, record)
    _note(session, record, PAUSE_ASKED, now=now, message=message, actor=actor)
    return record


def resume_job(session: Session, job_id: str, *, now: datetime, actor: str) -> JobRecord:
    """Let a paused job go on: it is submitted again. Raises JobUnknown, NotPaused."""
    record = _locked(session, job_id)
    if record.pause_requested_at is None or record.state != FIRST:
        raise NotPaused(record.name, record.state, is_pausing=record.pause_requested_at is not None)
    record.pause_requested_at = record.pause_requested_by = None
    record.message, record.updated_at = f"resumed by {actor}", now
    _flush(session, record)
    _note(session, record, RESUMED, now=now, actor=actor)
    return record


def note_change(
    session: Session, record: JobRecord, what: str, *, now: datetime, actor: str, message: str = ""
) -> None:
    """Add an entry to a job's history that is no step."""
    _note(session, record, what, now=now, message=message, actor=actor)


def note_budget(session: Session, job_id: str, *, now: datetime, message: str, mark: str) -> None:
    """Record that a budget was spent, and which. Raises JobUnknown."""
    record = _locked(session, job_id)
    record.budget_mark, record.updated_at = mark, now
    _flush(session, record)
    _note(session, record, BUDGET_SPENT, now=now, message=message)


def retry_job(session: Session, job_id: str, *, now: datetime, actor: str) -> JobRecord:
    """Retry a failed job at once, with its retry count reset. Raises JobUnknown, IllegalStep, NameTaken."""
    record = _locked(session, job_id)
    if JobState(record.state) is not JobState.FAILED:  # the table lets the service itself retry from other states
        raise IllegalStep(record.name, JobState(record.state), JobStep.RETRY, _history(session, job_id))
    fresh = ("not_before", "cancel_requested_at", "cancel_requested_by", "pause_requested_at", "pause_requested_by")
    changes = {"retry_count": 0, **dict.fromkeys(fresh)}
    try:
        with session.begin_nested():
            return take_step(
                session, job_id, JobStep.RETRY, now=now, message=f"tried again by {actor}", actor=actor, changes=changes
            )
    except IntegrityError as error:
        raise NameTaken(record.name, record.namespace) from error


def _locked(session: Session, job_id: str) -> JobRecord:
    """Return a record, locked until the transaction ends; SQLite locks the whole file anyway."""
    record = session.scalars(select(JobRecord).where(JobRecord.id == job_id).with_for_update()).one_or_none()
    if record is None:
        raise JobUnknown(job_id)
    return record


def _flush(session: Session, record: JobRecord) -> None:
    try:
        session.flush()
    except StaleDataError as error:
        raise RecordChanged(record.id) from error


def _note(session: Session, record: JobRecord, what: str, *, now: datetime, message: str = "", actor: str = "") -> None:
    session.add(
        JobEventRecord(job_id=record.id, at=now, what=what, state=record.state, message=bounded(message), actor=actor)
    )
    session.flush()


def _history(session: Session, job_id: str) -> tuple[str, ...]:
    newest = select(JobEventRecord.what).where(JobEventRecord.job_id == job_id).order_by(JobEventRecord.id.desc())
    return tuple(reversed(session.scalars(newest.limit(HISTORY_READ_MAX)).all()))
