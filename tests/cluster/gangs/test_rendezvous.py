"""Ranks, addresses and their order for members of gangs that ask for them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api import names
from atoll.api.gangs import GpuGang
from atoll.cluster.gangs.membership import GangMember, MemberStage
from atoll.cluster.gangs.rendezvous import HOSTS_BYTES_MAX, address, rendezvous_annotations
from tests.builders import make_pod
from tests.cluster.gangs.builders import make_gang, member

GATED, READY, FAILED = MemberStage.GATED, MemberStage.READY, MemberStage.FAILED
LED = make_gang(podSets=[{"name": "leader", "count": 1}, {"name": "workers", "count": 3}])


def asking(
    number: int, *, pod_set: str = "workers", name: str = "", stage: MemberStage = GATED, **spec: Any
) -> GangMember:
    """Return a member that asks for its rendezvous; `number` is its rank in the pod set."""
    made = member(number, stage, pod_set=pod_set, **spec)
    name = name or f"{pod_set}-{number}"
    annotations = {**made.pod.metadata.annotations, names.RENDEZVOUS: "true"}
    metadata = msgspec.structs.replace(made.pod.metadata, name=name, uid=f"uid-of-{name}", annotations=annotations)
    return replace(made, pod=msgspec.structs.replace(made.pod, metadata=metadata))


def started(gang: GpuGang, found: Iterable[GangMember]) -> list[GangMember]:
    """Return the members as they are once all of them are ungated."""
    members = list(found)
    given = rendezvous_annotations(gang.spec, members, {one.uid for one in members})
    return [annotated(one, given.get(one.uid, {})) for one in members]


def annotated(one: GangMember, annotations: dict[str, str], stage: MemberStage = READY) -> GangMember:
    """Return the member at a stage, with further annotations."""
    metadata = one.pod.metadata
    metadata = msgspec.structs.replace(metadata, annotations={**metadata.annotations, **annotations})
    return replace(one, pod=msgspec.structs.replace(one.pod, metadata=metadata), stage=stage)


def read(one: GangMember, key: str) -> str:
    """Return an annotation of the member."""
    return one.pod.metadata.annotations.get(key, "")


def test_ranks_follow_the_pod_sets_and_the_members_ranks() -> None:
    """The leader's set is first in the gang: rank 0. Everybody knows how many there are, and all addresses in order."""
    found = started(LED, [asking(1), asking(0, pod_set="leader"), asking(2), asking(0)])

    assert {one.pod.metadata.name: read(one, names.RANK) for one in found} == {
        "leader-0": "0",
        "workers-0": "1",
        "workers-1": "2",
        "workers-2": "3",
    }
    assert {read(one, names.WORLD_SIZE) for one in found} == {"4"}
    assert {read(one, names.LEADER) for one in found} == {"leader-0"}
    again = rendezvous_annotations(LED.spec, found, {one.uid for one in found})
    assert {one[names.HOSTS] for one in again.values()} == {"leader-0,workers-0,workers-1,workers-2"}


@pytest.mark.parametrize(
    ("rank", "size"), [("7", "8"), ("999999", "1000000"), ("1000000", "1"), ("-1", "1"), ("first", "1")]
)
def test_a_rank_that_no_gang_can_have_counts_for_nothing(rank: str, size: str) -> None:
    """A pod's annotations are read as they are, and anybody may have changed them."""
    running, coming = annotated(asking(0), {names.RANK: rank}), asking(1)
    (given,) = rendezvous_annotations(LED.spec, [running, coming], {coming.uid}).values()

    assert given[names.WORLD_SIZE] == size


def test_who_does_not_ask_has_no_rank() -> None:
    """A launcher that only starts the others is not one of them."""
    launcher = member(0, GATED, pod_set="leader")
    found = started(LED, [launcher, *(asking(number) for number in range(3))])

    assert names.RANK not in found[0].pod.metadata.annotations
    assert [read(one, names.RANK) for one in found[1:]] == ["0", "1", "2"]
    assert {read(one, names.WORLD_SIZE) for one in found[1:]} == {"3"}


def test_an_address_has_the_subdomain_of_pods_that_have_one() -> None:
    """A host name alone is resolved by nobody."""
    named = make_pod("p", hostname="set-0", subdomain="set")

    assert address(named) == "set-0.set"
    assert address(make_pod("p", hostname="set-0")) == "p"


def test_a_successor_takes_the_rank_of_whom_it_succeeds() -> None:
    """Two are lost, and one comes, of the later index: it gets its own rank, the other stays free for its successor."""
    found = started(LED, [asking(0, pod_set="leader"), *(asking(number) for number in range(3))])
    lost = [replace(one, stage=FAILED) if read(one, names.RANK) in {"2", "3"} else one for one in found]
    successor = asking(2, name="workers-2-again")
    (given,) = rendezvous_annotations(LED.spec, [*lost, successor], {successor.uid}).values()

    assert (given[names.RANK], given[names.WORLD_SIZE], given[names.LEADER]) == ("3", "4", "leader-0")
    assert given[names.HOSTS] == "leader-0,workers-0,workers-2-again"


def test_half_an_admission_is_continued_with_the_same_ranks() -> None:
    """The leader of the controllers died between two gates: its successor numbers the rest as it would have."""
    members = [asking(number) for number in range(3)]
    whole = rendezvous_annotations(LED.spec, members, {one.uid for one in members})
    half = [annotated(members[1], whole[members[1].uid]), members[0], members[2]]
    rest = rendezvous_annotations(LED.spec, half, {members[0].uid, members[2].uid})

    assert {uid: one[names.RANK] for uid, one in rest.items()} == {members[0].uid: "0", members[2].uid: "2"}


def test_a_list_of_addresses_that_is_too_long_is_left_out() -> None:
    """Every member carries it, and a pod may have 256 KiB of annotations; ranks and size are there all the same."""
    gang = make_gang(2000)
    found = [asking(number, name=f"a-rather-long-name-{number}") for number in range(2000)]
    first = rendezvous_annotations(gang.spec, found, {one.uid for one in found})[found[0].uid]

    assert (first[names.HOSTS], first[names.WORLD_SIZE]) == ("", "2000")
    assert 2000 * len("a-rather-long-name-0") > HOSTS_BYTES_MAX


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 14), st.booleans()), max_size=12),
    st.booleans(),
)
def test_ranks_are_unique_and_stay(counts: list[int], losses: list[tuple[int, bool]], has_index: bool) -> None:
    """Through losses and successors of any order no two living members have one rank, none changes, all are below the
    size, and successors with an index of their own get the rank of whom they succeed."""
    sets = [{"name": f"s{index}", "count": count} for index, count in enumerate(counts)]
    gang = make_gang(podSets=sets)
    living = started(gang, [asking(n, pod_set=f"s{i}") for i, count in enumerate(counts) for n in range(count)])
    size = len(living)
    for step, (chosen, both) in enumerate(losses):
        gone = [living.pop(chosen % len(living)) for _ in range(2 if both and len(living) > 1 else 1)]
        come = [
            asking(one.rank if has_index else 0, pod_set=one.pod_set, name=f"again-{step}-{n}")
            for n, one in enumerate(gone)
        ]
        given = rendezvous_annotations(gang.spec, [*living, *come], {one.uid for one in come})
        before = {one.uid: read(one, names.RANK) for one in gone}
        living += [annotated(one, given[one.uid]) for one in come]
        ranks = sorted(int(read(one, names.RANK)) for one in living)
        assert ranks == list(range(size))
        if has_index:
            assert [read(one, names.RANK) for one in living[-len(gone) :]] == list(before.values())
