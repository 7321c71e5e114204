"""Which GPUs a waiting gang could use, free or not: what it contends for with the gangs behind it.

What it could not use on an empty cluster it does not contend for: machines with too few cards for a member, models of
which there are too few for all members, and domains of a required level that cannot hold them. While a node has not
reported, nobody can tell what is too few.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from atoll.api.gangs import GpuGangSpec, TopologyMode
from atoll.cluster import host_fit
from atoll.cluster.gangs.membership import GangMember
from atoll.cluster.gangs.node_domains import NodeDomains
from atoll.cluster.gangs.readiness import minimum_of
from atoll.cluster.gangs.search_input import PlacementSnapshot, unknown_nodes
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import device_groups, plain


def usable_positions(
    spec: GpuGangSpec,
    chosen: Sequence[GangMember],
    requests: Mapping[str, Request],
    node_domains: NodeDomains,
    cluster: PlacementSnapshot,
) -> dict[str, int]:
    """Return the positions by node that the members could use. `requests`: by uid."""
    found: dict[str, int] = {}
    is_blind = bool(unknown_nodes(chosen, requests, node_domains, cluster))
    by_set: dict[str, list[GangMember]] = defaultdict(list)
    for member in chosen:
        if member.uid in requests:
            by_set[member.pod_set].append(member)
    for pod_set, members in by_set.items():
        request = plain(requests[members[0].uid])
        least = 0 if is_blind else min(len(members), max(1, minimum_of(spec, pod_set)))
        level = _level(spec, pod_set, node_domains)
        for masks in _by_model(members[0].pod, request, cluster).values():
            domains = _by_domain(masks, level, node_domains)
            roomy = (one for one in domains if _held_members(one.values(), request) >= least)
            for name, mask in chain.from_iterable(one.items() for one in roomy):
                found[name] = found.get(name, 0) | mask
    return found


def _held_members(masks: Iterable[int], request: Request) -> int:
    return sum(mask.bit_count() // max(1, request.ask.count) for mask in masks)


def _by_model(pod: Pod, request: Request, cluster: PlacementSnapshot) -> dict[str, dict[str, int]]:
    """Return the positions that one pod could use, by model and node; models that may be mixed count as one."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, cell in cluster.cells.items():
        node = cluster.nodes.get(name)
        groups = device_groups(cell.shape, request)
        if node is None or isinstance(groups, Rejection) or host_fit.node_reason(pod, host_fit.opened(node)):
            continue
        for group in groups:
            masks = found[group.model]
            masks[name] = masks.get(name, 0) | group.mask
    return found


def _level(spec: GpuGangSpec, pod_set: str, node_domains: NodeDomains) -> int | None:
    """Return the position of the narrowest level that all members of a pod set must share; None for none."""
    named = next(one for one in spec.pod_sets if one.name == pod_set)
    levels = [
        node_domains.levels.index(wanted.level)
        for wanted in (spec.topology, spec.topology_of(named))
        if wanted is not None and wanted.mode is TopologyMode.REQUIRED and wanted.level in node_domains.levels
    ]
    return max(levels, default=None)


def _by_domain(masks: Mapping[str, int], level: int | None, node_domains: NodeDomains) -> Iterator[Mapping[str, int]]:
    """Yield the positions domain by domain; nodes outside of the topology are in none."""
    if level is None:
        yield masks
        return
    found: dict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    for name, mask in masks.items():
        if name in node_domains.paths:
            found[node_domains.paths[name][: level + 1]][name] = mask
    yield from found.values()
