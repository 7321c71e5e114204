"""How many members of a gang a node takes by the number of volumes that a CSI driver allows there. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from atoll.cluster.objects import Pod
from atoll.cluster.volume_fit import STATIC, Volumes, claim_names

UNLIMITED = 1_000_000
Volume = tuple[str, str]
"""Driver and handle."""


def members_by_volumes(
    pod: Pod, nodes: Iterable[str], pods_on: Mapping[str, Sequence[Pod]], volumes: Volumes, shared: Collection[str]
) -> dict[str, int] | None:
    """Return how many pods like this one each node takes; None if no driver of their volumes has a limit. `shared`:
    claims that all of them use together, which count once on a node."""
    own, common = set[Volume](), set[Volume]()
    for name in claim_names(pod):
        (common if name in shared else own).add(_volume(pod.metadata.namespace, name, volumes))
    limits = {name: one.limits() for name, one in volumes.csi_nodes.items()}
    named = {driver for limit in limits.values() for driver in limit} & {driver for driver, _ in own | common}
    if not named:
        return None
    found = {}
    for node in nodes:
        limit = {driver: count for driver, count in limits.get(node, {}).items() if driver in named}
        used = _used(pods_on.get(node, ()), volumes) if limit else set[Volume]()
        rooms = (_room(driver, count, own, common, used) for driver, count in limit.items())
        found[node] = min(rooms, default=UNLIMITED)
    return found


def _room(driver: str, limit: int, own: set[Volume], common: set[Volume], used: set[Volume]) -> int:
    """Return how many members the limit of a driver leaves room for, beside the volumes in `used`. What the node has
    already takes no more room."""
    each = _count(own)[driver]
    room = limit - _count((used | common) - own)[driver]
    if each:
        return max(0, room) // each
    return UNLIMITED if room >= 0 or not _count(common - used)[driver] else 0


def crowded_node(placed: Iterable[tuple[Pod, str]], pods_on: Mapping[str, Sequence[Pod]], volumes: Volumes) -> str:
    """Say which node would take fewer volumes of a driver than a plan needs there, with pods of all kinds; empty for
    none. `placed`: members and their nodes."""
    coming: dict[str, list[Pod]] = {}
    for pod, node in placed:
        if node in volumes.csi_nodes and pod.spec.volumes:
            coming.setdefault(node, []).append(pod)
    for node, found in coming.items():
        used = _count(_used((*pods_on.get(node, ()), *found), volumes))
        wanted = _count(_used(found, volumes))
        for driver, count in volumes.csi_nodes[node].limits().items():
            if wanted[driver] and used[driver] > count:
                return (
                    f"node {node} takes {count} volumes of {driver}, and the members that fit there otherwise need "
                    f"{used[driver]} with those in use; ask for a wider domain, or for fewer volumes"
                )
    return ""


def _used(pods: Iterable[Pod], volumes: Volumes) -> set[Volume]:
    """Return the volumes that pods use, each once."""
    return {_volume(pod.metadata.namespace, name, volumes) for pod in pods for name in claim_names(pod)}


def _count(used: Iterable[Volume]) -> Counter[str]:
    return Counter(driver for driver, _ in used)


def _volume(namespace: str, name: str, volumes: Volumes) -> Volume:
    """Return driver and handle of a claim's volume; of one that is not made yet, the claim stands for it."""
    claim = volumes.claims.get((namespace, name))
    if claim is None:
        return "", ""
    bound = volumes.volumes.get(claim.spec.volume_name)
    if bound is not None:
        return str(bound.spec.csi.get("driver", "")), str(bound.spec.csi.get("volumeHandle", ""))
    kind = (volumes.classes or {}).get(claim.spec.storage_class_name or "")
    return (kind.provisioner if kind is not None and kind.provisioner != STATIC else ""), f"{namespace}/{name}"
