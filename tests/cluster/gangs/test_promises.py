"""Promises of gangs: a single pod that needs room evicts spare members, or a whole gang."""

from __future__ import annotations

import pytest

from atoll.api import names
from atoll.cluster.budgets import DisruptionBudgets, GangBudgets, violations
from atoll.cluster.gangs.gang_budgets import gang_budgets, needs
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.membership import MemberStage
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy
from tests.builders import make_pod
from tests.cluster.gangs.builders import make_gang, member

LEADER = {
    "minMember": 2,
    "podSets": [{"name": "leader", "count": 1, "minCount": 1}, {"name": "workers", "count": 3, "minCount": 1}],
}


def view(running: int, *, priority: int = 0, leader: bool = False, **spec: object) -> GangView:
    """Return a gang of four of which some run."""
    found = [member(number, MemberStage.READY, priority=priority) for number in range(running)]
    found += [member(9, MemberStage.READY, pod_set="leader", priority=priority)] if leader else []
    return GangView(make_gang(4, **spec), tuple(found), ReadinessPolicy())


def broken(gang: GangView, *gone: int, whole_below: int | None = None) -> int:
    """Return how many promises the eviction of these members breaks."""
    budgets = DisruptionBudgets((), gang_budgets([gang], whole_below=whole_below))
    victims = [one for one in gang.members if one.rank in gone]
    return violations((budgets.promises_of(one.pod) for one in victims), budgets.allowed())


@pytest.mark.parametrize(
    ("gang", "gone", "expected"),
    [
        pytest.param(view(4), (0,), 1, id="all are needed"),
        pytest.param(view(4, minMember=3), (0,), 0, id="one can be spared"),
        pytest.param(view(4, minMember=3), (0, 1), 1, id="but not two"),
        pytest.param(view(3, leader=True, **LEADER), (0, 1), 0, id="two workers can be spared"),
        pytest.param(view(3, leader=True, **LEADER), (9,), 1, id="the leader cannot"),
        pytest.param(view(2, minMember=3), (0,), 1, id="a gang that lacks members has none to spare"),
    ],
)
def test_a_gang_spares_what_it_does_not_need(gang: GangView, gone: tuple[int, ...], expected: int) -> None:
    """As whole and per pod set."""
    assert broken(gang, *gone) == expected
    assert needs(gang, [one for one in gang.members if one.rank in gone]) == bool(expected)


@pytest.mark.parametrize(("priority", "expected"), [(9, 0), (10, 1)])
def test_a_gang_may_give_way_whole_to_a_higher_priority_alone(priority: int, expected: int) -> None:
    """Strictly higher than that of every member."""
    assert broken(view(4, priority=priority), 0, whole_below=10) == expected


def test_whoever_knows_only_the_name_of_a_gang_takes_it_that_all_are_needed() -> None:
    """The extender watches no gangs; a pod in none is protected by none."""
    pod = make_pod("p", annotations={names.GANG: "g"})

    assert GangBudgets().of(pod) == ("gang team/g",)
    assert GangBudgets().of(make_pod("q")) == ()
