"""Writes the report when it has news.

A report is the smallest merge patch of the status subresource. The agent is the only writer of its node's status, so
there is nothing to merge with. The object's uid fences a patch, so that it cannot land on a newly created successor.
"""

from collections.abc import Mapping
from typing import Any

import orjson
import structlog
from pydantic import ValidationError

from atoll.api import names
from atoll.api.base import ObjectMeta
from atoll.api.node_status import GpuNodeStatus, GpuNodeStatusReport
from atoll.api.times import format_microtime
from atoll.kube import patches, paths
from atoll.kube.cache import is_older
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock
from atoll.kube.errors import AlreadyExists, Conflict, NotFound

ATTEMPTS_MAX = 3
DIFFERENCES_MAX = 2
"""The first may be due to an outdated state; what the second try lacks, the API server left out."""

log = structlog.get_logger(__name__)


def json_merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7386 patch that turns one JSON object into the other; whole lists are replaced."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            inner = json_merge_patch(old, value)
            if inner:
                patch[key] = inner
        elif key not in before or old != value:
            patch[key] = value
    return patch


def stored_of(raw: bytes) -> GpuNodeStatus:
    """The object in the API server. A report that this version cannot read, written by a newer agent or by hand, counts
    as none and is rewritten."""
    try:
        return GpuNodeStatus.model_validate_json(raw)
    except ValidationError as error:
        log.warning("Stored report cannot be read", err=str(error.errors()[0]["msg"]), count=error.error_count())
        metadata = ObjectMeta.model_validate(orjson.loads(raw)["metadata"])
        return GpuNodeStatus(metadata=metadata)


def says_something_new(report: GpuNodeStatusReport, stored: GpuNodeStatusReport | None) -> bool:
    """True if a report differs in more than its time, its sequence and its position in the watch."""
    if stored is None:
        return True
    steady = {"sequence": stored.evidence.sequence, "pod_resource_version": stored.evidence.pod_resource_version}
    evidence = report.evidence.model_copy(update=steady)
    return report.model_copy(update={"evidence": evidence, "observed_time": stored.observed_time}) != stored


class StatusWriter:
    """Publishes the reports of one node. `stored` is the last known object in the API server."""

    def __init__(self, client: ApiClient, node: str, *, clock: Clock) -> None:
        self._client = client
        self._node = node
        self._clock = clock
        self._sequence = 0
        self._refused: tuple[GpuNodeStatusReport, GpuNodeStatusReport | None] | None = None
        self.stored: GpuNodeStatus | None = None
        self._last: GpuNodeStatusReport | None = None
        self._before_restore: GpuNodeStatusReport | None = None
        self.is_restored = False
        """True from `forget`, or the first look of a process that rules no restore out, until a report is written."""

    @property
    def stored_report(self) -> GpuNodeStatusReport | None:
        """The stored report."""
        return self.stored.status if self.stored is not None else None

    @property
    def known_report(self) -> GpuNodeStatusReport | None:
        """The stored report; after somebody deleted the object, or the API server was restored and has an older one,
        the last one known. Incidents end by their cures, and ids stay with their cards, whatever becomes of the
        object."""
        return self._before_restore or self.stored_report or self._last

    @property
    def releases(self) -> Mapping[str, str]:
        """Time at which an administrator declared a device well, by uuid."""
        return {one.uuid: one.time for one in self.stored.spec.releases} if self.stored is not None else {}

    def forget(self) -> None:
        """Forget the stored object: the API server was restored and holds another. What the last report says of the
        machine stays known until the next one is written."""
        self._before_restore = self.known_report
        self.is_restored = True
        self.stored = None

    def take(self, seen: GpuNodeStatus) -> None:
        """Store the object from an answer or the watch, unless it is older than the known one."""
        version, known = seen.metadata.resource_version, self.stored
        if known is None or not is_older(version, known.metadata.resource_version):
            self.stored = seen
            self._last = seen.status or self._last

    def is_news(self, report: GpuNodeStatusReport) -> bool:
        """True if a report is worth a write: it has news beyond fields that the API server dropped before, as one with
        older CRDs does."""
        if not says_something_new(report, self.stored_report):
            return False
        if self._refused is None:
            return True
        sent, kept = self._refused
        return self.stored_report != kept or says_something_new(report, sent)

    async def publish(self, report: GpuNodeStatusReport) -> bool:
        """Write the report under the next sequence number; create the object if there is none. Raises KubeError.

        Return False if the API server turns out to be restored from a backup: nothing is written, since the report was
        made from what is known of the time before. The patch carries only changes, so it must not meet another object
        than the stored one: the backup's old pods under a new number would say that all others are gone.
        """
        self._refused = None
        differences, version = 0, ""
        for _ in range(ATTEMPTS_MAX):
            stored = self.stored or await self._fetch_or_create()
            if is_older(stored.metadata.resource_version, version):
                return False
            version = stored.metadata.resource_version
            numbered = self._numbered(report, stored.status)
            patch = json_merge_patch(stored.status.to_json() if stored.status else {}, numbered.to_json())
            try:
                answer = await self._client.patch(
                    paths.gpunodestatuses(self._node, "status"),
                    patches.merge_patch(uid=stored.metadata.uid, resource_version=version, status=patch),
                    retry=True,
                )
            except (NotFound, Conflict):
                self.stored = None
                continue
            self._sequence = numbered.evidence.sequence
            self.take(stored_of(answer))
            self._before_restore = None
            self.is_restored = False
            if self.stored_report == numbered:
                return True
            differences += 1
            if differences == DIFFERENCES_MAX:
                self._refused = (numbered, self.stored_report)
                break
        log.warning("Stored report differs from the one written", node=self._node)
        return True

    def _numbered(self, report: GpuNodeStatusReport, stored: GpuNodeStatusReport | None) -> GpuNodeStatusReport:
        sequence = max(self._sequence, stored.evidence.sequence if stored else 0) + 1
        evidence = report.evidence.model_copy(update={"sequence": sequence})
        return report.model_copy(update={"evidence": evidence, "observed_time": format_microtime(self._clock.now())})

    async def _fetch_or_create(self) -> GpuNodeStatus:
        body = {"apiVersion": names.API_VERSION, "kind": "GpuNodeStatus", "metadata": {"name": self._node}, "spec": {}}
        try:
            answer = await self._client.create(paths.gpunodestatuses(), body)
        except AlreadyExists:
            answer = await self._client.get(paths.gpunodestatuses(self._node))
        self.stored = stored_of(answer)
        return self.stored
