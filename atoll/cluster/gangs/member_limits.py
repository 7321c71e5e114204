"""How many members of a pod set one domain or host may take: by what they mean for each other, and by volumes. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from atoll.api.topologies import HOSTNAME
from atoll.cluster import host_fit, pod_fit
from atoll.cluster.objects import Node, Pod
from atoll.cluster.spread import spread_counts
from atoll.cluster.static_volumes import members_by_static_volumes
from atoll.cluster.volume_fit import Volumes
from atoll.cluster.volume_limits import VolumeUse, members_by_volumes
from topology.gangs.model import HOST, Limit


def own_limits(
    pod: Pod,
    levels: Collection[str],
    nodes: Mapping[str, Node],
    pods_on: Mapping[str, Sequence[Pod]],
    volumes: Volumes,
) -> tuple[Limit, ...]:
    """Return how many members one domain may take by their own anti-affinity and host ports, and one host by a spread
    that kube-scheduler judges by the host alone, and by its disks. What other labels mean is seen when a plan is
    rehearsed."""
    labels = [level_of(label) for label in pod_fit.own_limits(pod)]
    if host_fit.host_ports(pod):
        labels.append(HOST)
    alone = tuple(Limit(label, 1) for label in dict.fromkeys(labels) if label == HOST or label in levels)
    spread = spread_counts(pod, tuple(nodes.values()), pods_on)
    hosts = [Limit(HOST, one.constraint.max_skew, one.present) for one in spread if one.is_by_host and one.means(pod)]
    return (*alone, *hosts, *_host_limit(members_by_static_volumes(pod, nodes, volumes)))


def volume_limits(
    pod: Pod,
    nodes: Collection[str],
    pods_on: Mapping[str, Sequence[Pod]],
    use: VolumeUse,
    shared: Collection[str],
) -> Iterator[Limit]:
    """Yield how many members one host takes by the number of volumes that a driver allows there. `shared`: claims that
    several members use."""
    yield from _host_limit(members_by_volumes(pod, nodes, pods_on, use, shared))


def _host_limit(room: Mapping[str, int] | None) -> Iterator[Limit]:
    """Yield the limit of hosts that take so many members each; none for None."""
    if room is not None:
        most = max(room.values(), default=0)
        yield Limit(HOST, most, {name: most - left for name, left in room.items()})


def level_of(label: str) -> str:
    """Return the level of the search that a node label stands for, whether or not the topology has it."""
    return HOST if label == HOSTNAME else label
