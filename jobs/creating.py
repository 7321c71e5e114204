"""Creates jobs: validates a submission, estimates its cost, and records it. The API does so, and steps of pipelines."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Protocol

from sqlalchemy.orm import Session

from atoll.jobs.costs.estimates import estimate, kind_of
from atoll.jobs.costs.prices import PriceTable
from atoll.jobs.queue_file import QueueFile
from atoll.jobs.settings import RenderSettings
from jobs.accounts import learned
from jobs.database import Database
from jobs.queue_store import queue_file_of
from jobs.records import JobRecord
from jobs.settings import JobServiceSettings
from jobs.store import create_job
from jobs.submission import Submission, new_job_of


class CreationParts(Protocol):
    """What is needed to create a job."""

    @property
    def database(self) -> Database:
        """The records."""
        ...

    @property
    def settings(self) -> JobServiceSettings:
        """The service's settings."""
        ...

    @property
    def rendering(self) -> RenderSettings:
        """How jobs become objects."""
        ...

    @property
    def prices(self) -> PriceTable:
        """What GPUs cost."""
        ...


JobCreation = Callable[[Session, str], tuple[JobRecord, bool]]
"""The work of one transaction: records the job under an id; returns it and whether it is new."""


async def creation_of(parts: CreationParts, submission: Submission, now: datetime) -> JobCreation:
    """Return how a submitted job is recorded. Raises ApiRefusal."""
    cluster = parts.settings.cluster
    queues = await parts.database.read(lambda session: queue_file_of(session, cluster))
    file = QueueFile.model_validate(queues.document) if queues is not None else None
    new, needs = new_job_of(submission, parts.settings, parts.rendering, file, now_seconds=now.timestamp())
    kind = kind_of(new.job, needs)

    def create(session: Session, job_id: str) -> tuple[JobRecord, bool]:
        earlier = learned(session, cluster, kind)
        priced = replace(new, estimate=estimate(new.job, needs, parts.prices, learned_seconds=earlier))
        return create_job(session, priced, now, job_id=job_id)

    return create
