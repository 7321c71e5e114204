"""Joint choice of the GPUs of all members on one host."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles import placement as reference
from topology.choice import Choice, choose
from topology.device_requests import DeviceRequest, Interconnect, Policy
from topology.gangs.devices import MemberDevices, machine_ref, most, sets_for
from topology.model import mask_of, positions_of
from topology.profiles import profile

SMALL = ("rtx8000x4-bridged", "gb200-tray", "h100-vm-6gpu", "a100-pcie4-bridged")
BRIDGED = machine_ref(profile("h100-nvl-8").machine)
CUBE = machine_ref(profile("dgx1-v100").machine)


def test_capacity_is_counted_in_islands_not_in_gpus() -> None:
    """Eight bridged GPUs of which one of each pair is free: four, but not one island of two."""
    odd = 0b0101_0101
    want = MemberDevices(DeviceRequest(2, Policy.ISLAND))

    assert most(BRIDGED, odd, (), want) == 0
    assert most(BRIDGED, 0b0101_0111, (), want) == 1
    assert most(BRIDGED, odd, (), MemberDevices(DeviceRequest(2))) == 2
    assert most(BRIDGED, odd, (), MemberDevices(DeviceRequest(2), one_island=True)) == 0


def test_mixed_members_are_counted_exactly() -> None:
    """Pairs beside singles: greedy singles would break pairs; counted together they do not."""
    pair, single = MemberDevices(DeviceRequest(2, Policy.ISLAND)), MemberDevices(DeviceRequest(1))

    assert most(BRIDGED, 0xFF, ((single, 2),), pair) == 3
    assert most(BRIDGED, 0xFF, ((single, 3),), pair) == 2
    assert most(BRIDGED, 0b0001_0111, ((pair, 1),), single) == 2


def test_two_quads_of_a_cube_mesh_are_found_together() -> None:
    """Both members of four get a ring of links, as only the two quads give them."""
    found = sets_for(CUBE, 0xFF, ((MemberDevices(DeviceRequest(4)), 2),))

    assert found is not None
    assert sorted(positions_of(mask) for mask in found[0]) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_models_keep_to_their_masks() -> None:
    """A set lies inside one admitted mask, the first that serves."""
    want = MemberDevices(DeviceRequest(2), masks=(0b1100, 0b0011))

    assert most(BRIDGED, 0b1111, (), want) == 2
    assert most(BRIDGED, 0b0110, (), want) == 0
    assert sets_for(BRIDGED, 0b1111, ((want, 1),)) == ((0b1100,),)


@settings(deadline=None, max_examples=100)
@given(
    name=st.sampled_from(SMALL),
    free=st.integers(0, 63),
    policy=st.sampled_from(Policy),
    count=st.integers(1, 4),
    link=st.sampled_from(Interconnect),
)
def test_one_member_gets_what_a_single_pod_would(
    name: str, free: int, policy: Policy, count: int, link: Interconnect
) -> None:
    """For one member the answer is that of filter and bind."""
    machine = profile(name).machine
    ask = DeviceRequest(count, policy, link)
    alone = choose(machine, free & machine.full, ask)
    found = sets_for(machine_ref(machine), free & machine.full, ((MemberDevices(ask), 1),))

    assert (found is not None) == isinstance(alone, Choice)
    if found is not None and isinstance(alone, Choice):
        assert found == ((mask_of(alone.positions),),)


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(SMALL), free=st.integers(0, 63), first=st.integers(1, 3), second=st.integers(1, 3))
def test_two_kinds_fit_exactly_when_disjoint_sets_exist(name: str, free: int, first: int, second: int) -> None:
    """Against trying all pairs of sets, for an island beside an NVLink set."""
    machine = profile(name).machine
    asks = (DeviceRequest(first, Policy.ISLAND), DeviceRequest(second, interconnect=Interconnect.NVLINK))
    left = positions_of(free & machine.full)
    pairs = (
        (one, other)
        for one in itertools.combinations(left, first)
        for other in itertools.combinations([position for position in left if position not in one], second)
    )
    exists = any(
        reference.admits(machine, one, asks[0]) and reference.admits(machine, other, asks[1]) for one, other in pairs
    )
    found = sets_for(machine_ref(machine), free & machine.full, tuple((MemberDevices(ask), 1) for ask in asks))

    assert (found is not None) == exists


@pytest.mark.parametrize("name", ["dgx2-v100", "mi250-16gcd"])
def test_machines_of_sixteen_are_served_one_set_after_the_other(name: str) -> None:
    """More than eight GPUs: what is counted can be given, in sets that do not overlap."""
    machine = machine_ref(profile(name).machine)
    want = MemberDevices(DeviceRequest(4))
    count = most(machine, machine.machine.full, ((MemberDevices(DeviceRequest(2)), 1),), want)
    found = sets_for(machine, machine.machine.full, ((MemberDevices(DeviceRequest(2)), 1), (want, count)))

    assert count == 3
    assert found is not None
    masks = [mask for sets in found for mask in sets]
    assert sum(mask.bit_count() for mask in masks) == 14
    assert sum(masks).bit_count() == 14
