"""Whether kube-scheduler would take every member of a plan at its place, with all other members there.

What one member means for another is weighed here: required affinity and anti-affinity by any node label, strict
topology spread, and volumes that they compete for. What pods that run already mean is weighed before, see
atoll.cluster.host_fit. The answer holds for every order in which the members may bind.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.cluster import pod_fit
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.objects import LabelSelector, Pod
from atoll.cluster.spread import spread_counts, strict_constraints
from atoll.cluster.static_volumes import static_clash
from atoll.cluster.volume_limits import crowded_node


class MemberRule(StrEnum):
    """What kube-scheduler would refuse a member for."""

    APART = "pod anti-affinity"
    NEAR = "pod affinity"
    SPREAD = "topology spread"


@dataclass(frozen=True, slots=True)
class Clash:
    """Members of `pod_set` and `other`, perhaps the same, cannot be where they are. `key`: the rule's node label;
    `domain`: its value there; `number`: of the pod's strict spread constraint."""

    rule: MemberRule
    pod_set: str
    other: str
    key: str
    domain: str = ""
    number: int = 0

    @property
    def text(self) -> str:
        """One line for people."""
        beside = f" and {self.other}" if self.other != self.pod_set else ""
        return f"pod set {self.pod_set}{beside}: no arrangement that was tried keeps the {self.rule} by {self.key}"


@dataclass(frozen=True, slots=True)
class VolumeClash:
    """Members may find no static volume, or need more volumes than a host takes; no other arrangement is sought for
    that."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Rehearsed:
    """Members of one pod set that no rule of the gang tells apart, and how many of them are on each node."""

    pod_set: str
    pod: Pod
    on: Counter[str] = field(default_factory=Counter)


def minds_mates(pod: Pod) -> bool:
    """Tell whether a rule of the pod may mean other members."""
    return pod_fit.minds_neighbours(pod) or any(True for _ in strict_constraints(pod))


def find_clash(placed: Sequence[tuple[str, Pod, str]], cluster: PlacementSnapshot) -> Clash | VolumeClash | None:
    """Return the first clash of a plan; None if kube-scheduler takes it. `placed`: pod set, member and node."""
    kinds = _kinds(placed)
    rules = (clash for kind in kinds if minds_mates(kind.pod) for clash in _clashes(kind, kinds, cluster))
    return next(rules, None) or _volume_clash(placed, cluster)


def _volume_clash(placed: Sequence[tuple[str, Pod, str]], cluster: PlacementSnapshot) -> VolumeClash | None:
    users = [(pod, node) for _, pod, node in placed if pod.spec.volumes]
    if not users:
        return None
    told = static_clash(((pod, cluster.nodes[node]) for pod, node in users), cluster.volumes)
    told = told or crowded_node(users, cluster.pods_on, cluster.volume_use)
    return VolumeClash(told) if told else None


def _kinds(placed: Sequence[tuple[str, Pod, str]]) -> list[Rehearsed]:
    """Group the members by pod set and by those of their labels that some rule names."""
    keys = sorted({key for pod in {name: pod for name, pod, _ in placed}.values() for key in _keys_named(pod)})
    found: dict[tuple[str | None, ...], Rehearsed] = {}
    for name, pod, node in placed:
        kind = (name, *(pod.metadata.labels.get(key) for key in keys))
        found.setdefault(kind, Rehearsed(name, pod)).on[node] += 1
    return list(found.values())


def _keys_named(pod: Pod) -> Iterator[str]:
    terms = (*pod_fit.anti_terms(pod), *pod_fit.affinity_terms(pod))
    constraints = tuple(strict_constraints(pod))
    for term in terms:
        yield from (*_keys_of(term.label_selector), *term.match_label_keys, *term.mismatch_label_keys)
    for constraint in constraints:
        yield from (*_keys_of(constraint.label_selector), *constraint.match_label_keys)


def _keys_of(selector: LabelSelector | None) -> Iterator[str]:
    if selector is not None:
        yield from selector.match_labels
        yield from (row.key for row in selector.match_expressions)


def _clashes(kind: Rehearsed, kinds: Sequence[Rehearsed], cluster: PlacementSnapshot) -> Iterator[Clash]:
    for term in pod_fit.anti_terms(kind.pod):
        key = term.topology_key
        here = _domains(kind, key, cluster)
        for other in kinds:
            if pod_fit.term_matches(term, of=kind.pod, other=other.pod, labels=cluster.namespaces):
                there = _domains(other, key, cluster)
                shared = (domain for domain in here if there[domain] > (1 if other is kind else 0))
                yield from (Clash(MemberRule.APART, kind.pod_set, other.pod_set, key, domain) for domain in shared)
    yield from _unmet(kind, kinds, cluster)
    for number, count in enumerate(spread_counts(kind.pod, list(cluster.nodes.values()), cluster.pods_on)):
        meant = sum((other.on for other in kinds if count.means(other.pod)), Counter[str]())
        crowded = count.crowded(kind.on, meant)
        if crowded is not None:
            key = count.constraint.topology_key
            yield Clash(MemberRule.SPREAD, kind.pod_set, kind.pod_set, key, crowded, number)


def _unmet(kind: Rehearsed, kinds: Sequence[Rehearsed], cluster: PlacementSnapshot) -> Iterator[Clash]:
    """Yield where the affinity of members is not met by the others: where nobody is yet whom it means, they all have to
    be in one domain, with one of those."""
    terms, pods_on, labels = pod_fit.affinity_terms(kind.pod), cluster.pods_on, cluster.namespaces
    nodes = list(cluster.nodes.values())
    if not terms or pod_fit.PodNeighbours.of(kind.pod, nodes, pods_on, labels).needed:
        return
    meant = [
        other
        for other in kinds
        if all(pod_fit.term_matches(term, of=kind.pod, other=other.pod, labels=labels) for term in terms)
    ]
    is_own_kind = any(other is kind for other in meant)
    for term in terms:
        here = _domains(kind, term.topology_key, cluster).keys()
        theirs = [_domains(other, term.topology_key, cluster).keys() for other in meant]
        is_met = any(domains & here for domains in theirs) and not (is_own_kind and any(one - here for one in theirs))
        if len(here) > 1 or not is_met:
            other = next((one.pod_set for one in meant if one.pod_set != kind.pod_set), kind.pod_set)
            yield Clash(MemberRule.NEAR, kind.pod_set, other, term.topology_key)


def _domains(kind: Rehearsed, key: str, cluster: PlacementSnapshot) -> Counter[str]:
    """Count the members in each domain of a node label."""
    found: Counter[str] = Counter()
    for name, count in kind.on.items():
        value = cluster.nodes[name].metadata.labels.get(key)
        if value is not None:
            found[value] += count
    return found
