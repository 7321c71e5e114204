"""Permissions on jobs: one table of roles, and the decision for one request.

From the grants of a caller, a permission and the owner of the job follows allowed, hidden or refused. A job of a tenant
without a grant for the caller is hidden: the response is the same as for a job that does not exist.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class JobPermission(StrEnum):
    """Actions on a job."""

    VIEW = "view"
    LIST = "list"
    METRICS = "metrics"
    LOGS = "logs"
    CREATE = "create"
    CANCEL = "cancel"
    DELETE = "delete"
    RETRY = "retry"
    EXEC = "exec"
    PRIORITY = "priority"
    """Change a job that waits or runs."""
    CRITICAL = "critical"
    """Give a job the priority that nothing preempts."""


class TenantRole(StrEnum):
    """Role of a user in a tenant or in one of its projects."""

    VIEWER = "viewer"
    """Sees every job."""
    MEMBER = "member"
    """Also reads the logs of every job, and creates jobs."""
    ADMIN = "admin"
    """May do everything with every job."""
    OPERATOR = "operator"
    """Runs the platform: an admin of every tenant."""


class Reach(StrEnum):
    """Scope of a permission."""

    NONE = "none"
    OWN = "own"
    """The jobs that the caller created."""
    ALL = "all"


_P, _R = JobPermission, TenantRole
_SEEING: Final = (_P.VIEW, _P.LIST, _P.METRICS)
_OWNING: Final = (_P.CANCEL, _P.DELETE, _P.RETRY, _P.EXEC, _P.PRIORITY)

REACH: Final[Mapping[tuple[TenantRole, JobPermission], Reach]] = {
    **{(role, permission): Reach.ALL for role in (_R.ADMIN, _R.OPERATOR) for permission in _P},
    **{(role, permission): Reach.ALL for role in (_R.VIEWER, _R.MEMBER) for permission in _SEEING},
    **{(role, permission): Reach.OWN for role in (_R.VIEWER, _R.MEMBER) for permission in _OWNING},
    (_R.VIEWER, _P.LOGS): Reach.OWN,
    (_R.MEMBER, _P.LOGS): Reach.ALL,
    (_R.VIEWER, _P.CREATE): Reach.NONE,
    (_R.MEMBER, _P.CREATE): Reach.ALL,
    **{(role, _P.CRITICAL): Reach.NONE for role in (_R.VIEWER, _R.MEMBER)},
}
"""Scope of each permission in each role. Creators keep their rights on their own jobs while they see the tenant."""


@dataclass(frozen=True, slots=True)
class TenantGrant:
    """A role in a tenant, or only in its `project` if given. An operator's role covers every tenant."""

    role: TenantRole
    tenant: str = ""
    project: str | None = None

    def covers(self, whose: "JobOwnership") -> bool:
        """Return whether the grant applies to a job."""
        if self.role is TenantRole.OPERATOR:
            return True
        return self.tenant == whose.tenant and (self.project is None or self.project == whose.project)


@dataclass(frozen=True, slots=True)
class JobCaller:
    """The caller, by the name that the identity provider confirms, with their grants."""

    name: str
    grants: tuple[TenantGrant, ...]

    @property
    def is_operator(self) -> bool:
        """Return whether the caller is an operator of the platform."""
        return any(grant.role is TenantRole.OPERATOR for grant in self.grants)

    def tenants(self, permission: JobPermission) -> tuple[str, ...]:
        """Return, sorted, the tenants where the caller has the permission for all jobs of tenant or project."""
        found = {grant.tenant for grant in self.grants if grant.tenant and REACH[grant.role, permission] is Reach.ALL}
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class JobOwnership:
    """Owner of a job."""

    tenant: str
    project: str | None
    created_by: str


class AccessAnswer(StrEnum):
    """Decision about a request."""

    ALLOWED = "allowed"
    HIDDEN = "hidden"
    """The caller may not learn that the job exists."""
    REFUSED = "refused"


def decide(caller: JobCaller, permission: JobPermission, whose: JobOwnership) -> AccessAnswer:
    """Decide whether a caller has a permission on a job, or may create it."""
    covering = [grant for grant in caller.grants if grant.covers(whose)]
    if not covering:
        return AccessAnswer.HIDDEN
    reaches = {REACH[grant.role, permission] for grant in covering}
    is_owner = caller.name == whose.created_by
    if Reach.ALL in reaches or (Reach.OWN in reaches and is_owner):
        return AccessAnswer.ALLOWED
    return AccessAnswer.REFUSED


def seen_scopes(caller: JobCaller) -> tuple[tuple[str, str | None], ...] | None:
    """Return what a caller may list, as (tenant, project), project None for all projects; None for every tenant."""
    if caller.is_operator:
        return None
    return tuple(sorted(_scopes(caller.grants), key=lambda scope: (scope[0], scope[1] or "")))


def _scopes(grants: Iterable[TenantGrant]) -> set[tuple[str, str | None]]:
    wide = {grant.tenant for grant in grants if grant.project is None}
    return {(grant.tenant, None if grant.tenant in wide else grant.project) for grant in grants}
