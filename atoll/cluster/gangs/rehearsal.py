"""Whether kube-scheduler would take every member of a plan at its place, with all other members there.

What one member means for another is weighed here: required affinity and anti-affinity by any node label, strict
topology spread, and volumes that they compete for. What pods that run already mean is weighed before, see
atoll.cluster.host_fit. The answer holds for every order in which the members may bind, if those that have to be near
others come after them, see atoll.cluster.gangs.bind_order.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from atoll.cluster import pod_fit
from atoll.cluster.gangs.bind_order import BindOrder, MemberKind, Placed, kinds_of, order_of
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.objects import Pod
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
class Circle:
    """Members of these pod sets would all have to come after each other: no arrangement helps."""

    pod_sets: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line for people."""
        named = f"pod set {self.pod_sets[0]}" if len(self.pod_sets) == 1 else f"pod sets {' and '.join(self.pod_sets)}"
        return (
            f"members of {named} can only be bound after each other, by their required pod affinity, so none can be "
            "the first; remove it from some of them, or let them prefer it"
        )


@dataclass(frozen=True, slots=True)
class VolumeClash:
    """Members may find no static volume, or need more volumes than a host takes; no other arrangement is sought for
    that."""

    text: str


def minds_mates(pod: Pod) -> bool:
    """Tell whether a rule of the pod may mean other members."""
    return pod_fit.minds_neighbours(pod) or any(True for _ in strict_constraints(pod))


def find_clash(placed: Sequence[Placed], cluster: PlacementSnapshot) -> Clash | Circle | VolumeClash | None:
    """Return the first clash of a plan; None if kube-scheduler takes it."""
    kinds = tuple(dict.fromkeys(kinds_of(placed)))
    minding = [kind for kind in kinds if minds_mates(kind.pod)]
    order = order_of(kinds if minding else (), cluster)
    if circle := order.circle():
        return Circle(circle)
    rules = (clash for kind in minding for clash in _clashes(kind, kinds, order, cluster))
    return next(rules, None) or _volume_clash(placed, cluster)


def _volume_clash(placed: Sequence[Placed], cluster: PlacementSnapshot) -> VolumeClash | None:
    users = [(pod, node) for _, pod, node in placed if pod.spec.volumes]
    if not users:
        return None
    told = static_clash(((pod, cluster.nodes[node]) for pod, node in users), cluster.volumes)
    told = told or crowded_node(users, cluster.pods_on, cluster.volume_use)
    return VolumeClash(told) if told else None


def _clashes(
    kind: MemberKind, kinds: Sequence[MemberKind], order: BindOrder, cluster: PlacementSnapshot
) -> Iterator[Clash]:
    for term in pod_fit.anti_terms(kind.pod):
        key = term.topology_key
        here = _domains(kind, key, cluster)
        for other in kinds:
            if pod_fit.term_matches(term, of=kind.pod, other=other.pod, labels=cluster.namespaces):
                there = _domains(other, key, cluster)
                shared = (domain for domain in here if there[domain] > (1 if other is kind else 0))
                yield from (Clash(MemberRule.APART, kind.pod_set, other.pod_set, key, domain) for domain in shared)
    yield from _unmet(kind, order, cluster)
    for number, count in enumerate(spread_counts(kind.pod, list(cluster.nodes.values()), cluster.pods_on)):
        meant = sum((other.on for other in kinds if count.means(other.pod)), Counter[str]())
        crowded = count.crowded(kind.on, meant)
        if crowded is not None:
            key = count.constraint.topology_key
            yield Clash(MemberRule.SPREAD, kind.pod_set, kind.pod_set, key, crowded, number)


def _unmet(kind: MemberKind, order: BindOrder, cluster: PlacementSnapshot) -> Iterator[Clash]:
    """Yield what members lack that can be bound after no others."""
    company = order.company[kind]
    for name in sorted(order.stuck.get(kind, ()))[:1]:
        key = next(term.topology_key for term in company.terms if company.is_lacking(term, cluster.nodes.get(name)))
        other = next((one.pod_set for one in company.meant if one.pod_set != kind.pod_set), kind.pod_set)
        yield Clash(MemberRule.NEAR, kind.pod_set, other, key)


def _domains(kind: MemberKind, key: str, cluster: PlacementSnapshot) -> Counter[str]:
    """Count the members in each domain of a node label."""
    found: Counter[str] = Counter()
    for name, count in kind.on.items():
        value = cluster.nodes[name].metadata.labels.get(key)
        if value is not None:
            found[value] += count
    return found
