"""Where volumes let a pod run before they are bound: by their class, by free volumes, or nowhere, with the reason."""

from typing import Any

import msgspec
import pytest

from atoll.cluster.host_fit import excluded_nodes
from atoll.cluster.storage import PersistentVolume, PersistentVolumeClaim, StorageClass, VolumeStatus
from atoll.cluster.volume_fit import Volumes, volume_problem
from tests.cluster.test_host_fit import HOSTNAME, ZONE, node, pod

POD = pod(volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}])
NODES = [node("n1", labels={ZONE: "a"}), node("n2", labels={ZONE: "b"})]
LATE = {"volumeBindingMode": "WaitForFirstConsumer"}
ONLY_A = [{"matchLabelExpressions": [{"key": ZONE, "values": ["a"]}]}]


def claim(**spec: Any) -> PersistentVolumeClaim:
    """Return the claim `data` of class `c` for ten gibibytes."""
    asked = {"resources": {"requests": {"storage": "10Gi"}}, "accessModes": ["ReadWriteOnce"]}
    body = {"metadata": {"name": "data", "namespace": "ml"}, "spec": {"storageClassName": "c", **asked, **spec}}
    return msgspec.convert(body, PersistentVolumeClaim)


def disk(at: str = "n2", *, phase: str = "Available", size: str = "20Gi", **spec: Any) -> PersistentVolume:
    """Return a disk of one node."""
    row = {"key": HOSTNAME, "operator": "In", "values": [at]}
    reach = {"required": {"nodeSelectorTerms": [{"matchExpressions": [row]}]}}
    own = {"storageClassName": "c", "capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"], **spec}
    body = {"metadata": {"name": "d"}, "spec": {"nodeAffinity": reach, **own}, "status": {"phase": phase}}
    return msgspec.convert(body, PersistentVolume)


def known(wanted: PersistentVolumeClaim | None, volume: PersistentVolume | None = None, **kind: Any) -> Volumes:
    """Return a cluster with a claim, a volume and the class `c`; no such class for none of its fields."""
    classes = {"c": msgspec.convert({"metadata": {"name": "c"}, **kind}, StorageClass)} if kind else {}
    claims = {("ml", "data"): wanted} if wanted is not None else {}
    return Volumes(claims, {"d": volume} if volume is not None else {}, classes)


HALF_BOUND = msgspec.structs.replace(claim(volumeName="d"), status=VolumeStatus("Pending"))
LOST = msgspec.structs.replace(claim(volumeName="d"), status=VolumeStatus("Lost"))
STATIC = {**LATE, "provisioner": "kubernetes.io/no-provisioner"}
MADE = {**LATE, "provisioner": "example.com/disks"}


@pytest.mark.parametrize(
    ("volume", "kind", "expected"),
    [
        pytest.param(None, MADE, {"n1", "n2"}, id="made wherever its pod runs"),
        pytest.param(None, {**MADE, "allowedTopologies": ONLY_A}, {"n1"}, id="made in one zone"),
        pytest.param(disk(), {**MADE, "allowedTopologies": ONLY_A}, {"n1", "n2"}, id="free in another"),
        pytest.param(disk(), STATIC, {"n2"}, id="free on one node"),
        pytest.param(disk(size="5Gi"), STATIC, set(), id="too small"),
        pytest.param(disk(phase="Bound"), STATIC, set(), id="taken"),
        pytest.param(disk(accessModes=["ReadOnlyMany"]), STATIC, set(), id="of another mode"),
        pytest.param(disk(claimRef={"namespace": "ml", "name": "data"}), STATIC, {"n2"}, id="set aside for this claim"),
        pytest.param(disk(claimRef={"namespace": "ml", "name": "x"}), STATIC, set(), id="set aside for another"),
    ],
)  # fmt: skip
def test_a_claim_that_is_not_bound_yet_leaves_the_nodes_where_it_can_be(
    volume: PersistentVolume | None, kind: dict[str, Any], expected: set[str]
) -> None:
    """As kube-scheduler finds a volume for the first pod that uses the claim."""
    refused = excluded_nodes(POD, NODES, {}, volumes=known(claim(), volume, **kind))

    assert {one.metadata.name for one in NODES} - refused.keys() == expected


@pytest.mark.parametrize(
    ("volumes", "shared", "problem"),
    [
        (known(None, **MADE), (), "PersistentVolumeClaim data does not exist; create it"),
        (known(claim()), (), "PersistentVolumeClaim data names StorageClass c, which does not exist; create it"),
        (known(claim(), provisioner="x"), (), "PersistentVolumeClaim data is not bound to a volume yet"),
        (known(claim(storageClassName=""), **MADE), (), "PersistentVolumeClaim data is not bound to a volume yet"),
        (known(claim(volumeName="d"), disk()), (), ""),
        (known(claim(), **MADE), ("data",), ""),
        (known(HALF_BOUND, disk(), **MADE), (), "PersistentVolumeClaim data is not bound to a volume yet"),
        (known(LOST, **MADE), (), "PersistentVolumeClaim data has lost its volume d; create both anew"),
        (known(claim(), **STATIC), ("data",), "bind it before, or give each member a claim of its own"),
        (known(claim(accessModes=["ReadWriteOncePod"]), **MADE), (), ""),
        (
            known(claim(accessModes=["ReadWriteOncePod"]), **MADE),
            ("data",),
            "is for one pod (ReadWriteOncePod), and other members use it too; give each member a claim of its own",
        ),
        (Volumes(), (), ""),
    ],
)
def test_a_claim_that_no_node_can_serve_is_named(volumes: Volumes, shared: tuple[str, ...], problem: str) -> None:
    """kube-scheduler refuses such a pod everywhere; where classes are not known, nothing is said."""
    assert problem in volume_problem(POD, volumes, shared=shared)
    assert bool(volume_problem(POD, volumes, shared=shared)) == bool(problem)


def test_a_claim_for_one_pod_that_another_pod_uses_is_named() -> None:
    """The user may be a pod of no gang on any node; a claim of another mode may have many users."""
    users = {"data": "somebody"}
    taken = known(claim(accessModes=["ReadWriteOncePod"]), **MADE)

    assert "and pod somebody uses it" in volume_problem(POD, taken, users=users)
    assert volume_problem(POD, known(claim(), **MADE), users=users) == ""
