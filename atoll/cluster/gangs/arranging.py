"""Plans whose members kube-scheduler takes beside each other: search, rehearse, search anew with what clashed fixed.

The search weighs levels of the topology and hosts. Rules that it cannot weigh (affinity and anti-affinity by other node
labels, strict topology spread) are fixed one at a time once a plan breaks them: members are confined to domains,
or divided among them as evenly as the domains have room. Every plan that is returned keeps all rules; of several rules
at once not every arrangement is tried, TRIES_MAX at most.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from atoll.cluster.gangs.member_limits import level_of
from atoll.cluster.gangs.node_domains import ALONE
from atoll.cluster.gangs.rehearsal import Circle, Clash, MemberRule, VolumeClash, find_clash
from atoll.cluster.gangs.search_input import PART, GangSearchInput, PlacementSnapshot
from atoll.cluster.spread import SpreadCount, spread_counts
from topology.gangs.descent import StepBudget
from topology.gangs.model import POD_SETS_MAX, Limit, Mode, Placement, PlacementRefusal, PodSet
from topology.gangs.placing import host_capacity
from topology.gangs.search import place

TRIES_MAX: Final = 16
ELSEWHERE: Final = "outside of the domain that other members leave"
FEWER_MAX: Final = 64
"""How many members fewer than there was room for are tried, where fewer are enough."""
DOMAINS_MAX: Final = 8
"""Domains to which members with affinity to each other are confined in turn."""


def arrange(
    question: GangSearchInput, cluster: PlacementSnapshot, budget: StepBudget
) -> tuple[GangSearchInput, Placement] | PlacementRefusal | Clash | Circle | VolumeClash:
    """Return a plan with the question that it answers; or which volumes a plan lacks that breaks no other rule, or the
    first refusal, or what every plan that was tried breaks. Raises TopologyError as the search does."""
    left: list[GangSearchInput] = [question]
    failure: PlacementRefusal | Clash | VolumeClash | None = None
    for _ in range(TRIES_MAX):
        if not left or (failure is not None and budget.is_over()):
            break
        asked = left.pop()
        answer = place(asked.gang, asked.snapshot, budget=budget)
        if isinstance(answer, PlacementRefusal):
            failure = failure or answer
            continue
        placed = [
            (part.pod_set, asked.asked[part.pod_set][member.rank].pod, member.host)
            for part in answer.assignments
            for member in part.members
        ]
        clash = find_clash(placed, cluster)
        if clash is None:
            return asked, answer
        if isinstance(clash, Circle):
            return clash
        if isinstance(clash, VolumeClash):
            failure = clash
            continue
        failure = failure or clash
        counts = {part.pod_set: part.count for part in answer.assignments}
        left += reversed(list(_mended(asked, clash, counts, cluster)))
    assert failure is not None, "the first try ends in a plan or a failure"
    return failure


def _mended(
    question: GangSearchInput, clash: Clash, counts: Mapping[str, int], cluster: PlacementSnapshot
) -> Iterator[GangSearchInput]:
    """Yield questions whose answers do not clash so again, what is most likely to succeed first."""
    members = question.asked[clash.pod_set]
    nodes = list(cluster.nodes.values())
    labels = {node.metadata.name: node.metadata.labels.get(clash.key) for node in nodes}
    domains = {name: value for name, value in labels.items() if value is not None}
    if clash.rule is MemberRule.NEAR:
        yield from _together(question, {clash.pod_set, clash.other}, domains)
    elif clash.pod_set != clash.other:
        for name in (clash.pod_set, clash.other):
            inside = [host for host, domain in domains.items() if domain == clash.domain]
            yield _changed(question, {name: (_without(_pod_set(question, name), inside),)})
    elif clash.rule is MemberRule.APART:
        domains = {name: value if value is not None else ALONE for name, value in labels.items()}
        room = _room(_pod_set(question, clash.pod_set), question, domains)
        free = room.pop(ALONE, 0)
        roomiest = sorted(room, key=lambda domain: (-room[domain], domain))[: counts[clash.pod_set]]
        rest = min(counts[clash.pod_set] - len(roomiest), free)
        alone = dict.fromkeys(roomiest, 1) | ({ALONE: rest} if rest else {})
        yield from _divided(question, clash.pod_set, alone, domains)
    else:
        count = spread_counts(members[0].pod, nodes, cluster.pods_on)[clash.number]
        yield from _limited(question, clash, count)
        room = _room(_pod_set(question, clash.pod_set), question, count.domains)
        for fewer in range(FEWER_MAX):
            shares = count.even_shares(counts[clash.pod_set] - fewer, room)
            if shares:
                yield from _divided(question, clash.pod_set, shares, count.domains)
                break


def _together(
    question: GangSearchInput, names: Collection[str], domains: Mapping[str, str]
) -> Iterator[GangSearchInput]:
    """Confine pod sets to one domain: those with the least room first that have enough for each."""
    pod_sets = [_pod_set(question, name) for name in sorted(names)]
    rooms = [_room(one, question, domains) for one in pod_sets]
    fitting = [
        domain
        for domain in sorted(set(domains.values()))
        if all(room.get(domain, 0) >= (one.count if one.min_count is None else one.min_count)
               for one, room in zip(pod_sets, rooms, strict=True))
    ]  # fmt: skip
    for domain in sorted(fitting, key=lambda one: sum(room[one] for room in rooms))[:DOMAINS_MAX]:
        outside = [host.name for host in question.snapshot.hosts if domains.get(host.name) != domain]
        yield _changed(question, {one.name: (_without(one, outside),) for one in pod_sets})


def _limited(question: GangSearchInput, clash: Clash, count: SpreadCount) -> Iterator[GangSearchInput]:
    """Let every domain take what it may while the emptiest stays as it is, if the search knows these domains."""
    level = level_of(clash.key)
    if question.snapshot.tree.level_of(level) is not None:
        most = count.constraint.max_skew + count.least(count.totals({}))
        limit = Limit(level, most, count.present)
        pod_set = _pod_set(question, clash.pod_set)
        if limit not in pod_set.limits:
            yield _changed(question, {pod_set.name: (replace(pod_set, limits=(*pod_set.limits, limit)),)})


def _divided(
    question: GangSearchInput, name: str, shares: Mapping[str, int], domains: Mapping[str, str]
) -> Iterator[GangSearchInput]:
    """Divide a pod set among domains; each part keeps to its own. Slices need consecutive ranks and are not divided."""
    pod_set = _pod_set(question, name)
    is_enough = sum(shares.values()) >= (pod_set.count if pod_set.min_count is None else pod_set.min_count)
    if not is_enough or pod_set.request.slices or len(question.gang.pod_sets) - 1 + len(shares) > POD_SETS_MAX:
        return
    group = pod_set.group or (name.partition(PART)[0] if pod_set.request.mode is Mode.REQUIRED else "")
    parts = []
    for number, (domain, share) in enumerate(sorted(shares.items())):
        outside = [host.name for host in question.snapshot.hosts if domains.get(host.name) != domain]
        part = replace(pod_set, name=f"{name}{PART}{number}", count=share, min_count=None, group=group)
        parts.append(_without(part, outside))
    yield _changed(question, {name: parts})


def _room(pod_set: PodSet, question: GangSearchInput, domains: Mapping[str, str]) -> dict[str, int]:
    """Return how many members each domain could hold if nobody else came."""
    room: dict[str, int] = {}
    for host, capacity in host_capacity(pod_set, question.snapshot).items():
        if host in domains:
            room[domains[host]] = room.get(domains[host], 0) + capacity
    return room


def _without(pod_set: PodSet, hosts: Sequence[str]) -> PodSet:
    return replace(pod_set, excluded={**dict.fromkeys(hosts, ELSEWHERE), **pod_set.excluded})


def _pod_set(question: GangSearchInput, name: str) -> PodSet:
    return next(one for one in question.gang.pod_sets if one.name == name)


def _changed(question: GangSearchInput, changed: Mapping[str, Sequence[PodSet]]) -> GangSearchInput:
    """Return the question with pod sets replaced, each by one or more that share its members in the order of ranks."""
    asked = dict(question.asked)
    names: dict[str, tuple[str, ...]] = {}
    for name, parts in changed.items():
        members, begin = asked.pop(name), 0
        names[name] = tuple(part.name for part in parts)
        for part in parts:
            asked[part.name] = members[begin : begin + part.count] if len(parts) > 1 else members
            begin += part.count
    pod_sets = [part for one in question.gang.pod_sets for part in changed.get(one.name, (one,))]
    renamed = (
        replace(one, apart=frozenset(new for name in one.apart for new in names.get(name, (name,)))) for one in pod_sets
    )
    return replace(question, gang=replace(question.gang, pod_sets=tuple(renamed)), asked=asked)
