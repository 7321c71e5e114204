"""How many members of a gang a node takes by the number of volumes that a CSI driver allows there. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from atoll.cluster.objects import Pod
from atoll.cluster.volume_fit import STATIC, Volumes, claim_names

UNLIMITED = 1_000_000
VOLUME_COUNT: Final = "max volume count"
Volume = tuple[str, str]
"""Driver and handle."""


class NodeUse(NamedTuple):
    """Volumes that the pods of a node use, each once, and their number by driver."""

    pods: Sequence[Pod]
    volumes: frozenset[Volume]
    counts: Counter[str]


class VolumeUse:
    """Which volumes are in use by node, and how many a node takes. Each node is looked at once as long as it has the
    same pods: what-ifs on one snapshot share this."""

    def __init__(self, volumes: Volumes) -> None:
        """Use the claims and volumes of one moment."""
        self.volumes = volumes
        self._limits: dict[str, dict[str, int]] | None = None
        self._on: dict[str, NodeUse] = {}

    @property
    def limits(self) -> Mapping[str, Mapping[str, int]]:
        """Volumes that a node takes, by node and driver."""
        if self._limits is None:
            limits = {name: one.limits() for name, one in self.volumes.csi_nodes.items()}
            self._limits = {name: limit for name, limit in limits.items() if limit}
        return self._limits

    def on(self, node: str, pods: Sequence[Pod]) -> NodeUse:
        """Return what the pods of a node use. They are not changed afterwards."""
        known = self._on.get(node)
        if known is None or known.pods is not pods:
            used = frozenset(self.of(pods))
            known = self._on[node] = NodeUse(pods, used, _count(used))
        return known

    def of(self, pods: Iterable[Pod]) -> set[Volume]:
        """Return the volumes that pods use, each once."""
        return {_volume(pod.metadata.namespace, name, self.volumes) for pod in pods for name in claim_names(pod)}


def members_by_volumes(
    pod: Pod, nodes: Iterable[str], pods_on: Mapping[str, Sequence[Pod]], use: VolumeUse, shared: Collection[str]
) -> dict[str, int] | None:
    """Return how many pods like this one each node takes; None if no driver of their volumes has a limit. `shared`:
    claims that all of them use together, which count once on a node."""
    own, common = set[Volume](), set[Volume]()
    for name in claim_names(pod):
        (common if name in shared else own).add(_volume(pod.metadata.namespace, name, use.volumes))
    drivers = {driver for driver, _ in own | common}
    asked = {
        driver: ({one for one in own if one[0] == driver}, {one for one in common - own if one[0] == driver})
        for driver in drivers
    }
    if not any(drivers & limit.keys() for limit in use.limits.values()):
        return None
    found = {}
    for node in nodes:
        limit = use.limits.get(node, {})
        named = drivers & limit.keys()
        used = use.on(node, pods_on.get(node, ())) if named else None
        rooms = (_room(limit[driver], *asked[driver], driver, used) for driver in named) if used is not None else ()
        found[node] = min(rooms, default=UNLIMITED)
    return found


def _room(limit: int, own: set[Volume], common: set[Volume], driver: str, used: NodeUse) -> int:
    """Return how many members the limit of a driver leaves room for, beside the volumes in `used`. What the node has
    already takes no more room."""
    coming = len(common - used.volumes)
    room = limit - (used.counts[driver] - len(own & used.volumes) + coming)
    if own:
        return max(0, room) // len(own)
    return UNLIMITED if room >= 0 or not coming else 0


def crowded_node(placed: Iterable[tuple[Pod, str]], pods_on: Mapping[str, Sequence[Pod]], use: VolumeUse) -> str:
    """Say which node would take fewer volumes of a driver than a plan needs there, with pods of all kinds; empty for
    none. `placed`: members and their nodes."""
    coming: dict[str, list[Pod]] = {}
    for pod, node in placed:
        if node in use.limits and pod.spec.volumes:
            coming.setdefault(node, []).append(pod)
    for node, found in coming.items():
        own = use.of(found)
        wanted, used = _count(own), _count(own | use.on(node, pods_on.get(node, ())).volumes)
        for driver, count in use.limits[node].items():
            if wanted[driver] and used[driver] > count:
                return (
                    f"node {node} takes {count} volumes of {driver}, and the members that fit there otherwise need "
                    f"{used[driver]} with those in use; ask for a wider domain, or for fewer volumes"
                )
    return ""


def _count(used: Iterable[Volume]) -> Counter[str]:
    return Counter(driver for driver, _ in used)


def _volume(namespace: str, name: str, volumes: Volumes) -> Volume:
    """Return driver and handle of a claim's volume; of one that is not made yet, the claim stands for it."""
    claim = volumes.claims.get((namespace, name))
    if claim is None:
        return "", ""
    bound = volumes.volumes.get(claim.spec.volume_name)
    if bound is not None:
        source = bound.spec.csi
        return (source.driver, source.volume_handle) if source is not None else ("", "")
    kind = (volumes.classes or {}).get(claim.spec.storage_class_name or "")
    return (kind.provisioner if kind is not None and kind.provisioner != STATIC else ""), f"{namespace}/{name}"
