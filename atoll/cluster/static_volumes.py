"""Static volumes that several members of a gang may be bound to: how many there are, and whether all find one.

A claim of a class without provisioner is bound, with its first pod, to some free volume that the pod's node reaches.
"""

from collections import Counter
from collections.abc import Iterable

from atoll.cluster.host_fit import matches_terms
from atoll.cluster.objects import Node, PersistentVolume, Pod
from atoll.cluster.volume_fit import Volumes, available, claim_names, is_static, reach


def static_choices(pod: Pod, volumes: Volumes) -> tuple[PersistentVolume, ...] | None:
    """Return the volumes of which each pod like this one needs one of its own; None where it needs none, or where one
    can be made."""
    for name in claim_names(pod):
        claim = volumes.claims.get((pod.metadata.namespace, name))
        if claim is not None and is_static(claim, volumes):
            return tuple(available(claim, volumes))
    return None


def static_clash(placed: Iterable[tuple[Pod, Node]], volumes: Volumes) -> str:
    """Say which claim may find no volume, if each pod takes any of the static volumes that its node reaches; empty if
    all find one, in whatever order they come. Volumes that several nodes reach go to whoever binds first."""
    asked = [
        (name, frozenset(one.metadata.name for one in available(claim, volumes) if _reaches(one, node)))
        for pod, node in placed
        for name in claim_names(pod)
        if (claim := volumes.claims.get((pod.metadata.namespace, name))) is not None and is_static(claim, volumes)
    ]
    alike = Counter(choices for _, choices in asked)
    for name, choices in asked:
        rivals = sum(count for others, count in alike.items() if others & choices)
        if len(choices) < max(1, rivals):
            return (
                f"PersistentVolumeClaim {name} and {max(0, rivals - 1)} more of other members may take the same "
                f"{len(choices)} volumes; create more volumes, or bind each claim to one by its volumeName"
            )
    return ""


def _reaches(volume: PersistentVolume, node: Node) -> bool:
    terms = reach(volume)
    return terms is None or matches_terms(terms, node)
