"""The work of a search is bounded, whatever a gang asks for; bounded, its answer is still a right one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.gangs import ReferenceCluster, faults
from tests.topology.gangs.worlds import LEVELS, counts_of, pod_sets, snapshot_of, worlds
from topology.device_requests import DeviceRequest
from topology.gangs import descent
from topology.gangs.descent import COUNTED_ALWAYS, StepBudget
from topology.gangs.model import Gang, Host, Mode, Placement, PodSet, TopologyRequest
from topology.gangs.search import place
from topology.gangs.snapshot import HostSnapshot, snapshot
from topology.profiles import profile

COUNTED_MAX = 10_000
RACK = TopologyRequest(Mode.PREFERRED, "rack")


def last_attempt(gang: Gang, hosts: int) -> int:
    """Hosts that the attempt counts at most during which the limit is hit: every unit once for the candidates of each
    level, once to place it, and once to prove a refusal."""
    return (len(LEVELS) + 1 + 3) * len(gang.pod_sets) * (COUNTED_ALWAYS + hosts)


def crowded(hosts: int) -> HostSnapshot:
    """Return machines that have half of their GPUs left, in no order."""
    machine = profile("dgx-h100").machine
    free = {"cpu": 192_000, "pods": 110}
    return snapshot(
        LEVELS,
        [
            Host(f"n{number:02}", (f"b{number // 16}", f"r{number // 4}"), free, machine, 0b1011_0110 >> number % 5)
            for number in range(hosts)
        ],
    )


def test_the_costliest_gang_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen pod sets with preferences, each of which may shrink, near each other and all near together."""
    hosts, shares = crowded(48), [3, 4, 2, 5]
    liked = {host.name: number % 7 - 3 for number, host in enumerate(hosts.hosts)}
    gang = Gang(
        tuple(
            PodSet(
                f"w{number}",
                6,
                {"pods": 1},
                DeviceRequest(shares[number % 4]),
                RACK,
                preferences=liked,
                min_count=1,
            )
            for number in range(16)
        ),
        RACK,
    )
    free, bounded = StepBudget(), StepBudget()
    place(gang, hosts, budget=free)
    monkeypatch.setattr(descent, "COUNTED_MAX", COUNTED_MAX)

    answer = place(gang, hosts, budget=bounded)

    assert free.counted > 2 * COUNTED_MAX
    assert bounded.counted <= COUNTED_MAX + last_attempt(gang, 48)
    assert answer.bounded


@settings(deadline=None, max_examples=100)
@given(world=worlds(), data=st.data())
def test_a_search_without_time_places_all_rightly_or_none(world: ReferenceCluster, data: st.DataObject) -> None:
    """The first attempt is always made, so that no limit keeps a gang from ever being tried."""
    first = data.draw(pod_sets(world, name="first", count_max=3))
    second = data.draw(pod_sets(world, name="second", count_max=3))
    least = data.draw(st.integers(0, second.count))
    gang = Gang((first, replace(second, min_count=least)), data.draw(st.sampled_from((TopologyRequest(), RACK))))
    budget = StepBudget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descent, "COUNTED_MAX", 0)
        answer = place(gang, snapshot_of(world), budget=budget)

    assert budget.counted <= last_attempt(gang, len(world.hosts))
    if isinstance(answer, Placement):
        assert faults(gang, world, counts_of(answer)) == []
