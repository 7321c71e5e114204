"""One gang scenario from another scheduler's tests as input of Atoll's search.

In: a JSON object with levels, nodes, usage and pod sets. Out: a `Scenario`: a snapshot of that scheduler's tree of
domains, and pod sets that exclude the nodes that kube-scheduler would refuse. Nodes that are not ready, unschedulable,
of another flavor or without a level's label are outside. If the lowest level is not the host, the nodes of one domain
are one place with the sum of their resources, and selectors and taints do not count, as in the peer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from atoll.cluster.host_fit import node_reason, preference
from atoll.cluster.objects import (
    Affinity,
    Metadata,
    Node,
    NodeAffinity,
    NodeSelector,
    NodeSelectorTerm,
    NodeSpec,
    Pod,
    PodSpec,
    PreferredNodeTerm,
    Requirement,
    Taint,
    Toleration,
)
from topology.gangs.model import Host, Mode, PodSet, Slice, TopologyRequest
from topology.gangs.snapshot import HostSnapshot, snapshot
from topology.gangs.tree import path_of

SHORT: Final = {
    "cloud.com/datacenter": "dc",
    "cloud.com/aizone": "zone",
    "cloud.com/topology-block": "block",
    "cloud.com/topology-subblock": "subblock",
    "cloud.com/topology-rack": "rack",
    "cloud.com/topology-switch": "switch",
    "kubernetes.io/hostname": "host",
}
HOST_LABEL: Final = "host"
GATES: Final = {
    "TASBalancedPlacement": False,
    "TASMultiLayerTopology": True,
    "TASRespectNodeAffinityPreferred": False,
    "TASHandleOverlappingFlavors": True,
    "SkipReassignmentForPodOwnedWorkloads": True,
    "ElasticJobsViaWorkloadSlicesWithTAS": False,
}
KNOWN: Final = frozenset({
    "id", "src", "note", "gates", "levels", "nodes", "podsets", "owners", "pod_group_workload", "existing", "previous",
    "unhealthy_nodes", "other_pods", "flavor_labels", "flavor_tolerations", "usage_own_flavor", "usage_sibling_flavor",
    "simulate_empty",
})  # fmt: skip
KNOWN_OF_NODES: Final = frozenset({"name", "labels", "alloc", "ready", "unschedulable", "repeat", "taints"})
KNOWN_OF_POD_SETS: Final = frozenset({
    "name", "count", "req", "want", "want_fail", "previous", "required", "preferred", "unconstrained", "mode", "slices",
    "group", "node_selector", "tolerations", "affinity_preferred", "affinity_required", "node_affinity", "affinity",
})  # fmt: skip
EFFECTS: Final = ("NoSchedule", "NoExecute", "PreferNoSchedule")
OPERATORS: Final = ("Exists", "Equal")
ENDED: Final = ("Succeeded", "Failed")
REPEAT_MAX: Final = 100_000
COMING: Final = "coming"
"""Place of members that have none yet."""
Json = Mapping[str, Any]


class Unsupported(Exception):
    """The scenario concerns the peer's own objects."""


@dataclass(frozen=True, slots=True, eq=False)
class AskedPodSet:
    """One pod set of the scenario; problem: why it is impossible. level: the level at which its domains are counted."""

    pod_set: PodSet
    group: str
    level: int
    problem: str
    want: tuple[tuple[tuple[str, ...], int], ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """paths: of every place by name, including those outside the tree. existing: (place, count) per pod set to repair.
    kept: the placement stays, whatever happened to its hosts. resized: members come beside those that stay, as an
    elastic Job grows; the place of the new ones is COMING. odd: unknown fields."""

    id: str
    levels: tuple[str, ...]
    snapshot: HostSnapshot
    asked: tuple[AskedPodSet, ...]
    paths: Mapping[str, tuple[str, ...]]
    existing: Mapping[str, tuple[tuple[str, int], ...]]
    lost: frozenset[str]
    kept: bool
    resized: bool
    odd: tuple[str, ...]

    @property
    def peer_found(self) -> bool:
        """True if the peer's answer has places for every pod set."""
        return all(asked.want is not None for asked in self.asked)


def scenario_of(case: Json, defaults: Json) -> Scenario:
    """Read a scenario. Raises Unsupported, and KeyError, TypeError or ValueError for anything else."""
    gates = {**GATES, **defaults, **case.get("gates", {})}
    if "flavors" in case:
        raise Unsupported("several flavors")
    levels = tuple(_short(level) for level in case["levels"])
    nodes = tuple(_expanded(_named(case["nodes"], "node")))
    paths = {
        place: path for node in nodes if (path := path_of(_labels(node), levels)) for place in [_place(path, levels)]
    }
    inside = [node for node in nodes if _is_inside(node, levels, case.get("flavor_labels", {}))]
    free = _free(case, inside, levels, overlapping=bool(gates["TASHandleOverlappingFlavors"]))
    hosts = [Host(place, paths[place], amounts) for place, amounts in free.items()]
    asked = tuple(_asked(row, case, inside, levels, gates) for row in _named(case["podsets"], "pod set"))
    owners = case.get("owners", [])
    existing = {name: _places(rows, levels) for name, rows in case.get("existing", {}).items()}
    lost = frozenset(_lost(case, levels, nodes))
    resized = _resized(case, levels, free) if gates["ElasticJobsViaWorkloadSlicesWithTAS"] else {}
    return Scenario(
        id=str(case["id"]),
        levels=levels,
        snapshot=snapshot(levels, hosts),
        asked=asked,
        paths=paths,
        existing=resized or existing,
        lost=frozenset({COMING}) if resized else lost,
        resized=bool(resized),
        kept=bool(gates["SkipReassignmentForPodOwnedWorkloads"])
        and owners == ["Pod"]
        and not case.get("pod_group_workload", False),
        odd=_odd(case),
    )


def _odd(case: Json) -> tuple[str, ...]:
    """Unknown fields, named because they may change the answer."""
    odd = set(case.keys() - KNOWN)
    odd |= {f"nodes.{key}" for node in case["nodes"] for key in node.keys() - KNOWN_OF_NODES}
    odd |= {f"podsets.{key}" for row in case["podsets"] for key in row.keys() - KNOWN_OF_POD_SETS}
    return tuple(sorted(odd))


def _short(level: str) -> str:
    return SHORT.get(level, level)


def _named(rows: Iterable[Json], kind: str) -> Iterable[Json]:
    """Rows; those without a name get their number."""
    return [{"name": f"{kind} {number}", **row} for number, row in enumerate(rows)]


def _expanded(nodes: Iterable[Json]) -> Iterable[Json]:
    """Expand `repeat` into nodes with their own names and, if they have one, host labels."""
    for node in nodes:
        count = int(node.get("repeat", 1))
        if count > REPEAT_MAX:
            raise ValueError(f"{count} identical nodes are more than {REPEAT_MAX}")
        for number in range(count):
            if count == 1:
                yield node
                continue
            labels = dict(node.get("labels", {}))
            labels = {key: f"{value}-{number}" if _short(key) == HOST_LABEL else value for key, value in labels.items()}
            yield {**node, "name": f"{node['name']}-{number}", "labels": labels}


def _labels(node: Json) -> dict[str, str]:
    """Labels by full and by short name."""
    labels = dict(node.get("labels", {}))
    full = {short: key for key, short in SHORT.items()}
    both = {**labels, **{_short(key): value for key, value in labels.items()}}
    return {**both, **{full[key]: value for key, value in both.items() if key in full}}


def _place(path: tuple[str, ...], levels: tuple[str, ...]) -> str:
    return path[-1] if levels[-1] == HOST_LABEL else "/".join(path)


def _is_inside(node: Json, levels: tuple[str, ...], flavor: Json) -> bool:
    labels = _labels(node)
    return (
        node.get("ready", True)
        and not node.get("unschedulable", False)
        and path_of(labels, levels) is not None
        and all(labels.get(key) == value for key, value in flavor.items())
    )


def _free(
    case: Json, nodes: Iterable[Json], levels: tuple[str, ...], *, overlapping: bool
) -> dict[str, dict[str, int]]:
    """Free resources per place after other pods and flavors' reservations."""
    free: dict[str, dict[str, int]] = {}
    place_of: dict[str, str] = {}
    for node in nodes:
        path = path_of(_labels(node), levels)
        assert path is not None
        place_of[node["name"]] = _place(path, levels)
        _add(free.setdefault(place_of[node["name"]], {}), node.get("alloc", {}), 1)
    for pod in case.get("other_pods", []):
        place = place_of.get(pod.get("node") or "")
        if place is not None and pod.get("phase") not in ENDED:
            _add(free[place], {"pods": 1, **pod.get("req", {})}, -1)
    usage = [*case.get("usage_own_flavor", []), *(case.get("usage_sibling_flavor", []) if overlapping else [])]
    usage = [] if case.get("simulate_empty") else usage
    for row in usage:
        place = _place(tuple(row["values"]), levels)
        if place in free:
            _add(free[place], row.get("req", {}), -int(row.get("count", 1)))
            _add(free[place], {"pods": 1}, -int(row.get("count", 1)))
    return free


def _add(total: dict[str, int], more: Json, factor: int) -> None:
    for resource, amount in more.items():
        total[resource] = total.get(resource, 0) + int(amount) * factor


def _places(rows: Iterable[Any], levels: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((_place(tuple(values), levels), int(count)) for values, count in rows)


def _resized(case: Json, levels: tuple[str, ...], places: Collection[str]) -> dict[str, tuple[tuple[str, int], ...]]:
    """Return the members that stay where they are, by pod set, and how many come beside them; of fewer than before the
    first stay. Empty where nothing is resized, or a place is no longer there: then all are placed anew."""
    if not any("previous" in row for row in case["podsets"]):
        return {}
    found = {}
    for row in _named(case["podsets"], "pod set"):
        left, stay = int(row["count"]), []
        for place, count in _places(row.get("previous") or (), levels):
            if place not in places:
                return {}
            stay.append((place, min(count, left)))
            left -= stay[-1][1]
        found[str(row["name"])] = (*((place, count) for place, count in stay if count), (COMING, left))
    return found


def _lost(case: Json, levels: tuple[str, ...], nodes: Iterable[Json]) -> Iterable[str]:
    by_name = {node["name"]: path_of(_labels(node), levels) for node in nodes}
    for name in case.get("unhealthy_nodes", []):
        path = by_name.get(name)
        yield _place(path, levels) if path is not None else name


def _asked(row: Json, case: Json, nodes: Iterable[Json], levels: tuple[str, ...], gates: Json) -> AskedPodSet:
    slices = [(_short(level), size) for level, size in row.get("slices") or []]
    if not gates["TASMultiLayerTopology"]:
        slices = slices[:1]
    problem = "a slice without a size" if any(size is None for _, size in slices) else ""
    request, level, trouble = _request(row, slices, levels, balanced=bool(gates["TASBalancedPlacement"]))
    excluded: dict[str, str] = {}
    preferences: dict[str, int] = {}
    if levels[-1] == HOST_LABEL:
        pod = _pod(row, case)
        for node in nodes:
            place = _labels(node)[HOST_LABEL]
            if reason := node_reason(pod, _node(node)):
                excluded[place] = reason
            if gates["TASRespectNodeAffinityPreferred"] and (liked := preference(pod, _node(node))):
                preferences[place] = liked
    pod_set = PodSet(
        name=str(row["name"]),
        count=int(row["count"]),
        needs={**{key: int(value) for key, value in row.get("req", {}).items() if value}, "pods": 1},
        request=request,
        excluded=excluded,
        preferences=preferences,
    )
    want = row.get("want")
    wanted = None if want is None else tuple((tuple(values), int(count)) for values, count in want)
    return AskedPodSet(pod_set, str(row.get("group") or ""), level, problem or trouble, wanted)


def _request(
    row: Json, slices: list[tuple[str, Any]], levels: tuple[str, ...], *, balanced: bool
) -> tuple[TopologyRequest, int, str]:
    """The request, the index of the level at which its domains are counted, and what makes it impossible."""
    whole = tuple(Slice(level, size) for level, size in slices if size)
    lowest = len(levels) - 1
    name = _short(str(row.get("required") or row.get("preferred") or ""))
    if name:
        mode = Mode.REQUIRED if row.get("required") else Mode.PREFERRED
        request = TopologyRequest(mode, name, whole, balanced=balanced and mode is Mode.PREFERRED)
        return request, levels.index(name) if name in levels else 0, ""
    anywhere = bool(row.get("unconstrained") or row.get("mode") == "implied")
    if anywhere and whole and whole[0].level != levels[-1]:
        return TopologyRequest(), lowest, f"slices at {whole[0].level} above the lowest level, where members may lie"
    if anywhere or whole:
        return TopologyRequest(slices=whole), lowest if anywhere else 0, ""
    return TopologyRequest(), lowest, "" if slices else "no topology request"


def _pod(row: Json, case: Json) -> Pod:
    tolerations = [*row.get("tolerations", []), *case.get("flavor_tolerations", [])]
    preferred = tuple(
        PreferredNodeTerm(int(term.get("weight", 1)), NodeSelectorTerm(_requirements(term)))
        for term in row.get("affinity_preferred", [])
    )
    required = _terms(row.get("affinity_required") or row.get("node_affinity") or row.get("affinity") or [])
    node_affinity = NodeAffinity(NodeSelector(required) if required else None, preferred)
    return Pod(
        metadata=Metadata(name=str(row["name"])),
        spec=PodSpec(
            node_selector=dict(row.get("node_selector", {})),
            tolerations=tuple(_toleration(one) for one in tolerations),
            affinity=Affinity(node_affinity=node_affinity),
        ),
    )


def _terms(rows: object) -> tuple[NodeSelectorTerm, ...]:
    """One list of conditions is one term; a list of lists, or of objects with `expressions`, is one term each."""
    if not rows:
        return ()
    if isinstance(rows, Mapping):
        rows = [rows]
    if all(isinstance(row, Mapping) and "key" in row for row in rows):
        return (NodeSelectorTerm(tuple(_requirement(row) for row in rows)),)
    return tuple(NodeSelectorTerm(_requirements(row)) for row in rows)


def _requirements(row: object) -> tuple[Requirement, ...]:
    if isinstance(row, Mapping):
        inner = row.get("expressions") or row.get("matchExpressions") or row.get("terms")
        return tuple(_requirement(one) for one in inner) if inner else (_requirement(row),)
    return tuple(_requirement(one) for one in row)


def _requirement(row: Json) -> Requirement:
    return Requirement(row["key"], row.get("op") or row.get("operator") or "In", tuple(row.get("values", ())))


def _toleration(row: object) -> Toleration:
    """Written as key=value:effect, as words in a list, or as an object."""
    if isinstance(row, str):
        taint = _taint(row)
        return Toleration(taint.key, "Equal" if taint.value else "Exists", taint.value, taint.effect)
    if isinstance(row, Mapping):
        operator = row.get("op") or row.get("operator") or "Equal"
        return Toleration(row.get("key") or "", operator, row.get("value") or "", row.get("effect") or "")
    words = _words(row)
    operator = next((word for word in words if word in OPERATORS), "Equal")
    names = [word for word in words if word not in (*EFFECTS, *OPERATORS)]
    effect = next((word for word in words if word in EFFECTS), "")
    return Toleration(names[0] if names else "", operator, names[1] if len(names) > 1 else "", effect)


def _taint(row: object) -> Taint:
    """Written as key=value:effect, as words in a list, or as an object."""
    if isinstance(row, str):
        pair, _, effect = row.rpartition(":")
        key, _, value = pair.partition("=")
        return Taint(key=key, effect=effect, value=value)
    if isinstance(row, Mapping):
        return Taint(key=row["key"], effect=row["effect"], value=row.get("value") or "")
    words = _words(row)
    names = [word for word in words if word not in EFFECTS]
    effect = next(word for word in words if word in EFFECTS)
    return Taint(key=names[0], effect=effect, value=names[1] if len(names) > 1 else "")


def _words(row: object) -> list[str]:
    if not isinstance(row, list):
        raise TypeError(f"needs text, a list or an object, got {row!r}")
    return [str(word) for word in row if word]


def _node(node: Json) -> Node:
    return Node(
        metadata=Metadata(name=node["name"], labels=_labels(node)),
        spec=NodeSpec(taints=tuple(_taint(taint) for taint in node.get("taints", []))),
    )
