"""PATCH of a job: policy, intent and labels, as a JSON merge patch (RFC 7396), checked like a new job.

What the service itself decides by, such as budgets, deadlines and retries, applies at once. Objects in the cluster keep
what they have until the next attempt.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from atoll.jobs.documents import parse_job
from atoll.jobs.errors import JobMistake, NodesUnknown
from atoll.jobs.needs import Needs
from atoll.jobs.queue_file import QueueFile, QueueTenant
from atoll.jobs.rendering import Rendered, render
from atoll.jobs.settings import RenderSettings
from atoll.jobs.states import ENDED, JobState
from jobs.errors import JobEnded
from jobs.problems import invalid
from jobs.records import JobRecord
from jobs.store import change_job, get_job, note_change
from jobs.submission import check_alone, named_queue
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


def changed_job(
    record: JobRecord, changes: JobChanges, rendering: RenderSettings, queues: QueueFile | None, *, now_seconds: float
) -> tuple[Needs, dict[str, Any]]:
    """Return what the changed job needs, and its document. `queues`: of its cluster. Raises ApiRefusal for a mistake,
    JobEnded for a job that has ended."""
    if JobState(record.state) in ENDED:
        raise JobEnded(record.name, record.state)
    document = changes.merged(record.document)
    parsed = parse_job(json.dumps(document).encode(), rendering.policy())
    if parsed.job is None:
        raise invalid(parsed.problems)
    parts = {name: getattr(parsed.job, name) for name in ("policy", "intent", "labels")}
    try:
        rendered = render(job_of(record).model_copy(update=parts), rendering, now_seconds=now_seconds)
    except NodesUnknown as unknown:
        raise invalid((unknown.problem,)) from unknown
    except JobMistake as mistake:
        raise invalid((mistake.problem,)) from mistake
    tenant = queues.tenant(record.tenant_id) if queues is not None else None
    if tenant is not None:
        _check_queue(record, parsed.job.policy.queue_name, rendered, tenant)
    return rendered.needs, parsed.job.model_dump(mode="json", exclude_unset=True)


def _check_queue(record: JobRecord, named: str | None, rendered: Rendered, tenant: QueueTenant) -> None:
    """Refuse another queue that is none of the tenant's, and a job that its queue would tear apart. A queue that the
    job named before may be gone meanwhile."""
    if named is not None and named != (record.document.get("policy") or {}).get("queue_name"):
        named_queue(tenant, named)
    name = queue_name_of(record, named)
    for queue in tenant.queues:
        if queue.name == name:
            check_alone(rendered, queue)


def apply_changes(
    session: Session, record: JobRecord, document: Mapping[str, Any], now: datetime, *, actor: str
) -> JobRecord:
    """Record a changed job. Raises JobUnknown, RecordChanged."""
    before = get_job(session, record.id).document
    told = ", ".join(name for name in ("policy", "intent", "labels") if before.get(name) != document.get(name))
    changed = change_job(session, record.id, version=record.version, now=now, changes={"document": dict(document)})
    note_change(session, changed, CHANGED, now=now, actor=actor, message=f"changed {told or 'nothing'}")
    return changed
