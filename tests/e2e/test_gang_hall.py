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
from atoll.kube.patches import MERGE_PATCH
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

    def add(
        self, count: int, prefix: str, labels: Callable[[int], dict[str, str]], *, profile: str | None = "dgx-h100"
    ) -> None:
        """Add fake machines of eight GPUs each, with what their agents would write; with nothing for no profile."""
        self.cluster.create_fake_nodes(count, prefix=prefix, labels=labels, allocatable={names.GPU_RESOURCE: "8"})
        if profile is not None:
            write_reports(self.cluster, (profile,), prefix=prefix)

    def topology(self) -> None:
        """Create the topology of three levels."""
        spec = {"levels": [{"nodeLabel": level} for level in (BLOCK, RACK, HOST)]}
        body = {**KIND, "kind": "Topology", "metadata": {"name": "hall"}, "spec": spec}
        self.api.request("POST", "/apis/gpu.scheduling/v1/topologies", body)

    def gang(self, name: str, count: int, *, gpus: int, topology: dict[str, Any]) -> None:
        """Create a gang of one pod set, and the claim of its members."""
        self.gang_of(name, [{"name": "workers", "count": count, "topology": topology}], gpus=gpus)

    def gang_of(self, name: str, pod_sets: list[dict[str, Any]], *, gpus: int, model: str = "") -> None:
        """Create a gang, and the claim of all its members."""
        self.claim(name, gpus=gpus, model=model)
        spec = {"topologyName": "hall", "podSets": pod_sets}
        self.api.request("POST", GANGS, {**KIND, "kind": "GpuGang", "metadata": {"name": name}, "spec": spec})

    def claim(self, name: str, *, gpus: int, model: str = "") -> None:
        """Create a claim that names the gang of its own name."""
        claim = {"gangRef": name, "devices": {"count": gpus, **({"models": [model]} if model else {})}}
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

    def reason(self, gang: str, *, part: str = "reason") -> str:
        """Return why the gang is admitted or is not, or the message about that; empty while nobody has said."""
        conditions = self.api.get(f"{GANGS}/{gang}").get("status", {}).get("conditions", [])
        return next((str(one[part]) for one in conditions if one["type"] == names.CONDITION_ADMITTED), "")

    def wait_reason(self, gang: str, reason: str) -> None:
        """Wait until the gang's condition Admitted has this reason."""
        wait_until(lambda: self.reason(gang) == reason, what=f"{gang}: {reason}", timeout_seconds=WAIT_SECONDS)

    def single(self, name: str, *, gpus: int, model: str = "", where: dict[str, str]) -> None:
        """Create a gang of one member, for machines with these labels."""
        self.gang_of(name, [{"name": "workers", "count": 1}], gpus=gpus, model=model)
        self.members(name, [0], nodeSelector=where)

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
        installation = Installation(cluster, options={"controllers": ["--gang-order", "strict"]})
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


def test_the_head_of_a_strict_order_blocks_only_who_would_take_what_it_can_use(hall: Hall) -> None:
    """It waits for A100s. Behind it idle H100s are taken, and free A100s are not. One whose claim is gone says so, and
    blocks nobody."""
    where = {"example.com/for": "strict"}
    hall.add(1, "strict-a", lambda _: {BLOCK: "s", RACK: "r0", **where}, profile="dgx-a100")
    hall.add(1, "strict-h", lambda _: {BLOCK: "s", RACK: "r0", **where})
    hall.single("holder", gpus=4, model="nvidia-a100", where=where)
    hall.wait_bound("holder", 1)
    hall.single("ahead", gpus=8, model="nvidia-a100", where=where)
    hall.wait_reason("ahead", "WaitForRoom")
    hall.single("claimless", gpus=8, model="nvidia-a100", where=where)
    hall.api.request("DELETE", f"{paths.gpuclaims(NAMESPACE)}/claimless")
    hall.wait_reason("claimless", "WaitForQuorum")
    hall.single("behind", gpus=4, model="nvidia-a100", where=where)
    hall.single("other", gpus=8, model="nvidia-h100", where=where)

    hall.wait_bound("other", 1)
    hall.wait_reason("behind", "WaitForOtherGangs")
    assert f"{NAMESPACE}/ahead comes first" in hall.reason("behind", part="message")
    assert [hall.held(gang) for gang in ("holder", "ahead", "behind", "other")] == [4, 0, 0, 8]


def test_what_is_not_known_yet_is_no_never(hall: Hall) -> None:
    """A Node is Ready and its agent has not reported; another one is cordoned. Each gang says what it waits for, keeps
    its turn, and starts when that has come."""
    new, cordoned = {"example.com/for": "new"}, {"example.com/for": "cordoned"}
    hall.add(1, "cordoned", lambda _: {BLOCK: "c", RACK: "r0", **cordoned})
    node = f"{paths.nodes()}/cordoned-0"
    hall.api.request("PATCH", node, {"spec": {"unschedulable": True}}, content_type=MERGE_PATCH)
    hall.add(1, "new", lambda _: {BLOCK: "n", RACK: "r0", **new}, profile=None)
    hall.single("early", gpus=8, where=new)
    hall.single("shut", gpus=8, where=cordoned)

    hall.wait_reason("early", "WaitForNodes")
    hall.wait_reason("shut", "WaitForNodes")
    assert "waits for the report of 1 node: new-0" in hall.reason("early", part="message")
    assert "fits when cordoned-0 is uncordoned" in hall.reason("shut", part="message")
    write_reports(hall.cluster, ("dgx-h100",), prefix="new")
    hall.api.request("PATCH", node, {"spec": {"unschedulable": None}}, content_type=MERGE_PATCH)
    hall.wait_bound("early", 1)
    hall.wait_bound("shut", 1)


def test_a_gang_that_is_made_anew_after_it_never_fitted_starts(hall: Hall) -> None:
    """Two whole machines where there is one: never. The successor of the same name asks for one, and has it."""
    where = {"example.com/for": "anew"}
    hall.add(1, "anew", lambda _: {BLOCK: "a", RACK: "r0", **where})
    hall.gang("anew", 2, gpus=8, topology={"mode": "required", "level": RACK})
    hall.members("anew", range(2), nodeSelector=where)
    hall.wait_reason("anew", "NeverFits")
    for path in (
        f"{GANGS}/anew",
        f"{paths.gpuclaims(NAMESPACE)}/anew",
        *(f"{paths.pods(NAMESPACE)}/anew-{n}" for n in (0, 1)),
    ):
        hall.api.request("DELETE", path)

    hall.single("anew", gpus=8, where=where)
    hall.wait_bound("anew", 1)
    assert hall.api.get(f"{GANGS}/anew")["status"]["admissions"] == 1


def test_a_gang_that_is_edited_after_it_never_fitted_starts(hall: Hall) -> None:
    """Two machines in two racks cannot hold two members in one rack; once the rack is only preferred, they start."""
    where = {"example.com/for": "edited"}
    hall.add(2, "edited", lambda number: {BLOCK: "a", RACK: f"r{number}", **where})
    hall.gang("edited", 2, gpus=8, topology={"mode": "required", "level": RACK})
    hall.members("edited", range(2), nodeSelector=where)
    hall.wait_reason("edited", "NeverFits")
    pod_set = {"name": "workers", "count": 2, "topology": {"mode": "preferred", "level": RACK}}

    hall.api.request("PATCH", f"{GANGS}/edited", {"spec": {"podSets": [pod_set]}}, content_type=MERGE_PATCH)

    hall.wait_bound("edited", 2)
