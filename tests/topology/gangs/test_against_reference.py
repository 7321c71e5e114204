"""The gang search against brute force: it finds valid placements if there are any, and none is nearer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.gangs import ReferenceCluster, distance, faults, holds, nearest, workers_of
from tests.topology.gangs.worlds import counts_of, gangs, lean_gangs, lean_worlds, snapshot_of, worlds
from topology.gangs.model import Gang, Mode, Placement, PlacementRefusal
from topology.gangs.search import place


@settings(deadline=None, max_examples=120)
@given(world=worlds(), data=st.data())
def test_the_search_finds_places_exactly_when_there_are_some(world: ReferenceCluster, data: st.DataObject) -> None:
    """Found exactly when brute force finds a placement, and what is found breaks nothing."""
    gang = data.draw(gangs(world))
    answer = place(gang, snapshot_of(world))
    oracle = nearest(gang, world)

    if oracle is None:
        assert isinstance(answer, PlacementRefusal)
    else:
        assert isinstance(answer, Placement), answer
        assert faults(gang, world, counts_of(answer)) == []


@settings(deadline=None, max_examples=120)
@given(world=worlds(), data=st.data())
def test_no_placement_is_nearer_or_in_fewer_domains(world: ReferenceCluster, data: st.DataObject) -> None:
    """The level that one domain suffices for is the lowest possible, and the requested level's domains are fewest."""
    gang = data.draw(gangs(world))
    answer = place(gang, snapshot_of(world))
    oracle = nearest(gang, world)

    if oracle is not None and workers_of(gang).request.mode is not Mode.UNCONSTRAINED:
        assert isinstance(answer, Placement)
        assert distance(gang, world, counts_of(answer)) == oracle


@settings(deadline=None, max_examples=120)
@given(world=lean_worlds(), data=st.data())
def test_hosts_without_gpus_are_found_as_near_as_can_be(world: ReferenceCluster, data: st.DataObject) -> None:
    """Racks of every shape, limits at every level, slices and a leader: found, right, and in the fewest domains."""
    gang = data.draw(lean_gangs(world))
    _check(gang, world)


@settings(deadline=None, max_examples=60)
@given(world=worlds(), data=st.data())
def test_device_sets_of_one_host_are_disjoint_and_as_asked(world: ReferenceCluster, data: st.DataObject) -> None:
    """GPUs of all members of a host are free, different, and each set is one that its ask admits."""
    gang = data.draw(gangs(world))
    answer = place(gang, snapshot_of(world))

    if isinstance(answer, Placement):
        taken: dict[str, int] = {}
        for assignment, pod_set in zip(answer.assignments, gang.pod_sets, strict=True):
            for member in assignment.members:
                host = next(one for one in world.hosts if one.name == member.host)
                mask = sum(1 << position for position in member.positions)
                assert len(member.positions) == (pod_set.ask.count if pod_set.ask else 0)
                assert mask & ~host.free_mask == 0
                assert mask & taken.get(host.name, 0) == 0
                taken[host.name] = taken.get(host.name, 0) | mask
                alone = type(host)(host.name, host.path, host.free, host.machine, mask, host.kind)
                assert holds(alone, [pod_set], {pod_set.name: 1})


@pytest.mark.long
@pytest.mark.timeout(900)
@settings(deadline=None, max_examples=2000)
@given(world=worlds(), data=st.data())
def test_many_worlds_agree_with_trying_everything(world: ReferenceCluster, data: st.DataObject) -> None:
    """Found exactly when there is a placement, right, and as near as can be, over thousands of worlds."""
    _check(data.draw(gangs(world)), world)


@pytest.mark.long
@pytest.mark.timeout(900)
@settings(deadline=None, max_examples=1500)
@given(world=lean_worlds(), data=st.data())
def test_many_hosts_without_gpus_agree_with_trying_everything(world: ReferenceCluster, data: st.DataObject) -> None:
    """The same over thousands of shapes of racks."""
    _check(data.draw(lean_gangs(world)), world)


def _check(gang: Gang, world: ReferenceCluster) -> None:
    answer = place(gang, snapshot_of(world))
    oracle = nearest(gang, world)
    assert isinstance(answer, Placement) == (oracle is not None)
    if oracle is not None and isinstance(answer, Placement):
        assert faults(gang, world, counts_of(answer)) == []
        if workers_of(gang).request.mode is not Mode.UNCONSTRAINED:
            assert distance(gang, world, counts_of(answer)) == oracle
