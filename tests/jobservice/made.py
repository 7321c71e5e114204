"""Builders of jobs."""

from datetime import UTC, datetime, timedelta
from typing import Any

from atoll.jobs.model import Job
from jobs.store import NewJob

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def after(seconds: float) -> datetime:
    """Return a moment after NOW."""
    return NOW + timedelta(seconds=seconds)


def job_of(name: str = "tune", **fields: Any) -> Job:
    """Return a small batch job."""
    return Job.model_validate({"name": name, "job_type": "batch", "container": {"image": "busybox:1"}} | fields)


def new_job(
    name: str = "tune", *, tenant: str = "acme", key: str | None = None, by: str = "ann", **fields: Any
) -> NewJob:
    """Return a job that may be submitted."""
    return NewJob(job_of(name, **fields), "local", tenant, f"tenant-{tenant}", by, key)
