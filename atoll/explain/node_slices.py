"""Extracts the part of a snapshot that one node's GPUs depend on, to decide a change there on that part only. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.api import names
from atoll.cluster.objects import Lease, Pod
from atoll.explain.decision import IndexedSnapshot
from atoll.explain.snapshot import ClusterSnapshot


@dataclass(frozen=True, slots=True)
class NodeSlices:
    """The lists of one scene by node. `leases_anywhere`: unreadable ones, each of which may belong to any node that
    matches its name; `leases_by_uid`: by the uid of the holder; `unbound`: pods without a node."""

    scene: IndexedSnapshot
    unbound: tuple[Pod, ...]
    leases_by_node: Mapping[str, Sequence[Lease]]
    leases_by_uid: Mapping[str, Sequence[Lease]]
    leases_anywhere: tuple[Lease, ...]

    @classmethod
    def of(cls, scene: IndexedSnapshot) -> "NodeSlices":
        """Index the scene's lists by node."""
        by_node: dict[str, list[Lease]] = {}
        by_uid: dict[str, list[Lease]] = {}
        anywhere: list[Lease] = []
        for lease in scene.snapshot.leases:
            node = lease.metadata.annotations.get(names.LEASE_NODE)
            if node is None:
                anywhere.append(lease)
            else:
                by_node.setdefault(node, []).append(lease)
            by_uid.setdefault(lease.spec.holder_identity.rpartition("/")[2], []).append(lease)
        unbound = tuple(pod for pod in scene.snapshot.pods if not pod.spec.node_name)
        return cls(scene, unbound, by_node, by_uid, tuple(anywhere))

    def around(self, node: str, *, holder_uid: str, has_neighbours: bool) -> ClusterSnapshot:
        """Return the part that one node's GPUs depend on, and the Leases of one pod. Other nodes and their pods stay
        only if neighbours can matter; an unknown node gives an empty part."""
        whole = self.scene.snapshot
        here = self.scene.nodes.get(node)
        leases = (*self.leases_by_node.get(node, ()), *self.leases_anywhere, *self.leases_by_uid.get(holder_uid, ()))
        small = replace(
            whole,
            reports=tuple(one for one in whole.reports if one.metadata.name == node),
            heartbeats=tuple(one for one in whole.heartbeats if one.metadata.name == node),
            leases=tuple({lease.metadata.name: lease for lease in leases}.values()),
        )
        if has_neighbours:
            return small
        return replace(
            small,
            nodes=() if here is None else (here,),
            pods=(*self.unbound, *self.scene.pods_by_node.get(node, ())),
        )
