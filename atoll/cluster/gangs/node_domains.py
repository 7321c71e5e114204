"""Which topology a gang uses, and the domains of its nodes; or the Obstacle that keeps the gang inactive.

A node that lacks a level is outside of the topology: a gang that demands a level never uses it; for any other gang it
is a domain of its own at each level that it lacks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from atoll.api import names
from atoll.api.gangs import GangTopologyRequest, GpuGangSpec, TopologyMode
from atoll.api.node_status import GpuNodeStatus
from atoll.api.topologies import HOSTNAME, Topology
from atoll.cluster.gangs.lifecycle import Obstacle
from atoll.cluster.objects import Node

ALONE = "~"
"""Begins the name of a domain that one node makes up because it lacks the level; no label value begins so."""


@dataclass(frozen=True, slots=True)
class NodeDomains:
    """`name`: the Topology, empty for none. `paths`: per node inside, one domain name per level, widest first.

    `spares`: (level, machines per domain) that are taken last. `wide`: the same with the nodes that are outside, each
    alone at the levels that it lacks; None if no node is.
    """

    name: str
    levels: tuple[str, ...]
    paths: Mapping[str, tuple[str, ...]]
    spares: tuple[str, int] | None = None
    wide: "NodeDomains | None" = None


def requests_of(spec: GpuGangSpec) -> Iterator[GangTopologyRequest]:
    """Yield the request for the whole gang, then those of its pod sets."""
    if spec.topology is not None:
        yield spec.topology
    for pod_set in spec.pod_sets:
        if pod_set.topology is not None:
            yield pod_set.topology


def levels_named(spec: GpuGangSpec) -> tuple[str, ...]:
    """Return every level that the gang names, each once."""
    levels = []
    for request in requests_of(spec):
        levels += [request.level] if request.level is not None else []
        levels += [part.level for part in request.slices]
    return tuple(dict.fromkeys(levels))


def demands_a_level(spec: GpuGangSpec) -> bool:
    """Tell whether some level must be kept to: a required one, or that of a slice."""
    return any(request.mode is TopologyMode.REQUIRED or request.slices for request in requests_of(spec))


def choose_topology(spec: GpuGangSpec, topologies: Sequence[Topology]) -> Topology | Obstacle | None:
    """Return the topology of a gang; None for a gang that neither names one nor needs any."""
    wanted = levels_named(spec)
    if spec.topology_name is not None:
        found = next((one for one in topologies if one.metadata.name == spec.topology_name), None)
        if found is None:
            return Obstacle(
                "TopologyMissing", f"there is no Topology {spec.topology_name!r}; create it, or name another"
            )
    elif len(topologies) == 1:
        found = topologies[0]
    elif not wanted:
        return None
    elif not topologies:
        return Obstacle("TopologyMissing", f"there is no Topology with the level {wanted[0]!r}; create one")
    else:
        having = [one for one in topologies if set(wanted) <= set(one.spec.labels)]
        if len(having) != 1:
            return _ambiguous(wanted, having, topologies)
        found = having[0]
    lacking = [level for level in wanted if level not in found.spec.labels]
    if lacking:
        levels = ", ".join(found.spec.labels)
        return Obstacle(
            "LevelMissing",
            f"Topology {found.metadata.name!r} has no level {lacking[0]!r}; its levels are {levels}",
        )
    return found


def _ambiguous(wanted: Sequence[str], having: Sequence[Topology], topologies: Sequence[Topology]) -> Obstacle:
    """Say why none of several topologies is chosen: several have the levels, or none does."""
    known = ", ".join(sorted(one.metadata.name for one in having or topologies)[:8])
    levels = ", ".join(wanted[:8])
    if not having:
        return Obstacle("LevelMissing", f"no Topology has all levels {levels}; there are {known}")
    return Obstacle(
        "TopologyAmbiguous", f"several Topologies ({known}) have the levels {levels}; name one in spec.topologyName"
    )


def covers(topology: Topology, node: Node) -> bool:
    """Tell whether the topology covers the node."""
    return all(node.metadata.labels.get(key) == value for key, value in topology.spec.node_selector.items())


def level_values(node: Node, report: GpuNodeStatus | None, levels: Iterable[str]) -> tuple[str, ...]:
    """Return the node's domain name per level, an empty text for a level that it lacks."""
    return tuple(
        fabric_clique(report) if level == names.FABRIC_LEVEL else node.metadata.labels.get(level, "")
        for level in levels
    )


def fabric_clique(report: GpuNodeStatus | None) -> str:
    """Return the NVLink fabric clique of a machine; both ids make it up, a clique id alone is not unique."""
    fabric = report.status.fabric if report is not None and report.status is not None else None
    if fabric is None or not fabric.cluster_uuid or not fabric.clique_id:
        return ""
    return f"{fabric.cluster_uuid}.{fabric.clique_id}"


def node_domains_of(
    topology: Topology | None,
    nodes: Iterable[Node],
    reports: Mapping[str, GpuNodeStatus],
    *,
    strict: bool,
    confined: bool = True,
) -> NodeDomains | Obstacle:
    """Return where the nodes stand. `strict` leaves out nodes that lack a level; `confined` those not covered."""
    known = list(nodes)
    if topology is None:
        return NodeDomains("", (), {node.metadata.name: () for node in known})
    problem = _problem(topology, known, reports) if strict else None
    if problem is not None:
        return problem
    levels = topology.spec.labels
    paths: dict[str, tuple[str, ...]] = {}
    outside: dict[str, tuple[str, ...]] = {}
    for node in known:
        name = node.metadata.name
        is_covered = covers(topology, node)
        values = level_values(node, reports.get(name), levels) if is_covered else ("",) * len(levels)
        is_inside = (is_covered or not confined) and (all(values) or not strict)
        (paths if is_inside else outside)[name] = tuple(value or f"{ALONE}{name}" for value in values)
    spares = (topology.spec.spares.level, topology.spec.spares.count) if topology.spec.spares is not None else None
    wide = NodeDomains(topology.metadata.name, levels, {**paths, **outside}, spares) if outside else None
    return NodeDomains(topology.metadata.name, levels, paths, spares, wide)


def _problem(topology: Topology, nodes: Sequence[Node], reports: Mapping[str, GpuNodeStatus]) -> Obstacle | None:
    """Return what keeps gangs inactive that demand a level of this topology."""
    absent, shared = absent_levels(topology, nodes, reports), shared_hostnames(topology, nodes)
    if absent:
        return Obstacle(
            "LevelMissing", f"no node of Topology {topology.metadata.name!r} has a value for the level {absent[0]!r}"
        )
    if shared:
        return Obstacle("HostnamesShared", f"nodes {shared[0]} have one kubernetes.io/hostname; give each its own")
    return None


def absent_levels(topology: Topology, nodes: Sequence[Node], reports: Mapping[str, GpuNodeStatus]) -> tuple[str, ...]:
    """Return the levels that no covered node has a value for."""
    levels = topology.spec.labels
    seen = [False] * len(levels)
    for node in nodes:
        if covers(topology, node):
            values = level_values(node, reports.get(node.metadata.name), levels)
            seen = [before or bool(value) for before, value in zip(seen, values, strict=True)]
    return tuple(level for level, is_seen in zip(levels, seen, strict=True) if not is_seen)


def shared_hostnames(topology: Topology, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the names of nodes, joined by "and", that share one host name, where host names are a level."""
    if HOSTNAME not in topology.spec.labels:
        return ()
    by_value: dict[str, list[str]] = {}
    for node in nodes:
        value = node.metadata.labels.get(HOSTNAME, "")
        if value and covers(topology, node):
            by_value.setdefault(value, []).append(node.metadata.name)
    return tuple(" and ".join(sorted(group)) for _, group in sorted(by_value.items()) if len(group) > 1)


def count_nodes(topology: Topology, nodes: Iterable[Node], reports: Mapping[str, GpuNodeStatus]) -> tuple[int, int]:
    """Return (nodes covered, those of them that lack a level)."""
    covered = [node for node in nodes if covers(topology, node)]
    outside = [
        node
        for node in covered
        if not all(level_values(node, reports.get(node.metadata.name), topology.spec.labels))
    ]  # fmt: skip
    return len(covered), len(outside)
