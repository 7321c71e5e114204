"""`atoll explain` gives the controllers' own reason also where volumes, storage or namespaces decide."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.api import names
from atoll.explain.anonymize import anonymize
from atoll.explain.codec import decode_snapshot, encode_snapshot
from atoll.explain.decision import decide, index_snapshot
from atoll.explain.gang_decision import decide_gang, index_gangs
from atoll.explain.snapshot import ClusterSnapshot
from atoll.kube.client import ApiClient
from atoll.kube.snapshots import read_snapshot
from atollctl.__main__ import app
from tests.controllers.gang_harness import GangHarness, cluster, settled, term
from tests.fakes.api_server import answering
from tests.fakes.listening import kubeconfig
from tests.kube.conftest import no_wait

DRIVER = "disks.example.com"
ZONE = "topology.kubernetes.io/zone"
CORE, STORAGE = "/api/v1", "/apis/storage.k8s.io/v1"
CLAIMS = f"{CORE}/namespaces/team/persistentvolumeclaims"
USER = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]}
LATE = {"provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer"}
WANTS = {"storageClassName": "fast", "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "10Gi"}}}
SPACE = {"topologyKey": ZONE, "labelSelector": {}, "namespaceSelector": {"matchLabels": {"kind": "quiet"}}}
QUIET = {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [SPACE]}}}
Objects = Mapping[str, Mapping[str, Any]]

CLAIM = {f"{CLAIMS}/data": {"spec": WANTS}}
BOUND = {
    f"{CLAIMS}/data": {"spec": {**WANTS, "volumeName": "disk"}, "status": {"phase": "Bound"}},
    f"{CORE}/persistentvolumes/disk": {"spec": {"csi": {"driver": DRIVER, "volumeHandle": "h"}}},
}
LIMITED = {
    f"{STORAGE}/csinodes/{node}": {"spec": {"drivers": [{"name": DRIVER, "allocatable": {"count": 0}}]}}
    for node in ("n1", "n2")
}
CASES: dict[str, tuple[dict[str, Any], Objects, str]] = {
    "a class that does not exist": (USER, CLAIM, "names StorageClass fast, which does not exist"),
    "a class of another zone": (
        USER,
        CLAIM
        | {
            f"{STORAGE}/storageclasses/fast": {
                **LATE,
                "allowedTopologies": [{"matchLabelExpressions": [{"key": ZONE, "values": ["c"]}]}],
            }
        },
        "give each member a claim of its own",
    ),
    "no room in any storage": (
        USER,
        CLAIM
        | {
            f"{STORAGE}/storageclasses/fast": LATE,
            f"{STORAGE}/csidrivers/{DRIVER}": {"spec": {"storageCapacity": True}},
            f"{STORAGE}/namespaces/team/csistoragecapacities/s": {
                "storageClassName": "fast",
                "capacity": "1Gi",
                "nodeTopology": {},
            },
        },
        "volume in another zone",
    ),
    "nodes that take no volume": (USER, BOUND | LIMITED, "fits 0 of 2 pods"),
    "a namespace to keep away from": (
        QUIET,
        {
            f"{CORE}/namespaces/other": {"metadata": {"labels": {"kind": "quiet"}}},
            f"{CORE}/namespaces/other/pods/o1": {"spec": {"nodeName": "n1", "containers": []}},
            f"{CORE}/namespaces/other/pods/o2": {"spec": {"nodeName": "n2", "containers": []}},
        },
        "pod affinity",
    ),
}


def gang_of_two(made: GangHarness, spec: Mapping[str, Any], objects: Objects) -> None:
    """Add a gang of two members with this spec, and other objects."""
    for path, body in objects.items():
        made.server.put(path, dict(body))
    made.add_gang("g", 2)
    for number in range(2):
        made.add_member("g", number, **spec)


async def seen(made: GangHarness, folder: Path) -> ClusterSnapshot:
    """Return what a command reads."""
    config = kubeconfig(folder, made.server.url)
    async with await ApiClient.connect(config, sleep=no_wait) as client:
        return await read_snapshot(client)


@pytest.mark.parametrize("case", CASES)
async def test_explain_gives_the_reason_of_the_controllers(case: str, tmp_path: Path) -> None:
    """Live, from a file, and with names replaced the verdict is that of the condition Admitted."""
    spec, objects, words = CASES[case]
    async with cluster("n1") as made:
        for node, zone in (("n1", "a"), ("n2", "b")):
            made.add_node(node, labels={ZONE: zone})
        gang_of_two(made, spec, objects)
        async with term(made, tmp_path) as running:
            await settled(running, lambda: made.reason("g") not in ("", "Waiting"))
        admitted = next(
            one for one in made.gang("g")["status"]["conditions"] if one["type"] == names.CONDITION_ADMITTED
        )
        found = await seen(made, tmp_path)

    assert words in admitted["message"], admitted["message"]
    for snapshot in (found, decode_snapshot(encode_snapshot(found))):
        told = decide_gang(index_gangs(index_snapshot(snapshot)), snapshot.gangs[0])
        assert (told.reason, told.message) == (admitted["reason"], admitted["message"])
    hidden = anonymize(found)
    assert decide_gang(index_gangs(index_snapshot(hidden)), hidden.gangs[0]).reason == admitted["reason"]
    assert "quiet" not in str(hidden)
    assert DRIVER not in str(hidden)


async def test_a_pod_is_explained_by_where_its_volume_can_be_made(tmp_path: Path) -> None:
    """As kube-scheduler decides: the class makes volumes in zone b alone."""
    kind = {**LATE, "allowedTopologies": [{"matchLabelExpressions": [{"key": ZONE, "values": ["b"]}]}]}
    async with cluster("n1") as made:
        for node, zone in (("n1", "a"), ("n2", "b")):
            made.add_node(node, labels={ZONE: zone})
        for path, body in (CLAIM | {f"{STORAGE}/storageclasses/fast": kind}).items():
            made.server.put(path, body)
        made.add_member("g", 0, **USER)
        scene = index_snapshot(await seen(made, tmp_path))

    told = decide(scene, scene.snapshot.pods[0], None)
    assert told.closed == {"n1": ("volume in another zone",)}


async def test_what_may_not_be_read_is_said_and_left_out(tmp_path: Path) -> None:
    """The gang is explained as if every node took its volumes, and whoever asks is told what is missing."""
    spec, objects, _ = CASES["no room in any storage"]
    async with cluster("n1") as made:
        gang_of_two(made, spec, objects)
        for resource in ("storageclasses", "csistoragecapacities", "namespaces"):
            made.server.fail(answering(403, "Forbidden"), containing=f"/{resource}?")
        found = await seen(made, tmp_path)
    (tmp_path / "file").write_bytes(encode_snapshot(found))

    asked = ["explain", "gang/g", "-n", "team", "--snapshot", str(tmp_path / "file"), "-o", "json"]
    answer = CliRunner().invoke(app, asked)
    assert json.loads(answer.stdout)["state"] == "fits", answer.stdout
    assert "you may not list storageclasses and csistoragecapacities" in answer.stderr
    assert "atoll-reader" in answer.stderr
