"""Memory of succeeded members, which still count after their objects are deleted.

Updates the gang status's memory from the existing members. Each success is counted once, by uid; the uids of counted
members are kept only while their objects exist. Bounded: members without room are counted from their objects only, and
remembered as soon as others are gone.
"""

from collections.abc import Collection, Iterable, Sequence

from atoll.api.gangs import PRESENT_MAX, SUCCEEDED_MAX, SucceededMembers
from atoll.cluster.gangs.membership import GangMember, MemberStage, owner_uid


def known_uids(succeeded: Iterable[SucceededMembers]) -> frozenset[str]:
    """Return the uids of counted members whose objects still existed."""
    return frozenset(uid for entry in succeeded for uid in entry.present)


def of_owners(succeeded: Iterable[SucceededMembers], owners: Collection[str]) -> tuple[SucceededMembers, ...]:
    """Return the succeeded members of these owners, without bare pods."""
    return tuple(entry for entry in succeeded if entry.owner and entry.owner in owners)


def remember(
    succeeded: Sequence[SucceededMembers], members: Sequence[GangMember], *, is_admitted: bool
) -> tuple[SucceededMembers, ...]:
    """Return the memory updated from the members. While the gang is not admitted, succeeded bare pods do not count for
    a later admission. The oldest are remembered first, because they are deleted first."""
    there = {member.uid for member in members}
    known = known_uids(succeeded)
    counts = {(entry.pod_set, entry.owner): entry.count for entry in succeeded}
    present = {(entry.pod_set, entry.owner): [uid for uid in entry.present if uid in there] for entry in succeeded}
    room = PRESENT_MAX - sum(map(len, present.values()))
    new = [
        member
        for member in members
        if member.stage is MemberStage.SUCCEEDED
        and member.uid not in known
        and member.pod_set
        and (is_admitted or owner_uid(member))
    ]
    new.sort(key=lambda member: (member.pod.metadata.creation_timestamp or "", member.uid))
    for member in new[: max(0, room)]:
        key = (member.pod_set, owner_uid(member))
        if key not in counts and len(counts) >= SUCCEEDED_MAX:
            continue
        counts[key] = counts.get(key, 0) + 1
        present.setdefault(key, []).append(member.uid)
    return tuple(
        SucceededMembers(pod_set=pod_set, owner=owner, count=count, present=tuple(present[pod_set, owner]))
        for (pod_set, owner), count in counts.items()
    )
