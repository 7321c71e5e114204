"""A possible change for a pod or a gang, and the cluster after it.

`changed` and `changed_gang` return the changed case, to be decided again, so that proposals and checks use the same
change. Pure: it makes new values.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from atoll.api import names
from atoll.api.claims import DeviceClaim, GpuClaim, InterconnectKind, PlacementPolicy
from atoll.api.gangs import GangTopologyRequest, GpuGang, GpuGangSpec, TopologyMode
from atoll.api.node_status import GpuNodeStatus, Health
from atoll.cluster import host_fit, pods
from atoll.cluster.errors import MalformedValue
from atoll.cluster.gangs.membership import gang_key, key_of
from atoll.cluster.leases import parse_lease
from atoll.cluster.objects import Container, Lease, Node, Pod, Taint, Toleration
from atoll.explain.snapshot import ClusterSnapshot


@dataclass(frozen=True, slots=True)
class PodCase:
    """A pod in a cluster, with its claim."""

    snapshot: ClusterSnapshot
    pod: Pod
    claim: GpuClaim | None


@dataclass(frozen=True, slots=True)
class Addition:
    """A node that is added: the Node, the report of its empty machine, its heartbeat."""

    shape: str
    node: Node
    report: GpuNodeStatus
    heartbeat: Lease


@dataclass(frozen=True, slots=True)
class ClusterChange:
    """A change; empty fields change nothing. GPUs are (node, uuid).

    `count`: number of GPUs, for a pod; `members`: the number that is enough, per pod set, for a gang.
    """

    relaxed: tuple[str, ...] = ()
    count: int = 0
    members: tuple[tuple[str, int], ...] = ()
    uncordoned: tuple[tuple[str, str], ...] = ()
    healed: tuple[tuple[str, str], ...] = ()
    ended: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    added: tuple[Addition, ...] = ()


RELAXATIONS: Final[dict[str, Callable[[DeviceClaim], DeviceClaim]]] = {
    "policy: contiguous": lambda asked: asked.model_copy(update={"policy": PlacementPolicy.CONTIGUOUS}),
    "interconnect: any": lambda asked: asked.model_copy(update={"interconnect": InterconnectKind.ANY}),
    "no minBandwidthGBps": lambda asked: asked.model_copy(update={"min_bandwidth_gbps": 0.0}),
    "mixedModels: true": lambda asked: asked.model_copy(update={"mixed_models": True}),
    "any model": lambda asked: asked.model_copy(update={"models": ()}),
    "no memory": lambda asked: asked.model_copy(update={"memory": None}),
    "no computeCapability": lambda asked: asked.model_copy(update={"compute_capability": None}),
}
"""What a claim can ask less of, the least painful first. Only the policy island refuses for links."""


def relaxations_of(claim: GpuClaim | None) -> tuple[str, ...]:
    """Return the relaxations that make a claim ask for less."""
    if claim is None:
        return ()
    asked = claim.spec.devices
    names_of = [name for name, relax in RELAXATIONS.items() if relax(asked) != asked]
    if asked.policy in (PlacementPolicy.PACKED, PlacementPolicy.SPREAD):
        names_of.remove("policy: contiguous")
    return tuple(names_of)


def changed(case: PodCase, change: ClusterChange) -> PodCase:
    """Return the case after the change."""
    claim, pod, snapshot = case.claim, case.pod, case.snapshot
    if claim is not None and (change.relaxed or change.count):
        claim = asking_less(claim, change.relaxed, count=change.count)
    if change.count:
        pod = with_count(pod, change.count, claim)
    snapshot = _freed(snapshot, change)
    for node in [one for one in snapshot.nodes if one.metadata.name in change.opened]:
        nodes = tuple(opened(one, pod) if one is node else one for one in snapshot.nodes)
        snapshot, pod = replace(snapshot, nodes=nodes), admitted_by(pod, node)
    return PodCase(snapshot, pod, claim)


def asking_less(claim: GpuClaim, relaxed: Collection[str], *, count: int = 0) -> GpuClaim:
    """Return the claim after these relaxations, with another count if one is given."""
    asked = claim.spec.devices
    for name in relaxed:
        asked = RELAXATIONS[name](asked)
    if count:
        asked = asked.model_copy(update={"count": count})
    return claim.model_copy(update={"spec": claim.spec.model_copy(update={"devices": asked})})


def _freed(snapshot: ClusterSnapshot, change: ClusterChange) -> ClusterSnapshot:
    """Return the cluster with added nodes, usable GPUs and ended pods as in the change."""
    if change.uncordoned or change.healed:
        reports = (well_again(one, change.uncordoned, change.healed) for one in snapshot.reports)
        snapshot = replace(snapshot, reports=tuple(reports))
    if change.ended:
        snapshot = without_pods(snapshot, frozenset(change.ended))
    return with_nodes(snapshot, change.added)


def with_nodes(snapshot: ClusterSnapshot, added: Sequence[Addition]) -> ClusterSnapshot:
    """Return the cluster with the added nodes."""
    return replace(
        snapshot,
        nodes=(*snapshot.nodes, *(one.node for one in added)),
        reports=(*snapshot.reports, *(one.report for one in added)),
        heartbeats=(*snapshot.heartbeats, *(one.heartbeat for one in added)),
    )


def with_count(pod: Pod, count: int, claim: GpuClaim | None) -> Pod:
    """Return the pod with another count of GPUs, all on the first container that asks for any."""
    profile = claim.spec.devices.mig_profile if claim is not None else ""
    resource = names.mig_resource(profile) if profile else names.GPU_RESOURCE
    left = [count]

    def recount(container: Container) -> Container:
        resources = container.resources
        if not (resource in resources.limits or resource in resources.requests):
            return container
        given, left[0] = left[0], 0
        limits = {**resources.limits, resource: given}
        requests = {**resources.requests, resource: given}
        return msgspec.structs.replace(
            container, resources=msgspec.structs.replace(resources, limits=limits, requests=requests)
        )

    inits = tuple(map(recount, pod.spec.init_containers))
    containers = tuple(map(recount, pod.spec.containers))
    spec = msgspec.structs.replace(pod.spec, init_containers=inits, containers=containers)
    return msgspec.structs.replace(pod, spec=spec)


def well_again(
    status: GpuNodeStatus, uncordoned: Collection[tuple[str, str]], healed: Collection[tuple[str, str]]
) -> GpuNodeStatus:
    """Return the report with these GPUs no longer cordoned, or healthy."""
    node = status.metadata.name
    cordons = tuple(one for one in status.spec.cordons if (node, one.uuid) not in uncordoned)
    status = status.model_copy(update={"spec": status.spec.model_copy(update={"cordons": cordons})})
    if status.status is None or not any(name == node for name, _ in healed):
        return status
    devices = tuple(
        device.model_copy(update={"health": Health(), "incidents": ()}) if (node, device.uuid) in healed else device
        for device in status.status.devices
    )
    return status.model_copy(update={"status": status.status.model_copy(update={"devices": devices})})


def without_pods(snapshot: ClusterSnapshot, uids: Collection[str]) -> ClusterSnapshot:
    """Return the snapshot after the proven end of these pods: without their Leases, allocations and processes."""
    reports = tuple(_without_uses(one, uids) for one in snapshot.reports)
    return replace(
        snapshot,
        pods=tuple(pod for pod in snapshot.pods if pod.metadata.uid not in uids),
        leases=tuple(lease for lease in snapshot.leases if not _is_held_by(lease, uids)),
        reports=reports,
    )


def _without_uses(status: GpuNodeStatus, uids: Collection[str]) -> GpuNodeStatus:
    report = status.status
    if report is None or not any(entry.uid in uids for entry in report.pods):
        return status
    left = tuple(entry for entry in report.pods if entry.uid not in uids)
    return status.model_copy(update={"status": report.model_copy(update={"pods": left})})


def _is_held_by(lease: Lease, uids: Collection[str]) -> bool:
    """True if the Lease names one of the uids; no pod's end frees an unreadable Lease."""
    if lease.spec.holder_identity.rpartition("/")[2] not in uids:
        return False
    try:
        return parse_lease(lease).holder.uid in uids
    except MalformedValue:
        return False


def opened(node: Node, pod: Pod) -> Node:
    """Return the Node without its cordon and that cordon's taint, and with the labels of the pod's selector."""
    labels = {**node.metadata.labels, **pod.spec.node_selector}
    taints = tuple(taint for taint in node.spec.taints if taint.key != host_fit.UNSCHEDULABLE)
    return msgspec.structs.replace(
        node,
        metadata=msgspec.structs.replace(node.metadata, labels=labels),
        spec=msgspec.structs.replace(node.spec, unschedulable=False, taints=taints),
    )


def tolerable(pod: Pod, node: Node) -> list[Taint]:
    """Return the taints that the pod could tolerate, without those that report the node's condition."""
    return [taint for taint in host_fit.untolerated(pod, node) if not host_fit.tells_state(taint)]


def admitted_by(pod: Pod, node: Node) -> Pod:
    """Return the pod that tolerates the node's taints. Selector and affinity stay: they are the user's wish."""
    more = tuple(Toleration(taint.key, "Equal", taint.value, taint.effect) for taint in tolerable(pod, node))
    spec = msgspec.structs.replace(pod.spec, tolerations=(*pod.spec.tolerations, *more))
    return msgspec.structs.replace(pod, spec=spec)


def _each_request(
    change: Callable[[GangTopologyRequest], GangTopologyRequest],
) -> Callable[[GpuGangSpec], GpuGangSpec]:
    def relax(spec: GpuGangSpec) -> GpuGangSpec:
        whole = change(spec.topology) if spec.topology is not None else None
        sets = tuple(
            one.model_copy(update={"topology": change(one.topology)}) if one.topology is not None else one
            for one in spec.pod_sets
        )
        return spec.model_copy(update={"topology": whole, "pod_sets": sets})

    return relax


def _preferred(asked: GangTopologyRequest) -> GangTopologyRequest:
    is_required = asked.mode is TopologyMode.REQUIRED
    return asked.model_copy(update={"mode": TopologyMode.PREFERRED}) if is_required else asked


GANG_RELAXATIONS: Final[dict[str, Callable[[GpuGangSpec], GpuGangSpec]]] = {
    "topology mode: preferred": _each_request(_preferred),
    "no slices": _each_request(lambda asked: asked.model_copy(update={"slices": ()})),
}
"""What a gang can ask less of its places, the least painful first; RELAXATIONS of its claims follow."""


def relaxations_of_gang(snapshot: ClusterSnapshot, gang: GpuGang) -> tuple[str, ...]:
    """Return the relaxations that make the gang or a member's claim ask for less."""
    found = [name for name, relax in GANG_RELAXATIONS.items() if relax(gang.spec) != gang.spec]
    asked = [claim.spec.devices for claim in snapshot.claims if _is_of(snapshot, gang, claim.metadata.name)]
    return (*found, *(name for name, relax in RELAXATIONS.items() if any(relax(one) != one for one in asked)))


def changed_gang(snapshot: ClusterSnapshot, gang: GpuGang, change: ClusterChange) -> tuple[ClusterSnapshot, GpuGang]:
    """Return the cluster and the gang after the change."""
    if change.relaxed or change.members:
        gang = _gang_asking_less(gang, change)
        snapshot = replace(
            snapshot, gangs=tuple(gang if key_of(one) == key_of(gang) else one for one in snapshot.gangs)
        )
        snapshot = _claims_relaxed(snapshot, gang, change.relaxed)
    return _with_open_nodes(_freed(snapshot, change), gang, change.opened), gang


def _gang_asking_less(gang: GpuGang, change: ClusterChange) -> GpuGang:
    spec = gang.spec
    for name in change.relaxed:
        relax = GANG_RELAXATIONS.get(name)
        spec = relax(spec) if relax is not None else spec
    if change.members:
        enough = dict(change.members)
        sets = tuple(one.model_copy(update={"min_count": enough.get(one.name) or None}) for one in spec.pod_sets)
        spec = spec.model_copy(update={"pod_sets": sets, "min_member": max(1, sum(enough.values()))})
    return gang.model_copy(update={"spec": spec})


def _claims_relaxed(snapshot: ClusterSnapshot, gang: GpuGang, relaxed: tuple[str, ...]) -> ClusterSnapshot:
    own = [name for name in relaxed if name in RELAXATIONS]
    if not own:
        return snapshot
    claims = []
    for claim in snapshot.claims:
        if claim.metadata.namespace == gang.metadata.namespace and _is_of(snapshot, gang, claim.metadata.name):
            claim = asking_less(claim, own)
        claims.append(claim)
    return replace(snapshot, claims=tuple(claims))


def _with_open_nodes(snapshot: ClusterSnapshot, gang: GpuGang, names: tuple[str, ...]) -> ClusterSnapshot:
    """Uncordon and label nodes for the members, and let the members tolerate their taints."""
    if not names:
        return snapshot
    found = {node.metadata.name: node for node in snapshot.nodes}
    key, changed = key_of(gang), []
    for pod in snapshot.pods:
        if gang_key(pod) == key:
            for name in names:
                found[name] = opened(found[name], pod)
                pod = admitted_by(pod, found[name])
        changed.append(pod)
    return replace(snapshot, nodes=tuple(found.values()), pods=tuple(changed))


def _is_of(snapshot: ClusterSnapshot, gang: GpuGang, claim: str) -> bool:
    key = key_of(gang)
    return any(gang_key(pod) == key and pods.claim_name(pod) == claim for pod in snapshot.pods)
