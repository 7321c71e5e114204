"""Properties of every answer: complete, within capacity, repeatable, and no worse for a smaller request."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.gangs import ReferenceCluster, distance, faults
from tests.topology.gangs.worlds import LEVELS, counts_of, gangs, pod_sets, snapshot_of, worlds
from topology.gangs.model import Gang, Host, Mode, Order, Placement, PlacementRefusal, PodSet, Slice, TopologyRequest
from topology.gangs.search import place
from topology.gangs.selection import DomainOffer, fewest
from topology.gangs.snapshot import snapshot

HOSTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from((0, 1, 2, 3, 4, 6, 9))), min_size=2, max_size=14
)


@settings(deadline=None, max_examples=100)
@given(world=worlds(), data=st.data())
def test_several_pod_sets_are_all_placed_or_none(world: ReferenceCluster, data: st.DataObject) -> None:
    """Of two pod sets with requests of their own and one for the whole, all members have right places, or none has."""
    first = data.draw(pod_sets(world, name="first", count_max=3))
    second = data.draw(pod_sets(world, name="second", count_max=3))
    whole = data.draw(st.sampled_from((TopologyRequest(), TopologyRequest(Mode.REQUIRED, "block"))))
    gang = Gang((first, replace(second, apart=frozenset(data.draw(st.sampled_from(((), ("first",))))))), whole)
    answer = place(gang, snapshot_of(world))

    if isinstance(answer, Placement):
        assert faults(gang, world, counts_of(answer)) == []


@settings(deadline=None, max_examples=100)
@given(world=worlds(), data=st.data())
def test_same_question_same_answer_in_whatever_order_hosts_come(world: ReferenceCluster, data: st.DataObject) -> None:
    """The answer depends on nothing but the question."""
    gang = data.draw(gangs(world))
    shuffled = ReferenceCluster(world.levels, tuple(data.draw(st.permutations(world.hosts))))

    assert place(gang, snapshot_of(shuffled)) == place(gang, snapshot_of(world))


@settings(deadline=None, max_examples=100)
@given(world=worlds(), data=st.data())
def test_asking_less_is_never_refused_more(world: ReferenceCluster, data: st.DataObject) -> None:
    """Who finds places for a required level finds them for the next higher one, for a preferred one, for fewer."""
    count = data.draw(st.integers(1, 5))
    pod_set = replace(data.draw(pod_sets(world)), count=count)
    for lower, higher in itertools.pairwise(("host", "rack", "block")):
        strict = Gang((replace(pod_set, request=TopologyRequest(Mode.REQUIRED, lower)),))
        if isinstance(place(strict, snapshot_of(world)), Placement):
            relaxed = [
                replace(pod_set, request=TopologyRequest(Mode.REQUIRED, higher)),
                replace(pod_set, request=TopologyRequest(Mode.PREFERRED, lower)),
                replace(pod_set, request=TopologyRequest()),
                replace(pod_set, request=TopologyRequest(Mode.REQUIRED, lower), count=count - 1),
            ]
            for other in relaxed:
                assert isinstance(place(Gang((other,)), snapshot_of(world)), Placement)


@settings(deadline=None, max_examples=150)
@given(rows=HOSTS, data=st.data())
def test_never_more_domains_of_the_requested_level_than_in_kueues_order(
    rows: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Both orders find places alike, and our own uses no more domains of the requested level."""
    hosts = tuple(
        Host(f"h{number:02}", (f"b{block}", f"r{rack}"), {"cpu": cpu}) for number, (block, rack, cpu) in enumerate(rows)
    )
    world, names = ReferenceCluster(LEVELS, hosts), ("block", "rack", "host")
    level = data.draw(st.sampled_from(names))
    mode = data.draw(st.sampled_from((Mode.REQUIRED, Mode.PREFERRED)))
    size = data.draw(st.sampled_from((1, 2, 3)))
    at = data.draw(st.sampled_from(names[names.index(level) :]))
    slices = (Slice(at, size),) if size > 1 else ()
    workers = PodSet(
        "workers",
        size * data.draw(st.integers(1, 8)),
        {"cpu": 1},
        request=TopologyRequest(mode, level, slices),
        group="g",
    )
    leader = PodSet("leader", 1, {"cpu": data.draw(st.integers(0, 3))}, group="g")
    gang = Gang((workers, leader) if workers.count > 1 and data.draw(st.booleans()) else (workers,))
    ours, kueues = place(gang, snapshot_of(world)), place(gang, snapshot_of(world), order=Order.KUEUE)

    assert isinstance(ours, PlacementRefusal) == isinstance(kueues, PlacementRefusal)
    if isinstance(ours, Placement) and isinstance(kueues, Placement):
        assert faults(gang, world, counts_of(kueues)) == []
        assert distance(gang, world, counts_of(ours)) <= distance(gang, world, counts_of(kueues))


@settings(deadline=None, max_examples=200)
@given(
    held=st.lists(st.integers(0, 6), min_size=1, max_size=7),
    need=st.integers(1, 20),
)
def test_the_fewest_siblings_with_the_least_surplus_are_taken(held: list[int], need: int) -> None:
    """Of all sets of siblings that hold the need, none is smaller, and none as small leaves less unused."""
    offers = [DomainOffer(number, units, units, False, (number,)) for number, units in enumerate(held)]
    found = fewest(offers, need, leader=False)
    right = [
        (size, sum(chosen) - need)
        for size in range(1, len(held) + 1)
        for chosen in itertools.combinations(held, size)
        if sum(chosen) >= need
    ]

    if found is None:
        assert right == []
    else:
        assert (len(found.picks), found.surplus) == min(right)
        assert sum(pick.units for pick in found.picks) == need


@settings(deadline=None, max_examples=100)
@given(rows=HOSTS, count=st.integers(1, 12))
def test_what_a_placement_takes_is_gone_for_the_next(rows: list[tuple[int, int, int]], count: int) -> None:
    """Gangs that are placed one after the other, each on what the former left, never use more than there is."""
    hosts = [
        Host(f"h{number:02}", (f"b{block}", f"r{rack}"), {"cpu": cpu}) for number, (block, rack, cpu) in enumerate(rows)
    ]
    state = snapshot(LEVELS, hosts)
    gang = Gang((PodSet("workers", count, {"cpu": 1}, request=TopologyRequest(Mode.REQUIRED, "rack")),))
    total = 0
    while isinstance(answer := place(gang, state), Placement):
        total += count
        state = state.take(answer, gang)

    assert total <= sum(cpu for _, _, cpu in rows)
    assert all(host.free["cpu"] >= 0 for host in state.hosts)
