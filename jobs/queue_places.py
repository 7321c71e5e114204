"""The queue of a job in a cluster: which one takes it, what its defaults make of the job, and why none takes it.

Submissions, changes, choices of a cluster and moves to another one are held to the same rules. Raises ApiRefusal.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from atoll.jobs.errors import JobMistake
from atoll.jobs.model import Job
from atoll.jobs.queue_file import QueueFile, QueueTenant, TenantQueue
from atoll.jobs.queue_limits import rules_of, within_limits
from atoll.jobs.rendering import Rendered, render
from atoll.jobs.settings import RenderSettings
from atoll.jobs.words import Priority
from atoll.ml.policy import MlPolicy
from jobs.database import Database
from jobs.problems import invalid, mistaken
from jobs.queue_store import queue_file_of, queues_in


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A job with its queue's defaults in the gaps, that as objects, and the queue; None in a cluster without a file, or
    whose file does not name the tenant."""

    job: Job
    rendered: Rendered
    queue: TenantQueue | None

    @property
    def chosen(self) -> str | None:
        """The name of the queue, if the job names none."""
        return self.queue.name if self.queue is not None and self.job.policy.queue_name is None else None


async def place_at(
    database: Database,
    cluster: str,
    job: Job,
    rendered: Rendered,
    *,
    tenant: str,
    rendering: RenderSettings,
    now: datetime,
) -> QueuePlace:
    """Return the place of a job in a cluster, by its file of queues. Raises ApiRefusal, RecordUnreadable and
    SQLAlchemy's errors."""
    file = await database.read(lambda session: queue_file_of(session, cluster))
    return place_in(queues_in(file), job, rendered, tenant=tenant, rendering=rendering, now=now)


def place_in(
    queues: QueueFile | None,
    job: Job,
    rendered: Rendered,
    *,
    tenant: str,
    rendering: RenderSettings,
    now: datetime,
) -> QueuePlace:
    """Return the place of a job in a cluster with these queues. Raises ApiRefusal if no queue takes it."""
    queue = _queue_of(job, queues, tenant, rendered.needs.priority)
    if queue is None:
        return QueuePlace(job, rendered, None)
    ruled = ruled_job(job, queue, rendering.policy())
    try:
        done = render(ruled, rendering, now_seconds=now.timestamp())
    except JobMistake as mistake:
        found = mistake.problem
        hint = f"{found.hint}; it may be a default of queue {queue.name}"
        raise invalid((replace(found, hint=hint),)) from mistake
    check_alone(done, queue)
    return QueuePlace(ruled, done, queue)


def _queue_of(job: Job, queues: QueueFile | None, tenant: str, priority: Priority) -> TenantQueue | None:
    """Return the queue of a job. Raises ApiRefusal for a name that is no queue of its tenant: it would wait there for
    ever."""
    known = queues.tenant(tenant) if queues is not None else None
    if known is None:
        return None
    if job.policy.queue_name is None:
        return known.queue_for(critical=priority is Priority.CRITICAL)
    return named_queue(known, job.policy.queue_name)


def named_queue(tenant: QueueTenant, name: str) -> TenantQueue:
    """Return a queue of a tenant. Raises ApiRefusal for a name that is none of its queues."""
    queues = {queue.name: queue for queue in tenant.queues}
    if name not in queues:
        choice = f"name one of {', '.join(queues)}, or remove it"
        raise mistaken("policy.queue_name", name, f"is no queue of tenant {tenant.name}", choice)
    return queues[name]


def ruled_job(job: Job, queue: TenantQueue, policy: MlPolicy) -> Job:
    """Return the job with its queue's defaults in the gaps. Raises ApiRefusal beyond a limit."""
    ruled = within_limits(job, rules_of(queue), policy)
    if isinstance(ruled, tuple):
        raise invalid(ruled)
    return ruled


def check_alone(rendered: Rendered, queue: TenantQueue) -> None:
    """Refuse a job of several objects for a queue that sends jobs elsewhere: MultiKueue takes the Job alone along.
    Raises ApiRefusal."""
    others = sorted({one["kind"] for one in rendered.objects} - {"Job"})
    if others and queue.multikueue is not None:
        limit = f"sends jobs to other clusters, and MultiKueue leaves {' and '.join(others)} behind"
        raise mistaken("policy.queue_name", queue.name, limit, "name a queue of this cluster, or submit it elsewhere")
