"""Recomputes the decision about one pod: kube-scheduler's filters first, then the extender's answer.

The pod need not exist yet. A Decision has the nodes that fit, the best of them, and why each other node does not fit.
The extender's part is `atoll.cluster.verdicts.judge_nodes` itself; kube-scheduler's part is `atoll.cluster.host_fit`,
which follows its filters, and counted resources. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.cluster import host_fit, pod_fit, pods
from atoll.cluster.feasibility import NodeFacts, unseen_nodes
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Node, Pod
from atoll.cluster.quantities import parse_amount
from atoll.cluster.requests import Rejection, Request, request_of
from atoll.cluster.selection import Candidate
from atoll.cluster.spread import SPREAD, has_spread_labels, spread_counts
from atoll.cluster.verdicts import FilterInput, NodeVerdicts, judge_nodes
from atoll.cluster.volume_fit import Volumes
from atoll.cluster.volume_limits import VOLUME_COUNT, VolumeUse, members_by_volumes
from atoll.explain.snapshot import NOW_SECONDS, ClusterSnapshot, ledger_of, pods_by_node, volumes_of

INSUFFICIENT: Final = "insufficient "


@dataclass(frozen=True, slots=True)
class IndexedSnapshot:
    """A snapshot indexed for many decisions. The ledger is only read."""

    snapshot: ClusterSnapshot
    ledger: Ledger
    nodes: Mapping[str, Node]
    pods_by_node: Mapping[str, Sequence[Pod]]
    by_uid: Mapping[str, Pod]
    has_neighbour_rules: bool
    unseen: Mapping[str, NodeFacts]
    """Nodes that have or may have GPUs, without a fresh, valid report."""
    volumes: Volumes
    volume_use: VolumeUse
    namespaces: Mapping[str, Mapping[str, str]]
    """Labels of namespaces."""
    _left: dict[str, dict[str, int]] = field(default_factory=dict)
    _needs: dict[str, Mapping[str, int]] = field(default_factory=dict)
    prices: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Cache of the cost of each pod's end; see atoll.explain.blockers."""

    def minds_neighbours(self, pod: Pod) -> bool:
        """True if pods on other nodes can matter to the pod, by its own rule or that of an existing pod."""
        return self.has_neighbour_rules or pod_fit.minds_neighbours(pod)

    def left(self, node: str) -> dict[str, int]:
        """Return a node's remaining counted resources."""
        found = self._left.get(node)
        if found is None:
            there = self.pods_by_node.get(node, ())
            found = self._left[node] = host_fit.free(self.nodes[node], there, self.needs)
        return found

    def needs(self, pod: Pod) -> Mapping[str, int]:
        """Return a pod's counted resources; computed once."""
        found = self._needs.get(pod.metadata.uid)
        if found is None:
            found = self._needs[pod.metadata.uid] = host_fit.needs(pod)
        return found


@dataclass(frozen=True, slots=True)
class PodDecision:
    """The decision about a pod now. `closed`: per node, kube-scheduler's own reasons against it; `full`: nodes where
    kube-scheduler counts too few free GPUs for the pod; `verdicts`: the extender's answer about all others."""

    request: Request | Rejection
    closed: Mapping[str, tuple[str, ...]]
    full: frozenset[str]
    verdicts: NodeVerdicts

    @property
    def best(self) -> Candidate | None:
        """Return where the pod would run; None if it fits nowhere."""
        return self.verdicts.best

    @property
    def fits(self) -> bool:
        """True if some node would take the pod now."""
        return self.verdicts.best is not None


def index_snapshot(snapshot: ClusterSnapshot) -> IndexedSnapshot:
    """Index a snapshot."""
    has_rules = any(map(pod_fit.minds_neighbours, snapshot.pods))
    nodes = {node.metadata.name: node for node in snapshot.nodes}
    ledger = ledger_of(snapshot)
    volumes = volumes_of(snapshot)
    scene = IndexedSnapshot(
        snapshot=snapshot,
        ledger=ledger,
        nodes=nodes,
        pods_by_node=pods_by_node(snapshot.pods),
        by_uid={pod.metadata.uid: pod for pod in snapshot.pods},
        has_neighbour_rules=has_rules,
        unseen={one.node.metadata.name: one for one in unseen_nodes(nodes, ledger, NOW_SECONDS)},
        volumes=volumes,
        volume_use=VolumeUse(volumes),
        namespaces={one.metadata.name: one.metadata.labels for one in snapshot.namespaces},
    )
    _load_cpu(scene)
    return scene


def _load_cpu(scene: IndexedSnapshot) -> None:
    """Load free CPU into the ledger's fleet as the extender does: it decides between nodes with equal GPUs."""
    for name, node in scene.nodes.items():
        allocatable = parse_amount("cpu", node.status.allocatable.get("cpu", ""))
        if allocatable:
            free = scene.left(name).get("cpu", 0)
            scene.ledger.fleet.put_cpu(name, free_milli=free, allocatable_milli=allocatable)
    for pod in scene.ledger.pods.values() if scene.snapshot.past_asks is None else ():
        gpus = pods.device_count(pod)
        if gpus:
            scene.ledger.fleet.count_ask(gpus, scene.needs(pod).get("cpu", 0))


def decide(
    scene: IndexedSnapshot, pod: Pod, claim: GpuClaim | None, *, only: Sequence[str] | None = None
) -> PodDecision:
    """Decide about the pod as kube-scheduler and extender would; `only` these nodes, all by default."""
    asked = list(scene.nodes) if only is None else [name for name in only if name in scene.nodes]
    return decide_beside(scene, pod, claim, closed_nodes(scene, pod, asked), asked)


def decide_beside(
    scene: IndexedSnapshot,
    pod: Pod,
    claim: GpuClaim | None,
    closed: Mapping[str, tuple[str, ...]],
    asked: Sequence[str],
) -> PodDecision:
    """Decide with a known `closed_nodes`, which is the same for pods that differ only in their GPUs."""
    request = request_for(scene, pod, claim)
    full = full_nodes(scene, pod, [name for name in asked if name not in closed])
    open_nodes = [name for name in asked if name not in closed and name not in full]
    return PodDecision(request, closed, full, judge(scene, pod, request, open_nodes))


def request_for(scene: IndexedSnapshot, pod: Pod, claim: GpuClaim | None) -> Request | Rejection:
    """Return the pod's request as the extender resolves it."""
    holds = scene.ledger.leases_of(pod.metadata.uid)
    reservation = scene.snapshot.reservation_of(pod)
    return request_of(pod, claim, is_admitted=bool(holds), reservation=reservation, holds=holds)


def judge(scene: IndexedSnapshot, pod: Pod, request: Request | Rejection, node_names: Sequence[str]) -> NodeVerdicts:
    """Judge these nodes by the extender's own function."""
    question = FilterInput(
        uid=pod.metadata.uid,
        request=request,
        now_seconds=NOW_SECONDS,
        priority=pod.spec.priority,
        cpu_milli=host_fit.needs(pod).get("cpu", 0),
    )
    return judge_nodes(node_names, question, scene.ledger)


def closed_nodes(scene: IndexedSnapshot, pod: Pod, node_names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the reasons of kube-scheduler's filters, without the GPU count, per refused node."""
    needed = {resource: amount for resource, amount in host_fit.needs(pod).items() if not _is_gpus(resource)}
    found: dict[str, tuple[str, ...]] = {}
    for name, reason in _refused(scene, pod, node_names).items():
        found[name] = (reason,)
    for reason, refused in (
        (SPREAD, _uneven(scene, pod, node_names)),
        (VOLUME_COUNT, _crowded(scene, pod, node_names)),
    ):
        for name in refused:
            found[name] = (*found.get(name, ()), reason)
    for name in node_names:
        short = shortages(scene.left(name), needed)
        if short:
            found[name] = (*found.get(name, ()), *short)
    return found


def shortages(left: Mapping[str, int], needed: Mapping[str, int]) -> tuple[str, ...]:
    """Return a reason per resource with too little left."""
    return tuple(
        INSUFFICIENT + resource for resource, amount in sorted(needed.items()) if amount > left.get(resource, 0)
    )


def full_nodes(scene: IndexedSnapshot, pod: Pod, node_names: Iterable[str]) -> frozenset[str]:
    """Return the nodes where kube-scheduler counts too few free GPUs for the pod."""
    needed = {resource: amount for resource, amount in host_fit.needs(pod).items() if _is_gpus(resource) and amount}
    return frozenset(name for name in node_names if shortages(scene.left(name), needed))


def _refused(scene: IndexedSnapshot, pod: Pod, node_names: Sequence[str]) -> dict[str, str]:
    """Return kube-scheduler's refusals; other nodes matter only for rules about neighbours."""
    has_rules = scene.minds_neighbours(pod)
    nodes = list(scene.nodes.values()) if has_rules else [scene.nodes[name] for name in node_names]
    on_nodes = scene.pods_by_node if has_rules or host_fit.host_ports(pod) else {}
    refused = host_fit.excluded_nodes(pod, nodes, on_nodes, volumes=scene.volumes, namespace_labels=scene.namespaces)
    return {name: refused[name] for name in node_names if name in refused}


def _uneven(scene: IndexedSnapshot, pod: Pod, node_names: Sequence[str]) -> list[str]:
    """Return the nodes that a strict topology spread constraint refuses."""
    counts = spread_counts(pod, list(scene.nodes.values()), scene.pods_by_node)
    full = {name for one in counts for name in one.full(more=int(one.means(pod)), is_pinned=False)}
    return [name for name in node_names if name in full or not has_spread_labels(pod, scene.nodes[name])]


def _crowded(scene: IndexedSnapshot, pod: Pod, node_names: Sequence[str]) -> list[str]:
    """Return the nodes that take no further volumes of the pod's drivers."""
    room = members_by_volumes(pod, node_names, scene.pods_by_node, scene.volume_use, ())
    return [name for name, count in (room or {}).items() if count < 1]


def _is_gpus(resource: str) -> bool:
    return resource == names.GPU_RESOURCE or resource.startswith(names.MIG_RESOURCE_PREFIX)
