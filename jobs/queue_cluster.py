"""The queues of one cluster at its API server: read all objects that a file of queues may name, and write changes.

Every read goes to the API server. Every change and removal carries the uid of its object.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from atoll.jobs.queue_changes import QueueVerb, QueueWrite
from atoll.jobs.queue_objects import KUEUE_API, Object
from atoll.kube import paths
from atoll.kube.api import Api
from atoll.kube.errors import AlreadyExists, LeadershipLost, NotFound
from atoll.kube.patches import delete_options

KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "Namespace": ("v1", "namespaces"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "PriorityClass": ("scheduling.k8s.io/v1", "priorityclasses"),
    "WorkloadPriorityClass": (KUEUE_API, "workloadpriorityclasses"),
    "ResourceFlavor": (KUEUE_API, "resourceflavors"),
    "Cohort": (KUEUE_API, "cohorts"),
    "MultiKueueCluster": (KUEUE_API, "multikueueclusters"),
    "MultiKueueConfig": (KUEUE_API, "multikueueconfigs"),
    "AdmissionCheck": (KUEUE_API, "admissionchecks"),
    "ClusterQueue": (KUEUE_API, "clusterqueues"),
    "LocalQueue": (KUEUE_API, "localqueues"),
}


class QueueCluster:
    """The queues of one cluster."""

    def __init__(self, api: Api, *, may_write: Callable[[], bool] = lambda: True) -> None:
        self._api = api
        self._may_write = may_write

    async def objects(self) -> tuple[list[Object], bool]:
        """Return every object of these kinds, and whether the cluster has Kueue. Raises KubeError."""
        found: list[Object] = []
        has_kueue = True
        for kind, (api, _) in KINDS.items():
            try:
                listing = await self._api.list(_path(kind), msgspec.json.decode)
            except NotFound:
                has_kueue = has_kueue and api != KUEUE_API
                continue
            found += [one | {"kind": kind} for one in listing.items]
        return found, has_kueue

    async def cluster_queues(self) -> dict[str, Object] | None:
        """Return the ClusterQueues by name; None if the cluster has no Kueue. Raises KubeError."""
        try:
            listing = await self._api.list(_path("ClusterQueue"), msgspec.json.decode)
        except NotFound:
            return None
        return {one["metadata"]["name"]: one for one in listing.items}

    async def write(self, write: QueueWrite) -> None:
        """Carry out one write. Raises KubeError."""
        key = write.key
        path = _path(key.kind, key.namespace, key.name)
        try:
            if write.verb is QueueVerb.CREATE:
                await self._api.create(_path(key.kind, key.namespace), write.body, check=self._check)
            elif write.verb is QueueVerb.CHANGE:
                body: dict[str, Any] = dict(write.body)
                body["metadata"] = body.get("metadata", {}) | {"uid": write.uid}
                await self._api.patch(path, body, check=self._check)
            else:
                await self._api.delete(path, delete_options(uid=write.uid), check=self._check)
        except AlreadyExists:
            return  # found at the next look
        except NotFound:
            if write.verb is QueueVerb.CREATE:
                raise

    def _check(self) -> None:
        if not self._may_write():
            raise LeadershipLost("another replica leads")


def _path(kind: str, namespace: str = "", name: str = "") -> str:
    api, plural = KINDS[kind]
    if api == "v1":
        return paths.core(plural, name=name)
    return paths.group(api, plural, namespace=namespace, name=name)
