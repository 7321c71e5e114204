"""Chooses the cluster of a job: reads every candidate's capacity and state now, and scores them.

A cluster that does not answer in time is no candidate, and the score sheet says so.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Final, Protocol

from atoll.api import job_names, names
from atoll.cluster.quantities import parse_amount
from atoll.explain.snapshot import ClusterSnapshot
from atoll.jobs.choosing import ClusterOffer, ClusterWish, ScoreSheet, choose_cluster
from atoll.jobs.fitting import ExpectedEnd, GpuCapacity, capacity_of, fit_of, pods_at_once, workers_of
from atoll.jobs.model import Job
from atoll.jobs.queue_file import TenantQueue
from atoll.jobs.rendering import Rendered
from atoll.jobs.settings import RenderSettings
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock
from atoll.kube.errors import KubeError, NotFound
from atoll.kube.snapshots import read_snapshot
from atoll.ml.attributes import Accelerator, MlAttributes
from atoll.ml.matching import impossible_tpu
from jobs.cluster_store import ClusterState, RunningJob, list_clusters, running_jobs
from jobs.database import Database
from jobs.errors import RecordUnreadable
from jobs.links import ClusterLinks, told
from jobs.problems import ApiRefusal
from jobs.queue_places import place_in
from jobs.queue_store import queue_file_of, queues_in
from jobs.records import RegisteredCluster
from jobs.searching import SearchThread

ANSWER_SECONDS: Final = 10.0
"""How long a cluster may take to answer before it is no candidate."""
KEPT_SECONDS: Final = 3.0
"""How long what was read of a cluster counts as now."""
CHOICES_MAX, CHOICE_SECONDS_MAX = 16, 60.0
"""How many clusters are chosen at a time, and how long a choice may take."""
QUEUE_REFUSES: Final = "its queue refuses the job: "
COMPLIANCE, EU_ONLY = "compliance", "eu-only"
LATENCY_SENSITIVE: Final = "latency_sensitive"
DATA_REGION: Final = "data_region"
NO_SNAPSHOT: Final = ClusterSnapshot(taken_at="1970-01-01T00:00:00Z")


class SnapshotSource(Protocol):
    """Reads the state of a cluster."""

    async def snapshot(self, cluster: RegisteredCluster) -> ClusterSnapshot:
        """Return the state of a cluster. Raises KubeError, OSError and TimeoutError, or a group of them."""
        ...


class LiveSnapshots:
    """Reads it from the cluster's API server, at most every KEPT_SECONDS. What was read before the
    connection was lost does not count: it is read anew, which fails while the connection is lost."""

    def __init__(self, links: ClusterLinks, clock: Clock) -> None:
        self._links = links
        self._clock = clock
        self._read: dict[str, tuple[float, ApiClient, ClusterSnapshot]] = {}

    async def snapshot(self, cluster: RegisteredCluster) -> ClusterSnapshot:
        """Return the state of a cluster. Raises KubeError, OSError and TimeoutError, or a group of them."""
        now = self._clock.monotonic_seconds()
        async with asyncio.timeout(ANSWER_SECONDS):
            client = await self._links.client(cluster)
            at, of, kept = self._read.get(cluster.id, (-math.inf, client, NO_SNAPSHOT))
            if now - at < KEPT_SECONDS and of is client and not client.is_lost and not cluster.trouble:
                return kept
            found = await _read_if_installed(client)
        self._read[cluster.id] = (now, client, found)
        return found


class ClusterChooser:
    """Chooses among the registered clusters."""

    def __init__(
        self, database: Database, source: SnapshotSource, rendering: RenderSettings, now: Callable[[], datetime]
    ) -> None:
        self._database = database
        self._source = source
        self._rendering = rendering
        self._now = now
        self._searches = SearchThread("choices of clusters", turns_max=CHOICES_MAX, seconds_max=CHOICE_SECONDS_MAX)
        self._capacities: dict[str, tuple[ClusterSnapshot, Sequence[GpuCapacity]]] = {}

    async def choose(self, job: Job, rendered: Rendered, *, tenant: str, namespace: str) -> ScoreSheet:
        """Return the score sheet of a job over all clusters. Raises SearchesBusy, SearchTooLong, and SQLAlchemy's
        errors."""
        wish = wish_of(job, rendered, tenant)
        async with self._searches.turn() as search:
            clusters = await self._database.read(list_clusters)
            offers = await asyncio.gather(
                *(self._offer(one, job, rendered, tenant, namespace, search) for one in clusters)
            )
        return choose_cluster(wish, offers)

    async def look_at(self, cluster: RegisteredCluster) -> tuple[ClusterSnapshot | None, str]:
        """Return the state of a cluster, or None and why it cannot be read."""
        return await looked_at(cluster, self._source)

    async def impossible(self, cluster: RegisteredCluster, attributes: MlAttributes) -> str:
        """Return why the cluster, however idle, has no TPU slice for a job; empty if it has one, for other jobs, and
        while the cluster does not answer."""
        if attributes.accelerator is not Accelerator.TPU:
            return ""
        found, _ = await looked_at(cluster, self._source)
        return impossible_tpu(attributes, workers_of(found)) if found is not None else ""

    async def _offer(
        self,
        cluster: RegisteredCluster,
        job: Job,
        rendered: Rendered,
        tenant: str,
        namespace: str,
        search: SearchThread,
    ) -> ClusterOffer:
        base = ClusterOffer(
            name=cluster.id,
            region=cluster.region,
            tenants=frozenset(cluster.tenants),
            prices=cluster.prices,
            latency_ms=cluster.latency_ms,
        )
        if cluster.state != ClusterState.ACTIVE:
            return replace(base, trouble="is draining")
        found, trouble = await looked_at(cluster, self._source)
        if found is None:
            return replace(base, trouble=f"does not answer: {trouble}")
        file, running = await self._database.read(
            lambda session: (queue_file_of(session, cluster.id), running_jobs(session, cluster.id))
        )
        now = self._now()
        try:
            place = place_in(
                queues_in(file),
                job,
                rendered,
                tenant=tenant,
                rendering=self._rendering,
                now=now,
            )
        except RecordUnreadable as error:
            return replace(base, trouble=str(error))
        except ApiRefusal as refusal:
            return replace(base, trouble=f"{QUEUE_REFUSES}{refusal}")
        ends = expected_ends(found, running, now)
        return replace(
            base,
            capacity=await self._capacity_of(cluster, found, search),
            quota=quota_of(place.queue) if place.queue is not None else None,
            fit=await search.run(partial(fit_of, found, place.rendered, namespace=namespace, ends=ends)),
        )

    async def _capacity_of(
        self, cluster: RegisteredCluster, found: ClusterSnapshot, search: SearchThread
    ) -> Sequence[GpuCapacity]:
        """Return the capacity in a snapshot, which is counted once for all jobs that meet the same one."""
        of, capacity = self._capacities.get(cluster.id, (NO_SNAPSHOT, ()))
        if of is not found:
            capacity = await search.run(partial(capacity_of, found))
            self._capacities[cluster.id] = (found, capacity)
        return capacity


async def looked_at(cluster: RegisteredCluster, source: SnapshotSource) -> tuple[ClusterSnapshot | None, str]:
    """Return the state of a cluster, or None and why it cannot be read."""
    try:
        return await source.snapshot(cluster), ""
    except (KubeError, OSError, ExceptionGroup) as error:  # a TimeoutError is an OSError
        return None, told(error)


async def _read_if_installed(client: ApiClient) -> ClusterSnapshot:
    """Return the snapshot; an empty one if the cluster does not know Atoll's kinds."""
    try:
        return await read_snapshot(client)
    except ExceptionGroup as errors:
        if errors.subgroup(NotFound) is None:
            raise
        return NO_SNAPSHOT


def wish_of(job: Job, rendered: Rendered, tenant: str) -> ClusterWish:
    """Return what a job wants of a cluster."""
    needs = rendered.needs
    return ClusterWish(
        tenant=tenant,
        gpu_type=needs.attributes.gpu_type if needs.gpus is not None else None,
        gpus=needs.gpus.claim.count * pods_at_once(rendered) if needs.gpus is not None else 0,
        goal=job.intent.optimization_goal,
        is_latency_sensitive=job.labels.get(LATENCY_SENSITIVE) == "true",
        is_eu_only=job.labels.get(COMPLIANCE) == EU_ONLY,
        data_region=job.labels.get(DATA_REGION),
    )


def quota_of(queue: TenantQueue) -> int | None:
    """Return the most GPUs that a queue may use at a time; None without a limit."""
    found = [quota.resources().get(names.GPU_RESOURCE) for quota in queue.flavors]
    amounts = [one for one in found if one is not None]
    if queue.cohort is not None and not queue.critical and any(one.borrow is None for one in amounts):
        return None
    return sum(parse_amount("gpu", one.nominal) + parse_amount("gpu", one.borrow or "0") for one in amounts)


def expected_ends(found: ClusterSnapshot, running: Sequence[RunningJob], now: datetime) -> list[ExpectedEnd]:
    """Return when the running jobs of the service are expected to end, by their duration or longest run time."""
    pods: dict[str, set[str]] = {}
    for pod in found.pods:
        pods.setdefault(pod.metadata.labels.get(job_names.JOB_ID, ""), set()).add(pod.metadata.uid)
    return [
        ExpectedEnd(max(0.0, job.seconds - (now - job.started_at).total_seconds()), frozenset(pods[job.id]))
        for job in running
        if job.started_at is not None and job.seconds is not None and job.id in pods
    ]
