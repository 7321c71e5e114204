"""The order in which the members of a plan can be bound. Pure.

kube-scheduler takes a pod that has to be near others only once those are there. As its InterPodAffinity decides: a pod
needs, for each of its terms, a pod in the same domain that all its terms mean; or it is the first that they mean
anywhere, and they mean itself.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from atoll.cluster import pod_fit
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.objects import LabelSelector, Node, Pod, PodAffinityTerm
from atoll.cluster.pod_fit import Domain
from atoll.cluster.spread import strict_constraints

Placed = tuple[str, Pod, str]
"""Pod set, member and node."""


@dataclass(frozen=True, slots=True, eq=False)
class MemberKind:
    """Members of one pod set that no rule of the gang tells apart, and how many of them are on each node."""

    pod_set: str
    pod: Pod
    on: Counter[str] = field(default_factory=Counter)


Wave = Mapping[MemberKind, frozenset[str]]
"""Nodes by kind."""


def kinds_of(placed: Sequence[Placed]) -> list[MemberKind]:
    """Return the kind of each member: alike are those of a pod set with the same labels, of those that some rule
    names."""
    keys = sorted({key for pod in {name: pod for name, pod, _ in placed}.values() for key in _keys_named(pod)})
    found: dict[tuple[str | None, ...], MemberKind] = {}
    kinds = []
    for name, pod, node in placed:
        alike = (name, *(pod.metadata.labels.get(key) for key in keys))
        kinds.append(found.setdefault(alike, MemberKind(name, pod)))
        kinds[-1].on[node] += 1
    return kinds


@dataclass(slots=True)
class Company:
    """Whom members of a kind have to be near. `meant`: the kinds that serve; `there`: the domains where one is."""

    terms: tuple[PodAffinityTerm, ...]
    meant: tuple[MemberKind, ...] = ()
    there: set[Domain] = field(default_factory=set)

    @classmethod
    def of(cls, kind: MemberKind, kinds: Iterable[MemberKind], cluster: PlacementSnapshot) -> "Company":
        """Look for it among running pods and among members."""
        terms, pods_on, labels = pod_fit.affinity_terms(kind.pod), cluster.pods_on, cluster.namespaces
        if not terms:
            return cls(())
        needed = pod_fit.PodNeighbours.of(kind.pod, list(cluster.nodes.values()), pods_on, labels).needed
        meant = (
            one
            for one in kinds
            if all(pod_fit.term_matches(term, of=kind.pod, other=one.pod, labels=labels) for term in terms)
        )
        return cls(terms, tuple(meant), set(needed or ()))

    def is_lacking(self, term: PodAffinityTerm, node: Node | None) -> bool:
        """Tell whether nobody is in the node's domain yet."""
        return _domain(term, node) not in self.there

    def note(self, nodes: Collection[Node | None]) -> None:
        """Remember that somebody who is meant has come to these nodes."""
        found = (_domain(term, node) for term in self.terms for node in nodes)
        self.there.update(domain for domain in found if domain is not None)


@dataclass(frozen=True, slots=True)
class BindOrder:
    """`waves`: who can be bound one after the other; `stuck`: who never can. `company`: by kind, at the end."""

    waves: tuple[Wave, ...]
    stuck: Wave
    company: Mapping[MemberKind, Company]

    def circle(self) -> tuple[str, ...]:
        """Return the pod sets whose members would all have to come after each other, wherever they are."""
        able = self.company.keys() - self.stuck.keys()
        able |= {kind for kind, one in self.company.items() if one.there or not one.meant or kind in one.meant}
        more = able
        while more:
            more = {kind for kind, one in self.company.items() if kind not in able and not able.isdisjoint(one.meant)}
            able |= more
        return tuple(dict.fromkeys(kind.pod_set for kind in self.company if kind not in able))


def order_of(kinds: Iterable[MemberKind], cluster: PlacementSnapshot) -> BindOrder:
    """Return the order for a plan beside the pods of a snapshot."""
    kinds = tuple(dict.fromkeys(kinds))
    company = {kind: Company.of(kind, kinds, cluster) for kind in kinds}
    left = {kind: frozenset(kind.on) for kind in kinds}
    waves: list[Wave] = []
    while left:
        wave = _ready(left, company, cluster) or _first_of_its_kind(left, company, cluster)
        if not wave:
            break
        waves.append(wave)
        for kind, one in company.items():
            nodes = {name for other in one.meant for name in wave.get(other, ())}
            one.note([cluster.nodes.get(name) for name in nodes])
            if rest := left.pop(kind, frozenset()) - wave.get(kind, frozenset()):
                left[kind] = rest
    return BindOrder(tuple(waves), left, company)


def _ready(left: Wave, company: Mapping[MemberKind, Company], cluster: PlacementSnapshot) -> Wave:
    """Return whose company is there."""

    def is_ready(kind: MemberKind, name: str) -> bool:
        one = company[kind]
        return not any(one.is_lacking(term, cluster.nodes.get(name)) for term in one.terms)

    found = {kind: frozenset(name for name in nodes if is_ready(kind, name)) for kind, nodes in left.items()}
    return {kind: nodes for kind, nodes in found.items() if nodes}


def _first_of_its_kind(left: Wave, company: Mapping[MemberKind, Company], cluster: PlacementSnapshot) -> Wave:
    """Return the members of one kind, in one domain, that need nobody but each other, while nobody like them is
    there."""
    for kind, names in left.items():
        one = company[kind]
        if one.there or kind not in one.meant:
            continue
        where = {name: [_domain(term, cluster.nodes.get(name)) for term in one.terms] for name in sorted(names)}
        for domains in where.values():
            if None not in domains:
                return {kind: frozenset(name for name, own in where.items() if own == domains)}
    return {}


def bind_waves(placed: Sequence[Placed], cluster: PlacementSnapshot) -> list[list[int]]:
    """Return the members, by their numbers, in the order in which they can be bound. Those that never can are among the
    first: nobody is worth waiting for. Pods of the snapshot that are not bound yet, members too, are not there."""
    own = {pod.metadata.uid for _, pod, _ in placed}
    pods_on = {
        name: [pod for pod in found if pod.metadata.uid not in own and pod.spec.node_name]
        for name, found in cluster.pods_on.items()
    }
    kinds = kinds_of(placed)
    order = order_of(kinds, replace(cluster, pods_on=pods_on))
    turns = {(kind, node): turn for turn, wave in enumerate(order.waves) for kind in wave for node in wave[kind]}
    waves: list[list[int]] = [[] for _ in range(max(1, len(order.waves)))]
    for number, (kind, (_, _, node)) in enumerate(zip(kinds, placed, strict=True)):
        waves[turns.get((kind, node), 0)].append(number)
    return waves


def _domain(term: PodAffinityTerm, node: Node | None) -> Domain | None:
    value = node.metadata.labels.get(term.topology_key) if node is not None else None
    return None if value is None else (term.topology_key, value)


def _keys_named(pod: Pod) -> Iterator[str]:
    for term in (*pod_fit.anti_terms(pod), *pod_fit.affinity_terms(pod)):
        yield from (*_keys_of(term.label_selector), *term.match_label_keys, *term.mismatch_label_keys)
    for constraint in strict_constraints(pod):
        yield from (*_keys_of(constraint.label_selector), *constraint.match_label_keys)


def _keys_of(selector: LabelSelector | None) -> Iterator[str]:
    if selector is not None:
        yield from selector.match_labels
        yield from (row.key for row in selector.match_expressions)
