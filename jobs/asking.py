"""What every route needs: the parts of the service, the caller, and the job that a request is about.

The checks run in this order: authenticate the caller, find the job and check that the caller may see it, check that the
caller may do this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final
from uuid import UUID

import structlog
from fastapi import Depends, Path, Query, Request

from atoll.jobs.costs.prices import PriceTable
from atoll.jobs.permissions import AccessAnswer, JobCaller, JobOwnership, JobPermission, decide
from atoll.jobs.settings import RenderSettings
from atoll.ml.problems import shown
from jobs.authentication import Authenticator, NotIdentified
from jobs.database import Database
from jobs.errors import JobUnknown
from jobs.pod_logs import LogReader
from jobs.problems import ApiRefusal, not_found, problem
from jobs.records import JobRecord
from jobs.settings import AccessRules, JobServiceSettings
from jobs.store import PAGE_SIZE_MAX, get_job

log = structlog.get_logger(__name__)

PAGES_MAX: Final = 1_000_000

Cluster = Annotated[str, Path(max_length=63)]
PageNumber = Annotated[int, Query(ge=1, le=PAGES_MAX)]
PageSize = Annotated[int, Query(ge=1, le=PAGE_SIZE_MAX)]


@dataclass(frozen=True, slots=True)
class ApiParts:
    """Dependencies of the API. `wake` is called with the id of each job that needs reconciling."""

    database: Database
    authenticator: Authenticator
    rules: AccessRules
    settings: JobServiceSettings
    rendering: RenderSettings
    prices: PriceTable
    logs: LogReader
    now: Callable[[], datetime]
    wake: Callable[[str], None]


def parts_of(request: Request) -> ApiParts:
    """Return the application's dependencies."""
    found: ApiParts = request.app.state.parts
    return found


async def caller_of(request: Request) -> JobCaller:
    """Return the caller, with their grants. Raises ApiRefusal."""
    parts = parts_of(request)
    found = await parts.authenticator.identify(request.headers.get("Authorization", ""))
    if isinstance(found, NotIdentified):
        kinds = {401: ("unauthenticated", "Not authenticated"), 429: ("too-many", "Too many requests")}
        kind, title = kinds.get(found.status, ("unavailable", "Cannot check the token now"))
        headers = {"WWW-Authenticate": "Bearer"} if found.status == 401 else {"Retry-After": "1"}
        raise ApiRefusal(problem(found.status, kind, title, found.told), headers=headers)
    return parts.rules.caller(found.name, found.groups)


Parts = Annotated[ApiParts, Depends(parts_of)]
Caller = Annotated[JobCaller, Depends(caller_of)]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request about one job of one cluster."""

    parts: ApiParts
    caller: JobCaller
    job_id: str

    async def allowed(self, permission: JobPermission) -> JobRecord:
        """Return the record if the caller has the permission. Raises JobUnknown, ApiRefusal."""
        record = await self.parts.database.read(lambda session: get_job(session, self.job_id))
        if record.cluster_id != self.parts.settings.cluster:
            raise JobUnknown(self.job_id)
        whose = JobOwnership(record.tenant_id, record.project_id, record.created_by)
        answers = [decide(self.caller, one, whose) for one in (JobPermission.VIEW, permission)]
        log.info("Decided", action=permission, job=self.job_id, user=self.caller.name, answer=answers[1])
        if answers[0] is not AccessAnswer.ALLOWED:
            raise JobUnknown(self.job_id)
        if answers[1] is not AccessAnswer.ALLOWED:
            detail = f"{self.caller.name} may not {permission} job {record.name} ({record.id})"
            raise ApiRefusal(problem(403, "not-allowed", "Not allowed", detail))
        return record


async def asked_for(cluster: Cluster, job_id: UUID, parts: Parts, caller: Caller) -> Asked:
    """Return the request about one job. Raises ApiRefusal for an unknown cluster."""
    check_cluster(cluster, parts)
    return Asked(parts, caller, str(job_id))


OneJob = Annotated[Asked, Depends(asked_for)]


def check_cluster(cluster: str, parts: ApiParts) -> None:
    """Refuse an unknown cluster. Raises ApiRefusal."""
    if cluster != parts.settings.cluster:
        raise not_found(f"there is no cluster {shown(cluster)}: this service has {parts.settings.cluster}")
