"""Everything that the job service refuses or cannot do.

JobServiceError
├── DatabaseUnfit     the database cannot be used: unreachable, or made by a newer Atoll
├── JobUnknown        no such job, or none that the caller may know of
├── NameTaken         an active job has that name in that namespace
├── KeyReused         an idempotency key came with another job than before
└── RecordChanged     somebody else changed the record meanwhile; look again
"""


class JobServiceError(Exception):
    """Base of every error that this package raises on purpose."""


class DatabaseUnfit(JobServiceError):
    """The database cannot be used."""


class JobUnknown(JobServiceError):
    """There is no such job, or none that the caller may know of."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id}")
        self.job_id = job_id


class NameTaken(JobServiceError):
    """An active job has that name in that namespace."""

    def __init__(self, name: str, namespace: str) -> None:
        message = (
            f"an active job {name} is in namespace {namespace}: wait for its end, cancel it, or choose another name"
        )
        super().__init__(message)


class KeyReused(JobServiceError):
    """An idempotency key came with another job than before."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(f"the idempotency key {key} was given for job {job_id}, which asks for something else")


class RecordChanged(JobServiceError):
    """Somebody else changed the record meanwhile."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the record of job {job_id} was changed meanwhile")
