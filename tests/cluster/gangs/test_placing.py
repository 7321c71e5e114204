"""Places for whole gangs: all existing members, else as many as fit, never fewer than the quorum."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.cluster import host_fit
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.membership import members_of
from atoll.cluster.gangs.node_domains import NodeDomains, node_domains_of
from atoll.cluster.gangs.placing import FoundPlacement, NoPlacement, find_places
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy
from atoll.cluster.gangs.search_input import PlacementSnapshot, ReservedPool
from atoll.cluster.leases import Holder
from atoll.cluster.objects import OwnerReference, Pod
from atoll.cluster.requests import Request, Verdict, request_of
from atoll.cluster.volume_fit import Volumes
from tests.builders import make_allocation, make_lease, make_pod
from tests.cluster.gangs.builders import GATES, make_gang
from tests.cluster.gangs.test_replacements import Ground
from tests.cluster.test_static_volumes import cluster

JOB = OwnerReference("Job", "j", "job", controller=True)
SETS = [{"name": "a", "count": 4}, {"name": "b", "count": 4}]


def find(
    counts: dict[str, int], *, machines: int, busy: int = 0, done: int = 0, volumes: Volumes | None = None, **spec: Any
) -> FoundPlacement | NoPlacement:
    """Place members of eight GPUs each, so many per pod set, on so many machines, of which some are full. `done`: how
    many of the set `workers` have succeeded; `volumes`: with them, each member uses a claim of its own name, and who is
    on the full machines the first one's."""
    gang = make_gang(8, status={"succeeded": [{"podSet": "workers", "owner": "job", "count": done}]}, **spec)
    ground = Ground({})
    nodes = {name: ground.nodes[name] for name in sorted(ground.nodes)[:machines]}
    used = [{"name": "v", "persistentVolumeClaim": {"claimName": "workers0"}}] if volumes else []
    full = [
        make_pod(f"f-{n}", namespace="team", gpus=8, node=n, allocation=make_allocation(n, *range(8)), volumes=used)
        for n in list(nodes)[:busy]
    ]
    for pod in full:
        ground.ledger.put_pod(pod)
    pods = [
        make_pod(
            f"{pod_set}{n}",
            gpus=8,
            schedulingGates=GATES,
            annotations={"gpu.scheduling/pod-set": pod_set},
            volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": f"{pod_set}{n}"}}] if volumes else [],
        )
        for pod_set, count in counts.items()
        for n in range(count)
    ]
    pods = [
        msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, owner_references=(JOB,)))
        for pod in pods
    ]
    members = members_of(pods, gang.spec, {})
    requests: dict[str, Request] = {}
    for pod in pods:
        request = request_of(pod, None)
        assert isinstance(request, Request)
        requests[pod.metadata.uid] = request
    on: dict[str, list[Pod]] = {pod.spec.node_name: [pod] for pod in full}
    free = {name: host_fit.free(node, on.get(name, ())) for name, node in nodes.items()}
    cells = {name: cell for name, cell in ground.ledger.cells(now_seconds=0.0).items() if name in nodes}
    land = PlacementSnapshot(nodes, dict(ground.ledger.nodes), cells, on, free, volumes=volumes or Volumes())
    site = node_domains_of(None, nodes.values(), {}, strict=False)
    assert isinstance(site, NodeDomains)
    return find_places(GangView(gang, members, ReadinessPolicy()), members, requests, site, land)


@pytest.mark.parametrize(
    ("counts", "machines", "spec", "placed"),
    [
        pytest.param({"workers": 4}, 6, {"minMember": 4}, 4, id="all fit"),
        pytest.param({"workers": 4}, 3, {"minMember": 4, "done": 1}, 3, id="one is done: three of four are enough"),
        pytest.param({"workers": 6}, 4, {"minMember": 3}, 4, id="more than enough: as many as fit"),
        pytest.param({"a": 4, "b": 4}, 6, {"podSets": SETS, "minMember": 6}, 6, id="two sets: six of eight"),
    ],
)
def test_as_many_as_fit_are_placed(counts: Any, machines: int, spec: Any, placed: int) -> None:
    """All that are there where they fit; else what the quorum allows."""
    answer = find(counts, machines=machines, **spec)

    assert isinstance(answer, FoundPlacement)
    assert sum(assignment.count for assignment in answer.placement.assignments) == placed


@pytest.mark.parametrize(
    ("counts", "machines", "busy", "spec", "reason"),
    [
        ({"workers": 4}, 4, 1, {"podSets": [{"name": "workers", "count": 4}]}, "WaitForRoom"),
        ({"workers": 5}, 4, 0, {"podSets": [{"name": "workers", "count": 5}]}, "NeverFits"),
        ({"a": 4, "b": 4}, 5, 0, {"podSets": SETS, "minMember": 6}, "NeverFits"),
        ({"a": 4, "b": 4}, 6, 1, {"podSets": SETS, "minMember": 6}, "WaitForRoom"),
    ],
    ids=["busy", "too large", "below the quorum of two sets", "below it for now"],
)
def test_a_gang_below_its_quorum_gets_nothing(counts: Any, machines: int, busy: int, spec: Any, reason: str) -> None:
    """Never fewer than the quorum, and what never fits is told apart from what is busy."""
    answer = find(counts, machines=machines, busy=busy, **spec)

    assert isinstance(answer, NoPlacement)
    assert answer.reason == reason


@pytest.mark.parametrize(
    ("second", "are_alike"),
    [
        pytest.param({}, True, id="alike"),
        pytest.param({"gpus": 4}, False, id="fewer GPUs"),
        pytest.param({"nodeSelector": {"rack": "a"}}, False, id="another place"),
        pytest.param({"overhead": {"cpu": "2"}}, False, id="more cpu"),
    ],
)
def test_members_of_one_pod_set_that_differ_are_told(second: dict[str, Any], *, are_alike: bool) -> None:
    """The search places them as one kind, so that the gang would get what only some of its members ask for."""
    asked = Ground({}, podSets=[{"name": "workers", "count": 2}]).request(0, 1)
    pod = make_pod("p1", **{"gpus": 8, "annotations": {names.GANG: "g"}, "schedulingGates": GATES, **second})
    request = request_of(pod, None, is_admitted=True)
    assert isinstance(request, Request)
    chosen = (asked.chosen[0], replace(asked.chosen[1], pod=pod))
    requests = {**asked.requests, pod.metadata.uid: request}

    answer = find_places(asked.view, chosen, requests, asked.node_domains, asked.cluster)

    assert isinstance(answer, FoundPlacement) is are_alike
    assert are_alike or "p0 and p1 of pod set workers ask for different things" in str(answer)


def test_a_gang_in_a_reservation_sees_its_gpus_alone() -> None:
    """Those that the reservation or its pods hold, on machines that are known; not those of another one or of a pod."""
    ground, own = Ground({}), {names.RESERVATION: "r/uid-of-r"}
    holder = Holder("@reservation", "r", "uid-of-r")
    ground.ledger.put_lease(make_lease("n1", 0, holder=holder, annotations=own))
    ground.ledger.put_lease(make_lease("n1", 1, annotations=own))
    ground.ledger.put_lease(make_lease("n1", 2, annotations={names.RESERVATION: "q/uid-of-q"}))
    ground.ledger.put_lease(make_lease("n2", 3))
    ground.ledger.put_lease(make_lease("gone", 4, holder=holder, annotations=own))

    confined = ground.land().confined(ground.ledger, "uid-of-r", now_seconds=0.0)

    assert confined.pool == ReservedPool("uid-of-r", {"n1": 0b11})
    assert {name: cell.free for name, cell in confined.cells.items() if cell.free} == {"n1": 0b01}
    assert {name: cell.free for name, cell in confined.emptied().cells.items() if cell.free} == {"n1": 0b11}


def test_gangs_that_are_tried_on_one_snapshot_share_its_hosts() -> None:
    """Building them takes longer than many a search; other domains have hosts of their own."""
    ground = Ground({})
    land, site = ground.land(), ground.site()

    assert land.snapshot(site) is land.snapshot(site)
    assert land.snapshot(ground.site()) is not land.snapshot(site)


@pytest.mark.parametrize("busy", [0, 1], ids=["room now", "others hold it"])
def test_a_gang_that_lacks_static_volumes_hears_of_them(busy: int) -> None:
    """One volume, which every node reaches, for two claims: that is told even if a machine has to become free first."""
    known = cluster({"workers0": 10, "workers1": 10}, [([], 20)], namespace="team")
    answer = find({"workers": 2}, machines=2, busy=busy, volumes=known, minMember=2)

    assert isinstance(answer, NoPlacement)
    assert (answer.verdict, answer.contends) == (Verdict.UNKNOWN, False)
    assert "create more volumes" in answer.message


@pytest.mark.parametrize(("mode", "is_told"), [("ReadWriteOncePod", True), ("ReadWriteOnce", False)])
def test_a_gang_hears_who_uses_a_claim_that_is_for_one_pod(mode: str, *, is_told: bool) -> None:
    """kube-scheduler would refuse the member that has it too."""
    known = cluster({"workers0": 10, "workers1": 10}, [([], 20)], namespace="team")
    claim = known.claims["team", "workers0"]
    used = msgspec.structs.replace(claim, spec=msgspec.structs.replace(claim.spec, access_modes=(mode,)))
    known = replace(known, claims={**known.claims, ("team", "workers0"): used})

    answer = find({"workers": 2}, machines=3, busy=1, volumes=known, minMember=2)

    assert isinstance(answer, NoPlacement)
    assert ("pod f-n1 uses it" in answer.message) is is_told
