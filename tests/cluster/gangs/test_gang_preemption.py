"""Victims of a gang's preemption: the fewest and least important, whole gangs, spare members first."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api import names
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.membership import GangKey, MemberStage
from atoll.cluster.gangs.preemption import (
    EvictionUnit,
    HeldDevices,
    fewest_units,
    plan_preemption,
    units_of,
    unneeded,
)
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy
from atoll.cluster.objects import Pod
from tests.builders import make_pod
from tests.cluster.gangs.builders import make_gang, member
from tests.cluster.gangs.test_replacements import Ground

KEY: GangKey = ("team", "g")


def view(count: int, running: int, *, succeeded: int = 0, priority: int = 0, **spec: Any) -> GangView:
    """Return a gang of which some members run and some have ended well."""
    found = [member(number, MemberStage.READY, priority=priority) for number in range(running)]
    found += [member(running + number, MemberStage.SUCCEEDED) for number in range(succeeded)]
    return GangView(make_gang(count, **spec), tuple(found), ReadinessPolicy())


def with_priority(pod: Pod, priority: int) -> Pod:
    """Return the pod with this priority."""
    return msgspec.structs.replace(pod, spec=msgspec.structs.replace(pod.spec, priority=priority))


def holdings(gang: GangView, *others: tuple[str, int]) -> list[HeldDevices]:
    """Return what a gang's members and pods of (name, priority) hold."""
    found = [HeldDevices(one.pod, "n1", 1) for one in gang.members if one.stage is MemberStage.READY]
    return [*found, *(HeldDevices(make_pod(name, priority=priority), "n1", 1) for name, priority in others)]


@pytest.mark.parametrize(
    ("gang", "spare"),
    [
        pytest.param(view(4, 4), [], id="all are needed"),
        pytest.param(view(4, 4, minMember=2), ["p3", "p2"], id="two are enough: the highest ranks can be spared"),
        pytest.param(view(4, 2, minMember=2), [], id="no more than enough"),
        pytest.param(view(4, 2, succeeded=1, minMember=2), ["p1"], id="one that has ended well counts"),
    ],
)
def test_members_beyond_the_minimum_are_not_needed(gang: GangView, spare: list[str]) -> None:
    """As many as can go without the gang falling below what it needs."""
    assert [one.pod.metadata.name for one in unneeded(gang)] == spare


def test_units_stand_in_order_and_gangs_go_whole() -> None:
    """Lower priorities first; of one priority single pods by name and unneeded members before the whole gang."""
    gang = view(3, 3, priority=5, minMember=2)
    found = units_of(holdings(gang, ("a", 1), ("b", 9)), {KEY: gang}, below=9)

    assert [(unit.name, unit.gang, len(unit.uids)) for unit in found] == [
        ("team/a", None, 1),
        ("team/p2", None, 1),
        ("team/g", KEY, 3),
    ]


def test_nobody_of_the_same_priority_goes_so_that_nothing_goes_round() -> None:
    """Two gangs of one priority never evict each other; a gang counts by its most important member."""
    gang = view(2, 2, priority=5)
    assert units_of(holdings(gang, ("a", 5)), {KEY: gang}, below=5) == ()


def test_members_of_a_gang_that_is_not_admitted_go_one_by_one() -> None:
    """They run alone already: what was adopted from elsewhere, or outlived its gang."""
    gang = view(2, 2)
    assert len(units_of(holdings(gang), {}, below=1)) == 2


def test_mirror_pods_are_left_alone() -> None:
    """Nobody can evict a static pod."""
    pod = make_pod("static", annotations={names.MIRROR: "x"})
    assert units_of([HeldDevices(pod, "n1", 1)], {}, below=None) == ()


def test_whoever_may_not_be_preempted_is_no_victim_and_waited_for() -> None:
    """A pod, and a gang with one such member: the rest of it would run in vain. Both end some day."""
    kept = {names.PREEMPTIBLE: "false"}
    gang = GangView(
        make_gang(3, minMember=2),
        (*(member(number, MemberStage.READY) for number in range(2)), member(2, MemberStage.READY, labels=kept)),
        ReadinessPolicy(),
    )
    held = [*holdings(gang), HeldDevices(make_pod("kept", labels=kept), "n1", 1)]
    spare = [one.pod.metadata.name for one in unneeded(gang)]
    assert spare == ["p2"]

    assert units_of(held, {KEY: gang}, below=9) == ()
    assert [unit.name for unit in units_of(held, {KEY: gang}, below=None)] == ["team/p2", "team/g", "team/kept"]


@pytest.mark.parametrize(
    ("ending", "may_evict", "evicted", "awaited"),
    [
        pytest.param((), True, {"f-n1", "f-n2"}, 0, id="all are evicted, nobody is waited for"),
        pytest.param(("f-n1",), True, {"f-n2"}, 1, id="one ends already"),
        pytest.param(("f-n1", "f-n2"), True, set(), 2, id="both end already"),
        pytest.param((), False, set(), 2, id="nobody may be evicted: both are waited for"),
        pytest.param(("f-n1",), False, set(), 2, id="nobody may be evicted, one ends already"),
    ],
)
def test_a_plan_counts_whom_it_waits_for(
    ending: tuple[str, ...], evicted: set[str], awaited: int, *, may_evict: bool
) -> None:
    """Two members, two full machines: each is freed by an eviction, or by a pod that ends by itself."""
    nodes = ("n1", "n2")
    ground = Ground({}, full=nodes, sick=("n3", "n4", "n5", "n6"), podSets=[{"name": "workers", "count": 2}])
    request = ground.request(0, 1)
    request = replace(request, chosen=tuple(replace(one, pod=with_priority(one.pod, 1)) for one in request.chosen))
    held = [
        HeldDevices(make_pod(f"f-{node}", gpus=8, node=node, deleted=f"f-{node}" in ending), node, 0xFF)
        for node in nodes
    ]

    plan = plan_preemption(request, held, {}, is_spared=(lambda _: False) if may_evict else None)

    assert plan is not None
    assert {unit.name.removeprefix("team/") for unit in plan.evicted} == evicted
    assert plan.awaited == awaited
    assert {one.node for one in plan.kept.values()} == set(nodes)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[EvictionUnit], Mapping[str, int], int]:
    """Units of up to three pods with sizes, least important first, and how much must be free."""
    units: list[EvictionUnit] = []
    for number in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 3))
        key = ("team", f"g{number}") if size > 1 else None
        uids = frozenset(f"{number}-{part}" for part in range(size))
        units.append(EvictionUnit(uids, draw(st.integers(0, 2)), name=f"{number}", gang=key))
        if key is not None and draw(st.booleans()):
            extra = frozenset({f"{number}-0"})
            units.append(EvictionUnit(extra, units[-1].priority, is_needed=False, name=f"{number}-0"))
    sizes = {uid: draw(st.integers(1, 4)) for unit in units for uid in sorted(unit.uids)}
    return sorted(units, key=lambda unit: unit.importance), sizes, draw(st.integers(0, 16))


@given(scenes())
def test_victims_suffice_none_can_be_spared_and_the_worst_is_the_mildest(
    scene: tuple[list[EvictionUnit], Mapping[str, int], int],
) -> None:
    """Against every set of units: found when there is one, minimal, and no set does without its most important one."""
    units, sizes, need = scene

    def fits(gone: frozenset[str]) -> bool:
        return sum(sizes[uid] for uid in gone) >= need

    def gone(chosen: tuple[EvictionUnit, ...]) -> frozenset[str]:
        return frozenset(uid for unit in chosen for uid in unit.uids)

    enough = [
        chosen for size in range(len(units) + 1) for chosen in itertools.combinations(units, size) if fits(gone(chosen))
    ]
    found = fewest_units(units, fits)

    if not enough:
        assert found is None
        return
    assert found is not None
    assert fits(gone(found))
    assert not any(fits(gone(tuple(one for one in found if one is not spared))) for spared in found)
    worst = [max((unit.importance for unit in chosen), default=None) for chosen in (found, *enough)]
    assert worst[0] is None or all(other is not None and worst[0] <= other for other in worst[1:])
    whole = {uid for unit in found if unit.gang for uid in unit.uids}
    assert all(unit.gang or not unit.uids <= whole for unit in found), "nobody is named twice"
