"""Problems of real clusters that the gang search decides."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.topology.gangs.worlds import counts_of, grid, hosts_of
from topology.device_requests import DeviceRequest
from topology.gangs.model import (
    Cause,
    Gang,
    Host,
    Mode,
    Order,
    PlacedMember,
    Placement,
    PlacementRefusal,
    PodSet,
    Slice,
    TopologyRequest,
)
from topology.gangs.repair import replace_lost
from topology.gangs.search import place
from topology.gangs.snapshot import HostSnapshot, snapshot
from topology.gangs.tree import path_of
from topology.profiles import profile

NEEDS = {"cpu": 1_000, "pods": 1}
DGX = profile("dgx-h100").machine
ONE_RACK = TopologyRequest(Mode.REQUIRED, "rack")


def workers(count: int, request: TopologyRequest | None = None, *, gpus: int = 8, name: str = "workers") -> PodSet:
    """Members of so many GPUs each."""
    return PodSet(name, count, NEEDS, DeviceRequest(gpus), request or TopologyRequest())


def placed(pod_set: PodSet, state: HostSnapshot) -> Placement:
    """The placement of a gang that must have one."""
    answer = place(Gang((pod_set,)), state)
    assert isinstance(answer, Placement), answer
    return answer


def refused(pod_set: PodSet, state: HostSnapshot) -> PlacementRefusal:
    """The refusal of a gang that must have none."""
    answer = place(Gang((pod_set,)), state)
    assert isinstance(answer, PlacementRefusal), answer
    return answer


def busy(state: HostSnapshot, names: list[str], mask: int = 0) -> HostSnapshot:
    """The snapshot with only these GPUs free on some hosts."""
    return state.with_hosts(replace(state.hosts[state.index[name]], free_mask=mask) for name in names)


def members(*hosts: str) -> list[PlacedMember]:
    """Members by rank."""
    return [PlacedMember(rank, host) for rank, host in enumerate(hosts)]


def test_of_two_gangs_that_each_fit_alone_one_is_placed_whole() -> None:
    """Eight nodes, two gangs of eight nodes each: the second finds nothing left, not half of something."""
    state = grid({("b0", "r0"): 8})
    first = Gang((workers(8),))
    answer = place(first, state)

    assert isinstance(answer, Placement)
    assert isinstance(place(first, state.take(answer, first)), PlacementRefusal)


@pytest.mark.parametrize("seed", range(5))
def test_mixed_jobs_drain(seed: int) -> None:
    """Sixty jobs of one to eight GPUs drain through sixteen, whatever the order: whole jobs come and go."""
    dice = random.Random(seed)
    waiting = [dice.randint(1, 8) for _ in range(60)]
    empty = grid({("b0", "r0"): 2})
    done = 0
    while waiting:
        state, running = empty, 0
        for gpus in list(waiting):
            gang = Gang((workers(1, gpus=gpus),))
            answer = place(gang, state)
            if isinstance(answer, Placement):
                state, running = state.take(answer, gang), running + 1
                waiting.remove(gpus)
        assert running
        done += running

    assert done == 60


def test_no_member_is_placed_when_the_second_has_no_room() -> None:
    """A gang of two with one free node is refused as a whole, and told how much fits."""
    answer = refused(workers(2), busy(grid({("b0", "r0"): 2}), ["b0-r0-1"]))

    assert (answer.fits, answer.of) == (1, 2)
    assert answer.text == "pod set workers: the topology fits 1 of 2 pods; 2 hosts; excluded: too few free GPUs: 1"


def test_a_gang_that_cannot_fit_costs_no_walk_over_small_domains() -> None:
    """A thousand nodes: a gang too large for any rack is refused after counting up, without following one domain."""
    state = grid({(f"b{rack // 10}", f"r{rack:03}"): 10 for rack in range(100)})
    answer = refused(workers(1000, ONE_RACK), state)

    assert (answer.fits, answer.of) == (10, 1000)


def test_a_thousand_members_in_slices_of_a_rack_take_few_steps() -> None:
    """A thousand nodes in a hundred racks, ten members per rack: placed, with steps in the order of the nodes."""
    state = grid({(f"b{rack // 10}", f"r{rack:03}"): 10 for rack in range(100)})
    answer = placed(workers(1000, TopologyRequest(slices=(Slice("rack", 10),))), state)

    assert answer.steps < 10_000


def test_idle_hosts_and_those_of_victims_are_found_together() -> None:
    """Asked of the hosts as they will be without the one low job, the search takes the idle node and the job's node of
    one rack; asked of them as they are, it finds nothing."""
    now = busy(grid({("b0", "r0"): 2, ("b0", "r1"): 2}), ["b0-r0-1", "b0-r1-0", "b0-r1-1"])
    without_victim = now.with_hosts([replace(now.hosts[now.index["b0-r0-1"]], free_mask=DGX.full)])

    assert isinstance(place(Gang((workers(2, ONE_RACK),)), now), PlacementRefusal)
    assert set(hosts_of(placed(workers(2, ONE_RACK), without_victim), "workers")) == {"b0-r0-0", "b0-r0-1"}


def test_hosts_that_kube_scheduler_would_refuse_do_not_count() -> None:
    """Two of four nodes of r1 are out: a gang of three goes to r2; when r2 is busy the reasons are counted."""
    state = grid({("b0", "r1"): 4, ("b0", "r2"): 4})
    gang = replace(workers(3, ONE_RACK), excluded={"b0-r1-1": "untolerated taint", "b0-r1-2": "cordoned"})

    assert {host[:5] for host in hosts_of(placed(gang, state), "workers")} == {"b0-r2"}
    assert refused(gang, busy(state, ["b0-r2-0", "b0-r2-1"])).text == (
        "pod set workers: topology rack fits 2 of 3 pods; 8 hosts; "
        "excluded: too few free GPUs: 2, cordoned: 1, untolerated taint: 1"
    )


def test_disliked_hosts_come_last() -> None:
    """A PreferNoSchedule taint is respected where that costs no nearness, and does not refuse."""
    state = grid({("b0", "r0"): 3})
    gang = replace(workers(2), preferences={"b0-r0-0": -1000})

    assert "b0-r0-0" not in hosts_of(placed(gang, state), "workers")
    assert "b0-r0-0" in hosts_of(placed(replace(gang, count=3), state), "workers")


def test_what_others_use_is_gone_and_comes_back() -> None:
    """Five GPUs are free beside others' pods: five single members fit there, not six; when a pod ends, six do."""
    state = busy(grid({("b0", "r0"): 1}), ["b0-r0-0"], 0b0001_1111)

    assert len(hosts_of(placed(workers(5, gpus=1), state), "workers")) == 5
    assert refused(workers(6, gpus=1), state).fits == 5
    assert placed(workers(6, gpus=1), busy(state, ["b0-r0-0"], 0b0111_1111))


def test_cpu_and_pod_room_count_for_all_members() -> None:
    """Free GPUs are no use without cpu and room for pods."""
    state = grid({("b0", "r0"): 2}, free={"cpu": 2_500, "pods": 3})

    assert refused(replace(workers(5, gpus=1), needs={"cpu": 1_000, "pods": 1}), state).fits == 4
    assert refused(replace(workers(7, gpus=1), needs={"cpu": 1, "pods": 1}), state).fits == 6


def test_members_are_named_by_host_and_domains_by_label() -> None:
    """Where the lowest level is the hostname label and labels are crossed with node names, nothing is mixed up."""
    crossed = snapshot(
        ("kubernetes.io/hostname",),
        [Host("node-a1", ("a1",), NEEDS, DGX, DGX.full), Host("a1", ("b7",), NEEDS, DGX, 0)],
    )
    answer = placed(workers(1), crossed)

    assert hosts_of(answer, "workers") == ["node-a1"]
    assert answer.assignments[0].domains[0].path == ("a1", "node-a1")


def test_a_replacement_is_charged_before_the_next_gang() -> None:
    """One spare node and two that want it: after the repair took it the other gang is refused."""
    state = busy(grid({("b0", "r0"): 3}), ["b0-r0-0", "b0-r0-1"])
    gang = workers(2, ONE_RACK)
    repair = replace_lost(gang, state, members("b0-r0-0", "b0-r0-1"), {"b0-r0-1"})
    moved = repair.members[0]
    after = busy(state, [moved.host], DGX.full & ~sum(1 << position for position in moved.positions))

    assert (moved.rank, moved.host) == (1, "b0-r0-2")
    assert isinstance(place(Gang((workers(1),)), after), PlacementRefusal)


def test_without_a_spare_node_nothing_is_moved() -> None:
    """The replacement stays where it is, with the reason; it is not sent to the bad node again."""
    state = busy(grid({("b0", "r0"): 2, ("b0", "r1"): 2}), ["b0-r0-0"])
    repair = replace_lost(workers(2, ONE_RACK), state, members("b0-r0-0", "b0-r0-1"), {"b0-r0-1"})

    assert repair.members == ()
    assert repair.refusals[0].text == (
        "pod set workers: the topology fits 0 of 1 pods; 1 hosts; excluded: too few free GPUs: 1"
    )


def test_of_two_broken_groups_the_one_with_a_spare_is_repaired() -> None:
    """Slices of two in rack r1 (no spare) and r2 (a spare) lose a node each: r2's is replaced, r1's waits."""
    state = busy(grid({("b0", "r1"): 2, ("b0", "r2"): 3}), ["b0-r1-0", "b0-r2-0"])
    gang = workers(4, TopologyRequest(Mode.REQUIRED, "block", (Slice("rack", 2),)))
    repair = replace_lost(gang, state, members("b0-r1-0", "b0-r1-1", "b0-r2-0", "b0-r2-1"), {"b0-r1-1", "b0-r2-1"})

    assert [(member.rank, member.host) for member in repair.members] == [(3, "b0-r2-2")]
    assert len(repair.refusals) == 1


def test_a_slice_that_was_lost_whole_moves_as_a_whole() -> None:
    """Both nodes of a slice are lost: its members find one rack together."""
    state = grid({("b0", "r1"): 2, ("b0", "r2"): 1, ("b0", "r3"): 2})
    gang = workers(4, TopologyRequest(Mode.REQUIRED, "block", (Slice("rack", 2),)))
    busy_state = busy(state, ["b0-r1-0", "b0-r1-1"])
    repair = replace_lost(gang, busy_state, members("b0-r1-0", "b0-r1-1", "x", "y"), {"x", "y"})

    assert [member.host for member in repair.members] == ["b0-r3-0", "b0-r3-1"]


def test_a_host_without_a_level_is_outside() -> None:
    """A missing or empty label gives no path."""
    assert path_of({"block": "b0"}, ("block", "rack")) is None
    assert path_of({"block": "b0", "rack": ""}, ("block", "rack")) is None
    assert path_of({"block": "b0", "rack": "r0", "zone": "z"}, ("block", "rack")) == ("b0", "r0")


def test_equal_rack_names_in_two_blocks_are_two_racks() -> None:
    """The same label value under different parents is no common domain."""
    state = grid({("b0", "r0"): 1, ("b1", "r0"): 1})

    assert refused(workers(2, ONE_RACK), state).fits == 1


def test_preferred_members_stay_together_and_fill_a_half_used_rack() -> None:
    """Two members take the one rack of two free nodes; four over racks of two take two racks, not three."""
    state = busy(grid({("b0", "r1"): 2, ("b0", "r2"): 2, ("b0", "r3"): 2}), ["b0-r2-1", "b0-r3-1"])
    preferred = TopologyRequest(Mode.PREFERRED, "rack")

    assert set(hosts_of(placed(workers(2, preferred), state), "workers")) == {"b0-r1-0", "b0-r1-1"}
    pairs = grid({("b0", f"r{rack}"): 2 for rack in range(4)})
    assert len({host[:5] for host in hosts_of(placed(workers(4, preferred), pairs), "workers")}) == 2


@pytest.mark.parametrize(
    "request_",
    [
        TopologyRequest(Mode.REQUIRED, "rak"),
        TopologyRequest(Mode.PREFERRED, "rak"),
        TopologyRequest(Mode.REQUIRED, "block", (Slice("rak", 2),)),
    ],
)
def test_a_misspelt_level_is_refused(request_: TopologyRequest) -> None:
    """A level that the topology lacks is never dropped; the refusal names those there are."""
    answer = refused(workers(2, request_), grid({("b0", "r0"): 4}))

    assert answer.cause is Cause.NO_LEVEL
    assert answer.text == "pod set workers: the topology has no level 'rak', only block, rack, host"


def test_neighbouring_ranks_share_racks() -> None:
    """Ten ranks over racks of four: [0-3] [4-7] [8, 9], three racks and no rank out of line."""
    answer = placed(workers(10, TopologyRequest(Mode.PREFERRED, "rack")), grid({("b0", f"r{n}"): 4 for n in range(3)}))
    racks = [host[:5] for host in hosts_of(answer, "workers")]

    assert [member.rank for member in answer.assignments[0].members] == list(range(10))
    assert sum(racks[rank] != racks[rank - 1] for rank in range(10)) == 3
    assert racks[0] == racks[3] != racks[4] == racks[7] != racks[8] == racks[9]


def test_a_replacement_looks_where_the_others_are_now() -> None:
    """A node was relabelled into another rack while the gang ran: the new member goes where most of the rest lies."""
    state = grid({("b0", "r1"): 3, ("b0", "r2"): 2})
    moved = [replace(host, path=("b0", "r2")) if host.name == "b0-r1-0" else host for host in state.hosts]
    now = busy(snapshot(state.tree.levels, moved), ["b0-r1-0", "b0-r2-0"])
    repair = replace_lost(workers(3, ONE_RACK), now, members("b0-r1-0", "b0-r2-0", "gone"), {"gone"})

    assert [member.host for member in repair.members] == ["b0-r2-1"]


def test_a_leader_and_workers_share_the_domain_and_one_host_where_they_must() -> None:
    """A leader of two GPUs and workers of three: eight per host hold two workers and the leader."""
    leader = PodSet("leader", 1, NEEDS, DeviceRequest(2), group="g")
    gang = Gang((leader, replace(workers(4, ONE_RACK, gpus=3), group="g")))
    answer = place(gang, grid({("b0", "r0"): 2}))

    assert isinstance(answer, Placement)
    assert counts_of(answer)["workers"] == {"b0-r0-0": 2, "b0-r0-1": 2}
    positions = [position for row in answer.assignments for one in row.members for position in one.positions]
    assert len(positions) == 14


def test_a_leader_in_a_rack_workers_in_racks_and_everything_in_a_block() -> None:
    """Pod sets have their own requests beside the one for the whole: the block that holds all of them is taken."""
    state = grid({("b0", "r0"): 2, ("b0", "r1"): 2, ("b1", "r0"): 2, ("b1", "r1"): 3, ("b1", "r2"): 3})
    gang = Gang(
        (
            workers(2, ONE_RACK, name="leader"),
            workers(6, TopologyRequest(Mode.PREFERRED, "rack", (Slice("rack", 3),))),
        ),
        TopologyRequest(Mode.REQUIRED, "block"),
    )
    answer = place(gang, state)

    assert isinstance(answer, Placement)
    assert {host[:2] for host in hosts_of(answer, "workers") + hosts_of(answer, "leader")} == {"b1"}
    assert {host[:5] for host in hosts_of(answer, "leader")} == {"b1-r0"}


def test_fewer_members_are_placed_where_that_is_enough() -> None:
    """With a least count the gang gets as many members as there is room for, in whole slices."""
    state = grid({("b0", "r0"): 5})
    gang = replace(workers(8, TopologyRequest(Mode.REQUIRED, "rack", (Slice("rack", 2),))), min_count=2)

    assert len(hosts_of(placed(gang, state), "workers")) == 4
    assert refused(replace(gang, min_count=6), state).fits == 2


def test_auto_takes_the_lowest_level_that_holds_everything() -> None:
    """One host if it can be, else one rack, else one block."""
    auto = TopologyRequest(Mode.AUTO)
    state = grid({("b0", "r0"): 2, ("b1", "r0"): 2, ("b1", "r1"): 2})
    levels = {count: placed(workers(count, auto, gpus=4), state).assignments[0].level for count in (2, 4, 8, 10)}

    assert levels == {2: "host", 4: "rack", 8: "block", 10: ""}


def test_balanced_members_are_dealt_out_evenly() -> None:
    """Twenty-two members over two hosts of fifteen: eleven each, although a host of twenty is there."""
    room = {"h1": ("b0", "r1", 20), "h2": ("b0", "r1", 10), "h3": ("b0", "r2", 15), "h4": ("b0", "r2", 15)}
    hosts = [Host(name, (block, rack), {"slots": slots}) for name, (block, rack, slots) in room.items()]
    request = TopologyRequest(Mode.PREFERRED, "rack", balanced=True)
    answer = placed(PodSet("workers", 22, {"slots": 1}, request=request), snapshot(("block", "rack"), hosts))

    assert counts_of(answer)["workers"] == {"h3": 11, "h4": 11}


def test_the_tightest_rack_is_taken_and_whole_ones_are_left() -> None:
    """Of racks that serve as well, the one that is left with least; of hosts, those that are used already."""
    state = busy(grid({("b0", "r0"): 4, ("b0", "r1"): 4}), ["b0-r1-0", "b0-r1-1"])
    half = busy(grid({("b0", "r0"): 4}), ["b0-r0-3"], 0b1111)

    assert {host[:5] for host in hosts_of(placed(workers(2, ONE_RACK), state), "workers")} == {"b0-r1"}
    assert hosts_of(placed(workers(1, ONE_RACK, gpus=4), half), "workers") == ["b0-r0-3"]


def test_members_get_islands_where_that_costs_no_nearness() -> None:
    """Bridged pairs: two members of two GPUs go to the host with whole pairs free, not to that of two odd cards."""
    bridged = profile("h100-nvl-8").machine
    hosts = [
        Host("odd", ("b0", "r0"), {"pods": 9}, bridged, 0b0101_0101),
        Host("pairs", ("b0", "r1"), {"pods": 9}, bridged, 0b0011_1100),
    ]
    answer = placed(PodSet("workers", 2, {"pods": 1}, DeviceRequest(2)), snapshot(("block", "rack"), hosts))

    assert {(member.host, member.positions) for member in answer.assignments[0].members} == {
        ("pairs", (2, 3)),
        ("pairs", (4, 5)),
    }


ALIKE = TopologyRequest(Mode.REQUIRED, "rack")
DIFFERENCES: dict[str, tuple[list[tuple[str, int]], TopologyRequest, int, list[int], list[int]]] = {
    "unconstrained": ([("r", room) for room in (1, 1, 1, 1, 1, 3, 2)], TopologyRequest(), 5, [3, 2], [1, 1, 1, 1, 1]),
    "below a slice": (
        [("a", 1), ("a", 3), ("a", 4)],
        replace(ALIKE, slices=(Slice("rack", 4),)),
        4,
        [4],
        [1, 3],
    ),
    "racks that fit alike": ([("a", 2), ("a", 2), ("a", 2), ("b", 4), ("b", 2)], ALIKE, 6, [4, 2], [2, 2, 2]),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_where_our_order_takes_other_hosts_than_kueues(case: str) -> None:
    """Rooms of hosts by rack, members, and how many of them go to each host in our order and in Kueue's."""
    rooms, request, count, ours, kueues = DIFFERENCES[case]
    hosts = [Host(f"h{number}", (rack,), {"pods": room}) for number, (rack, room) in enumerate(rooms)]
    gang = Gang((PodSet("workers", count, {"pods": 1}, request=request),))
    for order, want in ((Order.NEAREST, ours), (Order.KUEUE, kueues)):
        found = place(gang, snapshot(("rack",), hosts), order=order)
        assert isinstance(found, Placement)
        assert [domain.count for domain in found.assignments[0].domains] == want
