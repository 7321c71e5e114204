"""Whether a gang has its quorum, and whether its members are ready. Counting only, no time.

Ready are members that are ready or have succeeded; failed and deleted ones never count. A succeeded member keeps
counting while its successor starts, so that the condition does not flap.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.api.gangs import GpuGangSpec
from atoll.cluster.gangs.membership import COUNTING, STARTED, GangMember, MemberStage

PRESENT = frozenset({MemberStage.GATED, MemberStage.SUCCEEDED})
READY = frozenset({MemberStage.READY, MemberStage.SUCCEEDED})


@dataclass(frozen=True, slots=True)
class QuorumCount:
    """How many of the members that are needed are there. `short`: pod sets below their own minimum, and by how many."""

    count: int
    needed: int
    short: tuple[tuple[str, int], ...]

    @property
    def is_enough(self) -> bool:
        """Whether the gang as a whole and each of its pod sets have enough."""
        return self.count >= self.needed and not self.short

    def __str__(self) -> str:
        sets = "".join(f"; {count} more in pod set {name}" for name, count in self.short)
        return f"{self.count} of {self.needed} members{sets}"


def count_quorum(spec: GpuGangSpec, members: Iterable[GangMember], stages: frozenset[MemberStage]) -> QuorumCount:
    """Count the members in one of the stages. No pod set counts for more than its count: excess pods help nobody."""
    found = Counter(member.pod_set for member in members if member.stage in stages)
    counted = {pod_set.name: min(found[pod_set.name], pod_set.count) for pod_set in spec.pod_sets}
    short = tuple(
        (pod_set.name, least - counted[pod_set.name])
        for pod_set in spec.pod_sets
        if counted[pod_set.name] < (least := minimum_of(spec, pod_set.name))
    )
    return QuorumCount(sum(counted.values()), spec.quorum, short)


def minimum_of(spec: GpuGangSpec, name: str) -> int:
    """Return how many members of a pod set are needed: minCount; without it all, or with minMember none in particular.

    A gang of one pod set needs as many of it as of itself.
    """
    pod_set = next(pod_set for pod_set in spec.pod_sets if pod_set.name == name)
    if len(spec.pod_sets) == 1:
        return spec.quorum
    if pod_set.min_count is not None:
        return pod_set.min_count
    return 0 if spec.min_member is not None else pod_set.count


def quorum(spec: GpuGangSpec, members: Sequence[GangMember]) -> QuorumCount:
    """Count the members that can be placed now; those that ended well count, if their owner still makes members.

    A Job that was stopped half way comes back with the pods that are left to do.
    """
    owners = {owner for member in members if member.stage is MemberStage.GATED and (owner := owner_uid(member))}
    present = [
        member for member in members if member.stage is not MemberStage.SUCCEEDED or owner_uid(member) in owners
    ]  # fmt: skip
    return count_quorum(spec, present, PRESENT)


def readiness(spec: GpuGangSpec, members: Iterable[GangMember]) -> QuorumCount:
    """Count the members that are ready or have succeeded."""
    return count_quorum(spec, members, READY)


def placed(spec: GpuGangSpec, members: Iterable[GangMember]) -> QuorumCount:
    """Count the members that have a place and have not failed, ready or not, or have succeeded."""
    return count_quorum(spec, members, COUNTING)


def owner_uid(member: GangMember) -> str:
    """Return the uid of the member's controller, an empty text for a bare pod."""
    return next((owner.uid for owner in member.pod.metadata.owner_references if owner.controller), "")


def placeable(
    spec: GpuGangSpec, members: Iterable[GangMember]
) -> tuple[tuple[GangMember, ...], tuple[GangMember, ...]]:
    """Return (those to place, excess): gated members without GPUs, as many per pod set as its count has room for."""
    ordered = list(members)
    live = Counter(m.pod_set for m in ordered if m.stage in STARTED or (m.stage is MemberStage.GATED and m.holds))
    room = {pod_set.name: pod_set.count - live[pod_set.name] for pod_set in spec.pod_sets}
    chosen, excess = [], []
    for member in ordered:
        if member.stage is not MemberStage.GATED or member.holds or not member.pod_set:
            continue
        if room[member.pod_set] > 0:
            room[member.pod_set] -= 1
            chosen.append(member)
        else:
            excess.append(member)
    return tuple(chosen), tuple(excess)
