"""Looks up the PodGroup of a pod that asks for GPUs: whether its pods start together, and whether Atoll can keep that.

A live read, only for pods that name a PodGroup. A pod whose PodGroup does not exist yet is denied, because the gate
that holds a gang's pods back cannot be added later.
"""

from typing import Final

import msgspec
import structlog

from atoll.cluster.gangs.pod_groups import PodGroup, refusal
from atoll.kube import paths
from atoll.kube.api import ApiReader
from atoll.kube.errors import KubeError, NotFound
from webhook.pods import AdmittedPod
from webhook.review import Denial

log = structlog.get_logger(__name__)

LOOKUP_SECONDS: Final = 1.0
"""The API server waits 5 s for the webhook, and its other lookups may take 3.5 s."""


class GroupFinder:
    """Looks up PodGroups for one webhook process."""

    def __init__(self, client: ApiReader) -> None:
        self._client = client

    async def gang_of(self, namespace: str, pod: AdmittedPod) -> str | Denial:
        """Return the PodGroup of policy gang that the pod belongs to, empty for none, or why the pod is refused."""
        name = pod.spec.scheduling_group.pod_group_name if pod.spec.scheduling_group is not None else ""
        if not name:
            return ""
        path = paths.podgroups(namespace, name)
        try:
            raw = await self._client.get(path, timeout_seconds=LOOKUP_SECONDS)
            group = msgspec.json.decode(raw, type=PodGroup)
        except NotFound:
            return Denial(
                f"PodGroup {name[:120]!r} of scheduling.k8s.io/v1beta1 does not exist in namespace {namespace!r}; "
                "create it before its pods, so that Atoll knows whether they start together"
            )
        except (KubeError, msgspec.DecodeError, RecursionError) as error:
            log.warning("Could not look up a PodGroup", group=f"{namespace}/{name}", err=str(error))
            return Denial(f"PodGroup {name[:120]!r} could not be looked up; try again", 503)
        if not group.min_count:
            return ""
        refused = refusal(group, priority=pod.spec.priority)
        return Denial(refused) if refused else name
