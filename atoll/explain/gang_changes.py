"""One thing that could be different for a gang, and the cluster in which it is.

In: a snapshot, a gang, a GangChange. Out: the changed snapshot and gang, to be decided again. Separate for the same
reason as `atoll.explain.changes`, which it builds on: who proposes and who checks mean the same. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from atoll.api.gangs import GangTopologyRequest, GpuGang, GpuGangSpec, TopologyMode
from atoll.cluster import pods
from atoll.cluster.gangs.membership import gang_key, key_of
from atoll.explain.changes import RELAXATIONS, Addition, admitted_by, asking_less, freed, opened, with_node
from atoll.explain.snapshot import ClusterSnapshot


@dataclass(frozen=True, slots=True)
class GangChange:
    """What is different; every field that is empty changes nothing. GPUs stand as (node, uuid).

    `members`: how many are enough, per pod set.
    """

    relaxed: tuple[str, ...] = ()
    members: tuple[tuple[str, int], ...] = ()
    uncordoned: tuple[tuple[str, str], ...] = ()
    healed: tuple[tuple[str, str], ...] = ()
    ended: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    added: tuple[Addition, ...] = ()


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
"""What a gang can ask less of its places, the least painful first; then what its claims can, RELAXATIONS."""


def relaxations_of_gang(snapshot: ClusterSnapshot, gang: GpuGang) -> tuple[str, ...]:
    """Return the relaxations that would make the gang or a claim of its members ask less."""
    found = [name for name, relax in GANG_RELAXATIONS.items() if relax(gang.spec) != gang.spec]
    asked = [claim.spec.devices for claim in snapshot.claims if _is_of(snapshot, gang, claim.metadata.name)]
    return (*found, *(name for name, relax in RELAXATIONS.items() if any(relax(one) != one for one in asked)))


def changed_gang(snapshot: ClusterSnapshot, gang: GpuGang, change: GangChange) -> tuple[ClusterSnapshot, GpuGang]:
    """Return the cluster and the gang after the change."""
    if change.relaxed or change.members:
        gang = _gang_asking_less(gang, change)
        snapshot = replace(
            snapshot, gangs=tuple(gang if key_of(one) == key_of(gang) else one for one in snapshot.gangs)
        )
        snapshot = _claims_relaxed(snapshot, gang, change.relaxed)
    snapshot = freed(snapshot, uncordoned=change.uncordoned, healed=change.healed, ended=change.ended)
    if change.opened:
        snapshot = _with_open_nodes(snapshot, gang, change.opened)
    for one in change.added:
        snapshot = with_node(snapshot, one)
    return snapshot, gang


def _gang_asking_less(gang: GpuGang, change: GangChange) -> GpuGang:
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
    """Nodes are uncordoned and labelled for the members, which tolerate their taints."""
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
