"""PATCH of a job: policy, intent and labels, as a JSON merge patch (RFC 7396), checked like a new job.

What the service itself decides by, such as budgets, deadlines and retries, applies at once. Objects in the cluster keep
what they have until the next attempt.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from atoll.jobs.costs.estimates import estimate, kind_of
from atoll.jobs.costs.prices import PriceTable
from atoll.jobs.documents import parse_job
from atoll.jobs.errors import JobMistake, NodesUnknown
from atoll.jobs.model import Job
from atoll.jobs.needs import Needs
from atoll.jobs.queue_file import QueueFile, QueueTenant, TenantQueue
from atoll.jobs.rendering import Rendered, render
from atoll.jobs.settings import RenderSettings
from atoll.jobs.states import ENDED, JobState
from atoll.jobs.words import Priority
from jobs.accounts import learned
from jobs.errors import JobEnded
from jobs.problems import invalid
from jobs.queue_places import check_alone, named_queue, ruled_job
from jobs.records import JobRecord
from jobs.store import change_job, estimate_document, get_job, note_change
from jobs.views import job_of, queue_name_of

CHANGED: Final = "change"
Patch = Annotated[dict[str, Any] | None, Field(max_length=64)]


class JobChanges(BaseModel):
    """What to change; a null removes a field."""

    model_config = ConfigDict(extra="forbid")

    policy: Annotated[Patch, Field(description="fields of the policy")] = None
    intent: Annotated[Patch, Field(description="fields of the intent")] = None
    labels: Annotated[dict[str, str | None] | None, Field(max_length=64, description="labels")] = None

    def merged(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a job's document with the changes."""
        done = dict(document)
        for name in sorted(self.model_fields_set):
            change = getattr(self, name)
            if change is not None:
                done[name] = merge(done.get(name), change)
        return done


def merge(value: object, patch: object) -> object:
    """Return a value with a JSON merge patch applied."""
    if not isinstance(patch, Mapping):
        return patch
    base = dict(value) if isinstance(value, Mapping) else {}
    for key, one in patch.items():
        if one is None:
            base.pop(key, None)
        else:
            base[key] = merge(base.get(key), one)
    return base


@dataclass(frozen=True, slots=True)
class ChangedJob:
    """A job with its changes, and what it needs. `queue`: the service's choice, None if the job names one. `moved_to`:
    the queue that it moves to, None if it stays."""

    job: Job
    needs: Needs
    queue: str | None
    moved_to: TenantQueue | None


def changed_job(
    record: JobRecord, changes: JobChanges, rendering: RenderSettings, queues: QueueFile | None, *, now_seconds: float
) -> ChangedJob:
    """Return the changed job. A change of its policy is held to the limits of its queue and gets its defaults, as at
    submission. `queues`: of its cluster. Raises ApiRefusal for a mistake, JobEnded for a job that has ended."""
    if JobState(record.state) in ENDED:
        raise JobEnded(record.name, record.state)
    parsed = parse_job(json.dumps(changes.merged(record.document)).encode(), rendering.policy())
    if parsed.job is None:
        raise invalid(parsed.problems)
    rendered = _rendered(record, parsed.job, rendering, now_seconds)
    tenant = queues.tenant(record.tenant_id) if queues is not None else None
    if tenant is None:
        return ChangedJob(parsed.job, rendered.needs, record.queue_name, None)
    job, named, before = parsed.job, parsed.job.policy.queue_name, _named(record)
    current = next((one for one in tenant.queues if one.name == queue_name_of(record, before)), None)
    queue = current
    if changes.policy is not None:
        if named is None or named != before:
            queue = _queue_after(named, rendered.needs.priority, tenant, current if before is None else None)
        job = ruled_job(job, queue, rendering.policy()) if queue is not None else job
        rendered = _rendered(record, job, rendering, now_seconds)
    if queue is not None:
        check_alone(rendered, queue)
    chosen = queue.name if queue is not None else record.queue_name
    return ChangedJob(job, rendered.needs, chosen if named is None else None, queue if queue != current else None)


def _rendered(record: JobRecord, job: Job, rendering: RenderSettings, now_seconds: float) -> Rendered:
    """Return the changed job as objects. Raises ApiRefusal."""
    parts = {name: getattr(job, name) for name in ("policy", "intent", "labels", "attributes")}
    try:
        return render(job_of(record).model_copy(update=parts), rendering, now_seconds=now_seconds)
    except NodesUnknown as unknown:
        raise invalid((unknown.problem,)) from unknown
    except JobMistake as mistake:
        raise invalid((mistake.problem,)) from mistake


def _named(record: JobRecord) -> str | None:
    name: str | None = (record.document.get("policy") or {}).get("queue_name")
    return name


def _queue_after(
    named: str | None, priority: Priority, tenant: QueueTenant, current: TenantQueue | None
) -> TenantQueue:
    """Return the queue of a job after a change: the one it names, or the one that suits its priority: the earlier
    choice if that is as good. Raises ApiRefusal for a name that is none of the tenant's queues."""
    if named is not None:
        return named_queue(tenant, named)
    suits = tenant.queue_for(critical=priority is Priority.CRITICAL)
    return current if current is not None and current.critical == suits.critical else suits


def apply_changes(
    session: Session, record: JobRecord, changed: ChangedJob, prices: PriceTable, now: datetime, *, actor: str
) -> JobRecord:
    """Record a changed job; one that moves to another queue gets a new estimate, because of the queue's defaults.
    Raises JobUnknown, RecordChanged."""
    before, document = get_job(session, record.id).document, changed.job.model_dump(mode="json", exclude_unset=True)
    changes: dict[str, Any] = {"document": document, "queue_name": changed.queue}
    if changed.moved_to is not None:
        earlier = learned(session, record.cluster_id, kind_of(changed.job, changed.needs))
        estimated = estimate(changed.job, changed.needs, prices, learned_seconds=earlier)
        changes |= {"estimate": estimate_document(estimated), "estimated_micros": estimated.micros}
    told = ", ".join(
        name for name in ("policy", "intent", "labels", "attributes") if before.get(name) != document.get(name)
    )
    done = change_job(session, record.id, version=record.version, now=now, changes=changes)
    note_change(session, done, CHANGED, now=now, actor=actor, message=f"changed {told or 'nothing'}")
    return done
