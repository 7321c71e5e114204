"""A snapshot as the gang search sees it: the landscape, a gang's members, where the nodes stand, who holds what.

In: a scene and a GpuGang. Out: the values that the controllers' book would give to the same functions of
`atoll.cluster.gangs`. Separate from decisions, so that explanations, simulations and proposals look at one cluster.
Pure. What an administrator says about readiness stands in the controllers' flags, not in a snapshot: their defaults are
taken.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from atoll.api import names
from atoll.api.gangs import GpuGang
from atoll.cluster import host_fit, pods
from atoll.cluster.gangs.lifecycle import GangView, Obstacle, missing_claim
from atoll.cluster.gangs.membership import GangKey, GangMember, gang_key, key_of, members_of
from atoll.cluster.gangs.node_domains import NodeDomains, choose_topology, demands_a_level, node_domains_of
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Request, request_of
from atoll.explain.decision import IndexedSnapshot
from atoll.explain.snapshot import NOW_SECONDS


@dataclass(frozen=True, slots=True)
class IndexedGangs:
    """A scene made ready for questions about gangs; many gangs share the landscape."""

    scene: IndexedSnapshot
    landscape: PlacementSnapshot
    pods_of: Mapping[GangKey, tuple[Pod, ...]]

    def view(self, gang: GpuGang) -> GangView:
        """Return everything that a decision about the gang is made on."""
        found = self.pods_of.get(key_of(gang), ())
        ledger = self.scene.ledger
        members = members_of(found, gang.spec, {p.metadata.uid: bool(ledger.leases_of(p.metadata.uid)) for p in found})
        site = self.site(gang)
        return GangView(gang, members, ReadinessPolicy(), site if isinstance(site, Obstacle) else None)

    def site(self, gang: GpuGang) -> NodeDomains | Obstacle:
        """Return where the nodes stand for the gang."""
        snapshot = self.scene.snapshot
        topology = choose_topology(gang.spec, sorted(snapshot.topologies, key=lambda one: one.metadata.name))
        if isinstance(topology, Obstacle):
            return topology
        is_strict = demands_a_level(gang.spec)
        is_confined = is_strict or gang.spec.topology_name is not None
        reports = {one.metadata.name: one for one in snapshot.reports}
        return node_domains_of(topology, snapshot.nodes, reports, strict=is_strict, confined=is_confined)

    def requests(self, members: Iterable[GangMember]) -> dict[str, Request] | Obstacle:
        """Return what each member asks for, by uid; or why one of them cannot be served."""
        found: dict[str, Request] = {}
        for member in members:
            request = request_of(member.pod, self.scene.snapshot.claim_of(member.pod), is_admitted=True)
            if not isinstance(request, Request):
                return missing_claim(member.pod, request.reason)
            found[member.uid] = request
        return found

    def admitted(self) -> dict[GangKey, GangView]:
        """Return every admitted gang."""
        views = {key_of(gang): self.view(gang) for gang in self.scene.snapshot.gangs}
        return {key: view for key, view in views.items() if view.is_admitted}


def index_gangs(scene: IndexedSnapshot) -> IndexedGangs:
    """Make a scene ready for gangs."""
    on: dict[str, list[Pod]] = {}
    members: dict[GangKey, list[Pod]] = {}
    for pod in scene.snapshot.pods:
        key = gang_key(pod)
        if key is not None:
            members.setdefault(key, []).append(pod)
        node = pod.spec.node_name or _coming_to(scene, pod)
        if node and not pods.is_terminal(pod):
            on.setdefault(node, []).append(pod)
    landscape = PlacementSnapshot(
        nodes=scene.nodes,
        devices=dict(scene.ledger.nodes),
        cells=dict(scene.ledger.cells(now_seconds=NOW_SECONDS)),
        pods_on=on,
        free={name: host_fit.free(node, on.get(name, ())) for name, node in scene.nodes.items()},
    )
    return IndexedGangs(scene, landscape, {key: tuple(found) for key, found in members.items()})


def _coming_to(scene: IndexedSnapshot, pod: Pod) -> str:
    """Return the node that a pod without one is about to start on, as far as an object says so."""
    leases = scene.ledger.leases_of(pod.metadata.uid) if names.GANG in pod.metadata.annotations else ()
    return leases[0].node if leases else pod.status.nominated_node_name
