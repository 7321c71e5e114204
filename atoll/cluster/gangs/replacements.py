"""Places members that a running gang lacks, near its others.

What the gang required when it was admitted still holds: a member goes into the domain that its pod set, its slice and
the whole gang are in now, by today's node labels. Beyond that the narrowest domain around the others is tried first,
then wider ones (topology.gangs.repair). Here is decided who counts as lost and as remaining.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from atoll.api.gangs import GpuGangSpec, TopologyMode
from atoll.cluster import host_fit
from atoll.cluster.allocations import bound_allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.gangs.lifecycle import GangView, Obstacle
from atoll.cluster.gangs.member_assignments import MemberAssignment, member_assignment
from atoll.cluster.gangs.membership import STARTED, GangMember, MemberStage, node_of
from atoll.cluster.gangs.node_domains import NodeDomains
from atoll.cluster.gangs.placing import NoPlacement, judged, refused, with_company
from atoll.cluster.gangs.rehearsal import find_clash
from atoll.cluster.gangs.search_input import (
    PlacementSnapshot,
    gpu_requests,
    model_choices,
    search_input,
    unknown_nodes,
)
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Request, Verdict
from atoll.cluster.spread import SPREAD, spread_counts
from topology.gangs.model import Gang, Mode, Placement, PodSet, PodSetPlacement
from topology.gangs.model import PlacedMember as Place
from topology.gangs.repair import Replacement, replace_lost
from topology.gangs.snapshot import HostSnapshot

MISSING_MAX = 64
"""Members placed in one round; the next round goes on."""
NOWHERE = ""
Anchors = list[tuple[str, list[str]]]


@dataclass(frozen=True, slots=True)
class Replacements:
    """Assignments of missing members; `waiting`: why the others have none, None where all have one."""

    assignments: tuple[MemberAssignment, ...]
    waiting: NoPlacement | None = None


def place_missing(
    view: GangView,
    missing: Sequence[GangMember],
    requests: Mapping[str, Request],
    node_domains: NodeDomains,
    cluster: PlacementSnapshot,
) -> Replacements:
    """Place each missing member that finds a place, and say what the others wait for."""
    now = _place(view, missing, requests, node_domains, cluster)
    left = len(missing) - len(now.assignments)
    if now.waiting is None and left:
        return replace(now, waiting=NoPlacement(Verdict.BUSY, f"{left} members are placed after these", "WaitForRoom"))
    if now.waiting is None or now.waiting.verdict is not Verdict.BUSY:
        return now
    told = f"{left} of {len(missing)} members that it lacks find no place beside its others: {now.waiting.message}"

    def hosts_on(snapshot: PlacementSnapshot) -> Iterable[str] | NoPlacement:
        beside = with_company(_beside_its_others(view, snapshot), missing, cluster)
        found = _place(view, missing, requests, node_domains, beside)
        return found.waiting or [one.allocation.node for one in found.assignments]

    waiting = judged(told, hosts_on, cluster, lambda: unknown_nodes(missing, requests, node_domains, cluster))
    return replace(now, waiting=waiting)


def _beside_its_others(view: GangView, emptied: PlacementSnapshot) -> PlacementSnapshot:
    """Return a snapshot without any pod, with the members on it that run."""
    on: dict[str, list[Pod]] = {}
    taken: dict[str, int] = {}
    for member in view.members:
        home = node_of(member)
        if member.stage not in STARTED or home not in emptied.nodes:
            continue
        on.setdefault(home, []).append(member.pod)
        with suppress(MalformedValue):
            allocation = bound_allocation(member.pod)
            if allocation is not None and home in emptied.devices:
                taken[home] = taken.get(home, 0) | emptied.devices[home].mask_of(allocation.device_ids)
    free = {**emptied.free, **{home: host_fit.free(emptied.nodes[home], found) for home, found in on.items()}}
    return replace(emptied.without_positions(taken), pods_on=on, free=free)


def _place(
    view: GangView,
    missing: Sequence[GangMember],
    requests: Mapping[str, Request],
    node_domains: NodeDomains,
    cluster: PlacementSnapshot,
) -> Replacements:
    """Place the first missing members on this snapshot. `waiting`: busy, where some of them find no place on it."""
    spec = view.gang.spec
    homes = _homes(view.members, node_domains)
    used = {model for member, _ in homes for model in _models_of(member, cluster)}
    choices = model_choices(gpu_requests(missing, requests), node_domains, cluster)
    models = next((models for _, models in choices if not used or used.issuperset(models.values())), None)
    if models is None:
        told = f"no node has the model of its others, {', '.join(sorted(used))}"
        return Replacements((), NoPlacement(Verdict.BUSY, told, "WaitForRoom"))
    question = search_input(spec, missing[:MISSING_MAX], requests, node_domains, cluster, models=models)
    if isinstance(question, Obstacle):
        return Replacements((), NoPlacement(Verdict.UNKNOWN, question.message, "WaitForQuorum"))
    waiting: NoPlacement | None = None
    snapshot = question.snapshot
    placed: list[tuple[str, Pod, str]] = []
    assignments: list[MemberAssignment] = []
    for pod_set in sorted(question.gang.pod_sets, key=lambda one: -one.count if one.group else 0):
        asked = {member.rank: member for member in question.asked[pod_set.name]}
        kin = [Place(one.rank, home) for one, home in homes if one.pod_set == pod_set.name and one.rank not in asked]
        anchors = _anchors(spec, pod_set, homes, node_domains, kin=bool(kin))
        bound = _bound(pod_set, question.asked[pod_set.name][0].pod, cluster)
        repair = _nearest(bound, snapshot, kin, list(asked), anchors)
        snapshot = _taken(snapshot, pod_set, repair.members)
        homes += [(asked[place.rank], place.host) for place in repair.members]
        waiting = waiting or next(map(refused, repair.refusals), None)
        for place in repair.members:
            member = asked[place.rank]
            beside = [*placed, (pod_set.name, member.pod, place.host)]
            clash = find_clash(beside, cluster)
            if clash is None:
                placed = beside
                assignments.append(member_assignment(place, member, cluster.devices))
            else:
                waiting = waiting or refused(clash)
    return Replacements(tuple(assignments), waiting)


def _models_of(member: GangMember, cluster: PlacementSnapshot) -> Iterator[str]:
    """Yield the models of the GPUs that a bound member has."""
    try:
        allocation = bound_allocation(member.pod)
    except MalformedValue:
        return
    devices = cluster.devices.get(allocation.node) if allocation is not None else None
    if allocation is None or devices is None:
        return
    for device_id in allocation.device_ids:
        position = devices.position_by_id.get(device_id)
        if position is not None:
            yield devices.shape.cards[position].model


def _homes(members: Sequence[GangMember], node_domains: NodeDomains) -> list[tuple[GangMember, str]]:
    """Return the members that run or are about to, and their nodes; where none does, those that have ended well."""
    found = [(member, home) for member in members if (home := node_of(member)) in node_domains.paths]
    running = [entry for entry in found if entry[0].stage in STARTED]
    return running or [entry for entry in found if entry[0].stage is not MemberStage.FAILED]


def _bound(pod_set: PodSet, pod: Pod, cluster: PlacementSnapshot) -> PodSet:
    """Return the pod set as its replacements see it: what asks for nothing stays near its others all the same, and
    nodes are excluded where a strict topology spread takes no further member now."""
    request = pod_set.request
    mode = Mode.AUTO if request.mode is Mode.UNCONSTRAINED else request.mode
    counts = spread_counts(pod, list(cluster.nodes.values()), cluster.pods_on)
    full = [node for one in counts for node in one.full(more=int(one.means(pod)))]
    excluded = {**dict.fromkeys(full, SPREAD), **pod_set.excluded}
    return replace(pod_set, min_count=None, request=replace(request, mode=mode), excluded=excluded)


def _anchors(
    spec: GpuGangSpec,
    pod_set: PodSet,
    homes: Sequence[tuple[GangMember, str]],
    node_domains: NodeDomains,
    *,
    kin: bool,
) -> Iterator[Anchors]:
    """Yield the domains to try in turn: those that the whole gang and the group require. Within them, for a pod set
    without any member left, first the narrowest around its group, or else around all other members."""
    hosts, whole = [home for _, home in homes], spec.topology
    required: Anchors = []
    if whole is not None and whole.mode is TopologyMode.REQUIRED and whole.level in node_domains.levels:
        required = [(whole.level, hosts)]
    mates = {one.name for one in spec.pod_sets if pod_set.group and one.group == pod_set.group}
    hosts = [home for one, home in homes if one.pod_set in mates] or hosts
    if mates and pod_set.request.mode is Mode.REQUIRED and pod_set.request.level in node_domains.levels:
        required.append((pod_set.request.level, hosts))
    for level in () if kin or not hosts else reversed(node_domains.levels):
        yield [*required, (level, _common(hosts, node_domains, level))]
    yield required


def _common(hosts: Sequence[str], node_domains: NodeDomains, level: str) -> list[str]:
    """Return the hosts in the domain of the level in which most of them lie."""
    length = node_domains.levels.index(level) + 1
    most = Counter(node_domains.paths[host][:length] for host in hosts).most_common(1)[0][0]
    return [host for host in hosts if node_domains.paths[host][:length] == most]


def _nearest(
    pod_set: PodSet, snapshot: HostSnapshot, kin: Sequence[Place], ranks: Sequence[int], anchors: Iterator[Anchors]
) -> Replacement:
    """Try the anchors in turn until all have a place; else as many as the widest gives."""
    repair = Replacement((), ())
    for bound in anchors:
        members = [*kin, *(Place(rank, NOWHERE) for rank in ranks)]
        repair = replace_lost(pod_set, snapshot, members, {NOWHERE}, anchors=bound)
        if len(repair.members) == len(ranks):
            break
    return repair


def _taken(snapshot: HostSnapshot, pod_set: PodSet, places: Sequence[Place]) -> HostSnapshot:
    """Charge what one pod set got before the next is placed."""
    assignment = PodSetPlacement(pod_set.name, "", (), tuple(places))
    return snapshot.take(Placement(snapshot.tree.levels, (assignment,), 0, bounded=False), Gang((pod_set,)))
