"""Asking the API server itself, where a cache is not proof enough.

In: a pod's identity. Out: the live pod with that uid, or its absence and the resourceVersion as of which it is absent.
"""

from dataclasses import dataclass

from atoll.cluster.leases import Holder
from atoll.cluster.objects import Pod, decode_pod
from atoll.cluster.release import version_number
from atoll.kube import paths
from controllers.api import Api


@dataclass(frozen=True, slots=True)
class PodLookup:
    """The pod with the uid that was asked for, None when it does not exist; true as of `version`."""

    pod: Pod | None
    version: int


async def look_up(api: Api, holder: Holder) -> PodLookup:
    """Look for a pod by name and compare the uid. Raises KubeError.

    A list of one name instead of a get: where the pod is missing, only a list says as of which version.
    """
    selector = {"fieldSelector": f"metadata.name={_escape(holder.name)}"}
    listing = await api.list(paths.pods(holder.namespace), decode_pod, params=selector)
    pod = next((pod for pod in listing.items if pod.metadata.uid == holder.uid), None)
    return PodLookup(pod, version_number(listing.resource_version))


def _escape(name: str) -> str:
    """Escape what has a meaning in a field selector: the name stands on a Lease, which anybody may have written."""
    return name.replace("\\", "\\\\").replace(",", "\\,").replace("=", "\\=")
