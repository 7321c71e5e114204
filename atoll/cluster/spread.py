"""Strict topology spread constraints: how many pods of a kind lie in each domain, and whether that is even enough.

As kube-scheduler's PodTopologySpread counts, with one difference for members of a gang: they are pinned to their nodes
when they are let go, so kube-scheduler sees one domain alone and keeps no skew where nodeAffinityPolicy is Honor. Atoll
keeps it, by the pod as its author wrote it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec

from atoll.cluster import host_fit
from atoll.cluster.labels import selects
from atoll.cluster.objects import LabelSelector, Node, Pod, Requirement, SpreadConstraint
from atoll.cluster.pods import is_terminal

SPREAD: Final = "topology spread"
STRICT: Final = "DoNotSchedule"
HONOR: Final = "Honor"
STRICT_MAX: Final = 8
"""Constraints of one pod that are counted, each over all pods; further ones are left to kube-scheduler."""


@dataclass(frozen=True, slots=True)
class SpreadCount:
    """One strict constraint of a pod. domains: by node that counts, the domain that it lies in. present: by node, pods
    that the constraint means and that are there already."""

    constraint: SpreadConstraint
    namespace: str
    domains: Mapping[str, str]
    present: Mapping[str, int]

    def means(self, other: Pod) -> bool:
        """Tell whether a pod counts."""
        selector, metadata = self.constraint.label_selector, other.metadata
        return (
            selector is not None
            and metadata.namespace == self.namespace
            and not metadata.deletion_timestamp
            and selects(selector, metadata.labels)
        )

    def totals(self, more: Mapping[str, int]) -> dict[str, int]:
        """Return the pods by domain, `more` by node among them."""
        found = dict.fromkeys(self.domains.values(), 0)
        for counts in (self.present, more):
            for node, count in counts.items():
                if node in self.domains:
                    found[self.domains[node]] += count
        return found

    def least(self, totals: Mapping[str, int]) -> int:
        """Return the number that no domain may exceed by more than the skew."""
        return 0 if len(totals) < (self.constraint.min_domains or 1) else min(totals.values(), default=0)

    def even_shares(self, members: int, room: Mapping[str, int]) -> dict[str, int] | None:
        """Return how many members each domain gets, as evenly as `room` by domain allows; None where that is too uneven
        or there is no room. Domains that get none are left out."""
        totals, shares = self.totals({}), dict.fromkeys(room, 0)
        for _ in range(members):
            open_ones = [domain for domain in totals if shares.get(domain, 0) < room.get(domain, 0)]
            if not open_ones:
                return None
            domain = min(open_ones, key=lambda one: (totals[one], shares[one] - room[one], one))
            totals[domain] += 1
            shares[domain] += 1
        taken = {domain: share for domain, share in shares.items() if share}
        most = self.constraint.max_skew + self.least(totals)
        return taken if all(totals[domain] <= most for domain in taken) else None

    @property
    def is_by_host(self) -> bool:
        """Whether kube-scheduler takes a pinned pod by the pods on its node alone: it finds too few domains."""
        return self.constraint.node_affinity_policy == HONOR and (self.constraint.min_domains or 1) > 1

    def crowded(self, nodes: Iterable[str], more: Mapping[str, int]) -> str | None:
        """Return the domain of one of the nodes that holds too many with `more` by node; None for none. Where all nodes
        count whatever the pod's affinity says, it may not depend on the order in which the members bind."""
        skew, totals = self.constraint.max_skew, self.totals(more)
        is_honest = self.constraint.node_affinity_policy == HONOR
        most = skew + self.least(totals if is_honest else self.totals({}))
        for node in nodes:
            if self.is_by_host and self.present.get(node, 0) + more.get(node, 0) > skew:
                return self.domains.get(node, "")
            if node in self.domains and totals[self.domains[node]] > most:
                return self.domains[node]
        return None

    def full(self, *, more: int, is_pinned: bool = True) -> list[str]:
        """Return the nodes that take no further pod now. `more`: 1 if that pod itself counts, else 0; `is_pinned`: it
        will be pinned to its node when kube-scheduler is asked, as members are."""
        is_by_host = self.is_by_host and is_pinned
        totals, skew = self.totals({}), self.constraint.max_skew
        most = skew + self.least(totals)
        return [
            node
            for node, domain in self.domains.items()
            if totals[domain] + more > most or (is_by_host and self.present.get(node, 0) + more > skew)
        ]


def strict_constraints(pod: Pod) -> Iterator[SpreadConstraint]:
    """Yield the constraints that kube-scheduler refuses a pod for, STRICT_MAX at most."""
    strict = (one for one in pod.spec.topology_spread_constraints if one.when_unsatisfiable == STRICT)
    return islice(strict, STRICT_MAX)


def has_spread_labels(pod: Pod, node: Node) -> bool:
    """Tell whether the node has the labels of all strict constraints of the pod; kube-scheduler refuses any other."""
    return all(one.topology_key in node.metadata.labels for one in strict_constraints(pod))


def spread_counts(
    pod: Pod, nodes: Sequence[Node], pods_by_node: Mapping[str, Sequence[Pod]]
) -> tuple[SpreadCount, ...]:
    """Count for each strict constraint of the pod. Nodes that lack a label of any of them count for none."""
    constraints = tuple(strict_constraints(pod))
    having = [node for node in nodes if has_spread_labels(pod, node)] if constraints else ()
    return tuple(_counted(pod, one, having, pods_by_node) for one in constraints)


def _counted(
    pod: Pod, constraint: SpreadConstraint, nodes: Iterable[Node], pods_by_node: Mapping[str, Sequence[Pod]]
) -> SpreadCount:
    own = pod.metadata.labels
    selector = constraint.label_selector
    if selector is not None and constraint.match_label_keys:
        rows = [Requirement(key, "In", (own[key],)) for key in constraint.match_label_keys if key in own]
        selector = LabelSelector(selector.match_labels, (*selector.match_expressions, *rows))
    if selector is not None and not selector.match_labels and not selector.match_expressions:
        selector = None  # for kube-scheduler such a one means nobody
    narrowed = msgspec.structs.replace(constraint, label_selector=selector)
    domains = {
        node.metadata.name: node.metadata.labels[constraint.topology_key]
        for node in nodes
        if _is_included(pod, constraint, node)
    }
    empty = SpreadCount(narrowed, pod.metadata.namespace, domains, {})
    present = {
        name: count
        for name in domains
        if (count := sum(empty.means(other) and not is_terminal(other) for other in pods_by_node.get(name, ())))
    }
    return SpreadCount(narrowed, pod.metadata.namespace, domains, present)


def _is_included(pod: Pod, constraint: SpreadConstraint, node: Node) -> bool:
    if constraint.node_affinity_policy == HONOR and not host_fit.is_wanted(pod, node):
        return False
    return constraint.node_taints_policy != HONOR or not host_fit.is_tainted(pod, node)
