"""The order in which members are let go: kube-scheduler binds who must be near others only once those are there."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster.gangs.bind_order import bind_waves, kinds_of, order_of
from atoll.cluster.gangs.rehearsal import Circle, Clash, find_clash
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.objects import Pod
from tests.builders import make_pod
from tests.cluster.gangs.test_arranging import HOST, RACK, ROOM, ZONE, find, hall, node, other

Term = tuple[str, str]
"""The app to be near, and by which node label."""
NEAR = "requiredDuringSchedulingIgnoredDuringExecution"


def pod(name: str, app: str, *near: Term, **options: Any) -> Pod:
    """Return a member of an app that has to be near others."""
    return make_pod(name, gpus=None, labels={"app": app}, **near_terms(*near), **options)


def near_terms(*near: Term) -> dict[str, Any]:
    """Return the part of a spec."""
    terms = [{"topologyKey": key, "labelSelector": {"matchLabels": {"app": app}}} for app, key in near]
    return {"affinity": {"podAffinity": {NEAR: terms}}} if terms else {}


def world(*running: Pod) -> PlacementSnapshot:
    """Return five nodes in three zones, with some pods."""
    nodes = {one.metadata.name: one for one in hall()}
    on: dict[str, list[Pod]] = {}
    for one in running:
        on.setdefault(one.spec.node_name, []).append(one)
    return PlacementSnapshot(nodes, {}, {}, on, {})


def named_waves(placed: Sequence[tuple[str, Pod, str]], cluster: PlacementSnapshot) -> list[list[str]]:
    """Return the names of the members wave by wave."""
    return [[placed[number][1].metadata.name for number in wave] for wave in bind_waves(placed, cluster)]


def test_members_come_after_those_whom_they_need_whatever_their_names() -> None:
    """A chain over three pod sets, by different node labels."""
    placed = [
        ("a", pod("a0", "a", ("b", HOST)), "a1"),
        ("b", pod("b0", "b", ("c", ZONE)), "a1"),
        ("c", pod("c0", "c"), "a2"),
        ("c", pod("c1", "c"), "b1"),
    ]

    assert named_waves(placed, world()) == [["c0", "c1"], ["b0"], ["a0"]]
    assert find_clash(placed, world()) is None


def test_the_first_of_its_kind_needs_nobody_and_all_in_its_domain_may_come_at_once() -> None:
    """kube-scheduler takes a pod that means itself as long as nobody whom it means is anywhere."""
    placed = [("w", pod(f"w{number}", "w", ("w", ZONE)), at) for number, at in enumerate(("a1", "a2", "a1"))]

    assert named_waves(placed, world()) == [["w0", "w1", "w2"]]
    assert find_clash(placed, world()) is None
    apart = [*placed, ("w", pod("w3", "w", ("w", ZONE)), "b1")]
    assert isinstance(find_clash(apart, world()), Clash)


def test_members_that_are_not_bound_yet_are_not_there_though_the_snapshot_counts_them() -> None:
    """The snapshot counts a member on its node from its reservation on."""
    leader = pod("b0", "b")
    cluster = world()
    cluster = PlacementSnapshot(cluster.nodes, {}, {}, {"a1": [leader]}, {})

    assert named_waves([("a", pod("a0", "a", ("b", HOST)), "a1"), ("b", leader, "a1")], cluster) == [["b0"], ["a0"]]


def test_each_host_of_dependants_is_served_by_a_partner_of_its_own() -> None:
    """They need not all be on one host, as long as the partners come first."""
    placed = [
        *(("a", pod(f"a{number}", "a", ("b", HOST)), at) for number, at in enumerate(("a1", "b1"))),
        *(("b", pod(f"b{number}", "b"), at) for number, at in enumerate(("a1", "b1"))),
    ]

    assert find_clash(placed, world()) is None
    assert isinstance(find_clash(placed[:-1], world()), Clash)


def test_members_that_need_each_other_to_be_first_never_start_and_are_told_so() -> None:
    """Whoever is tried first is refused. A running pod that one of them means breaks the circle."""
    sets = {"lead": (1, near_terms(("x", ZONE))), "w": (2, near_terms(("lead", ZONE)))}
    told = find(sets, hall())

    assert told == (
        "members of pod sets lead and w can only be bound after each other, by their required pod affinity, so none "
        "can be the first; remove it from some of them, or let them prefer it"
    )
    assert isinstance(find(sets, hall(), [other(1, "a1")]), dict)


def test_a_circle_is_none_where_somebody_else_may_come_first() -> None:
    """Only those are named that nobody outside of the circle serves; who needs somebody unknown is no circle."""
    a, b, c = pod("a0", "a", ("b", ZONE)), pod("b0", "b", ("a", ZONE)), pod("c0", "c", ("b", ZONE))
    ring = [("a", a, "a1"), ("b", b, "a1"), ("c", c, "a1"), ("d", pod("d0", "d"), "a1")]

    assert find_clash(ring, world()) == Circle(("a", "b", "c"))
    assert find_clash([*ring, ("e", pod("e0", "a"), "a2")], world()) is None
    assert isinstance(find_clash(ring[:1], world()), Clash)


APPS = st.sampled_from("xyz")
PLACES = st.sampled_from(sorted(ROOM))


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[str, Pod, str]], list[Pod]]:
    """Return members of up to three pod sets, with terms by pod set, and pods that run."""
    terms = st.lists(st.tuples(APPS, st.sampled_from((ZONE, HOST, RACK))), max_size=2)
    placed = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        app, near = draw(APPS), draw(terms) if draw(st.integers(0, 2)) else []
        places = draw(st.lists(PLACES, min_size=1, max_size=2))
        placed += [(name, pod(f"{name}{number}", app, *near), at) for number, at in enumerate(places)]
    running = [pod(f"o{n}", draw(APPS), node=draw(PLACES), phase="Running") for n in range(draw(st.integers(0, 1)))]
    return placed, running


@given(plans())
def test_waves_are_an_order_that_kube_scheduler_accepts_and_one_is_found_if_there_is_any(
    plan: tuple[list[tuple[str, Pod, str]], list[Pod]],
) -> None:
    """Against all orders by a plain count. Members of one wave may come in any order. Who needs nobody comes first, so
    orders in which somebody passes them, to be the first of its kind elsewhere, are not looked for."""
    placed, running = plan
    cluster = PlacementSnapshot({name: node(name, own, 9) for name, own in NODES.items()}, {}, {}, by_node(running), {})
    order = order_of(kinds_of(placed), cluster)
    waves = bind_waves(placed, cluster)

    assert sorted(number for wave in waves for number in wave) == list(range(len(placed)))
    if order.stuck:
        free = [one for one in placed if not one[1].spec.affinity]
        bound = [one for one in placed if one[1].spec.affinity]
        assert not any(accepts([*free, *rest], running) for rest in permutations(bound))
    else:
        for turn in (1, -1):
            assert accepts([placed[number] for wave in waves for number in wave[::turn]], running)


NODES = {"a1": {ZONE: "a", RACK: "r"}, "a2": {ZONE: "a"}, "b1": {ZONE: "b", RACK: "r"}, "b2": {RACK: "s"}, "c1": {}}


def by_node(running: Sequence[Pod]) -> dict[str, list[Pod]]:
    """Return the pods by node."""
    return {name: [one for one in running if one.spec.node_name == name] for name in NODES}


def accepts(order: Sequence[tuple[str, Pod, str]], running: Sequence[Pod]) -> bool:
    """Bind members one by one, as InterPodAffinity filters."""
    labels = {name: {HOST: name, **own} for name, own in NODES.items()}
    there = [(one.metadata.labels["app"], one.spec.node_name) for one in running]
    for _, one, at in order:
        affinity = one.spec.affinity.pod_affinity if one.spec.affinity else None
        terms = affinity.required_during_scheduling_ignored_during_execution if affinity else ()
        apps, keys = [term.label_selector.match_labels["app"] for term in terms], [term.topology_key for term in terms]
        own = one.metadata.labels["app"]
        counted = {
            (key, labels[home][key])
            for app, home in there
            if all(app == wanted for wanted in apps)
            for key in keys
            if key in labels[home]
        }
        if not all(key in labels[at] for key in keys):
            return False
        is_first = not counted and all(own == wanted for wanted in apps)
        if not is_first and not all((key, labels[at][key]) in counted for key in keys):
            return False
        there.append((own, at))
    return True
