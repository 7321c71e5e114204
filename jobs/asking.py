"""What every route of one job needs: the record, if the caller may do what they ask for.

The checks run in this order: authenticate the caller, find the job and check that the caller may see it, check that the
caller may do this.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import Depends, Query

from atoll.jobs.base import NO_NUL
from atoll.jobs.permissions import AccessAnswer, JobCaller, JobOwnership, JobPermission, decide
from atoll.ml.problems import shown
from jobs.api_parts import ApiParts, Caller, Cluster, Parts, check_any_cluster
from jobs.audit import AuditEntry, entry_of
from jobs.errors import JobUnknown
from jobs.problems import ApiRefusal, problem
from jobs.records import JobRecord
from jobs.store import AUTO, PAGE_SIZE_MAX, get_job

PAGES_MAX: Final = 1_000_000

PageNumber = Annotated[int, Query(ge=1, le=PAGES_MAX)]
PageSize = Annotated[int, Query(ge=1, le=PAGE_SIZE_MAX)]
SoughtText = Annotated[str | None, Query(max_length=63, pattern=NO_NUL)]
"""Text that is looked for in the database, which takes no NUL."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request about one job of one cluster, or of any."""

    parts: ApiParts
    caller: JobCaller
    cluster: str
    job_id: str

    async def allowed(self, permission: JobPermission, extra: Mapping[str, Any] | None = None) -> JobRecord:
        """Return the record if the caller has the permission. `extra`: for the audit, what is to be done. Raises
        JobUnknown, ApiRefusal."""
        record = await self.parts.database.read(lambda session: get_job(session, self.job_id))
        if self.cluster not in (AUTO, record.cluster_id):
            raise JobUnknown(self.job_id)
        whose = JobOwnership(record.tenant_id, record.project_id, record.created_by)
        answers = [decide(self.caller, one, whose) for one in (JobPermission.VIEW, permission)]
        answer = answers[0] if answers[0] is not AccessAnswer.ALLOWED else answers[1]
        await self.parts.audit.note(entry_of(record, self.caller.name, permission, answer, extra))
        if answers[0] is not AccessAnswer.ALLOWED:
            raise JobUnknown(self.job_id)
        if answers[1] is not AccessAnswer.ALLOWED:
            detail = f"{self.caller.name} may not {permission} job {record.name} ({record.id})"
            raise ApiRefusal(problem(403, "not-allowed", "Not allowed", detail))
        return record


async def asked_for(cluster: Cluster, job_id: UUID, parts: Parts, caller: Caller) -> Asked:
    """Return the request about one job. Raises ApiRefusal for an unknown cluster."""
    await check_any_cluster(cluster, parts)
    return Asked(parts, caller, cluster, str(job_id))


OneJob = Annotated[Asked, Depends(asked_for)]


async def check_operator(caller: JobCaller, parts: ApiParts, action: str, cluster: str, **extra: str | bool) -> None:
    """Record the decision about what only operators may do with a cluster. Raises ApiRefusal for everybody else."""
    answer = AccessAnswer.ALLOWED if caller.is_operator else AccessAnswer.REFUSED
    await parts.audit.note(AuditEntry(caller.name, action, answer, "", cluster, resource_type="cluster", extra=extra))
    if not caller.is_operator:
        detail = f"{caller.name} may not do this with cluster {shown(cluster)}: it needs the role operator"
        raise ApiRefusal(problem(403, "not-allowed", "Not allowed", detail))
