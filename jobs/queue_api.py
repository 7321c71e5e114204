"""Routes of the queues: apply the file of a cluster, list its queues, show one.

Operators apply files and see every queue; everybody else sees the queues of their own tenants. A queue of another
tenant is answered as if it did not exist.
"""

from typing import Annotated, Final

from fastapi import FastAPI, Path, Query, Request

from atoll.jobs.permissions import JobCaller, seen_scopes
from atoll.jobs.queue_file import QueueFile, as_stored, parse_queue_file
from atoll.kube.errors import KubeError
from atoll.ml.problems import shown
from jobs.api_parts import ApiParts, Caller, Cluster, Parts, check_cluster
from jobs.asking import check_operator
from jobs.problems import ApiRefusal, documented, invalid, not_found, problem
from jobs.queue_cluster import QueueCluster
from jobs.queue_keeper import planned
from jobs.queue_store import queue_file_of, queues_in, store_queue_file
from jobs.queue_views import (
    WITHOUT_KUEUE,
    QueueChangesView,
    QueueListView,
    QueueView,
    hints_of,
    queue_views,
    trouble_of,
)
from jobs.records import QueueFileRecord, RegisteredCluster

QUEUES: Final = "/api/clusters/{cluster}/queues"
PAGE_SIZE_MAX: Final = 1000


def add_queue_routes(app: FastAPI) -> None:
    """Add the routes to an application."""
    app.put(QUEUES, responses=documented(401, 403, 404, 422, 429, 503))(apply_file)
    app.get(QUEUES, responses=documented(401, 404, 422, 429, 503))(list_queues)
    app.get(QUEUES + "/{name}", responses=documented(401, 404, 422, 429, 503))(show_queue)


async def apply_file(
    cluster: Cluster,
    request: Request,
    parts: Parts,
    caller: Caller,
    dry_run: Annotated[bool, Query(description="only show what would change")] = False,  # noqa: FBT002
) -> QueueChangesView:
    """Store the file of queues, as YAML or JSON; the leader makes the cluster agree with it within seconds."""
    known = await check_cluster(cluster, parts)
    await check_operator(caller, parts, "queues:apply", cluster, dry_run=dry_run)
    file = parse_queue_file(await request.body(), namespace=parts.settings.namespace)
    if not isinstance(file, QueueFile):
        raise invalid(file, what="queues")
    try:
        queues = QueueCluster(await parts.links.client(known))
        plan, has_kueue = await planned(file, queues, parts.rendering, service_id=parts.service_id)
    except KubeError as error:
        raise _unavailable(error) from error
    now = parts.now()
    if not dry_run:
        await parts.database.write(
            lambda session: store_queue_file(session, cluster, as_stored(file), now=now, actor=caller.name)
        )
    return QueueChangesView(
        changes=[str(write) for write in plan.writes],
        obstacles=list(plan.obstacles),
        hints=hints_of(file),
        has_kueue=has_kueue,
        dry_run=dry_run,
    )


async def list_queues(
    cluster: Cluster,
    parts: Parts,
    caller: Caller,
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    page_size: Annotated[int, Query(ge=1, le=PAGE_SIZE_MAX)] = 100,
) -> QueueListView:
    """List the queues that the caller may see."""
    known = await check_cluster(cluster, parts)
    record, found = await _seen(known, parts, caller)
    first = (page - 1) * page_size
    is_told = record is not None and caller.is_operator
    return QueueListView(
        items=found[first : first + page_size],
        page=page,
        page_size=page_size,
        total=len(found),
        has_kueue=not any(one.message == WITHOUT_KUEUE for one in found),
        message=trouble_of(record) if record is not None else "no file of queues was applied",
        problems=record.problems if record is not None and is_told else [],
        applied_by=record.applied_by if record is not None and is_told else None,
        applied_at=record.applied_at if record is not None else None,
    )


async def show_queue(
    cluster: Cluster, name: Annotated[str, Path(max_length=63)], parts: Parts, caller: Caller
) -> QueueView:
    """Show a queue, its quotas and what is used."""
    known = await check_cluster(cluster, parts)
    _, found = await _seen(known, parts, caller)
    queue = next((one for one in found if one.name == name), None)
    if queue is None:
        raise not_found(f"there is no queue {shown(name)}")
    return queue


async def _seen(
    cluster: RegisteredCluster, parts: ApiParts, caller: JobCaller
) -> tuple[QueueFileRecord | None, list[QueueView]]:
    """Return the stored file and the queues that the caller may see. Raises RecordUnreadable."""
    record = await parts.database.read(lambda session: queue_file_of(session, cluster.id))
    file = queues_in(record)
    if record is None or file is None:
        return None, []
    try:
        counted = await QueueCluster(await parts.links.client(cluster)).cluster_queues()
    except KubeError as error:
        raise _unavailable(error) from error
    scopes = seen_scopes(caller)
    tenants = None if scopes is None else {tenant for tenant, _ in scopes}
    found = queue_views(file, counted)
    return record, [one for one in found if tenants is None or one.tenant in tenants]


def _unavailable(error: KubeError) -> ApiRefusal:
    return ApiRefusal(
        problem(503, "unavailable", "The cluster does not answer", str(error)), headers={"Retry-After": "2"}
    )
