"""Renews the heartbeat: a Lease that says that the agent observes its machine and can publish what it sees.

Only the agent writes it, so its version shows whether the API server was restored from a backup: then the Lease is in
an older state than the one that the agent wrote last, or is missing as it is after a deletion.
"""

from typing import Any

from atoll.api import names
from atoll.api.times import format_microtime, seconds_of
from atoll.cluster.objects import Lease, decode_lease
from atoll.cluster.reports import SILENCE_PERIODS, silence_seconds_max
from atoll.kube import paths
from atoll.kube.cache import is_older
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock
from atoll.kube.errors import Conflict, NotFound


class HeartbeatWriter:
    """Writes one node's heartbeat. period_seconds: the interval of renewals."""

    def __init__(self, client: ApiClient, node: str, *, clock: Clock, period_seconds: float) -> None:
        self._client = client
        self._node = node
        self._clock = clock
        self._period_seconds = period_seconds
        self._version = ""

    async def renew(self) -> bool:
        """Renew or create the Lease. Raises KubeError. Return False, with nothing written, if the API server may have
        been restored from a backup since the last renewal; the next call then renews or creates what is there. A Lease
        that somebody deleted looks the same, and a report too many does no harm."""
        try:
            written = await self._patch(self._body(self._version))
        except NotFound:
            if self._version:
                self._version = ""
                return False
            written = await self._create()
        except Conflict:
            current = await self._patch({})
            was_restored = is_older(current.metadata.resource_version, self._version)
            self._version = current.metadata.resource_version
            if was_restored:
                return False
            written = await self._patch(self._body(self._version))
        self._version = written.metadata.resource_version
        return True

    async def was_silent(self) -> bool:
        """Whether the stored heartbeat is older than a report may be: the agent was away for so long, or the API server
        has the heartbeat of a backup. False where there is none yet. Raises KubeError."""
        try:
            stored = await self._patch({})
        except NotFound:
            return False
        renewed = seconds_of(stored.spec.renew_time or "")
        return renewed is None or self._clock.now().timestamp() - renewed > silence_seconds_max(stored)

    async def _patch(self, body: dict[str, Any]) -> Lease:
        """Patch the Lease; an empty patch changes nothing and returns it."""
        path = paths.leases(names.HEARTBEAT_NAMESPACE, self._node)
        return decode_lease(await self._client.patch(path, body, retry=True))

    async def _create(self) -> Lease:
        metadata = {"name": self._node, "namespace": names.HEARTBEAT_NAMESPACE}
        body = {**self._body(""), "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        return decode_lease(await self._client.create(paths.leases(names.HEARTBEAT_NAMESPACE), body))

    def _body(self, version: str) -> dict[str, Any]:
        spec = {
            "holderIdentity": self._node,
            "leaseDurationSeconds": max(1, round(SILENCE_PERIODS * self._period_seconds)),
            "renewTime": format_microtime(self._clock.now()),
        }
        return {"spec": spec, **({"metadata": {"resourceVersion": version}} if version else {})}
