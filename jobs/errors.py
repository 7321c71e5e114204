"""Errors of the job service.

JobServiceError
├── DatabaseUnfit     the database cannot be used: unreachable, or made by a newer Atoll
├── JobUnknown        no such job, or the caller may not see it
├── NameTaken         an active job has that name in that namespace
├── ClusterUnknown    no such cluster is registered
├── ClusterBusy       a cluster has jobs, or is in a state that does not allow the request
├── KeyReused         an idempotency key was used before for another job
└── RecordChanged     the record changed in the meantime; read it again
"""


class JobServiceError(Exception):
    """Base of every error that this package raises."""


class DatabaseUnfit(JobServiceError):
    """The database cannot be used."""


class JobUnknown(JobServiceError):
    """There is no such job, or the caller may not see it."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id}")
        self.job_id = job_id


class NameTaken(JobServiceError):
    """An active job has that name in that namespace."""

    def __init__(self, name: str, namespace: str) -> None:
        message = f"namespace {namespace} has an active job {name}: wait for its end, cancel it, or choose another name"
        super().__init__(message)


class KeyReused(JobServiceError):
    """An idempotency key was used before for another job."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(f"the idempotency key {key} belongs to job {job_id}, which differs from this one")


class RecordChanged(JobServiceError):
    """The record changed in the meantime."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the record of job {job_id} changed in the meantime")


class ClusterUnknown(JobServiceError):
    """There is no such cluster."""

    def __init__(self, cluster: str) -> None:
        super().__init__(f"there is no cluster {cluster}: register it, or see `atoll cluster list`")


class ClusterBusy(JobServiceError):
    """The cluster's state does not allow the request."""
