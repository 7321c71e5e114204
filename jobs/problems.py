"""Errors of the API as problem details (RFC 9457).

`type` is one of a few names that programs may rely on; `detail` is a sentence for people.
"""

from typing import Annotated, Any, Final

from fastapi import Response
from pydantic import BaseModel, Field

from atoll.jobs.errors import JobMistake
from atoll.jobs.states import IllegalStep
from atoll.ml.problems import AttributeProblem, Problems
from jobs.errors import (
    BudgetSpent,
    ClusterBusy,
    ClusterUnknown,
    JobEnded,
    JobServiceError,
    JobUnknown,
    KeyReused,
    NameTaken,
    NotPaused,
    RecordChanged,
    RecordUnreadable,
    SearchesBusy,
    SearchTooLong,
    WebhookUnknown,
)

MEDIA_TYPE: Final = "application/problem+json"
FAULTS_MAX: Final = 100
PREFIX: Final = "urn:atoll:"


class FieldFault(BaseModel):
    """What is wrong with one field."""

    field: Annotated[str, Field(description="its path, such as policy.max_runtime or ext_ml_gpu_count")]
    value: Annotated[str, Field(description="the value, truncated")] = ""
    limit: Annotated[str, Field(description="what may")] = ""
    hint: Annotated[str, Field(description="what to do")] = ""
    line: Annotated[int | None, Field(description="line in the request's body")] = None


class ProblemDetails(BaseModel):
    """What went wrong."""

    type: Annotated[str, Field(description="a name that programs may rely on")]
    title: Annotated[str, Field(description="what kind of problem it is")]
    status: Annotated[int, Field(description="HTTP status of the response")]
    detail: Annotated[str, Field(description="what happened, on which object, and what to do")]
    errors: Annotated[list[FieldFault] | None, Field(description="the fields that are wrong, one by one")] = None


class ApiRefusal(Exception):
    """A request that gets a problem as its response."""

    def __init__(self, problem: ProblemDetails, *, headers: dict[str, str] | None = None) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.headers = headers or {}


def problem(status: int, kind: str, title: str, detail: str, errors: list[FieldFault] | None = None) -> ProblemDetails:
    """Return a problem of a kind."""
    return ProblemDetails(type=PREFIX + kind, title=title, status=status, detail=detail, errors=errors)


def not_found(detail: str) -> ApiRefusal:
    """Return the refusal for something that does not exist, or that the caller may not see."""
    return ApiRefusal(problem(404, "not-found", "Not found", detail))


def invalid(faults: Problems, *, what: str = "job") -> ApiRefusal:
    """Return the refusal of an invalid job, or of another document."""
    told = [fault_of(one) for one in faults[:FAULTS_MAX]]
    first = str(faults[0]) if faults else f"the {what} cannot be read"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    title = f"The {what} {'have' if what.endswith('s') else 'has'} mistakes"
    return ApiRefusal(problem(422, f"invalid-{what}", title, first + more, told))


def fault_of(mistake: AttributeProblem) -> FieldFault:
    """Return an attribute problem as a FieldFault; a field of a pipeline's step has the step before it."""
    field = ".".join(part for part in (mistake.step, mistake.attribute) if part)
    return FieldFault(field=field, value=mistake.value, limit=mistake.limit, hint=mistake.hint, line=mistake.line)


def mistaken(field: str, value: object, limit: str, hint: str) -> ApiRefusal:
    """Return the refusal of one field."""
    return invalid((JobMistake(field, value, limit, hint).problem,))


_KINDS: Final[tuple[tuple[type[Exception], int, str, str], ...]] = (
    (JobUnknown, 404, "not-found", "Not found"),
    (NameTaken, 409, "name-taken", "An active job has that name"),
    (KeyReused, 409, "key-reused", "The idempotency key belongs to another job"),
    (ClusterUnknown, 404, "not-found", "Not found"),
    (ClusterBusy, 409, "cluster-busy", "The cluster's state does not allow this"),
    (WebhookUnknown, 404, "not-found", "Not found"),
    (JobEnded, 409, "job-ended", "The job has ended"),
    (NotPaused, 409, "not-paused", "The job is not paused"),
    (BudgetSpent, 409, "budget-spent", "The job's budget is spent"),
    (RecordChanged, 409, "changed-meanwhile", "The record changed in the meantime; try again"),
    (RecordUnreadable, 409, "unreadable", "What was recorded can no longer be read"),
    (SearchesBusy, 429, "too-many", "Too many requests at a time"),
    (SearchTooLong, 503, "unavailable", "It takes too long now"),
    (IllegalStep, 409, "illegal-step", "The job's state does not allow this"),
)


def problem_of(error: JobServiceError | IllegalStep) -> ProblemDetails:
    """Convert an error of this package to a problem."""
    for kind, status, name, title in _KINDS:
        if isinstance(error, kind):
            return problem(status, name, title, str(error))
    return problem(500, "fault", "Internal error", "see the service's log")


def response_of(told: ProblemDetails, headers: dict[str, str] | None = None) -> Response:
    """Return the response that carries a problem."""
    body = told.model_dump_json(exclude_none=True)
    return Response(body, status_code=told.status, media_type=MEDIA_TYPE, headers=headers)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of responses with a problem."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    titles = {
        400: "the body cannot be read",
        401: "no token, or an invalid one",
        403: "not allowed",
        404: "not found, or not visible to the caller",
        409: "conflicts with the current state",
        413: "too large",
        415: "neither JSON nor YAML",
        422: "invalid, with an entry per field",
        429: "too many requests",
        503: "temporarily unavailable",
    }
    return {status: {"description": titles[status], "content": content} for status in statuses}
