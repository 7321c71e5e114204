"""Creates jobs: validates a submission, estimates its cost, and records it. The API does so, and steps of pipelines."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from uuid import uuid4

from sqlalchemy.orm import Session

from atoll.jobs.costs.estimates import estimate, kind_of
from atoll.jobs.permissions import AccessAnswer, JobPermission
from jobs.accounts import learned
from jobs.api_parts import ApiParts
from jobs.audit import AuditEntry, action_of, entry_of
from jobs.problems import ApiRefusal
from jobs.records import JobRecord
from jobs.store import create_job
from jobs.submission import Submission, accepted_job, placed_job

JobCreation = Callable[[Session, str], tuple[JobRecord, bool]]
"""The work of one transaction: records the job under an id; returns it and whether it is new."""


async def creation_of(parts: ApiParts, submission: Submission, cluster: str, now: datetime) -> JobCreation:
    """Return how a submitted job is recorded. `cluster`: its name, or auto. Raises ApiRefusal."""
    accepted = accepted_job(submission, parts.settings, parts.rendering, cluster, now_seconds=now.timestamp())
    new, needs = await placed_job(accepted, parts, cluster)
    kind = kind_of(new.job, needs)

    def create(session: Session, job_id: str) -> tuple[JobRecord, bool]:
        earlier = learned(session, new.cluster_id, kind)
        priced = replace(new, estimate=estimate(new.job, needs, parts.prices, learned_seconds=earlier))
        return create_job(session, priced, now, job_id=job_id)

    return create


async def created_job(parts: ApiParts, submission: Submission, cluster: str) -> tuple[JobRecord, bool]:
    """Record a submitted job and audit that; return it and whether it is new. `cluster`: its name, or auto.

    Raises ApiRefusal.
    """
    caller = submission.caller
    try:
        creation = await creation_of(parts, submission, cluster, parts.now())
    except ApiRefusal as refusal:
        if refusal.problem.status == 403:
            extra = {"detail": refusal.problem.detail}
            entry = AuditEntry(caller.name, action_of(JobPermission.CREATE), AccessAnswer.REFUSED, "", "", extra=extra)
            await parts.audit.note(entry)
        raise
    record, is_new = await parts.database.write(lambda session: creation(session, str(uuid4())))
    await parts.audit.note(entry_of(record, caller.name, JobPermission.CREATE, AccessAnswer.ALLOWED))
    parts.wake(record.id)
    return record, is_new
