"""Creates jobs: validates a submission, estimates its cost, and records it. The API does so, and steps of pipelines."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from sqlalchemy.orm import Session

from atoll.jobs.costs.estimates import estimate, kind_of
from jobs.accounts import learned
from jobs.api_parts import ApiParts
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
