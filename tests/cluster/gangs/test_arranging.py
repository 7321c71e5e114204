"""Members of a gang beside each other: kube-scheduler's rules between pods hold for every plan, by any node label."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations, product
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import host_fit
from atoll.cluster.gangs.lifecycle import GangView, Obstacle
from atoll.cluster.gangs.member_requests import member_requests
from atoll.cluster.gangs.membership import members_of
from atoll.cluster.gangs.node_domains import NodeDomains, node_domains_of
from atoll.cluster.gangs.placing import FoundPlacement, NoPlacement, find_places
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy
from atoll.cluster.gangs.replacements import place_missing
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.objects import Node, Pod, decode_node
from atoll.cluster.requests import Verdict
from tests.builders import make_pod
from tests.cluster.gangs.builders import GATES, make_gang

ZONE, RACK, HOST = "topology.kubernetes.io/zone", "example.com/rack", "kubernetes.io/hostname"
THREE = {"a1": {ZONE: "a"}, "a2": {ZONE: "a"}, "b1": {ZONE: "b"}, "b2": {ZONE: "b"}, "c1": {ZONE: "c"}}
OWN = {"labelSelector": {"matchLabels": {"app": "x"}}}


ROOM = {"a1": 3, "a2": 3, "b1": 3, "b2": 3, "c1": 3}
Labels = Mapping[str, Mapping[str, str]]


def node(name: str, labels: Mapping[str, str], room: int, taints: Sequence[Mapping[str, str]] = ()) -> Node:
    """Return a node for so many pods."""
    metadata = {"name": name, "labels": {HOST: name, **labels}}
    status = {"allocatable": {"pods": str(room)}}
    return decode_node(orjson.dumps({"metadata": metadata, "spec": {"taints": list(taints)}, "status": status}))


def spread(key: str = ZONE, *, skew: int = 1, **more: Any) -> dict[str, Any]:
    """Return a strict constraint on pods of the same app."""
    return {"maxSkew": skew, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule", **OWN, **more}


def spec_of(*spreads: Any, apart: str = "", near: str = "", **more: Any) -> dict[str, Any]:
    """Return a part of a pod's spec: constraints, and a label by which it keeps apart from or near to its app."""
    affinity: dict[str, Any] = {}
    for kind, key in (("podAntiAffinity", apart), ("podAffinity", near)):
        if key:
            affinity[kind] = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": key, **OWN}]}
    return {"topologySpreadConstraints": list(spreads), **({"affinity": affinity} if affinity else {}), **more}


def other(number: int, at: str, app: str = "x", **options: Any) -> Pod:
    """Return a pod of somebody that runs."""
    return make_pod(f"o{number}", gpus=None, node=at, labels={"app": app}, phase="Running", **options)


def find(
    members: Mapping[str, tuple[int, dict[str, Any]]],
    nodes: Sequence[Node],
    others: Sequence[Pod] = (),
    *,
    namespaces: Labels | None = None,
    **gang: Any,
) -> dict[str, str] | str:
    """Return the node of each member, or why there is no plan."""
    answer = answer_of(members, nodes, others, namespaces=namespaces, **gang)
    if isinstance(answer, NoPlacement):
        return answer.message
    return {
        answer.question.asked[part.pod_set][one.rank].pod.metadata.name: one.host
        for part in answer.placement.assignments
        for one in part.members
    }


def answer_of(
    members: Mapping[str, tuple[int, dict[str, Any]]],
    nodes: Sequence[Node],
    others: Sequence[Pod] = (),
    *,
    namespaces: Labels | None = None,
    **gang: Any,
) -> FoundPlacement | NoPlacement:
    """Return the plan. `members`: number and spec per pod set; those of the pod set `lead` are of another app."""
    made = make_gang(podSets=[{"name": name, "count": count} for name, (count, _) in members.items()], **gang)
    pods = [
        make_pod(
            f"{name}{number}",
            gpus=None,
            labels={"app": "lead" if name == "lead" else "x", "version": "2"},
            annotations={"gpu.scheduling/pod-set": name},
            schedulingGates=GATES,
            **spec,
        )
        for name, (count, spec) in members.items()
        for number in range(count)
    ]
    on: dict[str, list[Pod]] = {}
    for pod in others:
        on.setdefault(pod.spec.node_name, []).append(pod)
    known = {one.metadata.name: one for one in nodes}
    free = {name: host_fit.free(one, on.get(name, ())) for name, one in known.items()}
    cluster = PlacementSnapshot(known, {}, {}, on, free, namespaces=namespaces or {})
    chosen = members_of(pods, made.spec, {})
    site = node_domains_of(None, nodes, {}, strict=False)
    assert isinstance(site, NodeDomains)
    return find_places(GangView(made, chosen, ReadinessPolicy()), chosen, {}, site, cluster)


def hall(labels: Labels = THREE, room: Mapping[str, int] = ROOM) -> list[Node]:
    """Return five nodes in three zones."""
    return [node(name, own, room[name]) for name, own in labels.items()]


def by_zone(places: dict[str, str] | str, labels: Labels = THREE) -> list[int]:
    """Return how many members each zone has, most first."""
    assert isinstance(places, dict), places
    return sorted(Counter(labels[host].get(ZONE) for host in places.values()).values(), reverse=True)


@pytest.mark.parametrize(
    ("count", "spec", "others", "expected"),
    [
        pytest.param(4, spec_of(spread()), [], [2, 1, 1], id="evenly over zones"),
        pytest.param(2, spec_of(spread(skew=2)), [], [2], id="within the skew, as near as without"),
        pytest.param(2, spec_of(spread()), [other(1, "a1"), other(2, "b1")], [1, 1], id="others count: c, then any"),
        pytest.param(3, spec_of(spread()), [other(1, "a1", app="y")], [1, 1, 1], id="other apps do not"),
        pytest.param(3, spec_of(spread(minDomains=4)), [], [1, 1, 1], id="too few domains: the skew in each"),
        pytest.param(2, spec_of(spread(minDomains=2, skew=1)), [], [1, 1], id="a pinned member sees its node alone"),
        pytest.param(
            3, spec_of(spread(matchLabelKeys=["version"])), [other(1, "a1"), other(2, "a2")], [1, 1, 1],
            id="only pods of the same version",
        ),
        pytest.param(3, spec_of(spread(nodeAffinityPolicy="Ignore")), [], [1, 1, 1], id="in any order"),
        pytest.param(2, spec_of(spread(), nodeSelector={ZONE: "a"}), [], [2], id="nodes that it may not use"),
        pytest.param(2, spec_of(spread(), spread(HOST)), [], [1, 1], id="by two labels at once"),
        pytest.param(3, spec_of(apart=ZONE), [], [1, 1, 1], id="apart by a label that is no level"),
        pytest.param(4, spec_of(near=ZONE), [], [4], id="near each other: one zone"),
    ],
)  # fmt: skip
def test_members_keep_their_rules_among_themselves(
    count: int, spec: dict[str, Any], others: list[Pod], expected: list[int]
) -> None:
    """Where the search by levels would break a rule, members are arranged anew."""
    assert by_zone(find({"w": (count, spec)}, hall(), others)) == expected


@pytest.mark.parametrize(
    ("count", "spec", "message"),
    [
        (4, spec_of(apart=ZONE), "pod set w: no arrangement that was tried keeps the pod anti-affinity by " + ZONE),
        (4, spec_of(spread(minDomains=4)), "no arrangement that was tried keeps the topology spread by " + ZONE),
        (7, spec_of(near=ZONE), "pod set w: no arrangement that was tried keeps the pod affinity by " + ZONE),
        (1, spec_of(spread("example.com/none")), "excluded: topology spread: 5"),
    ],
)  # fmt: skip
def test_a_gang_that_cannot_keep_its_rules_waits_and_says_so(count: int, spec: dict[str, Any], message: str) -> None:
    """Nothing is planned that kube-scheduler would refuse."""
    found = find({"w": (count, spec)}, hall())

    assert isinstance(found, str)
    assert message in found


@pytest.mark.parametrize("spec", [spec_of(apart=ZONE), spec_of(spread(minDomains=4))], ids=["apart", "spread"])
def test_fewer_members_start_where_their_rules_allow_no_more_and_fewer_are_enough(spec: dict[str, Any]) -> None:
    """Three zones, four members, one each."""
    assert by_zone(find({"w": (4, spec)}, hall(), minMember=2)) == [1, 1, 1]


def test_pod_sets_keep_apart_from_each_other_and_near_each_other() -> None:
    """Workers in another zone than the leader, whom they name; or in the same, where nobody else is whom they name."""
    term = {"labelSelector": {"matchLabels": {"app": "lead"}}, "topologyKey": ZONE}
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    apart = find({"lead": (1, {}), "w": (3, {"affinity": {"podAntiAffinity": rule}})}, hall())
    near = find({"lead": (1, {}), "w": (3, {"affinity": {"podAffinity": rule}})}, hall())

    assert isinstance(apart, dict)
    assert isinstance(near, dict)
    zone = {name: THREE[host][ZONE] for name, host in apart.items()}
    assert zone.pop("lead0") not in zone.values()
    assert len({THREE[host][ZONE] for host in near.values()}) == 1


@pytest.mark.parametrize(
    ("host", "count", "expected"),
    [("a1", 1, Verdict.BUSY), ("a1", 7, Verdict.NEVER), ("", 1, Verdict.NEVER)],
    ids=["room is missing beside it", "too little even if nobody else was there", "nobody is there"],
)
def test_who_has_to_be_near_somebody_waits_for_room_there(host: str, count: int, expected: Verdict) -> None:
    """Whom a member needs is not counted as gone where it is judged what becomes of it without other pods."""
    zone_is_full = [other(number, at, app="y") for number, at in enumerate(("a1", "a1", "a2", "a2", "a2"))]
    near = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": ZONE, **OWN}]}
    others = [*zone_is_full, *([other(9, host)] if host else [])]

    answer = answer_of({"lead": (count, {"affinity": {"podAffinity": near}})}, hall(), others)

    assert isinstance(answer, NoPlacement)
    assert answer.verdict is expected


def test_pod_sets_with_one_host_port_take_hosts_of_their_own() -> None:
    """kube-scheduler refuses the second pod that opens a port of its host."""
    port = {"initContainers": [{"name": "side", "restartPolicy": "Always", "ports": [{"hostPort": 80}]}]}
    places = find({"lead": (1, port), "w": (2, port)}, hall())

    assert isinstance(places, dict)
    assert len(set(places.values())) == 3


def test_others_keep_members_away_by_labels_of_namespaces() -> None:
    """A pod of another namespace that keeps apart from all of a team's namespaces keeps its zone free of members."""
    term = {"topologyKey": ZONE, **OWN, "namespaceSelector": {"matchLabels": {"tier": "gold"}}}
    rule = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    others = [other(1, "a1", namespace="else", affinity=rule), other(2, "b1", namespace="else", affinity=rule)]

    gold = find({"w": (3, {})}, hall(), others, namespaces={"team": {"tier": "gold"}})
    plain = find({"w": (3, {})}, hall(), others, namespaces={"team": {}})

    assert isinstance(gold, dict)
    assert set(gold.values()) == {"c1"}
    assert isinstance(plain, dict)


KEYS = st.sampled_from((ZONE, RACK, HOST))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Node], list[Pod], int, dict[str, Any]]:
    """Return a few nodes, pods of others, and members with one rule."""
    nodes = []
    for number in range(draw(st.integers(1, 4))):
        labels = {key: draw(st.sampled_from("ab")) for key in (ZONE, RACK) if draw(st.integers(0, 9))}
        nodes.append(node(f"n{number}", labels, draw(st.integers(0, 3))))
    names = [one.metadata.name for one in nodes]
    others = [other(number, draw(st.sampled_from(names))) for number in range(draw(st.integers(0, 2)))]
    rule = draw(st.sampled_from(("spread", "apart", "near")))
    if rule == "spread":
        more = draw(st.sampled_from(({}, {"nodeTaintsPolicy": "Honor"})))
        spec = spec_of(spread(draw(KEYS), skew=draw(st.integers(1, 2)), **more))
    else:
        spec = spec_of(**{rule: draw(KEYS)})
    return nodes, others, draw(st.integers(1, 4)), spec


@given(worlds())
def test_a_plan_is_found_if_and_only_if_members_could_be_bound_one_by_one(
    world: tuple[list[Node], list[Pod], int, dict[str, Any]],
) -> None:
    """Against all arrangements, each bound one by one under one rule of kube-scheduler, by a plain count."""
    nodes, others, count, spec = world
    found = find({"w": (count, spec)}, nodes, others)
    names = [one.metadata.name for one in nodes]
    if isinstance(found, dict):
        assert any(accepts(order, nodes, others, spec) for order in set(permutations(found.values())))
    else:
        assert not any(accepts(places, nodes, others, spec) for places in product(names, repeat=count))


def accepts(places: Sequence[str], nodes: Sequence[Node], others: Sequence[Pod], spec: dict[str, Any]) -> bool:
    """Bind members at these places in turn, as kube-scheduler would take them."""
    labels = {one.metadata.name: one.metadata.labels for one in nodes}
    there = [one.spec.node_name for one in others]
    for place in places:
        room = next(int(one.status.allocatable["pods"]) for one in nodes if one.metadata.name == place)
        if there.count(place) >= room or not all(rule(place, there, labels) for rule in rules_of(spec)):
            return False
        there.append(place)
    return True


def rules_of(spec: dict[str, Any]) -> list[Any]:
    """Return the rules of a spec as functions of the place, those there already, and labels."""

    def even(one: dict[str, Any]) -> Any:
        def rule(place: str, there: list[str], labels: Labels) -> bool:
            key = one["topologyKey"]
            counts = {own[key]: 0 for own in labels.values() if key in own}
            for name in there:
                if key in labels[name]:
                    counts[labels[name][key]] += 1
            return key in labels[place] and counts[labels[place][key]] + 1 - min(counts.values()) <= one["maxSkew"]

        return rule

    def term(kind: str) -> list[str]:
        rows = spec.get("affinity", {}).get(kind, {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
        return [row["topologyKey"] for row in rows]

    def apart(key: str) -> Any:
        return lambda place, there, labels: (
            key not in labels[place] or all(labels[name].get(key) != labels[place][key] for name in there)
        )

    def near(key: str) -> Any:
        def rule(place: str, there: list[str], labels: Labels) -> bool:
            where = {labels[name][key] for name in there if key in labels[name]}
            return key in labels[place] and (labels[place][key] in where or not where)

        return rule

    return [
        *map(even, spec["topologySpreadConstraints"]),
        *map(apart, term("podAntiAffinity")),
        *map(near, term("podAffinity")),
    ]


@pytest.mark.parametrize(
    ("running", "full", "expected"),
    [
        ({"w0": "a1", "w1": "b1"}, (), "c"),
        ({"w0": "a1", "w1": "b1"}, ("c1",), ""),
        ({"w0": "a1", "w1": "b1", "w2": "c1"}, ("b2",), "a"),
    ],
    ids=["the emptiest zone", "which is full: it waits", "all even, but only one has room"],
)
def test_a_replacement_keeps_the_spread(running: dict[str, str], full: Sequence[str], expected: str) -> None:
    """Members that run count; where the emptiest zone takes no member, no other zone does."""
    spec, room = spec_of(spread()), {name: 1 if name in running.values() else 3 for name in THREE}
    nodes = hall(room=room | dict.fromkeys(full, 0))
    notes = {"gpu.scheduling/pod-set": "w"}
    pods = [
        make_pod(name, gpus=None, labels={"app": "x"}, annotations=notes, node=at, phase="Running", **spec)
        for name, at in running.items()
    ]
    missing = make_pod("new", gpus=None, labels={"app": "x"}, annotations=notes, schedulingGates=GATES, **spec)
    gang = make_gang(podSets=[{"name": "w", "count": len(running) + 1}])
    members = members_of([*pods, missing], gang.spec, {})
    on = {pod.spec.node_name: [pod] for pod in pods}
    free = {one.metadata.name: host_fit.free(one, on.get(one.metadata.name, ())) for one in nodes}
    cluster = PlacementSnapshot({one.metadata.name: one for one in nodes}, {}, {}, on, free)
    site = node_domains_of(None, nodes, {}, strict=False)
    assert isinstance(site, NodeDomains)

    chosen = [one for one in members if one.pod.metadata.name == "new"]
    placed = place_missing(GangView(gang, members, ReadinessPolicy()), chosen, {}, site, cluster)

    assert [THREE[one.allocation.node][ZONE] for one in placed.assignments] == ([expected] if expected else [])


def test_a_member_with_resource_claims_is_refused_in_words() -> None:
    """Devices of dynamic resource allocation are not weighed, so kube-scheduler might refuse the place."""
    gang = make_gang(podSets=[{"name": "w", "count": 1}])
    pod = make_pod("w0", gpus=None, schedulingGates=GATES, resourceClaims=[{"name": "nic", "resourceClaimName": "n"}])

    refused = member_requests(members_of([pod], gang.spec, {}), lambda _: None, lambda _: None)

    assert isinstance(refused, Obstacle)
    assert "pod w0 uses ResourceClaims" in refused.message
    assert "remove spec.resourceClaims" in refused.message
