"""kube-scheduler's refusals are predicted: each filter as a table of pods and nodes."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import host_fit, pod_fit
from atoll.cluster.host_fit import (
    AFFINITY,
    CORDONED,
    NEIGHBOURS,
    NOT_READY,
    PORTS,
    SELECTOR,
    TAINTED,
    VOLUME,
    Volumes,
    excluded_nodes,
    free,
    needs,
    node_reason,
    preference,
    tolerates,
)
from atoll.cluster.labels import selects
from atoll.cluster.objects import Node, Pod
from atoll.cluster.pod_fit import are_apart, own_limits
from atoll.cluster.quantities import AMOUNT_MAX, is_zero, parse_amount
from atoll.cluster.storage import PersistentVolume, PersistentVolumeClaim

HOSTNAME = "kubernetes.io/hostname"
ZONE = "topology.kubernetes.io/zone"


def pod(name: str = "p", *, labels: dict[str, str] | None = None, phase: str = "Pending", **spec: Any) -> Pod:
    """A pod from the fields of its spec as the API server spells them."""
    metadata = {"name": name, "namespace": "ml", "labels": labels or {}}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": {"phase": phase}}, Pod)


def node(name: str, *, labels: dict[str, str] | None = None, ready: str = "True", **more: Any) -> Node:
    """A node with its hostname label."""
    status = {
        "conditions": [{"type": "Ready", "status": ready}],
        "allocatable": more.pop("allocatable", {"cpu": "8", "memory": "64Gi", "pods": "4"}),
    }
    metadata = {"name": name, "labels": {HOSTNAME: name, **(labels or {})}}
    return msgspec.convert({"metadata": metadata, "spec": more, "status": status}, Node)


def affinity(*expressions: dict[str, Any], fields: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Required node affinity of one term."""
    term = {"matchExpressions": list(expressions), "matchFields": fields or []}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def anti(labels: dict[str, str], key: str = HOSTNAME, **more: Any) -> dict[str, Any]:
    """Required anti-affinity to pods with these labels."""
    term = {"topologyKey": key, "labelSelector": {"matchLabels": labels}, **more}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def near(labels: dict[str, str], key: str) -> dict[str, Any]:
    """Required affinity to pods with these labels."""
    term = {"topologyKey": key, "labelSelector": {"matchLabels": labels}}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def refusals(subject: Pod, *nodes: Node, pods: dict[str, list[Pod]] | None = None, **more: Any) -> dict[str, str]:
    """What would refuse the pod."""
    return excluded_nodes(subject, nodes, pods or {}, **more)


NO_SCHEDULE = [{"key": "gpu", "value": "a", "effect": "NoSchedule"}]


@pytest.mark.parametrize(
    ("tolerations", "taints", "refused"),
    [
        ([], [], False),
        ([], NO_SCHEDULE, True),
        ([], [{"key": "gpu", "effect": "NoExecute"}], True),
        ([], [{"key": "gpu", "effect": "PreferNoSchedule"}], False),
        ([{"key": "gpu", "operator": "Exists"}], NO_SCHEDULE, False),
        ([{"operator": "Exists"}], NO_SCHEDULE, False),
        ([{"key": "gpu", "value": "a"}], NO_SCHEDULE, False),
        ([{"key": "gpu", "value": "b"}], NO_SCHEDULE, True),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], NO_SCHEDULE, True),
        ([{"key": "other", "operator": "Exists"}], NO_SCHEDULE, True),
        ([{"operator": "Equal"}], NO_SCHEDULE, True),
        ([{"key": "k", "operator": "Gt", "value": "5"}], [{"key": "k", "value": "6", "effect": "NoSchedule"}], False),
        ([{"key": "k", "operator": "Gt", "value": "5"}], [{"key": "k", "value": "5", "effect": "NoSchedule"}], True),
        ([{"key": "k", "operator": "Lt", "value": "5"}], [{"key": "k", "value": "-1", "effect": "NoSchedule"}], False),
        ([{"key": "k", "operator": "Lt", "value": "5"}], [{"key": "k", "value": "007", "effect": "NoSchedule"}], True),
        ([{"key": "k", "operator": "Lt", "value": "9"}], [{"key": "k", "value": "007", "effect": "NoSchedule"}], True),
        ([{"key": "gpu", "operator": "Nonsense", "value": "a"}], NO_SCHEDULE, True),
    ],
)
def test_taints(tolerations: list[dict[str, str]], taints: list[dict[str, str]], *, refused: bool) -> None:
    """NoSchedule and NoExecute refuse, unless tolerated by key, value and effect; PreferNoSchedule does not."""
    answer = node_reason(pod(tolerations=tolerations), node("n", taints=taints))

    assert answer == (TAINTED if refused else "")


def test_cordoned_and_not_ready_nodes() -> None:
    """A cordon refuses unless it is tolerated; a node that is not Ready refuses even before its taint."""
    tolerates = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]

    assert node_reason(pod(), node("n", unschedulable=True)) == CORDONED
    assert node_reason(pod(tolerations=tolerates), node("n", unschedulable=True)) == ""
    assert node_reason(pod(), node("n", ready="False")) == NOT_READY
    assert node_reason(pod(), node("n", ready="Unknown")) == NOT_READY


@pytest.mark.parametrize(
    ("requirement", "matches"),
    [
        ({"key": "zone", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "zone", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "other", "operator": "NotIn", "values": ["a"]}, True),
        ({"key": "zone", "operator": "Exists"}, True),
        ({"key": "zone", "operator": "DoesNotExist"}, False),
        ({"key": "cores", "operator": "Gt", "values": ["7"]}, True),
        ({"key": "cores", "operator": "Lt", "values": ["8"]}, False),
        ({"key": "zone", "operator": "Gt", "values": ["7"]}, False),
        ({"key": "cores", "operator": "Gt", "values": []}, False),
        ({"key": "zone", "operator": "Like", "values": ["a"]}, False),
    ],
)
def test_required_affinity(requirement: dict[str, Any], *, matches: bool) -> None:
    """Every operator, numbers compared as numbers; one that nobody knows never matches."""
    answer = node_reason(pod(affinity=affinity(requirement)), node("n", labels={"zone": "a", "cores": "8"}))

    assert answer == ("" if matches else AFFINITY)


def test_selector_fields_and_alternatives() -> None:
    """The node selector must match whole; matchFields names a node; one of several terms is enough; an empty one is
    none."""
    by_name = affinity(fields=[{"key": "metadata.name", "operator": "In", "values": ["n1"]}])
    terms = {"nodeSelectorTerms": [{}, {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]}
    either = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}

    assert refusals(pod(nodeSelector={"zone": "a"}), node("n1", labels={"zone": "a"}), node("n2")) == {"n2": SELECTOR}
    assert refusals(pod(affinity=by_name), node("n1"), node("n2")) == {"n2": AFFINITY}
    assert refusals(pod(affinity=either), node("n1", labels={"zone": "a"}), node("n2")) == {"n2": AFFINITY}


def test_preferences() -> None:
    """Preferred affinity adds its weight, an untolerated soft taint outweighs it."""
    preferred = {"weight": 7, "preference": {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}}
    subject = pod(affinity={"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}})
    soft = [{"key": "gpu", "effect": "PreferNoSchedule"}]

    assert preference(subject, node("n")) == 0
    assert preference(subject, node("n", labels={"zone": "a"})) == 7
    assert preference(subject, node("n", labels={"zone": "a"}, taints=soft)) == 7 - 1000


def test_what_a_pod_takes() -> None:
    """Containers add up, sidecars with them; an init container counts beside the sidecars before it; limits stand in
    for requests; pod-level requests replace; overhead comes on top; one of `pods` in any case."""
    containers = [
        {"name": "a", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}},
        {"name": "b", "resources": {"limits": {"cpu": "1"}}},
    ]
    init = [
        {"name": "proxy", "restartPolicy": "Always", "resources": {"requests": {"cpu": "250m"}}},
        {"name": "load", "resources": {"requests": {"cpu": "2", "memory": "512Mi"}}},
    ]

    assert needs(pod(containers=containers)) == {"cpu": 1500, "memory": 2**30, "pods": 1}
    assert needs(pod(containers=containers, initContainers=init)) == {"cpu": 2250, "memory": 2**30, "pods": 1}
    whole = pod(containers=containers, resources={"requests": {"cpu": "4"}}, overhead={"cpu": "100m"})
    assert needs(whole) == {"cpu": 4100, "memory": 2**30, "pods": 1}
    assert needs(pod()) == {"pods": 1}


def test_what_a_node_has_left() -> None:
    """DaemonSets, static and foreign pods count, those that are ending too; those that have ended do not."""
    one = [{"name": "c", "resources": {"requests": {"cpu": "1", "example.com/dongle": "2"}}}]
    there = [pod("runs", phase="Running", containers=one), pod("ended", phase="Succeeded", containers=one)]
    there.append(pod("failed", phase="Failed", containers=one))

    assert free(node("n"), there) == {"cpu": 7000, "memory": 64 * 2**30, "pods": 3, "example.com/dongle": -2}


def test_a_victims_place_among_the_pods_goes_with_it() -> None:
    """A node of one pod is full; without its pod it has room for one, cpu and pod together."""
    full = node("n", allocatable={"cpu": "1", "pods": "1"})
    victim = pod("v", phase="Running", containers=[{"name": "c", "resources": {"requests": {"cpu": "1"}}}])

    assert free(full, [victim]) == {"cpu": 0, "pods": 0}
    assert free(full, []) == {"cpu": 1000, "pods": 1}


@pytest.mark.parametrize(
    ("wanted", "taken", "clash"),
    [
        ({"hostPort": 80}, {"hostPort": 80}, True),
        ({"hostPort": 80}, {"hostPort": 81}, False),
        ({"hostPort": 80}, {"hostPort": 80, "protocol": "UDP"}, False),
        ({"hostPort": 80, "hostIP": "10.0.0.1"}, {"hostPort": 80, "hostIP": "10.0.0.2"}, False),
        ({"hostPort": 80, "hostIP": "10.0.0.1"}, {"hostPort": 80}, True),
        ({"hostPort": 80, "hostIP": "10.0.0.1"}, {"hostPort": 80, "hostIP": "0.0.0.0"}, True),
        ({"containerPort": 80}, {"hostPort": 80}, False),
    ],
)
def test_host_ports(wanted: dict[str, Any], taken: dict[str, Any], *, clash: bool) -> None:
    """One port, one protocol, one address; the wildcard is every address; ports inside of containers never clash."""
    subject = pod(containers=[{"name": "c", "ports": [wanted]}])
    other = pod("o", phase="Running", containers=[{"name": "c", "ports": [taken]}])

    assert refusals(subject, node("n"), pods={"n": [other]}) == ({"n": PORTS} if clash else {})


def test_anti_affinity_holds_both_ways() -> None:
    """A pod keeps out of domains of those it avoids, and of those that avoid it; ended pods avoid nobody."""
    app, other = {"app": "a"}, {"app": "b"}
    racks = [node(f"n{number}", labels={"rack": f"r{number // 2}"}) for number in range(4)]
    shy = pod("shy", labels=other, affinity=anti(app, "rack"))

    assert refusals(shy, *racks, pods={"n0": [pod("x", labels=app, phase="Running")]}) == dict.fromkeys(
        ("n0", "n1"), NEIGHBOURS
    )
    theirs = pod("x", labels=other, phase="Running", affinity=anti(app, "rack"))
    assert refusals(pod(labels=app), *racks, pods={"n2": [theirs]}) == dict.fromkeys(("n2", "n3"), NEIGHBOURS)
    ended = pod("x", labels=other, phase="Succeeded", affinity=anti(app, "rack"))
    assert refusals(pod(labels=app), *racks, pods={"n2": [ended]}) == {}


def test_affinity_needs_a_pod_in_the_domain_or_may_be_the_first() -> None:
    """Others must be there; a pod that matches its own term may start where there is none yet, on labelled nodes."""
    app = {"app": "a"}
    racks = [node("n0", labels={"rack": "r0"}), node("n1", labels={"rack": "r1"}), node("n2")]
    subject = pod(labels=app, affinity=near(app, "rack"))
    stranger = pod(labels={"app": "b"}, affinity=near(app, "rack"))

    assert refusals(subject, *racks, pods={"n0": [pod("x", labels=app, phase="Running")]}) == dict.fromkeys(
        ("n1", "n2"), NEIGHBOURS
    )
    assert refusals(subject, *racks) == {"n2": NEIGHBOURS}
    assert refusals(stranger, *racks) == dict.fromkeys(("n0", "n1", "n2"), NEIGHBOURS)


def test_affinity_terms_choose_namespaces_and_keys() -> None:
    """Named namespaces, those chosen by labels, the pod's own by default; matchLabelKeys narrow by its own values."""
    app = {"app": "a"}
    there = msgspec.convert(
        {"metadata": {"name": "x", "namespace": "web", "labels": {**app, "rev": "1"}}, "status": {"phase": "Running"}},
        Pod,
    )

    def out(subject: Pod, **more: Any) -> bool:
        return bool(refusals(subject, node("n"), pods={"n": [there]}, **more))

    assert not out(pod(affinity=anti(app)))
    assert out(pod(affinity=anti(app, namespaces=["web"])))
    everywhere = pod(affinity=anti(app, namespaceSelector={}))
    assert out(everywhere)
    chosen = pod(affinity=anti(app, namespaceSelector={"matchLabels": {"team": "x"}}))
    assert not out(chosen)
    assert out(chosen, namespace_labels={"web": {"team": "x"}})
    own = {"rev": "2"}
    assert not out(pod(labels=own, affinity=anti(app, namespaces=["web"], matchLabelKeys=["rev"])))
    assert out(pod(labels=own, affinity=anti(app, namespaces=["web"], mismatchLabelKeys=["rev"])))


def test_bound_volumes_bind_their_pods() -> None:
    """A volume's node affinity and its zone label hold; zones may be several; an unbound claim says nothing yet."""
    claim = msgspec.convert(
        {"metadata": {"name": "data", "namespace": "ml"}, "spec": {"volumeName": "pv"}}, PersistentVolumeClaim
    )
    terms = [{"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": ["n0", "n1"]}]}]
    local = msgspec.convert(
        {"metadata": {"name": "pv"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}},
        PersistentVolume,
    )
    zonal = msgspec.convert({"metadata": {"name": "pv", "labels": {ZONE: "a__b"}}}, PersistentVolume)
    nodes = [node(f"n{number}", labels={ZONE: zone}) for number, zone in enumerate("abc")]
    subject = pod(volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}])
    claims = {("ml", "data"): claim}

    assert refusals(subject, *nodes, volumes=Volumes(claims, {"pv": local})) == {"n2": VOLUME}
    assert refusals(subject, *nodes, volumes=Volumes(claims, {"pv": zonal})) == {"n2": VOLUME}
    assert refusals(subject, *nodes, volumes=Volumes(claims, {})) == {}
    generic = pod("p", volumes=[{"name": "v", "ephemeral": {}}])
    assert refusals(generic, *nodes, volumes=Volumes({("ml", "p-v"): claim}, {"pv": local})) == {"n2": VOLUME}


def test_what_templates_of_one_gang_say_of_each_other() -> None:
    """Anti-affinity to one's own kind limits a domain to one member; to another kind keeps the two apart."""
    app, other = {"app": "a"}, {"app": "b"}
    alone = pod(labels=app, affinity=anti(app))

    assert own_limits(alone) == (HOSTNAME,)
    assert own_limits(pod(labels=other, affinity=anti(app))) == ()
    assert are_apart(pod(labels=other), pod(labels=app, affinity=anti(other)))
    assert are_apart(pod(labels=app, affinity=anti(other)), pod(labels=other))
    assert not are_apart(alone, pod(labels=other))


@pytest.mark.parametrize(
    ("resource", "quantity", "amount"),
    [
        ("cpu", "100m", 100),
        ("cpu", "2", 2000),
        ("cpu", 0.5, 500),
        ("cpu", "1n", 1),
        ("memory", "1.5Gi", 3 * 2**29),
        ("memory", "1e3", 1000),
        ("memory", "128974848000m", 128974848),
        ("pods", 110, 110),
        ("pods", "", 0),
        ("pods", "-1", 0),
        ("pods", "nan", 0),
        ("pods", "many", 0),
        ("pods", "1e999999999", AMOUNT_MAX),
        ("memory", "12E", AMOUNT_MAX),
        ("memory", "3E", 3 * 1000**6),
        ("memory", "3Ei", 3 * 1024**6),
        *(("memory", f"3{suffix}", 3 * 1000**power) for power, suffix in enumerate(("", "k", "M", "G", "T", "P"))),
        *(("memory", f"3{suffix}", 3 * 1024**power) for power, suffix in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi"))),
        *(("memory", f"{10 ** (3 * power)}{suffix}", 1) for power, suffix in enumerate(("", "m", "u", "n"))),
    ],
)
def test_amounts(resource: str, quantity: str | float, amount: int) -> None:
    """Quantities in every spelling, rounded up; nonsense counts as none, the absurd as the most that is counted."""
    assert parse_amount(resource, quantity) == amount


RATIOS = {"n": "1e-9", "u": "1e-6", "m": "1e-3", "": "1", "k": "1e3", "E": "1e18", "Ki": "1024", "Gi": str(2**30)}


@given(
    number=st.integers(0, 10**22), suffix=st.sampled_from(sorted(RATIOS)), resource=st.sampled_from(["cpu", "memory"])
)
def test_whole_numbers_are_counted_exactly(number: int, suffix: str, resource: str) -> None:
    """As decimal fractions are, rounded up; what no machine has counts as the most."""
    with localcontext(prec=80):
        exact = Decimal(number) * Decimal(RATIOS[suffix]) * (1000 if resource == "cpu" else 1)
        amount = int(exact.to_integral_value(ROUND_CEILING))
    assert parse_amount(resource, f"{number}{suffix}") == min(amount, AMOUNT_MAX)
    assert is_zero(f"{number}{suffix}") == (number == 0)


def resized(asked: str, runs_with: str | None, promised: str | None, *, why: str = "", is_sidecar: bool = False) -> Pod:
    """A pod of one container whose cpu is being changed."""
    container = {"name": "c", "resources": {"requests": {"cpu": asked}}}
    status: dict[str, Any] = {"name": "c"}
    if runs_with is not None:
        status["resources"] = {"requests": {"cpu": runs_with}}
    if promised is not None:
        status["allocatedResources"] = {"cpu": promised}
    conditions = [{"type": "PodResizePending", "status": "True", "reason": why}] if why else []
    kind = "initContainers" if is_sidecar else "containers"
    spec = {kind: [{**container, "restartPolicy": "Always"} if is_sidecar else container]}
    kind = "initContainerStatuses" if is_sidecar else "containerStatuses"
    body = {"metadata": {"name": "p"}, "spec": spec, "status": {"conditions": conditions, kind: [status]}}
    return msgspec.convert(body, Pod)


@pytest.mark.parametrize(
    ("found", "cpu"),
    [
        (resized("2", None, None), 2000),
        (resized("2", "2", "2"), 2000),
        (resized("4", "2", "2"), 4000),
        (resized("1", "2", "2"), 2000),
        (resized("1", "2", "1"), 2000),
        (resized("2", "1", "3"), 3000),
        (resized("4", "2", "2", why="Deferred"), 4000),
        (resized("100", "2", "2", why="Infeasible"), 2000),
        (resized("100", "2", "3", why="Infeasible"), 3000),
        (resized("100", None, None, why="Infeasible"), 100_000),
        (resized("4", "2", "2", is_sidecar=True), 4000),
        (resized("100", "2", "2", why="Infeasible", is_sidecar=True), 2000),
        (resized("2", None, "3"), 2000),
    ],
    ids=[
        "kubelet has not looked",
        "as it is",
        "larger, not given yet",
        "smaller, not taken yet",
        "smaller, promised, not taken yet",
        "promised more",
        "larger later",
        "larger never",
        "larger never, promised more than it runs with",
        "larger never, and nothing told",
        "a sidecar",
        "a sidecar, larger never",
        "an old kubelet",
    ],
)
def test_a_pod_that_is_resized_takes_the_most_of_three(found: Pod, cpu: int) -> None:
    """As kube-scheduler: what is asked, promised and run with; what is infeasible is not asked for."""
    assert needs(found)["cpu"] == cpu


def test_an_infeasible_resize_leaves_no_node_below_zero() -> None:
    """A node of 8 cores with a pod that runs with 2 and was resized to 100 has 6 left."""
    wanted = resized("100", "2", "2", why="Infeasible")

    assert free(node("n"), [wanted])["cpu"] == 6000


def test_no_neighbour_costs_more_than_a_bounded_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """3,000 terms of anti-affinity on each of 300 running pods: a bounded number of comparisons. The first terms count,
    and the others as if they meant every pod."""
    looks = 0

    def count(*args: Any) -> bool:
        nonlocal looks
        looks += 1
        return selects(*args)

    monkeypatch.setattr(pod_fit, "selects", count)
    selectors = ({"matchLabels": {"app": f"a{number}"}} for number in range(3_000))
    terms = [{"topologyKey": HOSTNAME, "labelSelector": selector} for selector in selectors]
    crowded = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    nodes = [node(f"n{number}") for number in range(300)]
    running = {one.metadata.name: [pod("other", phase="Running", affinity=crowded)] for one in nodes}

    for app in ("a0", "a2999", "another"):
        refused = excluded_nodes(pod(labels={"app": app}), nodes[:-1], running)
        assert set(refused.values()) == {NEIGHBOURS}
        assert len(refused) == 299
    assert looks <= 3 * 2 * pod_fit.TERMS_MAX


def test_nodes_are_compared_with_what_is_forbidden_by_label() -> None:
    """200 pods that keep the pod off their hosts cost each node one look, not 200."""
    apart = anti({"app": "web"})
    nodes = [node(f"n{number}") for number in range(200)]
    running = {one.metadata.name: [pod("other", labels={"app": "web"}, phase="Running")] for one in nodes}

    neighbours = pod_fit.PodNeighbours.of(pod(labels={"app": "web"}, affinity=apart), nodes, running, {})

    assert {key: len(values) for key, values in neighbours.forbidden.items()} == {HOSTNAME: 200}
    assert all(map(neighbours.refuse, nodes))
    assert not neighbours.refuse(node("other"))


def test_taints_are_compared_once_for_nodes_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tolerations against 400 nodes with the same taints: as many comparisons as there are taints."""
    looks = 0

    def count(*args: Any) -> bool:
        nonlocal looks
        looks += 1
        return tolerates(*args)

    monkeypatch.setattr(host_fit, "tolerates", count)
    taints = [{"key": f"unique-{number}", "effect": "NoSchedule"} for number in range(3)]
    waiting = pod(tolerations=[{"key": f"unique-{number}", "operator": "Exists"} for number in range(1, 65)])

    assert set(excluded_nodes(waiting, [node(f"n{number}", taints=taints) for number in range(400)], {}).values()) == {
        TAINTED
    }
    assert looks == len(taints)
