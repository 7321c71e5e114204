"""What members of a gang need to find each other: rank, number of ranks, and addresses in the order of ranks. Pure.

Members that ask for it share one numbering: pod sets in the order of the GpuGang, within each the members' ranks, which
follow the topology. A rank is written once, on the member, and stays its own; a successor gets the rank that is free.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from atoll.api import names
from atoll.api.gangs import GpuGangSpec
from atoll.cluster.gangs.membership import OVER, GangMember
from atoll.cluster.objects import Pod

HOSTS_BYTES_MAX: Final = 16_384
"""Longer lists of addresses are left out: every member would carry one, within Kubernetes' 256 KiB of annotations."""


def asks_for_rendezvous(pod: Pod) -> bool:
    """Tell whether the pod asks for rank and addresses."""
    return pod.metadata.annotations.get(names.RENDEZVOUS) == "true"


def rendezvous_annotations(
    spec: GpuGangSpec, members: Sequence[GangMember], coming: Collection[str]
) -> Mapping[str, dict[str, str]]:
    """Return the annotations of the members with uids in `coming` that ask for them, by uid.

    `members` are those of the gang; of the others, those that are ungated and not over have their ranks already.
    """
    asking = [member for member in members if asks_for_rendezvous(member.pod)]
    order = {pod_set.name: index for index, pod_set in enumerate(spec.pod_sets)}
    new = sorted(
        (member for member in asking if member.uid in coming),
        key=lambda member: (order.get(member.pod_set, len(order)), member.rank, member.pod.metadata.name),
    )
    known = {
        rank: member
        for member in asking
        if member.uid not in coming and member.stage not in OVER and (rank := _number(member, names.RANK)) is not None
    }
    size = max((_number(member, names.WORLD_SIZE) or 0 for member in known.values()), default=0)
    by_rank = {**known, **_free_ranks(spec, new, known, size)}
    size = max(size, len(by_rank), max(by_rank, default=-1) + 1)
    leader = address(by_rank[0].pod) if 0 in by_rank else ""
    hosts = ",".join(address(by_rank[rank].pod) for rank in sorted(by_rank))
    shared = {
        names.WORLD_SIZE: str(size),
        names.LEADER: leader,
        names.HOSTS: hosts if len(hosts) <= HOSTS_BYTES_MAX else "",
    }
    return {
        member.uid: {names.RANK: str(rank), **shared} for rank, member in by_rank.items() if member.uid in coming
    }  # fmt: skip


def _free_ranks(
    spec: GpuGangSpec, new: Sequence[GangMember], known: Collection[int], size: int
) -> dict[int, GangMember]:
    """Return a rank for each new member: of a gang that starts, in order; of one that runs, the rank of its index if
    that is free, else the lowest free one."""
    if not known:
        return dict(enumerate(new))
    starts: dict[str, int] = {}
    for pod_set in spec.pod_sets:
        starts[pod_set.name] = sum(one.count for one in spec.pod_sets[: len(starts)])
    given: dict[int, GangMember] = {}
    left = []
    is_whole = size == sum(pod_set.count for pod_set in spec.pod_sets)
    for member in new:
        rank = starts.get(member.pod_set, 0) + member.rank
        if is_whole and rank < size and rank not in known and rank not in given:
            given[rank] = member
        else:
            left.append(member)
    free = (rank for rank in range(len(known) + len(new)) if rank not in known and rank not in given)
    return {**given, **dict(zip(free, left, strict=False))}


def address(pod: Pod) -> str:
    """Return the name by which other pods reach the pod: with its subdomain, if it has a host name and a subdomain."""
    spec = pod.spec
    return f"{spec.hostname}.{spec.subdomain}" if spec.hostname and spec.subdomain else pod.metadata.name


def _number(member: GangMember, key: str) -> int | None:
    text = member.pod.metadata.annotations.get(key, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else None
