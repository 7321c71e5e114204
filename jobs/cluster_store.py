"""Queries and changes of the registered clusters. Each function is the work of one transaction."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from atoll.jobs.fitting import GpuCapacity
from atoll.jobs.states import ENDED, IN_CLUSTER, JobState, JobStep
from jobs.errors import ClusterBusy, ClusterUnknown
from jobs.queue_store import forget_queue_file
from jobs.records import JobRecord, RegisteredCluster
from jobs.store import active_ids, get_job, take_step

MOVING: Final = ": the job moves to "
"""In the message of a job from the moment before its objects are removed from a drained cluster."""


class ClusterState(StrEnum):
    """Whether a cluster takes jobs."""

    ACTIVE = "active"
    DRAINING = "draining"
    """It takes no new jobs, and its jobs move away or end."""


@dataclass(frozen=True, slots=True)
class ClusterTerms:
    """What an operator says about a cluster; see RegisteredCluster."""

    kubeconfig: str
    region: str = ""
    tenants: tuple[str, ...] = ()
    prices: tuple[tuple[str, float], ...] = ()
    latency_ms: float = 0.0


def list_clusters(session: Session) -> Sequence[RegisteredCluster]:
    """Return every cluster, by name."""
    return session.scalars(select(RegisteredCluster).order_by(RegisteredCluster.id)).all()


def get_cluster(session: Session, name: str) -> RegisteredCluster:
    """Return a cluster. Raises ClusterUnknown."""
    record = session.get(RegisteredCluster, name)
    if record is None:
        raise ClusterUnknown(name)
    return record


def register_cluster(
    session: Session, name: str, terms: ClusterTerms, *, now: datetime, actor: str
) -> RegisteredCluster:
    """Register a cluster, or change what is known about it. Raises ClusterBusy if it is draining, or if it has jobs and
    would be reached in another way."""
    record = session.get(RegisteredCluster, name, with_for_update=True)
    if record is None:
        record = RegisteredCluster(id=name, state=ClusterState.ACTIVE.value, kubeconfig=terms.kubeconfig)
        record.trouble, record.capacity = "not yet looked at", []
        session.add(record)
    elif record.state == ClusterState.DRAINING:
        raise ClusterBusy(f"cluster {name} is draining: remove it, or undo the draining, before you change it")
    elif record.kubeconfig != terms.kubeconfig and active_ids(session, name):
        raise ClusterBusy(f"cluster {name} has active jobs: its kubeconfig cannot be changed to {terms.kubeconfig}")
    record.kubeconfig, record.region, record.latency_ms = terms.kubeconfig, terms.region, terms.latency_ms
    record.tenants, record.prices = list(terms.tenants), dict(terms.prices)
    record.changed_by, record.changed_at = actor, now
    session.flush()
    return record


def drain_cluster(session: Session, name: str, *, now: datetime, actor: str) -> RegisteredCluster:
    """Let a cluster take no new jobs; its jobs move away or end. Raises ClusterUnknown."""
    record = session.get(RegisteredCluster, name, with_for_update=True)
    if record is None:
        raise ClusterUnknown(name)
    if record.state != ClusterState.DRAINING:
        record.state, record.changed_by, record.changed_at = ClusterState.DRAINING.value, actor, now
        session.flush()
    return record


def activate_cluster(session: Session, name: str, *, now: datetime, actor: str) -> RegisteredCluster:
    """Let a drained cluster take jobs again. Raises ClusterUnknown, and ClusterBusy while a job is on its way out: its
    objects may be gone already, and it would be taken for lost."""
    record = get_cluster(session, name)
    where = (JobRecord.cluster_id == name, JobRecord.message.contains(MOVING), JobRecord.state.in_(IN_CLUSTER))
    leaving = session.scalars(select(JobRecord.name).where(*where).limit(1)).first()
    if leaving is not None:
        raise ClusterBusy(f"job {leaving} is on its way out of cluster {name}: try again when it has moved")
    if record.state != ClusterState.ACTIVE:
        record.state, record.changed_by, record.changed_at = ClusterState.ACTIVE.value, actor, now
        session.flush()
    return record


def check_removable(session: Session, name: str) -> RegisteredCluster:
    """Return a cluster that is drained and has no jobs. Raises ClusterUnknown, ClusterBusy."""
    record = get_cluster(session, name)
    active = active_ids(session, name)
    if record.state != ClusterState.DRAINING:
        raise ClusterBusy(f"cluster {name} is active: drain it first, or force the removal")
    if active:
        raise ClusterBusy(f"cluster {name} has {len(active)} active jobs: wait, or force the removal, which fails them")
    return record


def remove_cluster(session: Session, name: str, *, force: bool, now: datetime, actor: str) -> int:
    """Forget a cluster; return how many jobs failed by that. Without `force` it must be drained and have no jobs.

    Raises ClusterUnknown, ClusterBusy.
    """
    record = get_cluster(session, name) if force else check_removable(session, name)
    failed = 0
    for job_id in active_ids(session, name):
        state = JobState(get_job(session, job_id).state)
        step = JobStep.FAIL if state is JobState.PENDING else JobStep.VANISH
        told = f"cluster {name} was removed by force by {actor}; what ran there may go on without the service"
        take_step(session, job_id, step, now=now, message=told, actor=actor)
        failed += 1
    forget_queue_file(session, name)
    session.delete(record)
    session.flush()
    return failed


def note_health(
    session: Session, name: str, *, now: datetime, trouble: str, capacity: Sequence[GpuCapacity] | None
) -> None:
    """Record a look at a cluster; `capacity` None keeps the earlier one."""
    record = session.get(RegisteredCluster, name)
    if record is None:
        return
    record.checked_at, record.trouble = now, trouble
    if capacity is not None:
        record.capacity = [asdict(one) for one in capacity]
    session.flush()


def job_counts(session: Session, name: str) -> dict[str, int]:
    """Return how many active jobs a cluster has, by state."""
    where = (JobRecord.cluster_id == name, JobRecord.state.not_in([state.value for state in ENDED]))
    counted = select(JobRecord.state, func.count()).where(*where).group_by(JobRecord.state).order_by(JobRecord.state)
    return {row[0]: row[1] for row in session.execute(counted)}


class RunningJob(NamedTuple):
    """A job that runs. `seconds`: how long it is expected to run, by its hint or at most; None without either."""

    id: str
    started_at: datetime | None
    seconds: float | None


def running_jobs(session: Session, name: str) -> Sequence[RunningJob]:
    """Return the jobs of a cluster that run now."""
    where = (JobRecord.cluster_id == name, JobRecord.state == JobState.RUNNING.value)
    hint = JobRecord.document["intent"]["expected_duration_hint"].as_float()
    longest = JobRecord.document["policy"]["max_runtime"].as_float()
    asked = select(JobRecord.id, JobRecord.started_at, func.coalesce(hint, longest)).where(*where)
    return [RunningJob(*row) for row in session.execute(asked)]
