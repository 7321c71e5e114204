"""Lost hosts: every replaceable member is replaced, and the gang's request still holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.gangs import ReferenceCluster, faults
from tests.topology.gangs.worlds import grid, pod_sets, snapshot_of, worlds
from topology.device_requests import DeviceRequest
from topology.gangs.model import Gang, Limit, Mode, PlacedMember, Placement, PodSet, Slice, TopologyRequest
from topology.gangs.repair import replace_lost
from topology.gangs.search import place

NEEDS = {"cpu": 1_000, "pods": 1}


def at(*hosts: str) -> list[PlacedMember]:
    """Members by rank."""
    return [PlacedMember(rank, host) for rank, host in enumerate(hosts)]


@settings(deadline=None, max_examples=150)
@given(world=worlds(), data=st.data())
def test_a_repaired_gang_breaks_nothing(world: ReferenceCluster, data: st.DataObject) -> None:
    """With every lost member replaced, the gang is one that the request allows, on GPUs that are free."""
    pod_set = data.draw(pod_sets(world, count_max=4))
    gang = Gang((pod_set,))
    running = place(gang, snapshot_of(world))
    if not isinstance(running, Placement):
        return
    members = running.assignments[0].members
    lost = data.draw(st.sets(st.sampled_from([member.host for member in members]), min_size=1, max_size=2))
    state = snapshot_of(world).take(running, gang)
    repair = replace_lost(pod_set, state, members, lost)
    moved = {member.rank: member for member in repair.members}

    assert not {member.host for member in repair.members} & lost
    for member in repair.members:
        free = state.hosts[state.index[member.host]].free_mask
        assert all(free >> position & 1 for position in member.positions)
    if not repair.refusals:
        counts: dict[str, int] = {}
        for member in members:
            host = moved.get(member.rank, member).host
            counts[host] = counts.get(host, 0) + 1
        assert faults(gang, world, {pod_set.name: counts}) == []


@settings(deadline=None, max_examples=60)
@given(world=worlds(), data=st.data())
def test_a_host_that_comes_back_empty_takes_its_members_again(world: ReferenceCluster, data: st.DataObject) -> None:
    """Where the lost host itself is good again, a repair is always found."""
    pod_set = data.draw(pod_sets(world, count_max=4))
    gang = Gang((pod_set,))
    running = place(gang, snapshot_of(world))
    if not isinstance(running, Placement):
        return
    members = running.assignments[0].members
    lost = data.draw(st.sampled_from([member.host for member in members]))
    stay = [member for member in members if member.host != lost]
    partly = replace(running, assignments=(replace(running.assignments[0], members=tuple(stay)),))
    state = snapshot_of(world).take(partly, gang)
    gone = [replace(member, host="gone") if member.host == lost else member for member in members]
    repair = replace_lost(pod_set, state, gone, {"gone"})

    assert repair.refusals == ()
    assert len(repair.members) == len(members) - len(stay)


@pytest.mark.parametrize(("most", "expected"), [(1, ["b0-r0-1"]), (2, ["b0-r0-0"])], ids=["full", "room for one"])
def test_limits_count_the_members_that_remain_once(most: int, expected: list[str]) -> None:
    """They are among those that are present on their hosts."""
    limit = Limit("host", most, {"b0-r0-0": 1, "b0-r0-1": 2 * (most - 1)})
    gang = PodSet("w", 2, NEEDS, DeviceRequest(1), TopologyRequest(Mode.REQUIRED, "rack"), limits=(limit,))
    repair = replace_lost(gang, grid({("b0", "r0"): 2}), at("b0-r0-0", "gone"), {"gone"})

    assert [member.host for member in repair.members] == expected


def test_nested_slices_are_repaired_innermost_first() -> None:
    """A rack of eight in hosts of two: the lost pair stays in its rack, on one host."""
    request = TopologyRequest(Mode.REQUIRED, "block", (Slice("rack", 4), Slice("host", 2)))
    state = grid({("b0", "r0"): 3, ("b0", "r1"): 3})
    repair = replace_lost(
        PodSet("w", 8, NEEDS, DeviceRequest(4), request),
        state,
        at(*["b0-r0-0"] * 2, *["gone"] * 2, *["b0-r1-0"] * 2, *["b0-r1-1"] * 2),
        {"gone"},
    )

    assert [(member.rank, member.host[:5]) for member in repair.members] == [(2, "b0-r0"), (3, "b0-r0")]
    assert len({member.host for member in repair.members}) == 1


def test_others_of_the_gang_bind_the_domain() -> None:
    """A leader whose host was lost alone stays in the rack of its workers."""
    state = grid({("b0", "r0"): 1, ("b0", "r1"): 2})
    leader = PodSet("leader", 1, NEEDS, DeviceRequest(1), TopologyRequest(Mode.REQUIRED, "rack"))
    repair = replace_lost(leader, state, at("gone"), {"gone"}, anchors=[("rack", ["b0-r1-0"])])

    assert repair.members[0].host.startswith("b0-r1")


def test_preferred_members_come_back_as_near_as_there_is_room() -> None:
    """First the rack of the others, then their block, then anywhere."""
    request = TopologyRequest(Mode.PREFERRED, "rack")
    gang = PodSet("w", 2, NEEDS, DeviceRequest(8), request)
    state = grid({("b0", "r0"): 1, ("b0", "r1"): 1, ("b1", "r0"): 1})
    full = [replace(host, free_mask=0) for host in state.hosts if host.name == "b0-r0-0"]
    near = replace_lost(gang, state.with_hosts(full), at("b0-r0-0", "gone"), {"gone"})
    far = [*full, *(replace(host, free_mask=0) for host in state.hosts if host.name == "b0-r1-0")]
    away = replace_lost(gang, state.with_hosts(far), at("b0-r0-0", "gone"), {"gone"})

    assert [member.host for member in near.members] == ["b0-r1-0"]
    assert [member.host for member in away.members] == ["b1-r0-0"]


def test_a_level_that_is_gone_is_told() -> None:
    """The topology was edited while the gang ran: the repair says so and moves nobody."""
    gang = PodSet("w", 2, NEEDS, DeviceRequest(1), TopologyRequest(Mode.REQUIRED, "zone"))
    repair = replace_lost(gang, grid({("b0", "r0"): 1}), at("b0-r0-0", "gone"), {"gone"})

    assert repair.members == ()
    assert "no level 'zone'" in repair.refusals[0].text


def test_domains_in_use_come_before_new_ones() -> None:
    """The rack with most of the gang is full: its other rack is taken before a third one of the same block."""
    request = TopologyRequest(Mode.PREFERRED, "rack")
    state = grid({("b0", "r0"): 2, ("b0", "r1"): 3, ("b0", "r2"): 3})
    full = [replace(host, free_mask=0) for host in state.hosts if host.name in ("b0-r0-0", "b0-r0-1", "b0-r2-0")]
    hosts = ("b0-r0-0", "b0-r0-1", "b0-r2-0", "gone")
    repair = replace_lost(
        PodSet("w", 4, NEEDS, DeviceRequest(8), request), state.with_hosts(full), at(*hosts), {"gone"}
    )
    anywhere = replace_lost(PodSet("w", 2, NEEDS, DeviceRequest(1)), state, at("b0-r1-1", "gone"), {"gone"})

    assert [member.host for member in repair.members] == ["b0-r2-1"]
    assert [member.host for member in anywhere.members] == ["b0-r1-1"]
