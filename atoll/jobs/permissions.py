"""Who may do what with whose job: one table, and the decision that follows from it.

In: the grants of a caller, a permission, and whose job it is. Out: allowed, hidden or refused. A job of a tenant in
which the caller has no part is hidden: it is answered as if it were not there, so that nobody learns that it is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class JobPermission(StrEnum):
    """What can be done with a job."""

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


class TenantRole(StrEnum):
    """What part somebody has in a tenant, or in one of its projects."""

    VIEWER = "viewer"
    """Sees every job."""
    MEMBER = "member"
    """Also reads the logs of every job, and has jobs."""
    ADMIN = "admin"
    """May do everything with every job."""
    OPERATOR = "operator"
    """Runs the platform: an admin of every tenant."""


class Reach(StrEnum):
    """How far a permission goes."""

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
}
"""How far each permission goes in each role. An owner keeps what owners may while they see the tenant."""


@dataclass(frozen=True, slots=True)
class TenantGrant:
    """A role in a tenant, in one of its projects alone where `project` is given. An operator's covers every tenant."""

    role: TenantRole
    tenant: str = ""
    project: str | None = None

    def covers(self, whose: "JobOwnership") -> bool:
        """Tell whether the grant says something about a job."""
        if self.role is TenantRole.OPERATOR:
            return True
        return self.tenant == whose.tenant and (self.project is None or self.project == whose.project)


@dataclass(frozen=True, slots=True)
class JobCaller:
    """Who asks, by the name that the identity provider vouches for, and what they were granted."""

    name: str
    grants: tuple[TenantGrant, ...]

    @property
    def is_operator(self) -> bool:
        """Tell whether the caller runs the platform."""
        return any(grant.role is TenantRole.OPERATOR for grant in self.grants)

    def tenants(self, permission: JobPermission) -> tuple[str, ...]:
        """Return the tenants, in order, in which, or in a part of which, the caller has the permission for all jobs."""
        found = {grant.tenant for grant in self.grants if grant.tenant and REACH[grant.role, permission] is Reach.ALL}
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class JobOwnership:
    """Whose a job is."""

    tenant: str
    project: str | None
    created_by: str


class AccessAnswer(StrEnum):
    """What becomes of a request."""

    ALLOWED = "allowed"
    HIDDEN = "hidden"
    """The caller may not know of the job."""
    REFUSED = "refused"


def decide(caller: JobCaller, permission: JobPermission, whose: JobOwnership) -> AccessAnswer:
    """Decide whether somebody may do something with a job, or create it."""
    covering = [grant for grant in caller.grants if grant.covers(whose)]
    if not covering:
        return AccessAnswer.HIDDEN
    reaches = {REACH[grant.role, permission] for grant in covering}
    is_owner = caller.name == whose.created_by
    if Reach.ALL in reaches or (Reach.OWN in reaches and is_owner):
        return AccessAnswer.ALLOWED
    return AccessAnswer.REFUSED


def seen_scopes(caller: JobCaller) -> tuple[tuple[str, str | None], ...] | None:
    """Return what a caller's lists show, as (tenant, project or None for all of them); None for every tenant."""
    if caller.is_operator:
        return None
    return tuple(sorted(_scopes(caller.grants), key=lambda scope: (scope[0], scope[1] or "")))


def _scopes(grants: Iterable[TenantGrant]) -> set[tuple[str, str | None]]:
    wide = {grant.tenant for grant in grants if grant.project is None}
    return {(grant.tenant, None if grant.tenant in wide else grant.project) for grant in grants}
