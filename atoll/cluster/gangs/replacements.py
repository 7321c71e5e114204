"""Places for members that a running gang lacks: where its others are.

In: an admitted gang, the members to place, the cluster. Out: a place for each that has one. What the gang required
when it was admitted holds on: a member goes into the domain that its pod set, its slice and the whole gang lie in now,
by the labels that the nodes have today. Beyond that the narrowest domain around the others is tried first, then wider
ones. One member after the other: losing a few is what happens, and each is charged before the next is placed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from atoll.api.gangs import GpuGangSpec, TopologyMode, TopologyRequest
from atoll.cluster.gangs.lifecycle import GangView, Obstacle
from atoll.cluster.gangs.membership import Member, Stage
from atoll.cluster.gangs.question import Landscape, ask
from atoll.cluster.gangs.seats import Seat, seat_of
from atoll.cluster.gangs.sites import Site
from atoll.cluster.requests import Request
from topology.gangs.model import Gang, Placement
from topology.gangs.model import PodSet as WantedPodSet
from topology.gangs.model import TopologyRequest as Unconstrained
from topology.gangs.search import place
from topology.gangs.snapshot import Snapshot

MISSING_MAX = 64
"""Members placed in one round; the next round goes on."""


def place_missing(
    view: GangView, missing: Sequence[Member], requests: Mapping[str, Request], site: Site, landscape: Landscape
) -> tuple[Seat, ...]:
    """Return seats for those of the missing members that find one."""
    spec = view.gang.spec
    question = ask(spec, missing[:MISSING_MAX], requests, site, landscape)
    if isinstance(question, Obstacle):
        return ()
    nodes = {member.uid: _node_of(member) for member in view.members if member.stage is not Stage.FAILED}
    others = [member for member in view.members if nodes.get(member.uid) in site.paths]
    snapshot, seats = question.snapshot, []
    wanted = {pod_set.name: pod_set for pod_set in question.gang.pod_sets}
    for member in missing[:MISSING_MAX]:
        found = _place_one(member, wanted[member.pod_set], _prefixes(spec, member, others, nodes, site), site, snapshot)
        if found is None:
            continue
        gang, placement = found
        snapshot = snapshot.take(placement, gang)
        seats.append(seat_of(placement.assignments[0].members[0], member, landscape.devices))
    return tuple(seats)


def _place_one(
    member: Member, pod_set: WantedPodSet, prefixes: Iterable[tuple[str, ...]], site: Site, snapshot: Snapshot
) -> tuple[Gang, Placement] | None:
    """Try the domains, the narrowest first."""
    gang = Gang((replace(pod_set, name=member.pod_set, count=1, min_count=None, request=Unconstrained(), group=""),))
    for prefix in prefixes:
        outside = [name for name, path in site.paths.items() if path[: len(prefix)] != prefix]
        if len(outside) == len(site.paths):
            continue
        answer = place(gang, snapshot.without(outside) if outside else snapshot)
        if isinstance(answer, Placement):
            return gang, answer
    return None


def _prefixes(
    spec: GpuGangSpec, member: Member, others: Sequence[Member], nodes: Mapping[str, str], site: Site
) -> list[tuple[str, ...]]:
    """Return the domains to try, narrowest first, none wider than what is required."""
    own_set = next(pod_set for pod_set in spec.pod_sets if pod_set.name == member.pod_set)
    kin = [other for other in others if other.pod_set == member.pod_set]
    floor = 0
    anchor: tuple[str, ...] | None = None
    for request, group in ((spec.topology, others), (own_set.topology, kin)):
        anchor, floor = _keep_to(request, group, nodes, site, anchor, floor)
    for layer in own_set.topology.slices if own_set.topology is not None else ():
        mates = [other for other in kin if other.rank // layer.size == member.rank // layer.size]
        anchor, floor = _keep_to(_required(layer.level), mates, nodes, site, anchor, floor)
    around = _common([site.paths[nodes[other.uid]] for other in kin or others])
    if anchor is not None and around[:floor] != anchor[:floor]:
        around = anchor
    return [around[:length] for length in range(len(around), floor - 1, -1)]


def _keep_to(
    request: TopologyRequest | None,
    group: Sequence[Member],
    nodes: Mapping[str, str],
    site: Site,
    anchor: tuple[str, ...] | None,
    floor: int,
) -> tuple[tuple[str, ...] | None, int]:
    """Narrow (anchor, floor) to the domain of a required level that the group lies in."""
    if request is None or request.mode is not TopologyMode.REQUIRED or request.level not in site.levels or not group:
        return anchor, floor
    length = site.levels.index(request.level) + 1
    if length <= floor:
        return anchor, floor
    return site.paths[nodes[group[0].uid]][:length], length


def _required(level: str) -> TopologyRequest:
    return TopologyRequest(mode=TopologyMode.REQUIRED, level=level)


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the longest path that all begin with."""
    if not paths:
        return ()
    common = paths[0]
    for path in paths[1:]:
        length = next((i for i, (a, b) in enumerate(zip(common, path, strict=False)) if a != b), len(common))
        common = common[:length]
    return common


def _node_of(member: Member) -> str:
    """Return the node of a member that runs or is about to."""
    return member.pod.spec.node_name or ("" if member.is_gated else member.pod.status.nominated_node_name)
