"""What a placement means for members: the GPUs that each gets, the gang's status, the pod's node and gate. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.api import names
from atoll.api.gangs import DOMAINS_MAX, DomainShare, GangAssignment, PodSetAssignment
from atoll.api.topologies import HOSTNAME
from atoll.cluster.allocations import Allocation
from atoll.cluster.gangs.membership import STARTED, GangMember, node_of
from atoll.cluster.gangs.node_domains import NodeDomains
from atoll.cluster.gangs.search_input import PART
from atoll.cluster.machines import NodeDevices
from topology.gangs.model import DomainCount, PlacedMember, Placement, PodSetPlacement


@dataclass(frozen=True, slots=True)
class MemberAssignment:
    """The place of one member, and the GPUs that it is to hold there: none for a member that needs none. `node_uid` and
    the claim go onto its Leases."""

    member: GangMember
    allocation: Allocation
    node_uid: str


def member_assignments(
    placement: Placement, asked: Mapping[str, Sequence[GangMember]], devices: Mapping[str, NodeDevices]
) -> tuple[MemberAssignment, ...]:
    """Return the assignments of a placement; `asked` has the members of each pod set in the order of their ranks."""
    return tuple(
        member_assignment(placed, asked[assignment.pod_set][placed.rank], devices)
        for assignment in placement.assignments
        for placed in assignment.members
    )


def member_assignment(placed: PlacedMember, member: GangMember, devices: Mapping[str, NodeDevices]) -> MemberAssignment:
    """Return the assignment of one placed member."""
    if not placed.positions:
        return MemberAssignment(member, Allocation(placed.host, (), ()), "")
    node = devices[placed.host]
    chosen = [node.devices[position] for position in placed.positions]
    allocation = Allocation(node.node, tuple(d.id for d in chosen), tuple(d.uuid for d in chosen))
    return MemberAssignment(member, allocation, node.node_uid)


def status_assignment(placement: Placement, node_domains: NodeDomains) -> GangAssignment:
    """Return what the status says of a placement."""
    whole: dict[str, PodSetPlacement] = {}
    for part in placement.assignments:
        name = part.pod_set.partition(PART)[0]
        known = whole.get(name, PodSetPlacement(name, "", (), ()))
        whole[name] = PodSetPlacement(name, "", (*known.domains, *part.domains), (*known.members, *part.members))
    return GangAssignment(
        topology=node_domains.name,
        pod_sets=tuple(_pod_set_assignment(one, node_domains.levels) for one in whole.values()),
    )


def replaced_assignment(
    before: GangAssignment, members: Sequence[GangMember], come: Sequence[MemberAssignment], domains: NodeDomains
) -> GangAssignment:
    """Return what the status says once `come` have taken the places of lost members: where all members are now."""
    hosts = {one.uid: host for one in members if one.stage in STARTED and (host := node_of(one))}
    hosts |= {one.member.uid: one.allocation.node for one in come}
    known = {one.uid: one for one in members} | {one.member.uid: one.member for one in come}
    parts: dict[str, list[DomainCount]] = {}
    for uid, host in hosts.items():
        path = (*domains.paths.get(host, ()), host)
        parts.setdefault(known[uid].pod_set, []).append(DomainCount(path, 1))
    found = (
        PodSetPlacement(name, "", tuple(counts), tuple(PlacedMember(0, one.path[-1]) for one in counts))
        for name, counts in sorted(parts.items())
    )
    pod_sets = tuple(_pod_set_assignment(one, domains.levels) for one in found)
    return before.model_copy(update={"pod_sets": pod_sets})


def _pod_set_assignment(assignment: PodSetPlacement, levels: tuple[str, ...]) -> PodSetAssignment:
    """Count members per domain of the lowest level; where there are too many, of the lowest that has few enough.

    Where the lowest level is the host, its name alone says where that is.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for domain in assignment.domains:
        counts[domain.path[: len(levels)] if levels else domain.path[-1:]] += domain.count
    shown_levels = levels or (HOSTNAME,)
    total = len(counts)
    if shown_levels[-1] == HOSTNAME and total <= DOMAINS_MAX:
        counts, shown_levels = _cut(counts, slice(len(shown_levels) - 1, None)), (HOSTNAME,)
    while len(counts) > DOMAINS_MAX and len(shown_levels) > 1:
        shown_levels = shown_levels[:-1]
        counts = _cut(counts, slice(0, len(shown_levels)))
    shares = (DomainShare(values=path, count=count) for path, count in sorted(counts.items())[:DOMAINS_MAX])
    return PodSetAssignment(
        name=assignment.pod_set,
        count=assignment.count,
        levels=shown_levels,
        domain_count=total,
        domains=tuple(shares),
    )


def _cut(counts: Counter[tuple[str, ...]], kept: slice) -> Counter[tuple[str, ...]]:
    merged: Counter[tuple[str, ...]] = Counter()
    for path, count in counts.items():
        merged[path[kept]] += count
    return merged


def pinned_affinity(affinity: Mapping[str, Any] | None, node: str) -> dict[str, Any]:
    """Return the pod's affinity, tightened to one node by name: kube-scheduler then looks at that node alone.

    While a pod is gated the API server takes a required node affinity where there was none, and further expressions in
    the terms that are there; their number must stay. A pod may be pinned twice: the same pin is not added again.
    """
    pin = {"key": "metadata.name", "operator": "In", "values": [node]}
    found = dict(affinity or {})
    node_affinity = dict(found.get("nodeAffinity") or {})
    required = dict(node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {})
    terms = [dict(term) for term in required.get("nodeSelectorTerms") or [{}]]
    for term in terms:
        fields = list(term.get("matchFields") or [])
        term["matchFields"] = fields if pin in fields else [*fields, pin]
    required["nodeSelectorTerms"] = terms
    node_affinity["requiredDuringSchedulingIgnoredDuringExecution"] = required
    return {**found, "nodeAffinity": node_affinity}


def open_gate(affinity: Mapping[str, Any] | None, gates: Iterable[Mapping[str, Any]], node: str) -> dict[str, Any]:
    """Return the part of a pod's spec that pins it and takes Atoll's gate off, for one merge patch."""
    left = [gate for gate in gates if gate.get("name") != names.GANG_GATE]
    return {"affinity": pinned_affinity(affinity, node), "schedulingGates": left}
