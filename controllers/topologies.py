"""Writes the status of each Topology: how many nodes it covers, and how many lack a level.

Placing gangs does not read this status. Keys are names of Topologies.
"""

from collections.abc import Iterable
from typing import Any

from atoll.api import names
from atoll.api.topologies import Topology, TopologyStatus
from atoll.cluster.gangs import conditions
from atoll.cluster.gangs.node_domains import absent_levels, count_nodes, shared_hostnames
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import Conflict, NotFound
from atoll.kube.mirror import WatchedKind
from atoll.kube.patches import merge_patch
from controllers.context import Context

BLIND_SECONDS = 5.0


class TopologyReconciler:
    """Keeps the status of Topologies."""

    name = "topologies"

    def __init__(self, context: Context) -> None:
        self._context = context

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the topology that changed, or all of them when a node came, went, or was labelled anew."""
        if kind is WatchedKind.TOPOLOGY:
            return (change.object.metadata.name,) if change.kind is not ChangeKind.DELETED else ()
        is_same = change.old is not None and change.old.metadata.labels == change.object.metadata.labels
        return (
            () if kind is not WatchedKind.NODE or (is_same and change.kind is ChangeKind.MODIFIED) else self.all_keys()
        )

    def all_keys(self) -> Iterable[str]:
        """Return every topology."""
        return sorted(topology.metadata.name for topology in self._topologies())

    async def reconcile(self, key: str) -> float | None:
        """Write the status of one topology if it changed. Raises KubeError."""
        if self._context.mirror.unready_reason():
            return BLIND_SECONDS
        topology = next((one for one in self._topologies() if one.metadata.name == key), None)
        if topology is None:
            return None
        status = self._status(topology)
        if topology.status is not None and topology.status.to_json() == status.to_json():
            return None
        body = merge_patch(
            uid=topology.metadata.uid, resource_version=topology.metadata.resource_version, status=status.to_json()
        )
        try:
            await self._context.api.patch(paths.topologies(key, "status"), body)
        except (NotFound, Conflict):
            return None
        return None

    def _topologies(self) -> list[Topology]:
        topologies = self._context.mirror.topologies
        return list(topologies.store.values()) if topologies is not None else []

    def _status(self, topology: Topology) -> TopologyStatus:
        mirror = self._context.mirror
        nodes = list(mirror.nodes.store.values())
        covered, outside = count_nodes(topology, nodes, mirror.reports)
        absent = absent_levels(topology, nodes, mirror.reports)
        shared = shared_hostnames(topology, nodes)
        reason, message = "LevelsFound", f"{covered - outside} of {covered} nodes have all levels"
        if shared:
            reason, message = "HostnamesShared", f"nodes share one kubernetes.io/hostname: {', '.join(shared[:4])}"
        if absent:
            reason, message = "LevelMissing", f"no node has a value for {', '.join(absent)}"
        known = topology.status.conditions if topology.status is not None else ()
        entries = conditions.put(
            known,
            names.CONDITION_LEVELS,
            is_met=reason == "LevelsFound",
            reason=reason,
            message=message,
            now_seconds=self._context.clock.now().timestamp(),
        )
        return TopologyStatus(nodes=covered, outside=outside, conditions=entries)
