"""Recomputes the decision about one gang: what the controllers would do now, and where members would run.

The controllers' functions are used: `atoll.cluster.gangs.lifecycle.decide` decides what to do, `find_places` and
`place_missing` find places. `index_gangs` prepares a snapshot; `gang_victims` names the pods that would be evicted.
Pure.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from atoll.api import names
from atoll.api.gangs import GpuGang
from atoll.api.times import seconds_of
from atoll.cluster import host_fit, pods
from atoll.cluster.budgets import DisruptionBudgets, violations
from atoll.cluster.daemons import coming_daemons, waits_for_node
from atoll.cluster.gangs import conditions
from atoll.cluster.gangs.lifecycle import GangAction, GangView, LifecycleDecision, Obstacle, decide
from atoll.cluster.gangs.member_assignments import MemberAssignment, member_assignments
from atoll.cluster.gangs.member_requests import member_requests, shared_reservation
from atoll.cluster.gangs.membership import GangKey, GangMember, gang_key, key_of, members_of
from atoll.cluster.gangs.node_domains import NodeDomains, choose_topology, demands_a_level, node_domains_of
from atoll.cluster.gangs.placing import FoundPlacement, NoPlacement, find_places
from atoll.cluster.gangs.preemption import EvictionUnit, GangRequest, holdings_of, plan_preemption, with_kept
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy
from atoll.cluster.gangs.replacements import place_missing
from atoll.cluster.gangs.search_input import GangSearchInput, PlacementSnapshot, search_input
from atoll.cluster.gangs.sizes import size_conflict_of
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Request
from atoll.explain.decision import IndexedSnapshot
from atoll.explain.snapshot import NOW_SECONDS


@dataclass(frozen=True, slots=True)
class IndexedGangs:
    """A scene indexed for decisions about gangs; all gangs share the landscape."""

    scene: IndexedSnapshot
    landscape: PlacementSnapshot
    pods_of: Mapping[GangKey, tuple[Pod, ...]]

    def view(self, gang: GpuGang) -> GangView:
        """Return all input of a decision about the gang."""
        found = self.pods_of.get(key_of(gang), ())
        ledger = self.scene.ledger
        members = members_of(found, gang.spec, {p.metadata.uid: bool(ledger.leases_of(p.metadata.uid)) for p in found})
        conflict = size_conflict_of(gang, found)
        if conflict is not None:
            return GangView(gang, members, ReadinessPolicy(), Obstacle("Invalid", str(conflict)))
        site = self.site(gang)
        return GangView(gang, members, ReadinessPolicy(), site if isinstance(site, Obstacle) else None)

    def site(self, gang: GpuGang) -> NodeDomains | Obstacle:
        """Return the nodes' domains for the gang."""
        snapshot = self.scene.snapshot
        topology = choose_topology(gang.spec, sorted(snapshot.topologies, key=lambda one: one.metadata.name))
        if isinstance(topology, Obstacle):
            return topology
        is_strict = demands_a_level(gang.spec)
        is_confined = is_strict or gang.spec.topology_name is not None
        reports = {one.metadata.name: one for one in snapshot.reports}
        return node_domains_of(topology, snapshot.nodes, reports, strict=is_strict, confined=is_confined)

    def requests(self, members: Iterable[GangMember]) -> dict[str, Request] | Obstacle:
        """Return each member's request, by uid, without those that need no GPUs; or why one of them is invalid."""
        return member_requests(members, self.scene.snapshot.claim_of, self.scene.snapshot.reservation_of)

    def admitted(self) -> dict[GangKey, GangView]:
        """Return every admitted gang."""
        views = {key_of(gang): self.view(gang) for gang in self.scene.snapshot.gangs}
        return {key: view for key, view in views.items() if view.is_admitted}


def index_gangs(scene: IndexedSnapshot) -> IndexedGangs:
    """Index a scene for gangs."""
    on: dict[str, list[Pod]] = {}
    members: dict[GangKey, list[Pod]] = {}
    for pod in scene.snapshot.pods:
        key = gang_key(pod)
        if key is not None:
            members.setdefault(key, []).append(pod)
        node = pod.spec.node_name or _coming_to(scene, pod)
        if node and not pods.is_terminal(pod):
            on.setdefault(node, []).append(pod)
    taken_seconds = seconds_of(scene.snapshot.taken_at)
    now_seconds = taken_seconds if taken_seconds is not None else math.inf
    for name, coming in coming_daemons(scene.nodes, on, now_seconds=now_seconds).items():
        on.setdefault(name, []).extend(coming)
    landscape = PlacementSnapshot(
        nodes=scene.nodes,
        devices=dict(scene.ledger.nodes),
        cells=dict(scene.ledger.cells(now_seconds=NOW_SECONDS)),
        pods_on=on,
        free={name: host_fit.free(node, on.get(name, ())) for name, node in scene.nodes.items()},
        volumes=scene.volumes,
        namespaces=scene.namespaces,
    )
    return IndexedGangs(scene, landscape, {key: tuple(found) for key, found in members.items()})


def _coming_to(scene: IndexedSnapshot, pod: Pod) -> str:
    """Return the node on which an unbound pod is about to start, if an object names it."""
    leases = scene.ledger.leases_of(pod.metadata.uid)
    return leases[0].node if leases else pod.status.nominated_node_name or waits_for_node(pod)


@dataclass(frozen=True, slots=True)
class FindPlacesInput:
    """All arguments of `find_places`."""

    view: GangView
    chosen: tuple[GangMember, ...]
    requests: Mapping[str, Request]
    site: NodeDomains
    landscape: PlacementSnapshot

    def question(self) -> GangSearchInput | None:
        """Return the input of the search; None if it contradicts itself."""
        found = search_input(self.view.gang.spec, self.chosen, self.requests, self.site, self.landscape)
        return None if isinstance(found, Obstacle) else found


@dataclass(frozen=True, slots=True)
class GangDecision:
    """The decision about a gang now. `reason`, `message`: as in the condition Admitted. `seats`: places of members that
    have no GPUs yet; `asked`: None if no member is to be placed."""

    view: GangView
    act: GangAction
    reason: str
    message: str
    assignments: tuple[MemberAssignment, ...] = ()
    asked: FindPlacesInput | None = None

    @property
    def fits(self) -> bool:
        """True if enough of the members to be placed find a place."""
        if self.asked is None:
            return False
        return bool(self.assignments) and (
            self.act is GangAction.PLACE or len(self.assignments) == len(self.asked.chosen)
        )


def decide_gang(gangs: IndexedGangs, gang: GpuGang) -> GangDecision:
    """Decide about a gang as the controllers would at the time of the snapshot."""
    view = gangs.view(gang)
    now = seconds_of(gangs.scene.snapshot.taken_at) or 0.0
    decision = decide(view, now_seconds=now)
    reason, message = _told(decision)
    if decision.act not in (GangAction.PLACE, GangAction.REPLACE):
        return GangDecision(view, decision.act, reason, message)
    requests, site = gangs.requests(decision.members), gangs.site(gang)
    if isinstance(requests, Obstacle):
        return GangDecision(view, decision.act, "WaitForQuorum", requests.message)
    if isinstance(site, Obstacle):
        return GangDecision(view, decision.act, site.reason, site.message)
    asked = FindPlacesInput(view, decision.members, requests, site, _landscape(gangs, decision, requests))
    if decision.act is GangAction.REPLACE:
        found = place_missing(view, asked.chosen, requests, site, asked.landscape)
        if found.waiting is not None:
            reason, message = found.waiting.reason, found.waiting.message
        return GangDecision(view, decision.act, reason, message, found.assignments, asked)
    answer = find_places(view, asked.chosen, requests, site, asked.landscape)
    if isinstance(answer, NoPlacement):
        return GangDecision(view, decision.act, answer.reason, answer.message, (), asked)
    return GangDecision(view, decision.act, "Admitted", _placed(answer), seats_for(gangs, answer), asked)


def seats_for(gangs: IndexedGangs, found: FoundPlacement) -> tuple[MemberAssignment, ...]:
    """Return each member's GPUs."""
    return member_assignments(found.placement, found.question.asked, gangs.scene.ledger.nodes)


def _landscape(gangs: IndexedGangs, decision: LifecycleDecision, requests: Mapping[str, Request]) -> PlacementSnapshot:
    """Landscape in which GPUs kept for members of the gang count as free, and of a GpuReservation only its own."""
    ledger = gangs.scene.ledger
    landscape = gangs.landscape.confined(ledger, shared_reservation(requests), now_seconds=NOW_SECONDS)
    kept = (ledger.kept(member.uid) for member in decision.members)
    own = [one for one in kept if one is not None]
    return with_kept(landscape, ledger, own, now_seconds=NOW_SECONDS) if own else landscape


def _told(decision: LifecycleDecision) -> tuple[str, str]:
    """Return reason and message of the condition Admitted after the decision."""
    found = conditions.find(decision.status.conditions, names.CONDITION_ADMITTED)
    return (found.reason, found.message) if found is not None else ("", "")


def _placed(found: FoundPlacement) -> str:
    members = sum(assignment.count for assignment in found.placement.assignments)
    nodes = len({place.host for assignment in found.placement.assignments for place in assignment.members})
    return f"{members} members fit now, on {nodes} nodes"


def gang_victims(gangs: IndexedGangs, decision: GangDecision) -> tuple[Pod, ...]:
    """Return the pods that would be evicted for the gang; none if it may not preempt or that would not help."""
    asked = decision.asked
    if asked is None:
        return ()
    asking = GangRequest(asked.view, asked.chosen, asked.requests, asked.site, asked.landscape)
    if not asking.may_preempt:
        return ()
    budgets = DisruptionBudgets(gangs.scene.snapshot.budgets)
    holdings = holdings_of(gangs.scene.ledger, shared_reservation(asked.requests))
    allowed, protecting = budgets.allowed(), {one.pod.metadata.uid: budgets.of(one.pod) for one in holdings}

    def is_spared(unit: EvictionUnit) -> bool:
        return violations((protecting.get(uid, ()) for uid in sorted(unit.uids)), allowed) > 0

    clearing = plan_preemption(asking, holdings, gangs.admitted(), is_spared=is_spared)
    uids = sorted({uid for unit in clearing.evicted for uid in unit.uids}) if clearing is not None else ()
    by_uid = gangs.scene.by_uid
    return tuple(by_uid[uid] for uid in uids if uid in by_uid)
