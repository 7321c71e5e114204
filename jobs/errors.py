"""Errors of the job service.

JobServiceError
├── DatabaseUnfit     the database cannot be used: unreachable, or made by a newer Atoll
├── JobUnknown        no such job, or the caller may not see it
├── NameTaken         an active job has that name in that namespace
├── ClusterUnknown    no such cluster is registered
├── ClusterBusy       a cluster has jobs, or is in a state that does not allow the request
├── KeyReused         an idempotency key was used before for another job
├── WebhookUnknown    no such webhook, or the caller may not see it
├── JobEnded          a job that has ended cannot be changed
├── NotPaused         a job that is not paused, or not yet, cannot be resumed
├── BudgetSpent       a job whose budget is spent cannot be resumed
├── RecordUnreadable  what was recorded is no longer valid, such as after an upgrade
├── SearchesBusy      too many callers have clusters searched at a time
├── SearchTooLong     the clusters were not searched in time
└── RecordChanged     the record changed in the meantime; read it again
"""

from pydantic import ValidationError

from atoll.api.forms import message_of


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


class WebhookUnknown(JobServiceError):
    """There is no such webhook, or the caller may not see it."""

    def __init__(self, webhook_id: str) -> None:
        super().__init__(f"there is no webhook {webhook_id}")


class JobEnded(JobServiceError):
    """A job that has ended cannot be changed."""

    def __init__(self, name: str, state: str) -> None:
        super().__init__(f"job {name} has {state}: submit a new one, or retry it if it failed")


class NotPaused(JobServiceError):
    """A job that is not paused, or not yet, cannot be resumed."""

    def __init__(self, name: str, state: str, *, is_pausing: bool) -> None:
        why = "some of its objects are still in the cluster: try again soon" if is_pausing else f"it is {state}"
        super().__init__(f"job {name} is not paused: {why}")


class BudgetSpent(JobServiceError):
    """A job whose budget is spent cannot be resumed."""

    def __init__(self, name: str, budget: str) -> None:
        super().__init__(f"job {name} has spent its budget of {budget} USD: raise intent.budget_cap, then resume it")


class RecordChanged(JobServiceError):
    """The record changed in the meantime."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the record of job {job_id} changed in the meantime")


class RecordUnreadable(JobServiceError):
    """What was recorded is no longer valid, such as after an upgrade. `what`: the job, file of queues or pipeline."""

    def __init__(self, what: str, error: ValidationError) -> None:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        super().__init__(f"{what} can no longer be read: {field}{': ' if field else ''}{message_of(first)}")


class SearchesBusy(JobServiceError):
    """Too many callers have clusters searched at a time."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the service computes other {what}: try again later")


class SearchTooLong(JobServiceError):
    """The clusters were not searched in time."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"the service could not compute the {what} within {seconds:g} s: try again later")


class ClusterUnknown(JobServiceError):
    """There is no such cluster."""

    def __init__(self, cluster: str) -> None:
        super().__init__(f"there is no cluster {cluster}: register it, or see `atoll cluster list`")


class ClusterBusy(JobServiceError):
    """The cluster's state does not allow the request."""
