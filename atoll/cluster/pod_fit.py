"""Required affinity and anti-affinity between pods: those that run already, and those of one gang.

`PodNeighbours` tells for each node whether kube-scheduler's InterPodAffinity would refuse it. The rest reads what a
gang's own templates say of one another: how many members a domain may take, and which pod sets may not share a host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec

from atoll.cluster.labels import selects
from atoll.cluster.objects import APART_FROM_ALL, LabelSelector, Node, Pod, PodAffinity, PodAffinityTerm, Requirement
from atoll.cluster.pods import is_terminal

NEIGHBOURS: Final = "pod affinity"
TERMS_MAX: Final = 32
"""What the policy atoll-sizes allows a pod with GPUs. Other pods may have more, but each is compared with every waiting
pod."""
_NO_AFFINITY: Final = PodAffinity()
Domain = tuple[str, str]
NamespaceLabels = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class PodNeighbours:
    """forbidden: values by label of the domains that the pod must keep out of. keys: labels that a node must have at
    all. needed: domains of which a node must lie in all keys' one; None where the pod may be the first of its kind."""

    forbidden: Mapping[str, frozenset[str]]
    keys: tuple[str, ...]
    needed: frozenset[Domain] | None

    @classmethod
    def of(
        cls,
        pod: Pod,
        nodes: Sequence[Node],
        pods_by_node: Mapping[str, Sequence[Pod]],
        labels: NamespaceLabels,
        mates: Sequence[Pod] = (),
    ) -> "PodNeighbours":
        """Look at every running pod once, and compare terms once for all pods that are alike. `mates`: pods that start
        together with this one, beside which it may be the first of its kind."""
        pro = affinity_terms(pod)
        minds = minds_neighbours(pod)
        forbidden: set[Domain] = set()
        needed: set[Domain] = set()
        verdicts: dict[tuple[str, bytes, frozenset[tuple[str, str]]], tuple[list[PodAffinityTerm], bool]] = {}
        for node, other in _running(nodes, pods_by_node):
            theirs = _anti_affinity(other).terms_digest
            if not minds and not theirs:
                continue
            alike = (other.metadata.namespace, theirs, frozenset(other.metadata.labels.items()))
            if alike not in verdicts:
                is_near = bool(pro) and all(term_matches(term, of=pod, other=other, labels=labels) for term in pro)
                apart = {term.topology_key: term for term in _keeping_apart(pod, other, labels)}
                verdicts[alike] = (list(apart.values()), is_near)
            one_per_key, is_near = verdicts[alike]
            forbidden.update(_domains(one_per_key, node))
            if is_near:
                needed.update(_domains(pro, node))
        is_first = not needed and any(
            all(term_matches(term, of=pod, other=one, labels=labels) for term in pro) for one in (pod, *mates)
        )
        keys = tuple(term.topology_key for term in pro)
        by_key: dict[str, set[str]] = {}
        for key, value in forbidden:
            by_key.setdefault(key, set()).add(value)
        frozen = {key: frozenset(values) for key, values in by_key.items()}
        return cls(frozen, keys, None if is_first else frozenset(needed))

    def refuse(self, node: Node) -> bool:
        """Tell whether the node lies in a forbidden domain or outside of a needed one."""
        labels = node.metadata.labels
        if any(labels.get(key) in values for key, values in self.forbidden.items()):
            return True
        return any(
            key not in labels or (self.needed is not None and (key, labels[key]) not in self.needed)
            for key in self.keys
        )


def opponents(
    pod: Pod, nodes: Sequence[Node], pods_by_node: Mapping[str, Sequence[Pod]], labels: NamespaceLabels
) -> dict[Domain, frozenset[str]]:
    """Return the uids of the running pods that keep the pod out of a domain, by that domain."""
    found: dict[Domain, set[str]] = {}
    for node, other in _running(nodes, pods_by_node):
        for domain in _domains(_keeping_apart(pod, other, labels), node):
            found.setdefault(domain, set()).add(other.metadata.uid)
    return {domain: frozenset(uids) for domain, uids in found.items()}


def _keeping_apart(pod: Pod, other: Pod, labels: NamespaceLabels) -> list[PodAffinityTerm]:
    """Return the terms of either pod that keep the two in different domains."""
    theirs = [term for term in anti_terms(other) if term_matches(term, of=other, other=pod, labels=labels)]
    return theirs + [term for term in anti_terms(pod) if term_matches(term, of=pod, other=other, labels=labels)]


def anti_terms(pod: Pod) -> tuple[PodAffinityTerm, ...]:
    """Return the pod's required anti-affinity; terms beyond TERMS_MAX count as if they meant every pod."""
    terms = _anti_affinity(pod).required_during_scheduling_ignored_during_execution
    if len(terms) <= TERMS_MAX:
        return terms
    keys = dict.fromkeys(term.topology_key for term in terms[TERMS_MAX:])
    everybody = (msgspec.structs.replace(APART_FROM_ALL, topology_key=key) for key in keys)
    return (*terms[:TERMS_MAX], *islice(everybody, TERMS_MAX))


def _anti_affinity(pod: Pod) -> PodAffinity:
    return (pod.spec.affinity.pod_anti_affinity if pod.spec.affinity is not None else None) or _NO_AFFINITY


def affinity_terms(pod: Pod) -> tuple[PodAffinityTerm, ...]:
    """Return the pod's required affinity."""
    pro = pod.spec.affinity.pod_affinity if pod.spec.affinity is not None else None
    return pro.required_during_scheduling_ignored_during_execution if pro is not None else ()


def minds_neighbours(pod: Pod) -> bool:
    """Tell whether the pod requires to be near other pods, or away from them."""
    return bool(anti_terms(pod) or affinity_terms(pod))


def own_limits(pod: Pod) -> tuple[str, ...]:
    """Return the node labels of which each value may hold one member of the pod's own kind."""
    terms = (term for term in anti_terms(pod) if term_matches(term, of=pod, other=pod, labels={}))
    return tuple(dict.fromkeys(term.topology_key for term in terms))


def are_apart(first: Pod, second: Pod) -> bool:
    """Tell whether members like `first` and members like `second` keep out of each other's domains."""
    return any(term_matches(term, of=first, other=second, labels={}) for term in anti_terms(first)) or any(
        term_matches(term, of=second, other=first, labels={}) for term in anti_terms(second)
    )


def term_matches(term: PodAffinityTerm, *, of: Pod, other: Pod, labels: NamespaceLabels) -> bool:
    """Tell whether a term of one pod means another pod. labels: of namespaces, for terms that choose by those."""
    return _namespace_matches(term, of=of, other=other, labels=labels) and (
        term.label_selector is not None and selects(_narrowed(term, of), other.metadata.labels)
    )


def _namespace_matches(term: PodAffinityTerm, *, of: Pod, other: Pod, labels: NamespaceLabels) -> bool:
    namespace = other.metadata.namespace
    if not term.namespaces and term.namespace_selector is None:
        return namespace == of.metadata.namespace
    by_labels = term.namespace_selector is not None and selects(term.namespace_selector, labels.get(namespace, {}))
    return namespace in term.namespaces or by_labels


def _narrowed(term: PodAffinityTerm, of: Pod) -> LabelSelector:
    """The selector with the pod's own values of matchLabelKeys and mismatchLabelKeys."""
    assert term.label_selector is not None
    own = of.metadata.labels
    more = [Requirement(key, "In", (own[key],)) for key in term.match_label_keys if key in own]
    more += [Requirement(key, "NotIn", (own[key],)) for key in term.mismatch_label_keys if key in own]
    return LabelSelector(term.label_selector.match_labels, (*term.label_selector.match_expressions, *more))


def _running(nodes: Sequence[Node], pods_by_node: Mapping[str, Sequence[Pod]]) -> Iterator[tuple[Node, Pod]]:
    for node in nodes:
        for pod in pods_by_node.get(node.metadata.name, ()):
            if not is_terminal(pod):
                yield node, pod


def _domains(terms: Sequence[PodAffinityTerm], node: Node) -> Iterator[Domain]:
    for term in terms:
        value = node.metadata.labels.get(term.topology_key)
        if value is not None:
            yield term.topology_key, value
