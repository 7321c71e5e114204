"""Pods of DaemonSets that are about to come to a node: those that wait for it, and those that a new node will get.

Nobody needs to watch DaemonSets: what one brings is seen on other nodes. Nothing of the node affinity in its template
is left on its pods, so a new node may count one too many for as long as it is new.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from atoll.api.times import seconds_of
from atoll.cluster import host_fit
from atoll.cluster.objects import Node, Pod

NEW_SECONDS: Final = 120.0
"""Age of a node below which DaemonSets may not have created their pods yet."""
NAME: Final = "metadata.name"


def daemon_set_of(pod: Pod) -> str:
    """Return the uid of the DaemonSet that made the pod; empty for none."""
    owners = (one.uid for one in pod.metadata.owner_references if one.controller and one.kind == "DaemonSet")
    return next(owners, "")


def waits_for_node(pod: Pod) -> str:
    """Return the one node that a DaemonSet's pod is made for; empty for any other pod."""
    required = host_fit.required_affinity(pod) if daemon_set_of(pod) else None
    rows = (row for term in (required.node_selector_terms if required is not None else ()) for row in term.match_fields)
    return next((row.values[0] for row in rows if (row.key, row.operator, len(row.values)) == (NAME, "In", 1)), "")


def coming_daemons(
    nodes: Mapping[str, Node], pods_on: Mapping[str, Sequence[Pod]], *, now_seconds: float
) -> dict[str, list[Pod]]:
    """Return, by new node, a pod like the one that each DaemonSet has elsewhere and will have there too."""
    new = [node for node in nodes.values() if _is_new(node, now_seconds)]
    if not new:
        return {}
    samples = {uid: _anywhere(pod) for pods in pods_on.values() for pod in pods if (uid := daemon_set_of(pod))}
    found: dict[str, list[Pod]] = {}
    for node in new:
        present = {daemon_set_of(pod) for pod in pods_on.get(node.metadata.name, ())}
        ready = host_fit.opened(node)
        found[node.metadata.name] = [
            pod for uid, pod in samples.items() if uid not in present and not host_fit.node_reason(pod, ready)
        ]
    return found


def _is_new(node: Node, now_seconds: float) -> bool:
    created = seconds_of(node.metadata.creation_timestamp or "")
    return created is not None and now_seconds - created < NEW_SECONDS


def _anywhere(pod: Pod) -> Pod:
    """Return the pod without the pin to its node, and on none."""
    affinity = msgspec.structs.replace(pod.spec.affinity, node_affinity=None) if pod.spec.affinity is not None else None
    return msgspec.structs.replace(pod, spec=msgspec.structs.replace(pod.spec, affinity=affinity, node_name=""))
