"""Explain follows strict topology spread, and how many volumes a node takes, for single pods."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from atoll.cluster.csi import CsiNode
from atoll.cluster.spread import SPREAD
from atoll.cluster.storage import PersistentVolume, PersistentVolumeClaim
from atoll.cluster.volume_limits import VOLUME_COUNT
from atoll.explain.decision import index_snapshot
from atoll.explain.explanation import Explanation, PodState, explain
from tests.builders import make_pod
from tests.explain.situations import Situation, situation, waiting

ZONE = "topology.kubernetes.io/zone"
NODES = {"n1": {"node": {"labels": {ZONE: "a"}}}, "n2": {"node": {"labels": {ZONE: "b"}}}}


def asked(found: Situation) -> Explanation:
    """Explain the pod of a situation."""
    return explain(index_snapshot(found.snapshot), found.pod)


def closed(told: Explanation) -> dict[str, tuple[str, ...]]:
    """Return the reasons of kube-scheduler by node, where it has any."""
    return {one.node: one.others for group in told.groups for one in group.nodes if one.others}


def spread(nodes: Any = NODES, *, key: str = ZONE, taken: str = "n1", **constraint: Any) -> Explanation:
    """Explain a pod whose app may lie unevenly by one, beside one such pod."""
    rule = {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "x"}}, **constraint}  # fmt: skip
    other = make_pod("o", gpus=None, node=taken, phase="Running", labels={"app": "x"})
    asking = waiting(1, labels={"app": "x"}, topologySpreadConstraints=[rule])
    return asked(situation(nodes, [], asking, others=[other]))


def test_nodes_of_a_zone_that_has_more_than_the_others_are_closed() -> None:
    """The pod fits the emptier zone, and the other one says why not."""
    told = spread()

    assert told.state is PodState.FITS
    assert told.node == "n2"
    assert closed(told) == {"n1": (SPREAD,)}


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        pytest.param({"minDomains": 3, "taken": "n2"}, {"n2": (SPREAD,)}, id="too few zones: one each"),
        pytest.param({"key": "example.com/none"}, {"n1": (SPREAD,), "n2": (SPREAD,)}, id="a label that no node has"),
        pytest.param({"maxSkew": 2}, {}, id="within the skew"),
        pytest.param({"whenUnsatisfiable": "ScheduleAnyway"}, {}, id="a wish only"),
        pytest.param({"labelSelector": {"matchLabels": {"app": "y"}}}, {}, id="others count"),
    ],
)
def test_each_field_of_a_constraint_counts(constraint: dict[str, Any], expected: dict[str, tuple[str, ...]]) -> None:
    """As kube-scheduler judges a pod that is not pinned to a node."""
    told = spread(**constraint)

    assert closed(told) == expected
    assert told.state is (PodState.CLOSED if len(expected) == 2 else PodState.FITS)


def test_a_pod_that_is_not_pinned_is_judged_by_zones_and_not_by_its_host() -> None:
    """A member of a gang is pinned, and then kube-scheduler sees its node alone; a single pod may have a second one
    of its app beside it, where the zones allow that."""
    nodes = {**NODES, "n3": {"node": {"labels": {ZONE: "b"}}, "report": False}}
    one = make_pod("o", gpus=None, node="n1", phase="Running", labels={"app": "x"})
    two = make_pod("p2", gpus=None, node="n3", phase="Running", labels={"app": "x"})
    rule = {"maxSkew": 1, "minDomains": 2, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "x"}}}  # fmt: skip
    asking = waiting(1, labels={"app": "x"}, topologySpreadConstraints=[rule])

    assert closed(asked(situation(nodes, [], asking, others=[one, two]))) == {}


@pytest.mark.parametrize(("limit", "expected"), [(1, PodState.CLOSED), (2, PodState.FITS)])
def test_a_node_that_takes_no_further_volume_of_a_driver_is_closed(limit: int, expected: PodState) -> None:
    """Another pod uses one there."""
    driver = "disks.example.com"
    volumes = [
        {"metadata": {"name": f"v{n}"}, "spec": {"csi": {"driver": driver, "volumeHandle": f"h{n}"}}} for n in "ab"
    ]
    bound = {"status": {"phase": "Bound"}}
    claims = [
        {"metadata": {"namespace": "team", "name": f"c{n}"}, "spec": {"volumeName": f"v{n}"}, **bound} for n in "ab"
    ]
    limits = {"metadata": {"name": "n1"}, "spec": {"drivers": [{"name": driver, "allocatable": {"count": limit}}]}}

    def uses(name: str) -> dict[str, Any]:
        return {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]}

    other = make_pod("o", gpus=None, node="n1", phase="Running", **uses("ca"))
    found = situation({"n1": {}}, [], waiting(1, **uses("cb")), others=[other])
    snapshot = replace(
        found.snapshot,
        volumes=msgspec.convert(volumes, tuple[PersistentVolume, ...]),
        volume_claims=msgspec.convert(claims, tuple[PersistentVolumeClaim, ...]),
        csi_nodes=msgspec.convert([limits], tuple[CsiNode, ...]),
    )
    told = asked(replace(found, snapshot=snapshot))

    assert told.state is expected
    assert closed(told) == ({"n1": (VOLUME_COUNT,)} if limit == 1 else {})
