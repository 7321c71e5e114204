"""Where the volumes of a pod let it run: bound ones by where they lie, others by where they can be found or made.

As kube-scheduler's VolumeBinding and VolumeZone see it. A claim whose class binds at once is bound before its pod is
scheduled at all. The room that storage has left (CSIStorageCapacity) and how many volumes a node takes are not weighed.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from atoll.cluster.labels import selects
from atoll.cluster.objects import (
    NodeSelectorTerm,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    Requirement,
    StorageClass,
)
from atoll.cluster.quantities import parse_amount

STATIC: Final = "kubernetes.io/no-provisioner"
DELAYED: Final = "WaitForFirstConsumer"
_ZONE_LABELS: Final = (
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
)
_ZONE_SEPARATOR: Final = "__"
Terms = tuple[NodeSelectorTerm, ...]


@dataclass(frozen=True, slots=True)
class Volumes:
    """Claims and volumes of the cluster: claims by namespace and name, volumes and storage classes by name; `classes`
    is None where nobody knows them, and then claims that are not bound are left to kube-scheduler."""

    claims: Mapping[tuple[str, str], PersistentVolumeClaim] = field(default_factory=dict)
    volumes: Mapping[str, PersistentVolume] = field(default_factory=dict)
    classes: Mapping[str, StorageClass] | None = None


def claim_names(pod: Pod) -> Iterator[str]:
    """Yield the names of the claims of a pod."""
    for volume in pod.spec.volumes:
        if volume.ephemeral is not None:
            yield f"{pod.metadata.name}-{volume.name}"
        elif volume.persistent_volume_claim is not None:
            yield volume.persistent_volume_claim.claim_name


def volume_requirements(pod: Pod, volumes: Volumes) -> tuple[Terms, ...]:
    """Return, per volume that binds the pod to nodes, the terms of which a node must match one."""
    found: list[Terms] = []
    for name in claim_names(pod):
        claim = volumes.claims.get((pod.metadata.namespace, name))
        bound = volumes.volumes.get(claim.spec.volume_name) if claim is not None else None
        if bound is not None:
            found += [terms for terms in (reach(bound),) if terms is not None]
            found += [
                (NodeSelectorTerm(match_expressions=(Requirement(key, "In", tuple(zones.split(_ZONE_SEPARATOR))),)),)
                for key in _ZONE_LABELS
                if (zones := bound.metadata.labels.get(key))
            ]
        elif claim is not None and not claim.spec.volume_name and volumes.classes is not None:
            terms = _findable(claim, volumes, volumes.classes)
            found += [terms] if terms is not None else []
    return tuple(found)


def volume_problem(pod: Pod, volumes: Volumes, *, shared: Collection[str] = ()) -> str:
    """Say which claim kube-scheduler would refuse the pod for, or some of the pods that share the claims `shared`, and
    what to do; empty for none."""
    for name in claim_names(pod) if volumes.classes is not None else ():
        claim = volumes.claims.get((pod.metadata.namespace, name))
        if claim is None:
            return f"PersistentVolumeClaim {name} does not exist; create it"
        if claim.metadata.deletion_timestamp:
            return f"PersistentVolumeClaim {name} is being deleted; create it anew"
        if claim.status.phase == "Lost":
            return f"PersistentVolumeClaim {name} has lost its volume {claim.spec.volume_name}; create both anew"
        if claim.spec.volume_name and claim.status.phase == "Pending":
            return f"PersistentVolumeClaim {name} is not bound to a volume yet"
        if not claim.spec.volume_name:
            wanted = claim.spec.storage_class_name or ""
            kind = (volumes.classes or {}).get(wanted)
            if wanted and kind is None:
                return f"PersistentVolumeClaim {name} names StorageClass {wanted}, which does not exist; create it"
            if kind is None or kind.volume_binding_mode != DELAYED:
                return f"PersistentVolumeClaim {name} is not bound to a volume yet"
            if name in shared and (kind.provisioner == STATIC or kind.allowed_topologies):
                return (
                    f"PersistentVolumeClaim {name} is not bound to a volume yet, and other members use it too; bind it "
                    "before, or give each member a claim of its own"
                )
    return ""


def static_choices(pod: Pod, volumes: Volumes) -> tuple[PersistentVolume, ...] | None:
    """Return the volumes of which each pod like this one needs one of its own; None where it needs none, or where one
    can be made."""
    for name in claim_names(pod):
        claim = volumes.claims.get((pod.metadata.namespace, name))
        kind = (volumes.classes or {}).get(claim.spec.storage_class_name or "") if claim is not None else None
        if claim is not None and not claim.spec.volume_name and kind is not None and kind.provisioner == STATIC:
            return tuple(_available(claim, volumes))
    return None


def reach(volume: PersistentVolume) -> Terms | None:
    """Return the terms of which a node must match one to reach the volume; None for every node."""
    affinity = volume.spec.node_affinity
    return affinity.required.node_selector_terms if affinity is not None and affinity.required is not None else None


def _findable(claim: PersistentVolumeClaim, volumes: Volumes, classes: Mapping[str, StorageClass]) -> Terms | None:
    """Return where a claim that binds with its first pod can get a volume; None for everywhere."""
    kind = classes.get(claim.spec.storage_class_name or "")
    if kind is None or kind.volume_binding_mode != DELAYED:
        return None
    found: list[NodeSelectorTerm] = []
    if kind.provisioner != STATIC:
        if not kind.allowed_topologies:
            return None
        found += [
            NodeSelectorTerm(
                match_expressions=tuple(Requirement(row.key, "In", row.values) for row in term.match_label_expressions)
            )
            for term in kind.allowed_topologies
        ]
    for volume in _available(claim, volumes):
        terms = reach(volume)
        if terms is None:
            return None
        found += [term for term in terms if term not in found]
    return tuple(found)


def _available(claim: PersistentVolumeClaim, volumes: Volumes) -> Iterator[PersistentVolume]:
    """Yield the volumes that a claim can be bound to."""
    wanted = parse_amount("storage", claim.spec.resources.requests.get("storage", 0))
    for volume in volumes.volumes.values():
        spec, owner = volume.spec, volume.spec.claim_ref
        is_own = owner is not None and (owner.namespace, owner.name) == (claim.metadata.namespace, claim.metadata.name)
        if (
            (is_own or (owner is None and volume.status.phase == "Available"))
            and not volume.metadata.deletion_timestamp
            and spec.storage_class_name == (claim.spec.storage_class_name or "")
            and spec.volume_mode == claim.spec.volume_mode
            and set(claim.spec.access_modes) <= set(spec.access_modes)
            and parse_amount("storage", spec.capacity.get("storage", 0)) >= wanted
            and (claim.spec.selector is None or selects(claim.spec.selector, volume.metadata.labels))
        ):
            yield volume
