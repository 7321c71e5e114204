"""What every route of the API needs: its dependencies, the caller, and the check of the cluster in the path."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Final, Protocol

from fastapi import Depends, Path, Request
from starlette.requests import HTTPConnection

from atoll.jobs.base import NO_NUL
from atoll.jobs.costs.prices import PriceTable
from atoll.jobs.permissions import JobCaller
from atoll.jobs.settings import RenderSettings
from atoll.kube.api import Api
from atoll.ml.problems import shown
from jobs.audit import AuditTrail
from jobs.authentication import Authenticator, NotIdentified
from jobs.chooser import ClusterChooser
from jobs.cluster_store import list_clusters
from jobs.database import Database
from jobs.limits import RateLimits
from jobs.log_archive import LogArchive
from jobs.pod_exec import CommandRunner
from jobs.pod_logs import LogReader
from jobs.problems import ApiRefusal, not_found, problem
from jobs.records import RegisteredCluster
from jobs.secrets import SecretBox
from jobs.settings import AccessRules, JobServiceSettings
from jobs.store import AUTO

Cluster = Annotated[str, Path(max_length=63, pattern=NO_NUL)]
DOCUMENT_TYPES: Final = ("application/json", "application/yaml", "application/x-yaml")
"""Media types of bodies that are documents; the last one is an old name."""


class ApiLinks(Protocol):
    """Connections to clusters."""

    async def client(self, cluster: RegisteredCluster) -> Api:
        """Return the client of a cluster. Raises KubeError."""
        ...


@dataclass(frozen=True, slots=True)
class ApiParts:
    """Dependencies of the API. `wake` is called with the id of each job that needs reconciling."""

    database: Database
    authenticator: Authenticator
    rules: AccessRules
    settings: JobServiceSettings
    rendering: RenderSettings
    prices: PriceTable
    secrets: SecretBox | None
    audit: AuditTrail
    limits: RateLimits
    queue_limits: RateLimits
    """Of submissions with GPUs, by queue."""
    logs: LogReader
    commands: CommandRunner
    links: ApiLinks
    chooser: ClusterChooser
    service_id: str
    now: Callable[[], datetime]
    wake: Callable[[str], None]
    archive: LogArchive | None = None
    """Of the logs of pods that are gone."""
    terminals: Counter[str] = field(default_factory=Counter)
    """Open ones, by caller."""


def parts_of(request: HTTPConnection) -> ApiParts:
    """Return the application's dependencies."""
    found: ApiParts = request.app.state.parts
    return found


async def caller_of(request: HTTPConnection) -> JobCaller:
    """Return the caller, with their grants. Raises ApiRefusal."""
    parts = parts_of(request)
    found = await parts.authenticator.identify(request.headers.get("Authorization", ""))
    if isinstance(found, NotIdentified):
        kinds = {401: ("unauthenticated", "Not authenticated"), 429: ("too-many", "Too many requests")}
        kind, title = kinds.get(found.status, ("unavailable", "Cannot check the token now"))
        headers = {"WWW-Authenticate": "Bearer"} if found.status == 401 else {"Retry-After": "1"}
        raise ApiRefusal(problem(found.status, kind, title, found.told), headers=headers)
    if not parts.limits.try_take(found.name):
        told = problem(429, "too-many", "Too many requests", f"{found.name} sends too many requests: slow down")
        raise ApiRefusal(told, headers={"Retry-After": "1"})
    return parts.rules.caller(found.name, found.groups)


Parts = Annotated[ApiParts, Depends(parts_of)]
Caller = Annotated[JobCaller, Depends(caller_of)]


async def check_cluster(cluster: str, parts: ApiParts) -> RegisteredCluster:
    """Return the cluster in the path. Raises ApiRefusal for an unknown one."""
    known = await parts.database.read(lambda session: {one.id: one for one in list_clusters(session)})
    if cluster not in known:
        raise not_found(f"there is no cluster {shown(cluster)}: this service has {', '.join(sorted(known))}")
    return known[cluster]


async def check_any_cluster(cluster: str, parts: ApiParts) -> None:
    """Raise ApiRefusal for an unknown cluster; auto stands for all clusters."""
    if cluster != AUTO:
        await check_cluster(cluster, parts)


def check_media_type(request: Request, *, what: str) -> None:
    """Raise ApiRefusal unless the body is a document."""
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type not in DOCUMENT_TYPES:
        detail = f"send the {what} as {' or '.join(DOCUMENT_TYPES[:2])}"
        raise ApiRefusal(problem(415, "media-type", "Neither JSON nor YAML", detail))
