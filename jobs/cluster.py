"""The cluster as the reconciler sees it: find, create and remove a job's objects, and read their state.

Every read goes to the API server, never to a cache, so an answer is proof. Every deletion carries the uid of its
object, and `may_write` is checked before every write.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from atoll.api import job_names, names
from atoll.api.depth import at_any_depth
from atoll.jobs.facts import JobFacts, QuotaFacts
from atoll.jobs.queue_objects import KUEUE_API
from atoll.jobs.rendering import Object
from atoll.jobs.states import JobState
from atoll.kube import paths
from atoll.kube.api import StreamingApi
from atoll.kube.errors import AlreadyExists, Conflict, LeadershipLost, NotFound
from atoll.kube.patches import delete_options
from jobs.objects import WORKLOADS
from jobs.reading import decode_note, decode_pod, decode_quota, decode_workload
from jobs.records import JobRecord

KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "Job": ("batch/v1", "jobs"),
    "Deployment": ("apps/v1", "deployments"),
    "HorizontalPodAutoscaler": ("autoscaling/v2", "horizontalpodautoscalers"),
    "HTTPScaledObject": ("http.keda.sh/v1alpha1", "httpscaledobjects"),
    "Service": ("v1", "services"),
    "GpuGang": (names.API_VERSION, "gpugangs"),
    "GpuClaim": (names.API_VERSION, "gpuclaims"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"),
}
"""Every kind that a job may create, in the order of removal."""
PODS: Final = ("v1", "pods")
KEPT: Final = "PersistentVolumeClaim"
"""Holds checkpoints: the only kind that this service never removes."""
LOG_SILENCE_SECONDS: Final = 10.0
"""A kubelet that sends nothing more of a log for this long is not waited for."""
KUEUE_JOB_UID: Final = "kueue.x-k8s.io/job-uid"
COPY: Final = "kueue.x-k8s.io/multikueue-origin"
"""Label of what MultiKueue copied here from another cluster, with all labels: it belongs to the copy's manager."""


class _Metadata(msgspec.Struct, rename="camel", frozen=True):
    name: str
    uid: str = ""
    namespace: str = ""
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None


class _Head(msgspec.Struct, frozen=True):
    metadata: _Metadata


_decode_head = at_any_depth(msgspec.json.Decoder(_Head).decode)


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object with the labels of a job."""

    kind: str
    namespace: str
    name: str
    uid: str
    job_id: str
    service_id: str
    attempt: str
    is_leaving: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class JobCluster:
    """One cluster."""

    def __init__(
        self, api: StreamingApi, *, name: str, service_id: str, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        self.name = name
        self._api = api
        self._may_write = may_write
        self.service_id = service_id

    async def find(self, *, job_id: str = "", namespace: str = "") -> tuple[FoundObject, ...]:
        """Return the objects of a job, or of all jobs of this service; a kind that the cluster lacks gives none."""
        labels = {job_names.SERVICE_ID: self.service_id} | ({job_names.JOB_ID: job_id} if job_id else {})
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        found: list[FoundObject] = []
        for kind in KINDS:
            try:
                listing = await self._api.list(
                    path_of(kind, namespace), _decode_head, params={"labelSelector": selector}
                )
            except NotFound:
                continue
            found += [_found(kind, one.metadata) for one in listing.items if COPY not in one.metadata.labels]
        return tuple(found)

    async def get(self, one: Object) -> FoundObject | None:
        """Return the object that has this name in the cluster, or None."""
        metadata = one["metadata"]
        try:
            raw = await self._api.get(path_of(one["kind"], metadata["namespace"], metadata["name"]))
        except NotFound:
            return None
        return _found(one["kind"], _decode_head(raw).metadata)

    async def create(self, one: Object) -> str | None:
        """Create an object and return its uid, or None if its name is taken. Raises KubeError."""
        path = path_of(one["kind"], one["metadata"]["namespace"])
        try:
            raw = await self._api.create(path, one, check=self._check)
        except AlreadyExists:
            return None
        return _decode_head(raw).metadata.uid

    async def remove(self, found: Sequence[FoundObject]) -> None:
        """Delete exactly these objects, never others that took their names. Checkpoints stay."""
        for one in found:
            if one.is_leaving or one.kind == KEPT:
                continue
            propagation = "Foreground" if one.kind in WORKLOADS else "Background"
            await self._delete(path_of(one.kind, one.namespace, one.name), one.uid, propagation)

    async def pods(self, record: JobRecord) -> tuple[FoundObject, ...]:
        """Return the pods of a job, of every attempt."""
        params = {"labelSelector": f"{job_names.JOB_ID}={record.id}"}
        listing = await self._api.list(paths.pods(record.namespace), _decode_head, params=params)
        return tuple(_found("Pod", one.metadata) for one in listing.items)

    async def output(self, namespace: str, pod: str) -> AsyncGenerator[bytes, None]:
        """Yield the whole log of a pod. Raises KubeError."""
        path = paths.pods(namespace, pod, "log")
        async with aclosing(self._api.stream(path, {}, silence_seconds=LOG_SILENCE_SECONDS)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def remove_pods(self, pods: Sequence[FoundObject]) -> None:
        """Delete pods whose Job or Deployment is gone."""
        for pod in pods:
            if not pod.is_leaving:
                await self._delete(paths.pods(pod.namespace, pod.name), pod.uid, "Background")

    async def facts(self, record: JobRecord, kind: str) -> JobFacts:
        """Return the state of a job in the cluster."""
        try:
            raw = await self._api.get(path_of(kind, record.namespace, record.name))
        except NotFound:
            return JobFacts(None)
        workload = decode_workload(kind, raw)
        params = {"labelSelector": f"{job_names.JOB_ID}={record.id},{job_names.ATTEMPT}={record.attempt}"}
        pods = await self._api.list(paths.pods(record.namespace), decode_pod, params=params)
        is_asked = workload.is_suspended or record.state in (JobState.QUEUED, JobState.PREEMPTED)
        quota = await self._quota(record, workload.uid) if is_asked else None
        is_starting = kind == "Job" and record.state == JobState.ADMITTED and not workload.is_suspended
        if is_starting and not pods.items:
            workload = replace(workload, refused=await self._refusal(record, workload.uid))
        return JobFacts(workload, tuple(sorted(pods.items, key=lambda pod: pod.name)), quota)

    async def _refusal(self, record: JobRecord, uid: str) -> str:
        """Return why the pods of a Job cannot be created, which only an event tells; empty if none does."""
        params = {"fieldSelector": f"regarding.uid={uid},reason=FailedCreate"}
        listing = await self._api.list(paths.events(record.namespace), decode_note, params=params)
        return listing.items[-1] if listing.items else ""

    async def _quota(self, record: JobRecord, uid: str) -> QuotaFacts:
        """Return what Kueue says about a Job's quota; nothing of a Deployment: its pods have their own Workloads."""
        path = paths.group(KUEUE_API, "workloads", namespace=record.namespace)
        try:
            listing = await self._api.list(path, decode_quota, params={"labelSelector": f"{KUEUE_JOB_UID}={uid}"})
        except NotFound:
            return QuotaFacts(has_kueue=False)
        return next(iter(listing.items), QuotaFacts())

    async def _delete(self, path: str, uid: str, propagation: str) -> None:
        try:
            await self._api.delete(path, delete_options(uid=uid, propagation=propagation), check=self._check)
        except (NotFound, Conflict):
            return  # gone, or another object has its name now

    def _check(self) -> None:
        if not self._may_write():
            raise LeadershipLost("another replica leads")


def path_of(kind: str, namespace: str, name: str = "") -> str:
    """Return the API path of a kind or object; an empty namespace means all namespaces."""
    api, plural = PODS if kind == "Pod" else KINDS[kind]
    if api == "v1":
        return paths.core(plural, namespace=namespace, name=name)
    return paths.group(api, plural, namespace=namespace, name=name)


def _found(kind: str, metadata: _Metadata) -> FoundObject:
    labels = metadata.labels
    return FoundObject(
        kind,
        metadata.namespace,
        metadata.name,
        metadata.uid,
        job_id=labels.get(job_names.JOB_ID, ""),
        service_id=labels.get(job_names.SERVICE_ID, ""),
        attempt=labels.get(job_names.ATTEMPT, ""),
        is_leaving=metadata.deletion_timestamp is not None,
    )


def workload_kind(record: JobRecord) -> str:
    """Return the kind of the object that runs the pods."""
    return "Deployment" if record.job_type == "service" else "Job"


def by_job(found: Sequence[FoundObject]) -> dict[str, list[FoundObject]]:
    """Return the objects of each job, by its id."""
    groups: dict[str, list[FoundObject]] = {}
    for one in found:
        groups.setdefault(one.job_id, []).append(one)
    return groups


def uids_of(found: Sequence[FoundObject]) -> frozenset[str]:
    """Return the uids of objects."""
    return frozenset(one.uid for one in found)
