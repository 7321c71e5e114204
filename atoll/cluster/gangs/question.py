"""One gang as the search is asked about it: hosts with what is free, pod sets with what a member needs.

In: the members to place with their requests, the site, nodes, cells and pods. Out: a `Question` for topology.gangs, or
an Obstacle that names what contradicts itself. What kube-scheduler would refuse is taken out before (selectors,
taints, cordons, room for pods, cpu, memory). `emptied` asks the same of a cluster without any pod: what does not fit
there never fits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.api.gangs import GpuGangSpec
from atoll.api.gangs import TopologyRequest as WantedTopology
from atoll.cluster.gangs.host_room import free_of, needs_of
from atoll.cluster.gangs.lifecycle import Obstacle
from atoll.cluster.gangs.membership import Member
from atoll.cluster.gangs.readiness import least_of
from atoll.cluster.gangs.sites import Site
from atoll.cluster.machines import Cell, NodeDevices, Shape
from atoll.cluster.objects import Node, Pod
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import position_masks
from atoll.cluster.wakeups import NOT_ADMITTED, admits
from topology.gangs.model import Gang, Host, Mode, PodSet, Slice, TopologyRequest
from topology.gangs.snapshot import Snapshot, snapshot

NO_REPORT = "no fresh GPU report"


@dataclass(frozen=True, slots=True)
class Landscape:
    """The cluster at one moment. `cells`: what nodes with fresh reports can give out now; `pods_on`: pods by node,
    those that are about to start there included."""

    nodes: Mapping[str, Node]
    devices: Mapping[str, NodeDevices]
    cells: Mapping[str, Cell]
    pods_on: Mapping[str, Sequence[Pod]]


@dataclass(frozen=True, slots=True)
class Question:
    """What the search is asked. `asked`: the members of each pod set by rank, to read the answer by."""

    gang: Gang
    snapshot: Snapshot
    asked: Mapping[str, tuple[Member, ...]] = field(default_factory=dict)


def ask(
    spec: GpuGangSpec,
    chosen: Sequence[Member],
    requests: Mapping[str, Request],
    site: Site,
    landscape: Landscape,
    *,
    done: Mapping[str, int] | None = None,
    emptied: bool = False,
) -> Question | Obstacle:
    """Return the question for the members `chosen`; `requests` are their own, by uid. `done`: successes per pod set."""
    asked = {
        pod_set.name: found
        for pod_set in spec.pod_sets
        if (found := tuple(member for member in chosen if member.pod_set == pod_set.name))
    }
    for name, members in asked.items():
        problem = _unlike(name, members, requests)
        if problem is not None:
            return problem
    hosts = hosts_of(site, landscape, emptied=emptied)
    kinds = _kinds(landscape, site)
    finished = done or {}
    pod_sets = tuple(
        _pod_set(spec, name, members, requests[members[0].uid], landscape, site, kinds, finished.get(name, 0))
        for name, members in asked.items()
    )
    return Question(Gang(pod_sets, topology_request(spec.topology)), snapshot(site.levels, hosts), asked)


def topology_request(wanted: WantedTopology | None) -> TopologyRequest:
    """Return a topology request in the words of the search."""
    if wanted is None:
        return TopologyRequest()
    return TopologyRequest(
        mode=Mode(wanted.mode.value),
        level=wanted.level or "",
        slices=tuple(Slice(level=part.level, size=part.size) for part in wanted.slices),
    )


def hosts_of(site: Site, landscape: Landscape, *, emptied: bool = False) -> Iterable[Host]:
    """Return the hosts of a site."""
    kinds = _kinds(landscape, site)
    hosts = []
    for name, path in site.paths.items():
        node = landscape.nodes[name]
        cell = landscape.cells.get(name)
        devices = landscape.devices.get(name)
        mask = cell.free if cell is not None else 0
        if emptied and cell is not None and devices is not None:
            mask = devices.usable
        shape = cell.shape if cell is not None else None
        hosts.append(
            Host(
                name=name,
                path=path,
                free=free_of(node, () if emptied else landscape.pods_on.get(name, ())),
                machine=shape.machine if shape is not None else None,
                free_mask=mask,
                kind=kinds[shape] if shape is not None else "",
            )
        )
    return hosts


def _kinds(landscape: Landscape, site: Site) -> dict[Shape, str]:
    shapes = dict.fromkeys(landscape.cells[name].shape for name in sorted(site.paths) if name in landscape.cells)
    return {shape: f"shape-{number}" for number, shape in enumerate(shapes)}


def _unlike(name: str, members: Sequence[Member], requests: Mapping[str, Request]) -> Obstacle | None:
    """Members of one pod set are alike: the search places them as one kind."""
    first = members[0]
    for member in members[1:]:
        same_request = requests[member.uid] == requests[first.uid]
        same_place = (member.pod.spec.node_selector, member.pod.spec.tolerations) == (
            first.pod.spec.node_selector,
            first.pod.spec.tolerations,
        )
        if not (same_request and same_place and needs_of(member.pod) == needs_of(first.pod)):
            return Obstacle(
                "Invalid",
                f"pods {first.pod.metadata.name} and {member.pod.metadata.name} of pod set {name} ask for different "
                "things; give each kind of pod a pod set of its own",
            )
    return None


def _pod_set(
    spec: GpuGangSpec,
    name: str,
    members: Sequence[Member],
    request: Request,
    landscape: Landscape,
    site: Site,
    kinds: Mapping[Shape, str],
    finished: int,
) -> PodSet:
    wanted = next(pod_set.topology for pod_set in spec.pod_sets if pod_set.name == name)
    pod = members[0].pod
    excluded: dict[str, str] = {}
    for host in site.paths:
        if not admits(landscape.nodes[host], pod):
            excluded[host] = NOT_ADMITTED
        elif host not in landscape.cells:
            excluded[host] = NO_REPORT
    admitted: dict[str, tuple[int, ...]] = {}
    refused: dict[Shape, str] = {}
    for shape, kind in kinds.items():
        masks = position_masks(shape, request)
        if isinstance(masks, Rejection):
            refused[shape] = masks.reason
        else:
            admitted[kind] = masks
    for host in site.paths:
        cell = landscape.cells.get(host)
        if cell is not None and cell.shape in refused and host not in excluded:
            excluded[host] = refused[cell.shape]
    return PodSet(
        name=name,
        count=len(members),
        needs=needs_of(pod),
        ask=request.ask,
        request=topology_request(wanted),
        min_count=max(0, min(len(members), least_of(spec, name) - finished)),
        admitted=admitted,
        excluded=excluded,
    )
