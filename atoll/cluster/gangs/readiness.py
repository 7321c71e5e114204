"""Whether a gang has its quorum, and whether its members are ready. Counting only, no time:
`lifecycle` decides what follows, and `readiness_policy` has the times.

Ready are members that are ready or have succeeded; failed and deleted ones never count. A succeeded member keeps
counting while its successor starts, so that the condition does not flap.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.api.gangs import GpuGangSpec, SucceededMembers
from atoll.cluster.gangs.membership import COUNTING, STARTED, GangMember, MemberStage, owner_uid
from atoll.cluster.gangs.succeeded import known_uids, of_owners

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


def count_quorum(
    spec: GpuGangSpec,
    members: Iterable[GangMember],
    stages: frozenset[MemberStage],
    succeeded: Sequence[SucceededMembers] = (),
) -> QuorumCount:
    """Count the members in one of the stages, and those that have succeeded according to the status. A pod set counts
    at most its own count: excess pods do not help."""
    found = counted(members, stages, succeeded)
    counts = {pod_set.name: min(found[pod_set.name], pod_set.count) for pod_set in spec.pod_sets}
    short = tuple(
        (pod_set.name, least - counts[pod_set.name])
        for pod_set in spec.pod_sets
        if counts[pod_set.name] < (least := minimum_of(spec, pod_set.name))
    )
    return QuorumCount(sum(counts.values()), spec.quorum, short)


def counted(
    members: Iterable[GangMember], stages: frozenset[MemberStage], succeeded: Sequence[SucceededMembers] = ()
) -> Counter[str]:
    """Return, by pod set, how many members are in one of the stages or have succeeded by the status, each once."""
    known = known_uids(succeeded)
    found = Counter(member.pod_set for member in members if member.stage in stages and member.uid not in known)
    for entry in succeeded:
        found[entry.pod_set] += entry.count
    return found


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


def quorum(spec: GpuGangSpec, members: Sequence[GangMember], succeeded: Sequence[SucceededMembers] = ()) -> QuorumCount:
    """Count the members that can be placed now; those that ended well count, if their owner still makes members.

    A Job that was stopped half way comes back with the pods that are left to do.
    """
    owners = {owner for member in members if member.stage is MemberStage.GATED and (owner := owner_uid(member))}
    present = [
        member for member in members if member.stage is not MemberStage.SUCCEEDED or owner_uid(member) in owners
    ]  # fmt: skip
    return count_quorum(spec, present, PRESENT, of_owners(succeeded, owners))


def readiness(
    spec: GpuGangSpec, members: Iterable[GangMember], succeeded: Sequence[SucceededMembers] = ()
) -> QuorumCount:
    """Count the members that are ready or have succeeded."""
    return count_quorum(spec, members, READY, succeeded)


def have_all_succeeded(
    spec: GpuGangSpec, members: Iterable[GangMember], succeeded: Sequence[SucceededMembers] = ()
) -> bool:
    """Tell whether as many members of every pod set have succeeded as it counts."""
    found = counted(members, frozenset({MemberStage.SUCCEEDED}), succeeded)
    return all(found[pod_set.name] >= pod_set.count for pod_set in spec.pod_sets)


def placed(spec: GpuGangSpec, members: Iterable[GangMember], succeeded: Sequence[SucceededMembers] = ()) -> QuorumCount:
    """Count the members that have a place and have not failed, ready or not, or have succeeded."""
    return count_quorum(spec, members, COUNTING, succeeded)


def done_before(
    members: Iterable[GangMember], succeeded: Sequence[SucceededMembers], chosen: Iterable[GangMember]
) -> Counter[str]:
    """Return, by pod set, how many members have succeeded whose owners also own some of the `chosen` members."""
    owners = {owner for member in chosen if (owner := owner_uid(member))}
    ended = (member for member in members if owner_uid(member) in owners)
    return counted(ended, frozenset({MemberStage.SUCCEEDED}), of_owners(succeeded, owners))


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
