"""Static volumes that several members of a gang may be bound to: how many there are, and whether all find one.

A claim of a class without provisioner is bound, with its first pod, to some free volume that the pod's node reaches:
the smallest that serves it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from atoll.cluster.host_fit import matches_terms
from atoll.cluster.objects import Node, Pod
from atoll.cluster.quantities import parse_amount
from atoll.cluster.storage import PersistentVolume, PersistentVolumeClaim
from atoll.cluster.volume_fit import Volumes, available, claim_names, is_static, reach

Choices = frozenset[str]
"""Names of the volumes that one claim may be bound to."""


def members_by_static_volumes(pod: Pod, nodes: Mapping[str, Node], volumes: Volumes) -> dict[str, int] | None:
    """Return how many pods like this one each node takes, if each of their static claims needs a volume of its own;
    None where they have no such claim."""
    asked = [tuple(available(claim, volumes)) for claim in _static_claims(pod, volumes)]
    if not asked:
        return None
    reached = {one.metadata.name: one for choices in asked for one in choices}
    named = [frozenset(one.metadata.name for one in choices) for choices in asked]
    found = {}
    for name, node in nodes.items():
        here = {volume for volume, one in reached.items() if _reaches(one, node)}
        choices = [one & here for one in named]
        found[name] = min(len(one) // sum(other <= one for other in choices) for one in choices)
    return found


def static_clash(placed: Iterable[tuple[Pod, Node]], volumes: Volumes) -> str:
    """Say which claim may find no volume, if pods come in any order; empty if all find one. Volumes that several nodes
    reach go to whoever binds first."""
    asked: dict[str, Choices] = {
        claim.metadata.name: frozenset(one.metadata.name for one in available(claim, volumes) if _reaches(one, node))
        for pod, node in placed
        for claim in _static_claims(pod, volumes)
    }
    sizes = {name: parse_amount("storage", volumes.volumes[name].spec.capacity.get("storage", 0))
             for name in frozenset[str]().union(*asked.values())}  # fmt: skip
    alike = Counter(asked.values())
    for name, choices in asked.items():
        rivals = sum(count for others, count in alike.items() if _contends(others, choices, sizes))
        if len(choices) < max(1, rivals):
            return (
                f"PersistentVolumeClaim {name} and {max(0, rivals - 1)} more of the gang may take the same "
                f"{len(choices)} volumes; create more volumes, or bind each claim to one by its volumeName"
            )
    return ""


def _contends(others: Choices, choices: Choices, sizes: Mapping[str, int]) -> bool:
    """Tell whether a claim may take one of another's `choices` while it has others. One that can have all of these, and
    smaller ones beside, takes a smaller one first; when those are gone, its own choices are counted."""
    if others.isdisjoint(choices):
        return False
    smaller = others - choices
    return not (choices < others and max(sizes[one] for one in smaller) < min(sizes[one] for one in choices))


def _static_claims(pod: Pod, volumes: Volumes) -> Iterator[PersistentVolumeClaim]:
    """Yield the claims of a pod of which each needs a volume that exists, and no other claim has."""
    for name in dict.fromkeys(claim_names(pod)):
        claim = volumes.claims.get((pod.metadata.namespace, name))
        if claim is not None and is_static(claim, volumes):
            yield claim


def _reaches(volume: PersistentVolume, node: Node) -> bool:
    terms = reach(volume)
    return terms is None or matches_terms(terms, node)
