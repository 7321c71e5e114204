"""Where the volumes of a pod let it run: bound ones by where they lie, others by where they can be found or made.

As kube-scheduler's VolumeBinding, VolumeZone and VolumeRestrictions see it. A claim whose class binds at once is bound
before its pod is scheduled at all.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from atoll.cluster.csi import CsiDriver, CsiNode, StorageCapacity, capacity_terms
from atoll.cluster.labels import selects
from atoll.cluster.objects import NodeSelectorTerm, Pod, Requirement
from atoll.cluster.quantities import parse_amount
from atoll.cluster.storage import PersistentVolume, PersistentVolumeClaim, StorageClass

STATIC: Final = "kubernetes.io/no-provisioner"
DELAYED: Final = "WaitForFirstConsumer"
ONE_POD: Final = "ReadWriteOncePod"
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
    csi_nodes: Mapping[str, CsiNode] = field(default_factory=dict)
    csi_drivers: Mapping[str, CsiDriver] = field(default_factory=dict)
    capacities: Mapping[tuple[str, str], StorageCapacity] = field(default_factory=dict)


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


def is_for_one_pod(pod: Pod, volumes: Volumes) -> bool:
    """Tell whether a claim of the pod may be used by one pod at a time."""
    claims = (volumes.claims.get((pod.metadata.namespace, name)) for name in claim_names(pod))
    return any(claim is not None and ONE_POD in claim.spec.access_modes for claim in claims)


def volume_problem(
    pod: Pod, volumes: Volumes, *, shared: Collection[str] = (), users: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Say which claim kube-scheduler would refuse the pod for, or some of the pods that share the claims `shared`, and
    what to do; empty for none. `users`: another pod on a node, by the claim that it uses."""
    for name in claim_names(pod) if volumes.classes is not None else ():
        claim = volumes.claims.get((pod.metadata.namespace, name))
        if claim is None:
            return f"PersistentVolumeClaim {name} does not exist; create it"
        problem = _refused_use(claim, shared, users) or _refused_state(claim) or _unbound(claim, volumes, shared)
        if problem:
            return f"PersistentVolumeClaim {name} {problem}"
    return ""


def _refused_use(claim: PersistentVolumeClaim, shared: Collection[str], users: Mapping[str, str]) -> str:
    name = claim.metadata.name
    if ONE_POD not in claim.spec.access_modes or (name not in shared and name not in users):
        return ""
    if name in shared:
        return f"is for one pod ({ONE_POD}), and other members use it too; give each member a claim of its own"
    return f"is for one pod ({ONE_POD}), and pod {users[name]} uses it"


def _refused_state(claim: PersistentVolumeClaim) -> str:
    if claim.metadata.deletion_timestamp:
        return "is being deleted; create it anew"
    if claim.status.phase == "Lost":
        return f"has lost its volume {claim.spec.volume_name}; create both anew"
    return "is not bound to a volume yet" if claim.spec.volume_name and claim.status.phase == "Pending" else ""


def _unbound(claim: PersistentVolumeClaim, volumes: Volumes, shared: Collection[str]) -> str:
    if claim.spec.volume_name:
        return ""
    wanted = claim.spec.storage_class_name or ""
    kind = (volumes.classes or {}).get(wanted)
    if wanted and kind is None:
        return f"names StorageClass {wanted}, which does not exist; create it"
    if kind is None or kind.volume_binding_mode != DELAYED:
        return "is not bound to a volume yet"
    if claim.metadata.name in shared and (kind.provisioner == STATIC or kind.allowed_topologies):
        return (
            "is not bound to a volume yet, and other members use it too; bind it before, or give each member a claim "
            "of its own"
        )
    return ""


def is_static(claim: PersistentVolumeClaim, volumes: Volumes) -> bool:
    """Tell whether a claim is bound, with its first pod, to a volume that exists."""
    kind = (volumes.classes or {}).get(claim.spec.storage_class_name or "")
    return not claim.spec.volume_name and kind is not None and kind.provisioner == STATIC


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
        makeable = _makeable(claim, kind, volumes)
        if makeable is None:
            return None
        found += makeable
    for volume in available(claim, volumes):
        terms = reach(volume)
        if terms is None:
            return None
        found += [term for term in terms if term not in found]
    return tuple(found)


def _makeable(claim: PersistentVolumeClaim, kind: StorageClass, volumes: Volumes) -> list[NodeSelectorTerm] | None:
    """Return where the driver of a class can make a volume for the claim; None for everywhere."""
    allowed: list[NodeSelectorTerm | None] = [
        NodeSelectorTerm(
            match_expressions=tuple(Requirement(row.key, "In", row.values) for row in term.match_label_expressions)
        )
        for term in kind.allowed_topologies
    ]
    driver = volumes.csi_drivers.get(kind.provisioner)
    roomy: list[NodeSelectorTerm | None] = [None]
    if driver is not None and driver.spec.storage_capacity:
        wanted = parse_amount("storage", claim.spec.resources.requests.get("storage", 0))
        roomy = list(capacity_terms(volumes.capacities, kind.metadata.name, wanted))
    both = [(one, other) for one in allowed or [None] for other in roomy]
    if (None, None) in both:
        return None
    return [
        NodeSelectorTerm(match_expressions=tuple(row for term in pair if term for row in term.match_expressions))
        for pair in both
    ]


def available(claim: PersistentVolumeClaim, volumes: Volumes) -> Iterator[PersistentVolume]:
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
