"""Routes of the clusters: register, list, show, drain, remove.

Operators do everything; everybody else sees the clusters that serve their tenants, without how they are reached.
"""

import re
from datetime import datetime
from typing import Annotated, Final

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from atoll.jobs.permissions import JobCaller, seen_scopes
from atoll.jobs.queue_changes import plan_queues
from atoll.kube.errors import KubeError
from atoll.ml.problems import shown
from jobs.api_parts import ApiParts, Caller, Cluster, Parts, check_cluster
from jobs.asking import check_operator
from jobs.cluster_store import (
    ClusterTerms,
    activate_cluster,
    check_removable,
    drain_cluster,
    job_counts,
    list_clusters,
    register_cluster,
    remove_cluster,
)
from jobs.links import FILE, SECRET
from jobs.problems import ApiRefusal, documented, mistaken, not_found, problem
from jobs.queue_cluster import QueueCluster
from jobs.queue_store import forget_queue_file
from jobs.records import RegisteredCluster
from jobs.store import AUTO

CLUSTERS: Final = "/api/clusters"
CLUSTER: Final = CLUSTERS + "/{cluster}"
CLUSTERS_MAX: Final = 100
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)

Price = Annotated[float, Field(strict=True, ge=0, le=1000, allow_inf_nan=False)]


class ClusterRequest(BaseModel):
    """What an operator says about a cluster."""

    model_config = ConfigDict(extra="forbid")

    kubeconfig: Annotated[
        str,
        Field(
            max_length=512,
            description="file:NAME in kubeconfig_folder, or secret:NAMESPACE/NAME/KEY; empty only for the own cluster",
        ),
    ] = ""
    region: Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9-]*$", description="such as eu-west-1")] = ""
    tenants: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=1000)] = []
    prices: Annotated[
        dict[Annotated[str, Field(max_length=63)], Price],
        Field(max_length=100, description="US dollars per hour, by GPU type and cpu"),
    ] = {}
    latency_ms: Annotated[float, Field(strict=True, ge=0, le=60_000, allow_inf_nan=False)] = 0.0


class GpuCapacityView(BaseModel):
    """GPUs of one type."""

    gpu_type: str
    total: int
    free: int
    islands: Annotated[dict[str, int], Field(description="how many islands have so many free GPUs")]


class ClusterView(BaseModel):
    """A cluster and its health."""

    name: str
    state: Annotated[str, Field(description="active or draining")]
    kubeconfig: Annotated[str | None, Field(description="reference, for operators")]
    region: str
    tenants: list[str]
    prices: dict[str, float]
    latency_ms: float
    is_healthy: bool
    message: Annotated[str, Field(description="why it could not be read at the last look")]
    checked_at: datetime | None
    changed_by: Annotated[str | None, Field(description="who registered or drained it, for operators")]
    changed_at: datetime
    capacity: list[GpuCapacityView]
    jobs: Annotated[dict[str, int] | None, Field(description="active jobs by state, for operators")]


class ClusterListView(BaseModel):
    """All clusters that the caller may see, by name."""

    items: list[ClusterView]
    total: int


class ClusterRemovalView(BaseModel):
    """What became of a removed cluster's jobs."""

    name: str
    jobs_failed: int


def add_cluster_routes(app: FastAPI) -> None:
    """Add the routes to an application."""
    app.get(CLUSTERS, responses=documented(401, 404, 422, 429, 503))(list_all)
    app.get(CLUSTER, responses=documented(401, 404, 422, 429, 503))(show)
    app.put(CLUSTER, responses=documented(401, 403, 404, 409, 422, 429, 503))(register)
    app.post(CLUSTER + "/drain", responses=documented(401, 403, 404, 409, 422, 429, 503))(drain)
    app.post(CLUSTER + "/activate", responses=documented(401, 403, 404, 409, 422, 429, 503))(activate)
    app.delete(CLUSTER, responses=documented(401, 403, 404, 409, 422, 429, 503))(remove)


async def list_all(parts: Parts, caller: Caller) -> ClusterListView:
    """List clusters with their health and free GPUs."""
    found = [one for one in await parts.database.read(list_clusters) if sees_cluster(caller, one)]
    return ClusterListView(items=[await _view(one, parts, caller) for one in found], total=len(found))


async def show(cluster: Cluster, parts: Parts, caller: Caller) -> ClusterView:
    """Show a cluster."""
    known = await check_cluster(cluster, parts)
    if not sees_cluster(caller, known):
        raise not_found(f"there is no cluster {shown(cluster)}")
    return await _view(known, parts, caller)


async def register(cluster: Cluster, asked: ClusterRequest, parts: Parts, caller: Caller) -> ClusterView:
    """Register a cluster, or change what is known about it."""
    await check_operator(caller, parts, "cluster:register", cluster, kubeconfig=asked.kubeconfig)
    if not NAME.fullmatch(cluster) or cluster == AUTO:
        limit = f"must be lower-case letters, digits and dashes, and not {AUTO}"
        raise mistaken("cluster", cluster, limit, "choose another name")
    is_home = cluster == parts.settings.cluster
    is_reference = FILE.fullmatch(asked.kubeconfig) or SECRET.fullmatch(asked.kubeconfig)
    if is_home != (asked.kubeconfig == "") or not (is_home or is_reference):
        limit = "must be file:NAME or secret:NAMESPACE/NAME/KEY" if not is_home else "must be empty for the own cluster"
        raise mistaken("kubeconfig", asked.kubeconfig, limit, "correct it")
    now = parts.now()
    terms = ClusterTerms(
        asked.kubeconfig,
        asked.region,
        tuple(sorted(set(asked.tenants))),
        tuple(sorted(asked.prices.items())),
        asked.latency_ms,
    )
    known = await parts.database.read(list_clusters)
    if len(known) >= CLUSTERS_MAX and cluster not in {one.id for one in known}:
        detail = f"there are {CLUSTERS_MAX} clusters, the most that one service keeps: remove one"
        raise ApiRefusal(problem(409, "too-many", "Too many clusters", detail))
    record = await parts.database.write(
        lambda session: register_cluster(session, cluster, terms, now=now, actor=caller.name)
    )
    return await _view(record, parts, caller)


async def drain(cluster: Cluster, parts: Parts, caller: Caller) -> ClusterView:
    """Let a cluster take no new jobs. Services, trainings and waiting jobs move to others; batches that run may end."""
    await check_operator(caller, parts, "cluster:drain", cluster)
    now = parts.now()
    record = await parts.database.write(lambda session: drain_cluster(session, cluster, now=now, actor=caller.name))
    return await _view(record, parts, caller)


async def activate(cluster: Cluster, parts: Parts, caller: Caller) -> ClusterView:
    """Undo the draining: the cluster takes jobs again."""
    await check_operator(caller, parts, "cluster:activate", cluster)
    now = parts.now()
    record = await parts.database.write(lambda session: activate_cluster(session, cluster, now=now, actor=caller.name))
    return await _view(record, parts, caller)


async def remove(
    cluster: Cluster,
    parts: Parts,
    caller: Caller,
    force: Annotated[bool, Query(description="also with active jobs, which fail")] = False,  # noqa: FBT002
) -> ClusterRemovalView:
    """Forget a drained cluster and remove its queues; with force also one that has jobs, which fail."""
    await check_operator(caller, parts, "cluster:remove", cluster, force=force)
    if cluster == parts.settings.cluster:
        detail = f"{cluster} is the service's own cluster, which cannot be removed; drain it, if it shall take no jobs"
        raise ApiRefusal(problem(409, "cluster-busy", "The own cluster", detail))
    if not force:
        await _remove_queues(cluster, parts)
    now = parts.now()
    failed = await parts.database.write(
        lambda session: remove_cluster(session, cluster, force=force, now=now, actor=caller.name)
    )
    return ClusterRemovalView(name=cluster, jobs_failed=failed)


async def _remove_queues(cluster: str, parts: ApiParts) -> None:
    """Remove the objects of a cluster's queues, after nobody keeps them any longer. Raises ApiRefusal."""

    def work(session: Session) -> RegisteredCluster:
        record = check_removable(session, cluster)
        forget_queue_file(session, cluster)
        return record

    record = await parts.database.write(work)
    try:
        queues = QueueCluster(await parts.links.client(record))
        there, _ = await queues.objects()
        for write in plan_queues((), there, service_id=parts.service_id).writes:
            await queues.write(write)
    except KubeError as error:
        detail = f"cannot remove the queues of cluster {cluster}: {error}; try again, or force the removal"
        raise ApiRefusal(problem(503, "unavailable", "The cluster does not answer", detail)) from error


def sees_cluster(caller: JobCaller, cluster: RegisteredCluster) -> bool:
    """Return whether a caller may see a cluster."""
    scopes = seen_scopes(caller)
    if scopes is None:
        return True
    mine = {tenant for tenant, _ in scopes}
    return bool(mine) and (not cluster.tenants or not mine.isdisjoint(cluster.tenants))


async def _view(record: RegisteredCluster, parts: ApiParts, caller: JobCaller) -> ClusterView:
    counts = None
    if caller.is_operator:
        counts = await parts.database.read(lambda session: job_counts(session, record.id))
    mine = {tenant for tenant, _ in seen_scopes(caller) or ()}
    return ClusterView(
        name=record.id,
        state=record.state,
        kubeconfig=record.kubeconfig if caller.is_operator else None,
        region=record.region,
        tenants=[one for one in record.tenants if caller.is_operator or one in mine],
        prices=record.prices,
        latency_ms=record.latency_ms,
        is_healthy=not record.trouble,
        message=record.trouble,
        checked_at=record.checked_at,
        changed_by=record.changed_by if caller.is_operator else None,
        changed_at=record.changed_at,
        capacity=[
            GpuCapacityView(**one | {"islands": {str(size): count for size, count in one["islands"].items()}})
            for one in record.capacity
        ],
        jobs=counts,
    )
