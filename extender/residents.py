"""All pods by the node that they are bound to, so that what a node has left can be counted at once."""

from collections.abc import Collection
from typing import Any

from atoll.cluster.objects import Pod
from atoll.cluster.pods import is_terminal
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import WatchedKind


class Residents:
    """The bound pods of each node that have not ended, with GPUs or without, as last seen."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[str, Pod]] = {}

    def observe(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Take a change that the ledger has taken before. A pod's node never changes once it has one."""
        if kind is not WatchedKind.POD:
            return
        pod: Pod = change.object
        node, uid = pod.spec.node_name, pod.metadata.uid
        if node and change.kind is not ChangeKind.DELETED and not is_terminal(pod):
            self._by_node.setdefault(node, {})[uid] = pod
        elif node in self._by_node:
            self._by_node[node].pop(uid, None)
            if not self._by_node[node]:
                del self._by_node[node]

    def on(self, node: str) -> Collection[Pod]:
        """Return the pods of a node."""
        return self._by_node.get(node, {}).values()

    def by_node(self) -> dict[str, tuple[Pod, ...]]:
        """Return the pods of all nodes, as they are now."""
        return {node: tuple(found.values()) for node, found in self._by_node.items()}
