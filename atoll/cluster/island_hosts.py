"""Whether kube-scheduler would accept a pod on a node once its victims are gone; asked before any eviction.

What one node shows is judged as for gangs (`atoll.cluster.host_fit`). What needs a view of all nodes (affinity to other
pods, a strict spread, volumes) is not judged, and a pod that wants it is refused: nobody is evicted on a guess.
"""

from collections.abc import Iterable

import msgspec

from atoll.cluster import host_fit
from atoll.cluster.objects import Node, Pod, Present


class _PodAffinity(msgspec.Struct, frozen=True):
    required: tuple[msgspec.Raw, ...] = msgspec.field(default=(), name="requiredDuringSchedulingIgnoredDuringExecution")


class _Affinity(msgspec.Struct, frozen=True, rename="camel"):
    pod_affinity: _PodAffinity | None = None
    pod_anti_affinity: _PodAffinity | None = None


class _Spread(msgspec.Struct, frozen=True, rename="camel"):
    when_unsatisfiable: str = "DoNotSchedule"


class _Volume(msgspec.Struct, frozen=True, rename="camel"):
    persistent_volume_claim: Present | None = None
    ephemeral: Present | None = None


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    affinity: _Affinity | None = None
    topology_spread_constraints: tuple[_Spread, ...] = ()
    volumes: tuple[_Volume, ...] = ()
    resource_claims: tuple[msgspec.Raw, ...] = ()


class PlacementConstraints(msgspec.Struct, frozen=True):
    """What a pod wants of its place in view of all others."""

    spec: _Spec = _Spec()


decode_demands = msgspec.json.Decoder(PlacementConstraints).decode


def unjudged(demands: PlacementConstraints) -> str:
    """Say what of the pod's wishes only kube-scheduler can judge; empty when nothing."""
    spec = demands.spec
    sides = (spec.affinity.pod_affinity, spec.affinity.pod_anti_affinity) if spec.affinity is not None else ()
    if any(side is not None and side.required for side in sides):
        return "required affinity to other pods"
    if any(spread.when_unsatisfiable == "DoNotSchedule" for spread in spec.topology_spread_constraints):
        return "a strict topology spread"
    if any(volume.persistent_volume_claim or volume.ephemeral for volume in spec.volumes):
        return "persistent volumes"
    return "resource claims" if spec.resource_claims else ""


def refusal(pod: Pod, node: Node, staying: Iterable[Pod]) -> str:
    """Say why the node could not take the pod beside those that stay; empty when it could."""
    others = tuple(staying)
    reason = host_fit.node_reason(pod, node)
    if reason or host_fit.ports_clash(pod, others):
        return reason or host_fit.PORTS
    left = host_fit.free(node, others)
    short = [resource for resource, amount in sorted(host_fit.needs(pod).items()) if amount > left.get(resource, 0)]
    return f"insufficient {short[0]}" if short else ""
