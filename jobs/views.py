"""Response models of the API.

Separate from the tables, so that a change of one does not change the other by accident.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from atoll.jobs.costs.prices import MICROS
from atoll.jobs.last_checkpoint import LastCheckpoint
from atoll.jobs.model import Job
from atoll.jobs.relaxing import TopologyWait
from atoll.jobs.states import JobState
from atoll.jobs.words import JobType, SourceType
from jobs.errors import RecordUnreadable
from jobs.log_keeping import KeptLogs, kept_logs
from jobs.records import JobEventRecord, JobRecord


class EstimateView(BaseModel):
    """What a job was expected to cost when it was submitted."""

    usd: Annotated[float | None, Field(description="US dollars; null if price or run time is not known")]
    usd_per_hour: Annotated[float | None, Field(description="of all GPUs of the job")]
    seconds: Annotated[int | None, Field(description="expected run time")]
    gpu_type: str
    gpu_count: Annotated[int, Field(description="GPUs at a time")]
    advice: Annotated[str, Field(description="a cheaper GPU that would do; empty without one")]
    reasons: Annotated[list[str], Field(description="where each figure comes from")]


class JobView(BaseModel):
    """A job and its state."""

    id: str
    name: str
    status: JobState
    message: Annotated[str, Field(description="why the job is in this state, and what it waits for")]
    cluster_id: str
    tenant_id: str
    project_id: str | None
    namespace: str
    job_type: JobType
    source_type: SourceType
    created_by: str
    attempt: Annotated[int, Field(description="number of the attempt, from 1")]
    retry_count: Annotated[int, Field(description="retries after failures")]
    preemption_count: Annotated[int, Field(description="how often it was preempted")]
    not_before: Annotated[datetime | None, Field(description="when the pause before a retry ends")]
    cancel_requested_at: datetime | None
    cancel_requested_by: str | None
    pause_requested_at: Annotated[datetime | None, Field(description="since when it is paused")]
    pause_requested_by: str | None
    created_at: datetime
    updated_at: datetime
    started_at: Annotated[datetime | None, Field(description="when containers of this attempt started")]
    ended_at: datetime | None
    object_kind: Annotated[str, Field(description="kind of the object that runs the pods")]
    object_name: str
    estimate: Annotated[EstimateView | None, Field(description="null for jobs of an older service")]
    cost_usd: Annotated[float | None, Field(description="final cost; null until no GPU is held for the job")]
    queue_name: Annotated[str | None, Field(description="LocalQueue, if the cluster has Kueue")]
    choice: Annotated[
        dict[str, Any] | None, Field(description="score sheet of the choice of the cluster, if the service chose it")
    ]
    last_checkpoint: Annotated[
        LastCheckpoint | None,
        Field(description="as the job's containers told it when they ended; null before, or if it saves none"),
    ]
    log_archive: Annotated[list[KeptLogs], Field(description="which logs are in the archive, by attempt")]
    topology_wait: Annotated[
        TopologyWait | None,
        Field(description="since when it waits for its topology, and the weaker one that it was offered"),
    ]
    job: Annotated[dict[str, Any], Field(description="the submitted job, word for word")]


class JobListView(BaseModel):
    """One page of jobs, newest first."""

    items: list[JobView]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]


class JobEventView(BaseModel):
    """One entry of a job's history."""

    at: datetime
    what: Annotated[str, Field(description="create, a user's request, a topology offer, or a step of the state table")]
    status: Annotated[JobState, Field(description="afterwards")]
    message: str
    actor: Annotated[str, Field(description="who requested it; empty if the cluster did it")]


class JobEventListView(BaseModel):
    """One page of a job's history, oldest first."""

    items: list[JobEventView]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]


def job_of(record: JobRecord) -> Job:
    """Return the job to render: the submitted one with the fields that the service sets. Raises RecordUnreadable."""
    policy = record.document.get("policy") or {}
    is_chosen = record.queue_name is not None and policy.get("queue_name") is None
    queue = {"policy": policy | {"queue_name": record.queue_name}} if is_chosen else {}
    own = {
        "id": record.id,
        "namespace": record.namespace,
        "tenant_id": record.tenant_id,
        "cluster_id": record.cluster_id,
        "created_by": label_safe(record.created_by),
    }
    try:
        return Job.model_validate(record.document | queue | own)
    except ValidationError as error:
        raise RecordUnreadable(f"job {record.name}", error) from error


def queue_name_of(record: JobRecord, named: str | None) -> str:
    """Return the queue of a job: the one it names, else the service's choice, else the usual one of its tenant."""
    return named or record.queue_name or f"tenant-{record.tenant_id}-queue"


def checkpoint_of(record: JobRecord) -> LastCheckpoint | None:
    """Return the last checkpoint that was recorded; None for one that can no longer be read."""
    stored = record.last_checkpoint
    try:
        return LastCheckpoint.model_validate_json(json.dumps(stored)) if stored is not None else None
    except ValidationError:
        return None


def wait_of(record: JobRecord) -> TopologyWait | None:
    """Return what is recorded of a job's wait for its topology; None for one that can no longer be read."""
    try:
        return TopologyWait.model_validate(record.topology_wait) if record.topology_wait is not None else None
    except ValidationError:
        return None


def label_safe(name: str) -> str:
    """Return a user's name as a label value; for a ServiceAccount, the account's own name."""
    kept = "".join(one if one.isascii() and (one.isalnum() or one in "-_.") else "-" for one in name)
    return kept[-63:].strip("-_.") or "unknown"


def view_of(record: JobRecord) -> JobView:
    """Return the response for a job."""
    return JobView(
        id=record.id,
        name=record.name,
        status=JobState(record.state),
        message=record.message,
        cluster_id=record.cluster_id,
        tenant_id=record.tenant_id,
        project_id=record.project_id,
        namespace=record.namespace,
        job_type=JobType(record.job_type),
        source_type=SourceType(record.source_type),
        created_by=record.created_by,
        attempt=record.attempt,
        retry_count=record.retry_count,
        preemption_count=record.preemption_count,
        not_before=record.not_before,
        cancel_requested_at=record.cancel_requested_at,
        cancel_requested_by=record.cancel_requested_by,
        pause_requested_at=record.pause_requested_at,
        pause_requested_by=record.pause_requested_by,
        created_at=record.created_at,
        updated_at=record.updated_at,
        started_at=record.started_at,
        ended_at=record.ended_at,
        object_kind="Deployment" if record.job_type == JobType.SERVICE else "Job",
        object_name=record.name,
        estimate=EstimateView.model_validate(record.estimate) if record.estimate is not None else None,
        cost_usd=None if record.actual_micros is None else record.actual_micros / MICROS,
        queue_name=queue_name_of(record, (record.document.get("policy") or {}).get("queue_name")),
        choice=record.choice,
        last_checkpoint=checkpoint_of(record),
        log_archive=list(kept_logs(record)),
        topology_wait=wait_of(record),
        job=record.document,
    )


def event_views(records: Sequence[JobEventRecord]) -> list[JobEventView]:
    """Return the response for a job's history."""
    return [
        JobEventView(at=one.at, what=one.what, status=JobState(one.state), message=one.message, actor=one.actor)
        for one in records
    ]
