"""Input of the gang search: hosts with what is free, pod sets with what a member needs.

Members that contradict each other give an Obstacle. Nodes that kube-scheduler would refuse are removed before, see
atoll.cluster.host_fit. What does not fit the empty machines never fits.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, product
from types import MappingProxyType

from atoll.api.gangs import GangPodSet, GpuGangSpec, TopologyMode
from atoll.api.gangs import GangTopologyRequest as WantedTopology
from atoll.cluster import host_fit, pod_fit, volume_fit
from atoll.cluster.feasibility import NodeFacts, all_positions, missing_fact
from atoll.cluster.gangs import kueue_topology
from atoll.cluster.gangs.lifecycle import Obstacle
from atoll.cluster.gangs.member_limits import own_limits, volume_limits
from atoll.cluster.gangs.membership import GangMember
from atoll.cluster.gangs.node_domains import NodeDomains
from atoll.cluster.gangs.readiness import minimum_of
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import Cell, NodeDevices, NodeShape, cell_of
from atoll.cluster.objects import Node, Pod
from atoll.cluster.requests import Rejection, Request, Verdict
from atoll.cluster.reservation_use import reservation_of
from atoll.cluster.selection import device_groups, plain
from atoll.cluster.spread import SPREAD, has_spread_labels, strict_constraints
from atoll.cluster.volume_limits import VolumeUse
from atoll.cluster.weakness import weaknesses
from topology.gangs.model import Gang, Host, Mode, PodSet, Slice, TopologyRequest
from topology.gangs.snapshot import HostSnapshot, snapshot
from topology.gangs.spares import with_spares

NO_REPORT = "no fresh GPU report"
OTHER_MODEL = "another model than the others of the gang"
OUTSIDE = "outside of the topology"
Models = Mapping[Request, str]
ANY_MODEL: Models = MappingProxyType({})
MODEL_CHOICES_MAX = 64
PART = "/"
"""Between the name of a pod set and the number of a part of it; no name of a pod set holds one."""


@dataclass(frozen=True, slots=True)
class ReservedPool:
    """GPUs of a GpuReservation, given by its uid. `positions`: masks by node, of all that it or its pods hold."""

    reservation: str
    positions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PlacementSnapshot:
    """The cluster at one moment. `cells`: what nodes with fresh reports can give out now; `pods_on`: pods by node,
    those that are about to start there included; `free`: what those leave of counted resources; `last`: nodes that are
    taken only if no other serves as well; `volumes`: claims and volumes that bind pods to nodes; `pool`: the GPUs that
    the gang is confined to, if it uses a GpuReservation; `namespaces`: labels of namespaces; `volume_use`: looked up
    once."""

    nodes: Mapping[str, Node]
    devices: Mapping[str, NodeDevices]
    cells: Mapping[str, Cell]
    pods_on: Mapping[str, Sequence[Pod]]
    free: Mapping[str, Mapping[str, int]]
    last: frozenset[str] = frozenset()
    volumes: volume_fit.Volumes = field(default_factory=volume_fit.Volumes)
    pool: ReservedPool | None = None
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    volume_use: VolumeUse = field(default_factory=lambda: VolumeUse(volume_fit.Volumes()))
    _snapshots: dict[int, tuple[NodeDomains, HostSnapshot]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.volume_use.volumes is not self.volumes:
            object.__setattr__(self, "volume_use", VolumeUse(self.volumes))

    def snapshot(self, node_domains: NodeDomains) -> HostSnapshot:
        """Return the hosts of these domains, built once: every gang that is tried on this snapshot shares them."""
        known = self._snapshots.get(id(node_domains))
        if known is None or known[0] is not node_domains:
            built = snapshot(node_domains.levels, hosts_of(node_domains, self))
            if node_domains.spares is not None:
                built = with_spares(built, node_domains.spares[0], node_domains.spares[1])
            weaker = self._weaker()
            built = built.with_hosts(replace(host, spare=True) for host in built.hosts if host.name in weaker)
            known = self._snapshots[id(node_domains)] = (node_domains, built)
        return known[1]

    def _weaker(self) -> frozenset[str]:
        """Return the last choice, like spare nodes: those that are weaker than others of their class, and `last`."""
        weak = weaknesses(cell.shape for cell in self.cells.values())
        return self.last.union(name for name, cell in self.cells.items() if cell.shape in weak) if weak else self.last

    def emptied(self) -> "PlacementSnapshot":
        """Return the same machines without any pod; of a GpuReservation, only what it holds."""
        masks = {name: self.devices[name].usable for name in self.cells}
        if self.pool is not None:
            masks = {name: mask & self.pool.positions.get(name, 0) for name, mask in masks.items()}
        cells = {name: cell_of(self.devices[name].shape, mask) for name, mask in masks.items()}
        free = {name: host_fit.free(node, ()) for name, node in self.nodes.items()}
        return replace(self, cells=cells, pods_on={}, free=free)

    def opened(self) -> "PlacementSnapshot":
        """Return the same machines without any pod, as they are once every node is open, ready and heard of again and
        every card is given out. What differs from now is taken last."""
        nodes = {name: host_fit.opened(node) for name, node in self.nodes.items()}
        known = {name: one for name, one in self.devices.items() if name in nodes}
        cells = {name: cell_of(one.shape, all_positions(one)) for name, one in known.items()}
        free = {name: host_fit.free(node, ()) for name, node in nodes.items()}
        last = frozenset(name for name in known if self.withheld(name))
        return replace(self, nodes=nodes, cells=cells, pods_on={}, free=free, last=last)

    def withheld(self, name: str) -> str:
        """Return what would have to change so that all of a node counts that can be told; empty for nothing."""
        node, devices = self.nodes.get(name), self.devices.get(name)
        if node is None or (devices is None and host_fit.opened(node) == node):
            return ""
        cell = self.cells.get(name)
        return missing_fact(NodeFacts(node, devices, cell.free if cell is not None else None))

    def without_positions(self, masks: Mapping[str, int]) -> "PlacementSnapshot":
        """Return the snapshot without these positions of nodes."""
        cells = {name: cell_of(cell.shape, cell.free & ~masks.get(name, 0)) for name, cell in self.cells.items()}
        return replace(self, cells=cells)

    def confined(self, ledger: Ledger, reservation: str, *, now_seconds: float) -> "PlacementSnapshot":
        """Return the snapshot for a gang that may use the GPUs of one GpuReservation, given by its uid, and no others;
        for everybody if it is empty."""
        if not reservation:
            return self
        positions: dict[str, int] = {}
        for record in ledger.leases.values():
            devices = ledger.nodes.get(record.node)
            if devices is not None and reservation_of((record,)) == reservation:
                mask = devices.mask_of((), frozenset({record.device_uuid}))
                positions[record.node] = positions.get(record.node, 0) | mask
        own = ledger.own_cells(now_seconds=now_seconds, asking_reservation=reservation)
        cells = {name: own.get(name) or cell_of(cell.shape, 0) for name, cell in self.cells.items()}
        return replace(self, cells=cells, pool=ReservedPool(reservation, positions))


def unknown_nodes(
    chosen: Sequence[GangMember],
    requests: Mapping[str, Request],
    node_domains: NodeDomains,
    cluster: PlacementSnapshot,
) -> tuple[str, ...]:
    """Return the nodes that may have GPUs for a member: no report of them is known, or it leaves out what matters.

    A node without a report may have GPUs where the topology of the gang covers it, or where it says so by a label or a
    resource.
    """
    templates = {one.pod_set: one for one in chosen if one.uid in requests}.values()
    kinds = [(requests[one.uid], one.pod) for one in templates]

    def may_serve(name: str, request: Request) -> bool:
        devices = cluster.devices.get(name)
        if devices is None:
            return bool(node_domains.levels) or host_fit.may_have_gpus(cluster.nodes[name])
        groups = device_groups(devices.shape, request)
        return isinstance(groups, Rejection) and groups.verdict is Verdict.UNKNOWN

    return tuple(
        name
        for name in sorted(node_domains.paths)
        if name in cluster.nodes
        and any(
            may_serve(name, request) and not host_fit.node_reason(pod, host_fit.opened(cluster.nodes[name]))
            for request, pod in kinds
        )
    )


@dataclass(frozen=True, slots=True)
class GangSearchInput:
    """What the search is asked. `asked`: the members of each pod set by rank, to read the answer by."""

    gang: Gang
    snapshot: HostSnapshot
    asked: Mapping[str, tuple[GangMember, ...]] = field(default_factory=dict)


def search_input(
    spec: GpuGangSpec,
    chosen: Sequence[GangMember],
    requests: Mapping[str, Request],
    node_domains: NodeDomains,
    cluster: PlacementSnapshot,
    *,
    done: Mapping[str, int] | None = None,
    models: Models = ANY_MODEL,
) -> GangSearchInput | Obstacle:
    """Return the question for the members `chosen`; `requests` are their own, by uid. A member without a request needs
    no GPUs; if nothing keeps its pod set near others, it may also go to nodes outside of the topology.

    With `done`, the successes per pod set, as many of each as are still needed are enough; without it, all must fit.
    `models`: the one model that members with such a request take; a request that is not named takes any it accepts.
    """
    asked = {
        name: part
        for pod_set in spec.pod_sets
        if (found := tuple(member for member in chosen if member.pod_set == pod_set.name))
        for name, part in _parts(pod_set.name, found, cluster.volumes)
    }
    users = Counter(name for member in chosen for name in set(volume_fit.claim_names(member.pod)))
    shared = {name for name, count in users.items() if count > 1}
    for name, members in asked.items():
        problem = (
            _unlike(name, members, requests)
            or _contradicted(spec, name, members)
            or _scattered(spec, name, members, cluster.volumes)
            or _without_volume(members, cluster, shared)
        )
        if problem is not None:
            return problem
    inside = node_domains.paths
    free = {name for name, members in asked.items() if members[0].uid not in requests and _is_free(spec, name)}
    if free and node_domains.wide is not None:
        node_domains = node_domains.wide
    kinds = _kinds(cluster, node_domains)
    templates = {name: members[0].pod for name, members in asked.items()}
    mates = tuple(templates.values())
    pod_sets = tuple(
        replace(
            _pod_set(
                spec, name, members, requests.get(members[0].uid), cluster, node_domains, kinds, models, mates, shared
            ),
            min_count=_enough(spec, name, members, done),
            apart=_apart(name, templates),
        )
        for name, members in asked.items()
    )
    if node_domains.paths is not inside:
        outside = dict.fromkeys(node_domains.paths.keys() - inside.keys(), OUTSIDE)
        pod_sets = tuple(
            one if one.name in free else replace(one, excluded={**outside, **one.excluded}) for one in pod_sets
        )
    return GangSearchInput(Gang(pod_sets, topology_request(spec.topology)), cluster.snapshot(node_domains), asked)


def _named(spec: GpuGangSpec, name: str) -> GangPodSet:
    """Return the pod set of a name, or of a part of it."""
    return next(one for one in spec.pod_sets if one.name == name.partition(PART)[0])


def _is_free(spec: GpuGangSpec, name: str) -> bool:
    """Tell whether no topology keeps the pod set near other members."""
    named = _named(spec, name)
    wanted = (spec.topology, spec.topology_of(named))
    return named.group is None and all(one is None or one.mode is TopologyMode.UNCONSTRAINED for one in wanted)


def gpu_requests(members: Iterable[GangMember], requests: Mapping[str, Request]) -> tuple[Request, ...]:
    """Return the requests of those members that need GPUs."""
    return tuple(requests[member.uid] for member in members if member.uid in requests)


def model_choices(
    requests: Iterable[Request], node_domains: NodeDomains, cluster: PlacementSnapshot
) -> tuple[tuple[int, Models], ...]:
    """Return the models that a gang may take, in the order in which its claims prefer them: (rank, model by request).

    All members take the same one, since a collective runs at the pace of its slowest member. Only claims that name
    different models may lead to several, one per claim and as few as possible. Requests that mix models are bound to
    none.
    """
    shapes = _kinds(cluster, node_domains)
    accepted: dict[Request, dict[str, int]] = {}
    for request in dict.fromkeys(plain(request) for request in requests if not request.mixed_models):
        ranks = accepted.setdefault(request, {})
        for shape in shapes:
            groups = device_groups(shape, request)
            for group in () if isinstance(groups, Rejection) else groups:
                ranks[group.model] = min(group.preference, ranks.get(group.model, group.preference))
    known = {request: ranks for request, ranks in accepted.items() if ranks}
    if all(len(ranks) == 1 for ranks in known.values()):
        return ((0, ANY_MODEL),)
    common = set.intersection(*(set(ranks) for ranks in known.values()))
    if common and len({request.models for request in known}) == 1:
        choices = [dict.fromkeys(known, model) for model in sorted(common)]
    else:
        rows = product(*(sorted(ranks) for ranks in known.values()))
        choices = [dict(zip(known, row, strict=True)) for row in islice(rows, MODEL_CHOICES_MAX)]

    def order(choice: dict[Request, str]) -> tuple[int, int, tuple[str, ...]]:
        ranks = sum(known[request][model] for request, model in choice.items())
        return (ranks, len(set(choice.values())), tuple(choice.values()))

    ranked = groupby(sorted(choices, key=order), lambda choice: order(choice)[:2])
    return tuple((place, choice) for place, (_, alike) in enumerate(ranked) for choice in alike)


def topology_request(wanted: WantedTopology | None) -> TopologyRequest:
    """Return a topology request in the words of the search."""
    if wanted is None:
        return TopologyRequest()
    return TopologyRequest(
        mode=Mode(wanted.mode.value),
        level=wanted.level or "",
        slices=tuple(Slice(level=part.level, size=part.size) for part in wanted.slices),
        balanced=wanted.balanced,
    )


def hosts_of(node_domains: NodeDomains, cluster: PlacementSnapshot) -> Iterable[Host]:
    """Return the hosts of these domains."""
    kinds = _kinds(cluster, node_domains)
    hosts = []
    for name, path in node_domains.paths.items():
        cell = cluster.cells.get(name)
        shape = cell.shape if cell is not None else None
        hosts.append(
            Host(
                name=name,
                path=path,
                free=cluster.free.get(name, {}),
                machine=shape.machine if shape is not None else None,
                free_mask=cell.free if cell is not None else 0,
                kind=kinds[shape] if shape is not None else "",
            )
        )
    return hosts


def _parts(
    name: str, members: tuple[GangMember, ...], volumes: volume_fit.Volumes
) -> Iterator[tuple[str, tuple[GangMember, ...]]]:
    """Yield members separately if Kueue has chosen different domains for them (its choice stands, Atoll only chooses
    GPUs), or if their volumes are in different places, as in a StatefulSet."""
    is_by_kueue = any(key in members[0].pod.metadata.annotations for key in kueue_topology.MODES)
    chosen: dict[Hashable, list[GangMember]] = {}
    for member in members:
        selector = tuple(sorted((member.pod.spec.node_selector or {}).items())) if is_by_kueue else ()
        chosen.setdefault((selector, volume_fit.volume_requirements(member.pod, volumes)), []).append(member)
    if len(chosen) <= 1:
        yield name, members
        return
    for number, part in enumerate(chosen.values()):
        yield f"{name}{PART}{number}", tuple(part)


def _kinds(cluster: PlacementSnapshot, node_domains: NodeDomains) -> dict[NodeShape, str]:
    shapes = dict.fromkeys(cluster.cells[name].shape for name in sorted(node_domains.paths) if name in cluster.cells)
    return {shape: f"shape-{number}" for number, shape in enumerate(shapes)}


def _unlike(name: str, members: Sequence[GangMember], requests: Mapping[str, Request]) -> Obstacle | None:
    """Members of one pod set are alike: the search places them as one kind."""
    first = members[0]
    for member in members[1:]:
        same_request = requests.get(member.uid) == requests.get(first.uid)
        same_place = _constraints(member.pod) == _constraints(first.pod)
        if not (same_request and same_place and host_fit.needs(member.pod) == host_fit.needs(first.pod)):
            return Obstacle(
                "Invalid",
                f"pods {first.pod.metadata.name} and {member.pod.metadata.name} of pod set "
                f"{name.partition(PART)[0]} ask for different "
                "things; give each kind of pod a pod set of its own",
            )
    return None


def _scattered(
    spec: GpuGangSpec, name: str, members: Sequence[GangMember], volumes: volume_fit.Volumes
) -> Obstacle | None:
    """Return an obstacle for slices with volumes: slices need consecutive ranks, members must go to their volumes."""
    named = _named(spec, name)
    wanted = spec.topology_of(named) or spec.topology
    if PART not in name or wanted is None or not wanted.slices or not members:
        return None
    if not volume_fit.volume_requirements(members[0].pod, volumes):
        return None
    return Obstacle(
        "Invalid",
        f"pods of pod set {named.name} have volumes in different places, and slices; remove the slices or the "
        f"volumes: {members[0].pod.metadata.name} is bound by its volume",
    )


def _without_volume(
    members: Sequence[GangMember], cluster: PlacementSnapshot, shared: Collection[str]
) -> Obstacle | None:
    """Return an obstacle for a member whose claim no node could serve now. `shared`: claims of several members."""
    volumes, users = cluster.volumes, {}
    if any(volume_fit.is_for_one_pod(one.pod, volumes) for one in members):
        users = _claim_users(members[0].pod.metadata.namespace, cluster, {one.uid for one in members})
    problems = (
        (one.pod.metadata.name, volume_fit.volume_problem(one.pod, volumes, shared=shared, users=users))
        for one in members
    )
    return next((Obstacle("Invalid", f"pod {name}: {problem}") for name, problem in problems if problem), None)


def _claim_users(namespace: str, cluster: PlacementSnapshot, but: Collection[str]) -> dict[str, str]:
    """Return, by claim of a namespace, a pod on some node that uses it. `but`: uids of pods that are left out."""
    return {
        name: pod.metadata.name
        for found in cluster.pods_on.values()
        for pod in found
        if pod.metadata.namespace == namespace and pod.spec.volumes and pod.metadata.uid not in but
        for name in volume_fit.claim_names(pod)
    }


def _contradicted(spec: GpuGangSpec, name: str, members: Sequence[GangMember]) -> Obstacle | None:
    """Return an obstacle if Kueue's annotations ask for something that the GpuGang does not say: the gang waits."""
    problems = (kueue_topology.contradiction(member.pod, spec, name.partition(PART)[0]) for member in members)
    return next((Obstacle("Invalid", problem) for problem in problems if problem), None)


def _pod_set(
    spec: GpuGangSpec,
    name: str,
    members: Sequence[GangMember],
    request: Request | None,
    cluster: PlacementSnapshot,
    node_domains: NodeDomains,
    kinds: Mapping[NodeShape, str],
    models: Models,
    mates: Sequence[Pod],
    shared: Collection[str],
) -> PodSet:
    named = _named(spec, name)
    wanted = spec.topology_of(named)
    pod = members[0].pod
    nodes = [cluster.nodes[host] for host in node_domains.paths]
    excluded = host_fit.excluded_nodes(
        pod, nodes, cluster.pods_on, volumes=cluster.volumes, namespace_labels=cluster.namespaces, mates=mates
    )
    unlabelled = [name for name in node_domains.paths if not has_spread_labels(pod, cluster.nodes[name])]
    excluded = {**dict.fromkeys(unlabelled, SPREAD), **excluded}
    liked = {node.metadata.name: score for node in nodes if (score := host_fit.preference(pod, node))}
    admitted: dict[str, tuple[int, ...]] = {}
    if request is not None:
        admitted, refused = _admitted(request, kinds, models.get(plain(request)))
        for host in node_domains.paths.keys() - excluded.keys():
            cell = cluster.cells.get(host)
            if cell is None or cell.shape in refused:
                excluded[host] = refused[cell.shape] if cell is not None else NO_REPORT
    return PodSet(
        name=name,
        count=len(members),
        needs=host_fit.needs(pod),
        ask=request.ask if request is not None else None,
        request=topology_request(wanted),
        admitted=admitted,
        excluded=excluded,
        preferences=liked,
        limits=(
            *own_limits(pod, node_domains.levels, cluster.nodes, cluster.pods_on, cluster.volumes),
            *volume_limits(pod, cluster.nodes, cluster.pods_on, cluster.volume_use, shared),
        ),
        group=_group(named, name, pod),
    )


def _admitted(
    request: Request, kinds: Mapping[NodeShape, str], model: str | None
) -> tuple[dict[str, tuple[int, ...]], dict[NodeShape, str]]:
    """Return (positions that the request admits by kind of machine, why other machines are refused)."""
    admitted: dict[str, tuple[int, ...]] = {}
    refused: dict[NodeShape, str] = {}
    for shape, kind in kinds.items():
        groups = device_groups(shape, request)
        if isinstance(groups, Rejection):
            refused[shape] = groups.reason
        else:
            admitted[kind] = tuple(group.mask for group in groups if model is None or group.model == model)
            if not admitted[kind]:
                refused[shape] = OTHER_MODEL
    return admitted, refused


def _group(named: GangPodSet, name: str, pod: Pod) -> str:
    """Return a pod set's group: a leader with its workers, or parts of one pod set; none for parts placed by Kueue."""
    if PART in name and kueue_topology.is_placed_by_kueue(pod):
        return ""
    return named.group or (name.partition(PART)[0] if PART in name else "")


def _enough(spec: GpuGangSpec, name: str, members: Sequence[GangMember], done: Mapping[str, int] | None) -> int:
    if done is None or PART in name:
        return len(members)
    return max(0, min(len(members), minimum_of(spec, name) - done.get(name, 0)))


def _constraints(pod: Pod) -> tuple[object, ...]:
    strict = tuple(strict_constraints(pod))
    return pod.spec.node_selector, pod.spec.tolerations, pod.spec.affinity, strict, host_fit.host_ports(pod)


def _apart(name: str, templates: Mapping[str, Pod]) -> frozenset[str]:
    """Return the pod sets whose members may not share a host with those of one."""
    own = templates[name]
    return frozenset(
        other
        for other, pod in templates.items()
        if other != name and (pod_fit.are_apart(own, pod) or host_fit.ports_clash(own, (pod,)))
    )
