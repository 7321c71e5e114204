"""Gangs in a hall of fake machines: three levels, 64 members, machines that are added. The real control plane and all
of Atoll, no containers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from atoll.api import names
from atoll.kube import paths
from bench.stand import NAMESPACE, make_namespace, write_reports
from devcluster import DevCluster
from devcluster.api import AdminRequest
from devcluster.errors import StartError
from devcluster.installation import Installation
from devcluster.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

BLOCK, RACK, HOST = "example.com/block", "example.com/rack", "kubernetes.io/hostname"
HOSTS, RACK_HOSTS, BLOCK_HOSTS, MEMBERS = 32, 4, 16, 64
PARTS = ("webhook", "extender", "controllers")
KIND = {"apiVersion": names.API_VERSION}
GANGS = f"/apis/gpu.scheduling/v1/namespaces/{NAMESPACE}/gpugangs"
WAIT_SECONDS = 300.0


def labels_of(number: int) -> dict[str, str]:
    """Two blocks of four racks of four hosts."""
    return {BLOCK: f"b{number // BLOCK_HOSTS}", RACK: f"r{number // RACK_HOSTS % 4}", HOST: f"node-{number}"}


class Hall:
    """The cluster, and what the tests ask of it."""

    def __init__(self, cluster: DevCluster) -> None:
        self.api = cluster.api
        self.cluster = cluster

    def add(self, count: int, prefix: str, labels: Callable[[int], dict[str, str]]) -> None:
        """Add fake machines of eight GPUs each, with what their agents would write."""
        self.cluster.create_fake_nodes(count, prefix=prefix, labels=labels, allocatable={names.GPU_RESOURCE: "8"})
        write_reports(self.cluster, ("dgx-h100",), prefix=prefix)

    def topology(self) -> None:
        """Create the topology of three levels."""
        spec = {"levels": [{"nodeLabel": level} for level in (BLOCK, RACK, HOST)]}
        body = {**KIND, "kind": "Topology", "metadata": {"name": "hall"}, "spec": spec}
        self.api.request("POST", "/apis/gpu.scheduling/v1/topologies", body)

    def gang(self, name: str, count: int, *, gpus: int, topology: dict[str, Any]) -> None:
        """Create a gang of one pod set, and the claim of its members."""
        self.gang_of(name, [{"name": "workers", "count": count, "topology": topology}], gpus=gpus)

    def gang_of(self, name: str, pod_sets: list[dict[str, Any]], *, gpus: int) -> None:
        """Create a gang, and the claim of all its members."""
        self.claim(name, gpus=gpus)
        spec = {"topologyName": "hall", "podSets": pod_sets}
        self.api.request("POST", GANGS, {**KIND, "kind": "GpuGang", "metadata": {"name": name}, "spec": spec})

    def claim(self, name: str, *, gpus: int) -> None:
        """Create a claim that names the gang of its own name."""
        claim = {"gangRef": name, "devices": {"count": gpus}}
        self.api.request(
            "POST", paths.gpuclaims(NAMESPACE), {**KIND, "kind": "GpuClaim", "metadata": {"name": name}, "spec": claim}
        )

    def members(
        self, gang: str, ranks: Iterable[int], *, annotations: dict[str, str] | None = None,
        labels: dict[str, str] | None = None, **spec: Any,
    ) -> None:  # fmt: skip
        """Create members with these ranks."""
        container = {"name": "main", "image": "none", "resources": {"requests": {"cpu": "1", "memory": "64Mi"}}}
        self.api.request_all(
            AdminRequest(
                "POST",
                paths.pods(NAMESPACE),
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {
                        "name": f"{gang}-{rank}",
                        "annotations": {names.CLAIM: gang, names.GANG: gang, **(annotations or {})},
                        "labels": {"batch.kubernetes.io/job-completion-index": str(rank), **(labels or {})},
                    },
                    "spec": {"containers": [container], **spec},
                },
            )
            for rank in ranks
        )

    def homes(self, gang: str) -> dict[int, str]:
        """Return the nodes of the gang's bound members, by rank."""
        pods = self.api.get(paths.pods(NAMESPACE))["items"]
        bound = {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in pods}
        prefix = f"{gang}-"
        return {
            int(name.removeprefix(prefix)): node for name, node in bound.items() if name.startswith(prefix) and node
        }

    def reason(self, gang: str) -> str:
        """Return why the gang is admitted or is not; empty while nobody has said."""
        conditions = self.api.get(f"{GANGS}/{gang}").get("status", {}).get("conditions", [])
        return next((str(one["reason"]) for one in conditions if one["type"] == names.CONDITION_ADMITTED), "")

    def held(self, gang: str) -> int:
        """Return how many GPUs the gang holds."""
        leases = self.api.get(paths.leases(names.SYSTEM_NAMESPACE))["items"]
        notes = (lease["metadata"].get("annotations", {}).get(names.LEASE_GANG, "") for lease in leases)
        return sum(note.startswith(f"{NAMESPACE}/{gang}/") for note in notes)

    def wait_bound(self, gang: str, count: int) -> None:
        """Wait until so many members are bound; a failure tells what the gang says."""
        try:
            wait_until(
                lambda: len(self.homes(gang)) == count,
                what=f"{count} members to be bound",
                timeout_seconds=WAIT_SECONDS,
            )
        except StartError as error:
            raise AssertionError(f"{error}; gang: {self.api.get(f'{GANGS}/{gang}').get('status')}") from error


@pytest.fixture(scope="module")
def hall() -> Iterator[Hall]:
    """Fake machines with Atoll."""
    with DevCluster.start(f"hall-{uuid4().hex[:6]}", nodes=(), scheduler=False) as cluster:
        installation = Installation(cluster)
        cluster.start_kwok()
        installation.apply_manifests()
        make_namespace(cluster)
        made = Hall(cluster)
        made.add(HOSTS, "node", labels_of)
        for part in PARTS:
            installation.start(part, wait=False)
        installation.start_scheduler()
        installation.wait_ready(PARTS)
        made.topology()
        yield made


def test_64_members_fill_one_block_by_racks_and_hosts(hall: Hall) -> None:
    """All in one block, 16 consecutive ranks in one rack, four in one host; 128 GPUs, each held once."""
    slices = [{"level": RACK, "size": 16}, {"level": HOST, "size": 4}]
    hall.gang("wide", MEMBERS, gpus=2, topology={"mode": "required", "level": BLOCK, "slices": slices})
    hall.members("wide", range(MEMBERS))

    hall.wait_bound("wide", MEMBERS)
    placed = {rank: int(node.removeprefix("node-")) for rank, node in hall.homes("wide").items()}
    assert len({node // BLOCK_HOSTS for node in placed.values()}) == 1
    assert all(placed[rank] // RACK_HOSTS == placed[rank // 16 * 16] // RACK_HOSTS for rank in placed)
    assert all(placed[rank] == placed[rank // 4 * 4] for rank in placed)
    assert set(Counter(placed.values()).values()) == {4}
    assert hall.held("wide") == 2 * MEMBERS


def test_machines_that_are_added_make_a_waiting_gang_start(hall: Hall) -> None:
    """Nothing has the label that its members ask for: it never fits, and holds nothing. One machine is not enough for a
    whole rack of them; with the second it starts."""
    hall.gang("late", 2, gpus=8, topology={"mode": "required", "level": RACK})
    hall.members("late", range(2), nodeSelector={"example.com/generation": "new"})

    def labels(number: int) -> dict[str, str]:
        return {BLOCK: "b9", RACK: "r0", "example.com/generation": "new"}

    wait_until(lambda: hall.reason("late") == "NeverFits", what="the gang to wait", timeout_seconds=WAIT_SECONDS)
    hall.add(1, "first", labels)
    wait_until(lambda: hall.reason("late") == "NeverFits", what="the gang to wait on", timeout_seconds=WAIT_SECONDS)
    assert hall.held("late") == 0
    hall.add(1, "second", labels)
    hall.wait_bound("late", 2)
    assert sorted(hall.homes("late").values()) == ["first-0", "second-0"]


def racks_of_two_and_three(hall: Hall, name: str) -> dict[str, str]:
    """Add a rack of two machines and one of three for one test alone; returns the node selector of its members."""
    mine = {"example.com/for": name}
    for rack, count in (("r0", 2), ("r1", 3)):
        hall.add(count, f"{name}-{rack}", lambda _, rack=rack: {BLOCK: name, RACK: rack, **mine})  # type: ignore[misc]
    return mine


def test_balanced_members_are_dealt_out_evenly(hall: Hall) -> None:
    """Six members of two GPUs in the preferred rack: three on each of two hosts, where filling gives four and two."""
    hall.gang("even", 6, gpus=2, topology={"mode": "preferred", "level": RACK, "balanced": True})
    hall.members("even", range(6))

    hall.wait_bound("even", 6)
    assert list(Counter(hall.homes("even").values()).values()) == [3, 3]


def test_a_leader_goes_where_its_workers_go(hall: Hall) -> None:
    """Whole machines for two workers and their leader, in one rack: only the one of three machines will do."""
    where = racks_of_two_and_three(hall, "led")
    workers = {"name": "workers", "count": 2, "group": "g", "topology": {"mode": "required", "level": RACK}}
    hall.gang_of("led", [{"name": "leader", "count": 1, "group": "g"}, workers], gpus=8)
    for rank, pod_set in enumerate(("leader", "workers", "workers")):
        hall.members("led", [rank], annotations={names.POD_SET: pod_set}, nodeSelector=where)

    hall.wait_bound("led", 3)
    assert {node.rpartition("-")[0] for node in hall.homes("led").values()} == {"led-r1"}


def test_pod_sets_of_a_jobset_keep_their_own_topology(hall: Hall) -> None:
    """The leader's template requires a rack, the workers' prefers one: four of them start though no rack holds four."""
    where = racks_of_two_and_three(hall, "sets")
    hall.claim("sets", gpus=8)
    for rank, pod_set, mode in ((0, "leader", "required"), *((rank, "workers", "preferred") for rank in range(1, 5))):
        hall.members(
            "sets",
            [rank],
            annotations={names.GANG_SIZE: "5", f"kueue.x-k8s.io/podset-{mode}-topology": RACK},
            labels={"jobset.sigs.k8s.io/replicatedjob-name": pod_set},
            nodeSelector=where,
        )

    hall.wait_bound("sets", 5)
    sets = {one["name"]: one["topology"] for one in hall.api.get(f"{GANGS}/sets")["spec"]["podSets"]}
    assert {name: (one["mode"], one["level"]) for name, one in sets.items()} == {
        "leader": ("required", RACK),
        "workers": ("preferred", RACK),
    }


def test_members_go_where_their_bound_volume_is(hall: Hall) -> None:
    """Both racks hold two whole machines, the tighter one first; the volume of the members is in the other."""
    where = racks_of_two_and_three(hall, "stored")
    row = {"key": RACK, "operator": "In", "values": ["r1"]}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "stored"},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "hostPath": {"path": "/stored"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [row]}]}},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "stored"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "volumeName": "stored",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    hall.api.request("POST", "/api/v1/persistentvolumes", volume)
    hall.api.request("POST", f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims", claim)
    hall.gang("stored", 2, gpus=8, topology={"mode": "required", "level": RACK})
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "stored"}}]
    hall.members("stored", range(2), nodeSelector=where, volumes=volumes)

    hall.wait_bound("stored", 2)
    assert {node.rpartition("-")[0] for node in hall.homes("stored").values()} == {"stored-r1"}
