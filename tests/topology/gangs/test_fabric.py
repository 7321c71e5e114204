"""GB200 racks: an NVLink fabric clique of eighteen trays is a level, and a few trays are kept for repairs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.topology.gangs.worlds import hosts_of
from topology.device_requests import DeviceRequest
from topology.gangs.errors import GangError
from topology.gangs.model import (
    Gang,
    Host,
    Mode,
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
from topology.gangs.spares import with_spares
from topology.profiles import profile

LEVELS = ("block", "rack", "clique")
TRAY = profile("gb200-tray").machine
ONE_CLIQUE = TopologyRequest(Mode.REQUIRED, "clique")


def fabric(*, cliques: int = 3, used: dict[str, int] | None = None) -> HostSnapshot:
    """Racks of eighteen trays of four GPUs, a clique each; `used`: how many of the first trays of a clique are."""
    busy = used or {}
    return snapshot(
        LEVELS,
        [
            Host(
                f"c{clique}-t{tray:02}",
                ("b0", f"r{clique}", f"uuid.{clique}"),
                {"pods": 9},
                TRAY,
                0 if tray < busy.get(f"c{clique}", 0) else TRAY.full,
                "gb200",
            )
            for clique in range(cliques)
            for tray in range(18)
        ],
    )


def gang(count: int, request: TopologyRequest = ONE_CLIQUE) -> Gang:
    """Members of a whole tray each."""
    return Gang((PodSet("workers", count, {"pods": 1}, DeviceRequest(4), request),))


def cliques_of(answer: Placement | PlacementRefusal) -> set[str]:
    """The cliques that a placement uses."""
    assert isinstance(answer, Placement), answer
    return {host[:2] for host in hosts_of(answer, "workers")}


@pytest.mark.parametrize("count", [1, 5, 16, 18])
def test_a_gang_stays_in_one_clique(count: int) -> None:
    """Up to eighteen members share one clique; nineteen are refused with what fits."""
    assert len(cliques_of(place(gang(count), fabric()))) == 1
    answer = place(gang(19), fabric())
    assert isinstance(answer, PlacementRefusal)
    assert answer.text.startswith("pod set workers: topology clique fits 18 of 19 pods")


def test_the_tightest_clique_is_taken() -> None:
    """Six members go to the clique with seven free trays, and leave the whole one whole."""
    assert cliques_of(place(gang(6), fabric(used={"c0": 2, "c1": 11}))) == {"c1"}


def test_slices_of_one_clique_each() -> None:
    """Two times eight members: each slice inside one clique, the whole in one block."""
    request = TopologyRequest(Mode.REQUIRED, "block", (Slice("clique", 8),))
    answer = place(gang(16, request), fabric(used={"c0": 9, "c1": 9, "c2": 12}))

    assert cliques_of(answer) == {"c0", "c1"}
    assert isinstance(answer, Placement)
    assert len({host[:2] for host in hosts_of(answer, "workers")[:8]}) == 1


def test_spare_trays_come_last() -> None:
    """Sixteen members leave the two spare trays of a clique alone; seventeen take one rather than leave the clique."""
    state = with_spares(fabric(cliques=1), "clique", 2)
    spare = {host.name for host in state.hosts if host.spare}
    sixteen, seventeen = place(gang(16), state), place(gang(17), state)

    assert spare == {"c0-t16", "c0-t17"}
    assert isinstance(sixteen, Placement)
    assert not spare & set(hosts_of(sixteen, "workers"))
    assert isinstance(seventeen, Placement)
    assert len(spare & set(hosts_of(seventeen, "workers"))) == 1


def test_a_clique_with_room_beside_its_spares_goes_before_a_tighter_one_without() -> None:
    """Spares are kept as long as another clique holds the gang as near."""
    state = with_spares(fabric(cliques=2, used={"c0": 10}), "clique", 2)

    assert cliques_of(place(gang(6), state)) == {"c0"}
    assert cliques_of(place(gang(7), state)) == {"c1"}


def test_spares_are_chosen_among_whole_trays_and_move_with_use() -> None:
    """Only trays that are all free can be spare; marking again takes back what was marked before."""
    state = with_spares(fabric(cliques=1), "clique", 2)
    used = state.with_hosts([replace(state.hosts[state.index["c0-t17"]], free_mask=0b0111)])
    again = with_spares(used, "clique", 2)

    assert {host.name for host in again.hosts if host.spare} == {"c0-t15", "c0-t16"}
    assert not any(host.spare for host in with_spares(again, "clique", 0).hosts)
    with pytest.raises(GangError, match="no such level"):
        with_spares(state, "pod", 1)


def test_a_lost_tray_is_replaced_by_a_spare_of_the_same_clique() -> None:
    """Another clique is all free, but the repair stays where the others are."""
    state = with_spares(fabric(cliques=2), "clique", 2)
    running = place(gang(16), state)
    assert isinstance(running, Placement)
    after = state.take(running, gang(16))
    hosts = hosts_of(running, "workers")
    repair = replace_lost(
        gang(16).pod_sets[0], after, [PlacedMember(rank, host) for rank, host in enumerate(hosts)], {hosts[3]}
    )

    assert [(member.rank, member.host, member.positions) for member in repair.members] == [(3, "c0-t16", (0, 1, 2, 3))]


def test_the_same_clique_number_under_two_fabrics_is_two_cliques() -> None:
    """Clique ids repeat from fabric to fabric: uuid and id together make the name, so nobody crosses them."""
    hosts = [Host(f"h{fabric}", ("b0", "r0", f"uuid-{fabric}.1"), {"pods": 9}, TRAY, TRAY.full) for fabric in (0, 1)]

    assert isinstance(place(gang(2), snapshot(LEVELS, hosts)), PlacementRefusal)
