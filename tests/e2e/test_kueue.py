"""The real Kueue with Atoll: Kueue admits by quota; Atoll chooses the GPUs.

One cluster with two real machines in two racks, Atoll from deploy/ and Kueue from its own manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from atoll.api import names
from devcluster import DevCluster, DevNodeSpec
from devcluster.installation import Installation
from devcluster.kueue import Kueue
from tests.e2e.conftest import OPTIONS
from tests.e2e.queues import HIGH, PRIORITY_LABEL, RACK, TOPOLOGY_FLAVOR, Queues, make_flavors
from tests.e2e.world import HOLD, RealCluster

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "kueue"
HOSTNAME = "kubernetes.io/hostname"
REQUIRED = "kueue.x-k8s.io/podset-required-topology"
FAIL = "trap 'exit 1' TERM; while :; do sleep 1 & wait $!; done"
"""A program that is told to end has not done its work."""
Open = Callable[..., Queues]


@pytest.fixture(scope="module")
def beside_kueue() -> Iterator[Installation]:
    """A cluster with Atoll and Kueue: 16 GPUs on two machines."""
    nodes = [DevNodeSpec(f"hopper-{rack}", profile="dgx-h100", labels={RACK: rack}) for rack in ("a", "b")]
    with DevCluster.start(f"kueue-{uuid4().hex[:6]}", nodes=nodes, scheduler=False) as cluster:
        installed = Installation(cluster, options=OPTIONS)
        installed.install()
        Kueue(cluster).install(settings={"featureGates": {"ElasticJobsViaWorkloadSlices": True}})
        make_flavors(RealCluster(installed, "default"))
        yield installed


@pytest.fixture
def world(beside_kueue: Installation) -> Iterator[RealCluster]:
    """A namespace for one test."""
    with RealCluster.of_one_test(beside_kueue) as world:
        yield world


@pytest.fixture
def open_queue(world: RealCluster) -> Iterator[Open]:
    """Opens the queue of the test's namespace; it closes with the test."""
    opened: list[Queues] = []

    def open_one(**options: Any) -> Queues:
        opened.append(Queues(world, **options))
        return opened[-1]

    yield open_one
    for queues in opened:
        queues.leave()


def test_kueue_admits_by_quota_and_atoll_chooses_the_gpus(open_queue: Open) -> None:
    """Two Jobs of four GPUs in a quota of four: one runs on GPUs of Atoll's choice, the other has not even pods.

    Their templates name a claim and no resource; the quota counts the GPUs all the same.
    """
    queues = open_queue(quota=4)
    for name in ("first", "second"):
        queues.gang(name, count=2, gpus=2)
    queues.job("first", count=2)
    queues.wait_admitted("first")
    queues.job("second", count=2)

    pods = queues.wait_running("first", 2)
    queues.wait_pending("second")
    assert queues.counted("first") == 4
    assert queues.held("first") == 4
    assert all(HOSTNAME not in pod["spec"].get("nodeSelector", {}) for pod in pods)
    assert queues.get_job("second")["spec"]["suspend"] is True
    assert queues.pods("second") == []
    seen = [queues.world.seen(pod["metadata"]["name"]) for pod in pods]
    assert len({uuid for one in seen for uuid in one.nvidia}) == 4

    queues.delete_job("first")
    queues.wait_running("second", 2)
    assert queues.counted("second") == 4


def test_a_template_that_is_not_completed_costs_kueue_nothing(open_queue: Open) -> None:
    """Why the label is there: without it a quota of no GPU at all lets the Job pass, and its pods get GPUs."""
    queues = open_queue(quota=0, completes=False)
    queues.gang("free", count=1, gpus=2)
    queues.job("free", count=1)

    queues.wait_running("free", 1)
    assert queues.counted("free") == 0
    assert queues.held("free") == 2


def test_a_pod_group_waits_for_kueue_and_then_for_its_gpus(open_queue: Open) -> None:
    """While Kueue holds the group its gang holds no GPU; Kueue's gates go first, ours last, and all members start."""
    queues = open_queue(quota=8)
    queues.hold("Hold")
    queues.gang("group", count=2, gpus=4)
    for number in range(2):
        queues.group_pod("group", number, count=2)
    queues.wait_reason("group", "ForeignGates", names.CONDITION_QUORUM)
    queues.wait_pending("group")
    assert queues.held("group") == 0

    queues.hold("None")
    queues.wait_admitted("group")
    pods = queues.wait_running("group", 2)
    assert queues.counted("group") == 8
    assert queues.held("group") == 8
    assert all(HOSTNAME not in pod["spec"].get("nodeSelector", {}) for pod in pods)


def check_topology(queues: Queues, pods: list[dict[str, Any]], *, gpus: int, racks: int) -> None:
    """Every pod runs where Kueue put it, in so many racks, on GPUs of that machine."""
    for pod in pods:
        assert pod["spec"]["nodeName"] == pod["spec"]["nodeSelector"][HOSTNAME]
    chosen = {pod["spec"]["nodeSelector"][HOSTNAME] for pod in pods}
    allocations = [queues.world.allocation(pod["metadata"]["name"]) for pod in pods]
    assert {one.node for one in allocations if one is not None} == chosen
    assert len({uuid for one in allocations if one is not None for uuid in one.uuids}) == gpus
    found = {queues.api.get(f"/api/v1/nodes/{name}")["metadata"]["labels"][RACK] for name in chosen}
    assert len(found) == racks


def test_a_job_under_kueues_topology_gets_gpus_where_kueue_puts_it(open_queue: Open) -> None:
    """Kueue chooses a machine for each pod; Atoll chooses the GPUs on it, and no other machine."""
    queues = open_queue(quota=16, flavor=TOPOLOGY_FLAVOR)
    queues.gang("train", count=3, gpus=4)
    queues.job("train", count=3)

    pods = queues.wait_running("train", 3)
    assert queues.counted("train") == 12
    assert queues.held("train") == 12
    check_topology(queues, pods, gpus=12, racks=2)


def test_a_pod_group_under_kueues_topology_gets_gpus_where_kueue_puts_it(open_queue: Open) -> None:
    """The same for pods that nobody owns, and a rack that Kueue was asked for."""
    queues = open_queue(quota=16, flavor=TOPOLOGY_FLAVOR)
    queues.gang("group", count=2, gpus=4)
    for number in range(2):
        queues.group_pod("group", number, count=2, annotations={REQUIRED: RACK})

    pods = queues.wait_running("group", 2)
    assert queues.held("group") == 8
    check_topology(queues, pods, gpus=8, racks=1)


def test_gpus_of_a_preempted_job_are_given_on_only_after_proof(open_queue: Open) -> None:
    """Kueue frees the quota when it marks the pods; while their containers run on, the next gang holds nothing.

    When the more important Job is gone, the preempted one comes back whole.
    """
    queues = open_queue(quota=16)
    world = queues.world
    flag = f"end-{world.namespace}"
    linger = (
        f"trap 'while [ ! -f /locks/{flag} ]; do sleep 0.2; done; exit 0' TERM; while :; do sleep 1 & wait $!; done"
    )
    for name in ("low", "high"):
        queues.gang(name, count=2, gpus=8)
    queues.job("low", count=2, script=HOLD + linger)
    queues.wait_running("low", 2)
    queues.job("high", count=2, labels={PRIORITY_LABEL: HIGH})

    queues.wait_admitted("high")
    queues.wait_reason("high", "WaitForRoom")
    assert queues.held("low") == 16
    assert queues.held("high") == 0
    assert not queues.is_admitted("low")
    (world.locks / flag).touch()
    queues.wait_running("high", 2)
    assert queues.held("high") == 16
    assert queues.held("low") == 0

    queues.delete_job("high")
    queues.wait_running("low", 2)
    assert queues.held("low") == 16
    assert queues.get_job("low")["status"].get("failed", 0) == 0


def test_a_gang_that_atoll_evicts_gives_its_quota_back_and_comes_back(open_queue: Open) -> None:
    """Not ready in time: Kueue's Workload is stopped, so that the next Job gets the quota; then it is started again."""
    queues = open_queue(quota=4)
    world = queues.world
    flag = f"ready-{world.namespace}"
    late = {"backoffBaseSeconds": 10, "backoffMaxSeconds": 20}
    queues.gang("late", count=2, gpus=2, waitForPodsReady={"enable": True, "timeout": "20s", "requeuingStrategy": late})
    queues.gang("next", count=2, gpus=2)
    probe = {"exec": {"command": ["test", "-f", f"/locks/{flag}"]}, "periodSeconds": 1}
    queues.job("late", count=2, readinessProbe=probe)
    queues.wait_running("late", 2)
    queues.job("next", count=2)
    queues.wait_pending("next")

    queues.wait_admitted("next")
    stopped = queues.workload("late")
    assert stopped["spec"]["active"] is False
    assert names.GANG_SUSPENDED in stopped["metadata"]["labels"]
    queues.wait_running("next", 2)
    (world.locks / flag).touch()
    world.wait(lambda: queues.workload("late")["spec"]["active"], "the Workload to be started again")
    assert not queues.is_admitted("late")
    queues.delete_job("next")
    queues.wait_reason("late", "Started", names.CONDITION_PODS_READY)
    assert queues.held("late") == 4
    assert queues.get_job("late")["status"].get("failed", 0) == 0
    assert names.GANG_SUSPENDED not in queues.workload("late")["metadata"].get("labels", {})


def test_an_elastic_job_grows_within_its_gang_and_is_stopped_by_its_latest_workload(open_queue: Open) -> None:
    """Two members run, the Job grows to four: Kueue admits a second, larger Workload, and Atoll gives the new members
    GPUs. A fifth is beyond the gang's count and is told so. Evicted, the gang gives back the larger quota."""
    queues = open_queue(quota=16)
    world = queues.world
    queues.gang("elastic", count=4, gpus=2, minMember=2)
    queues.job("elastic", count=2, script=HOLD + FAIL, is_elastic=True)
    queues.wait_running("elastic", 2)

    def grow(count: int) -> None:
        patch = f'{{"spec":{{"parallelism":{count},"completions":{count}}}}}'
        done = world.kubectl("patch", "job", "elastic", "--type=merge", "-p", patch)
        assert done.returncode == 0, done.stderr

    def workload() -> dict[str, Any]:
        """Return the Workload that is not over."""
        for one in queues.api.get(queues.workloads_path)["items"]:
            conditions = one.get("status", {}).get("conditions", [])
            if not any(c["type"] == "Finished" and c["status"] == "True" for c in conditions):
                return dict(one)
        return {}

    first = workload()["metadata"]["name"]
    grow(4)
    queues.wait_running("elastic", 4)
    assert queues.held("elastic") == 8
    world.wait(lambda: workload()["metadata"]["name"] != first, "the first Workload to be replaced")
    grow(5)
    excess = world.wait(lambda: [p for p in queues.pods("elastic") if "nodeName" not in p["spec"]], "a fifth pod")
    world.wait_event(excess[0]["metadata"]["name"], names.REASON_GANG_WAITING)
    assert "the pod set's count is raised" in str(world.events(excess[0]["metadata"]["name"]))
    grow(4)
    world.wait(lambda: len(queues.pods("elastic")) == 4, "the fifth pod to be gone")

    done = world.kubectl("patch", "gpugang", "elastic", "--type=merge", "-p", '{"spec":{"active":false}}')
    assert done.returncode == 0, done.stderr
    world.wait(lambda: not world.leases() and not queues.pods("elastic"), "the gang to be off")
    assert workload()["spec"]["active"] is False
    world.wait(lambda: "admission" not in workload()["status"], "the quota to be given back")


def test_the_examples_work_as_shipped(world: RealCluster) -> None:
    """Label, queues, Job, as the files say: the Job is admitted for its GPUs and ends well."""
    label = ("label", "namespace", world.namespace, f"{names.COMPLETE_JOBS}=true")
    for words in (label, ("apply", "-f", str(EXAMPLES / "queues.yaml")), ("apply", "-f", str(EXAMPLES / "job.yaml"))):
        done = world.kubectl(*words)
        assert done.returncode == 0, done.stderr
    world.wait(
        lambda: world.kubectl("wait", "--for=condition=Complete", "job/queued", "--timeout=1s").returncode == 0,
        "the Job of the examples to end well",
    )
    (workload,) = yaml.safe_load(world.kubectl("get", "workloads", "-o", "yaml").stdout)["items"]
    usage = workload["status"]["admission"]["podSetAssignments"][0]["resourceUsage"]
    assert usage[names.GPU_RESOURCE] == "4"
    world.kubectl("delete", "-f", str(EXAMPLES), "--wait=false")


def test_every_file_of_the_examples_is_applied_and_listed() -> None:
    """A file that is added joins the test above and the table."""
    text = (EXAMPLES.parent / "README.md").read_text()

    assert sorted(path.name for path in EXAMPLES.iterdir()) == ["job.yaml", "queues.yaml"]
    assert all(f"(kueue/{name})" in text for name in ("job.yaml", "queues.yaml"))
