"""Asks an agent for two fresh readings, where a release waits for a report that would not come by itself.

In: nodes and the version that a report must have passed. Out: one annotation on the node's GpuNodeStatus per version.
An agent publishes by itself when something changes and after each deletion of a GPU pod; it cannot know of a pod that
it never saw, nor of a deletion that only we missed.
"""

from collections.abc import Iterable
from typing import Any

from atoll.api import names
from atoll.cluster.release import version_number
from atoll.kube import paths
from atoll.kube.cache import Change
from atoll.kube.errors import NotFound
from atoll.kube.mirror import WatchedKind
from atoll.kube.patches import merge_patch
from controllers.context import Context


class EvidenceReconciler:
    """Keys are node names. `want` is called by the release; the loop writes, once per version."""

    name = "evidence"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._wanted: dict[str, int] = {}
        self._asked: dict[str, int] = {}

    def want(self, node: str, version: int) -> bool:
        """Note that reports of `node` past `version` are wanted; False if that was asked for already."""
        if version <= max(self._asked.get(node, 0), self._wanted.get(node, 0)):
            return False
        self._wanted[node] = version
        return True

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:  # noqa: ARG002 - nothing concerns it
        """Return nothing: only the release knows what is wanted."""
        return ()

    def all_keys(self) -> Iterable[str]:
        """Return the nodes whose agents must still be asked."""
        return tuple(self._wanted)

    async def reconcile(self, node: str) -> float | None:
        """Write the annotation, also over a version that no pod has reached yet: nobody who waits for proof wrote that.

        A node without a report has no agent to be asked.
        """
        version = self._wanted.get(node, 0)
        status = self._context.mirror.reports.get(node)
        if not version or status is None:
            self._wanted.pop(node, None)
            return None
        present = version_number(status.metadata.annotations.get(names.EVIDENCE_WANTED, ""))
        if present < version or present > version_number(self._context.mirror.pods.resource_version):
            body = merge_patch(uid=status.metadata.uid, annotations={names.EVIDENCE_WANTED: str(version)})
            try:
                await self._context.api.patch(paths.gpunodestatuses(node), body)
            except NotFound:
                self._wanted.pop(node, None)
                return None
            self._context.metrics.evidence_requests.inc()
        self._asked[node] = version
        if self._wanted.get(node) == version:
            del self._wanted[node]
        return None
