"""Gangs of JobSet, LeaderWorkerSet, the MPI operator, KubeRay, Kubeflow's trainer and AppWrapper, each with its real
controller.

Each gang has a leader without GPUs and four workers of four GPUs, on two machines of eight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest

from atoll.api import names
from devcluster import DevCluster, DevNodeSpec
from devcluster.installation import Installation
from devcluster.kueue import Kueue
from devcluster.operators import OperatorProcess
from devcluster.owners import AppWrappers, JobSet, KubeRay, LeaderWorkerSet, MpiOperator, Trainer
from tests.e2e.conftest import OPTIONS
from tests.e2e.queues import QUEUE, QUEUE_LABEL, Queues, make_flavors
from tests.e2e.world import HOLD, RealCluster

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

FRAMEWORKS = [
    "batch/job",
    "pod",
    "jobset.x-k8s.io/jobset",
    "leaderworkerset.x-k8s.io/leaderworkerset",
    "kubeflow.org/mpijob",
    "ray.io/raycluster",
    "ray.io/rayjob",
    "trainer.kubeflow.org/trainjob",
    "workload.codeflare.dev/appwrapper",
]
GANG = "training"
WORKERS = 4
GPUS = 4
FAIL = "trap 'exit 1' TERM; while :; do sleep 1 & wait $!; done"
"""A program that is told to end has not done its work: with status 0, an Indexed Job would count it as complete."""
GANGS = "/apis/gpu.scheduling/v1/namespaces/{}/gpugangs/" + GANG


@dataclass(frozen=True)
class Kind:
    """A kind of owner: its operators, its path, and its spec of the templates of leader and worker."""

    operators: tuple[type[OperatorProcess], ...]
    api: str
    plural: str
    kind: str
    spec: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    members: int = 1 + WORKERS
    queued: Mapping[str, Any] = field(default_factory=dict)
    """What Kueue demands of its spec besides."""
    before: Callable[[dict[str, Any], dict[str, Any]], tuple[str, dict[str, Any]]] | None = None
    """Plural and body of an object of the same API that must exist before."""


def _job_set(leader: dict[str, Any], worker: dict[str, Any]) -> dict[str, Any]:
    def replicated(name: str, replicas: int, pods: int, template: dict[str, Any]) -> dict[str, Any]:
        template = {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}
        job = {"parallelism": pods, "completions": pods, "backoffLimit": 0, "template": template}
        return {"name": name, "replicas": replicas, "template": {"spec": job}}

    jobs = [replicated("leader", 1, 1, leader), replicated("workers", 2, WORKERS // 2, worker)]
    return {"failurePolicy": {"maxRestarts": 20}, "replicatedJobs": jobs}


def _leader_worker_set(leader: dict[str, Any], worker: dict[str, Any]) -> dict[str, Any]:
    return {"replicas": 1, "leaderWorkerTemplate": {"size": 1 + WORKERS, "leaderTemplate": leader,
                                                    "workerTemplate": worker}}  # fmt: skip


def _mpi_job(leader: dict[str, Any], worker: dict[str, Any]) -> dict[str, Any]:
    sets = {
        "Launcher": {"replicas": 1, "restartPolicy": "OnFailure", "template": leader},
        "Worker": {"replicas": WORKERS, "restartPolicy": "OnFailure", "template": worker},
    }
    return {"runPolicy": {"backoffLimit": 20}, "mpiReplicaSpecs": sets}


def _ray_cluster(leader: dict[str, Any], worker: dict[str, Any]) -> dict[str, Any]:
    group = {"groupName": "gpus", "replicas": WORKERS, "minReplicas": 0, "maxReplicas": WORKERS}
    return {
        "headGroupSpec": {"rayStartParams": {}, "template": leader},
        "workerGroupSpecs": [{**group, "rayStartParams": {}, "template": worker}],
    }


def _ray_job(leader: dict[str, Any], worker: dict[str, Any]) -> dict[str, Any]:
    """Its cluster stays after its work, as by default. The submitter only waits: there is no Ray to submit to."""
    submitter = {"spec": {**leader["spec"], "restartPolicy": "Never"}}
    return {"entrypoint": "true", "submitterPodTemplate": submitter, "rayClusterSpec": _ray_cluster(leader, worker)}


def _training_runtime(leader: dict[str, Any], worker: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a runtime whose second Job gets the nodes that a TrainJob asks for."""
    jobs = _job_set(leader, worker)
    jobs["replicatedJobs"][1] |= {"name": "node", "replicas": 1}
    nodes = jobs["replicatedJobs"][1]["template"]
    nodes["spec"]["template"]["spec"]["containers"][0]["name"] = "node"
    nodes["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    spec = {"mlPolicy": {"numNodes": 1}, "template": {"spec": jobs}}
    return "trainingruntimes", {"kind": "TrainingRuntime", "metadata": {"name": GANG}, "spec": spec}


def _train_job(_leader: dict[str, Any], _worker: dict[str, Any]) -> dict[str, Any]:
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": GANG}
    return {"runtimeRef": runtime, "trainer": {"numNodes": WORKERS}}


def _app_wrapper(leader: dict[str, Any], worker: dict[str, Any]) -> dict[str, Any]:
    wrapped = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": GANG}}
    return {"components": [{"template": {**wrapped, "spec": _job_set(leader, worker)}}]}


KINDS = {
    "JobSet": Kind((JobSet,), "jobset.x-k8s.io/v1alpha2", "jobsets", "JobSet", _job_set),
    "LeaderWorkerSet": Kind(
        (LeaderWorkerSet,), "leaderworkerset.x-k8s.io/v1", "leaderworkersets", "LeaderWorkerSet", _leader_worker_set
    ),
    "MPIJob": Kind((MpiOperator,), "kubeflow.org/v2beta1", "mpijobs", "MPIJob", _mpi_job),
    "RayCluster": Kind((KubeRay,), "ray.io/v1", "rayclusters", "RayCluster", _ray_cluster),
    "RayJob": Kind((KubeRay,), "ray.io/v1", "rayjobs", "RayJob", _ray_job, queued={"shutdownAfterJobFinishes": True}),
    "TrainJob": Kind(
        (JobSet, Trainer),
        "trainer.kubeflow.org/v1alpha1",
        "trainjobs",
        "TrainJob",
        _train_job,
        before=_training_runtime,
    ),
    "AppWrapper": Kind(
        (JobSet, AppWrappers), "workload.codeflare.dev/v1beta2", "appwrappers", "AppWrapper", _app_wrapper
    ),
}


@pytest.fixture(scope="module")
def beside_operators() -> Iterator[Installation]:
    """A cluster with Atoll: 16 GPUs on two machines."""
    nodes = [DevNodeSpec(f"hopper-{number}", profile="dgx-h100") for number in range(2)]
    with DevCluster.start(f"owners-{uuid4().hex[:6]}", nodes=nodes, scheduler=False) as cluster:
        installed = Installation(cluster, options=OPTIONS)
        installed.install()
        yield installed


@pytest.fixture(scope="module", params=KINDS)
def kind(beside_operators: Installation, request: pytest.FixtureRequest) -> Kind:
    """A kind of owner whose operator runs in the cluster."""
    kind = KINDS[request.param]
    for operator in kind.operators:
        made = operator(beside_operators.cluster)
        if not made.is_serving():
            made.install()
    return kind


@pytest.fixture(scope="module")
def kueue(beside_operators: Installation) -> None:
    """Kueue in the same cluster; it manages what names a queue."""
    Kueue(beside_operators.cluster).install(settings={"integrations": {"frameworks": FRAMEWORKS}})
    make_flavors(RealCluster(beside_operators, "default"))


@pytest.fixture
def owner(beside_operators: Installation, kind: Kind) -> Iterator[Owner]:
    """A namespace with an owner of a gang; it is deleted with the test."""
    with RealCluster.of_one_test(beside_operators) as world:
        owner = Owner(world, kind)
        yield owner
        owner.delete()


@pytest.fixture
def queued_owner(beside_operators: Installation, kind: Kind, kueue: None) -> Iterator[Owner]:
    """A namespace with an owner of a gang in a queue of Kueue."""
    with RealCluster.of_one_test(beside_operators) as world:
        queues = Queues(world, quota=WORKERS * GPUS, completes=False)
        owner = Owner(world, kind, labels={QUEUE_LABEL: QUEUE})
        yield owner
        owner.delete()
        queues.leave()


class Owner:
    """One owner of a gang in the namespace of a test."""

    def __init__(self, world: RealCluster, kind: Kind, *, labels: dict[str, str] | None = None) -> None:
        self.world = world
        self.kind = kind
        self._labels = labels or {}
        self.path = f"/apis/{kind.api}/namespaces/{world.namespace}/{kind.plural}/{GANG}"

    def create(self) -> None:
        """Create the claim of the workers, and the owner."""
        self.world.claim("gpus", GPUS)
        templates = (self._template(None), self._template("gpus"))
        if self.kind.before is not None:
            plural, before = self.kind.before(*templates)
            path = f"/apis/{self.kind.api}/namespaces/{self.world.namespace}/{plural}"
            self.world.cluster.api.request("POST", path, {"apiVersion": self.kind.api, **before})
        body = {
            "apiVersion": self.kind.api,
            "kind": self.kind.kind,
            "metadata": {
                "name": GANG,
                "labels": self._labels,
                "annotations": {"ray.io/overwrite-container-cmd": "true"},
            },
            "spec": {
                **self.kind.spec(*templates),
                **(self.kind.queued if self._labels else {}),
            },
        }
        self.world.cluster.api.request("POST", self.path.removesuffix(f"/{GANG}"), body)

    def _template(self, claim: str | None) -> dict[str, Any]:
        body = self.world.pod_body("x", claim, script=HOLD + FAIL, terminationGracePeriodSeconds=30)
        size = {names.GANG: GANG, names.GANG_SIZE: str(self.kind.members)}
        annotations = {
            **body["metadata"].get("annotations", {}), **size, "ray.io/overwrite-container-cmd": "true"
        }  # fmt: skip
        return {"metadata": {"annotations": annotations}, "spec": body["spec"]}

    def delete(self) -> None:
        """Delete the owner and everything below it."""
        self.world.cluster.api.request("DELETE", f"{self.path}?propagationPolicy=Background")

    def members(self) -> list[dict[str, Any]]:
        """Return the pods of the owner that are not ending."""
        return [
            pod
            for pod in self.world.pods()
            if pod["metadata"].get("annotations", {}).get(names.GANG) == GANG
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def running(self) -> list[dict[str, Any]]:
        """Return the members whose containers run."""
        return [
            pod
            for pod in self.members()
            if any("running" in one["state"] for one in pod["status"].get("containerStatuses", []))
        ]

    def leader(self) -> dict[str, Any]:
        """Return the member without GPUs."""
        return next(pod for pod in self.running() if names.CLAIM not in pod["metadata"]["annotations"])

    def worker(self) -> dict[str, Any]:
        """Return a member with GPUs."""
        return next(pod for pod in self.running() if names.CLAIM in pod["metadata"]["annotations"])

    def wait_whole(self, but: str = "") -> None:
        """Wait until every member runs, none of them the pod of uid `but`, and all GPUs of the workers are held."""

        def is_whole() -> bool:
            running = self.running()
            uids = {pod["metadata"]["uid"] for pod in running}
            held = len(self.world.leases())
            return len(uids) == self.kind.members and but not in uids and held == WORKERS * GPUS

        self.world.wait(is_whole, f"the gang of the {self.kind.kind} to run whole")

    def set_active(self, active: str) -> None:
        """Switch the gang on or off."""
        done = self.world.kubectl(
            "patch", "gpugang", GANG, "--type=merge", "-p", f'{{"spec":{{"active":{active}}}}}'
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_a_gang_of_an_owner_starts_whole_survives_its_members_and_comes_back(owner: Owner) -> None:
    """Four GPUs are somebody else's: no member runs. They are freed: all run. A worker dies, the leader dies, the gang
    is switched off and on: each time all members run again, and a gang that is off holds nothing."""
    _live(owner)


def test_so_does_one_in_a_queue_of_kueue(queued_owner: Owner) -> None:
    """Kueue suspends and resumes the owner, or gates its pods; Atoll stops it through Kueue's Workload."""
    _live(queued_owner)


def _live(owner: Owner) -> None:
    world = owner.world
    world.claim("four", 4)
    world.pod("somebody", "four")
    world.wait_running("somebody")
    owner.create()
    world.wait(lambda: len(owner.members()) == owner.kind.members, "all members to exist")
    world.wait(lambda: world.maybe(GANGS.format(world.namespace)), "the gang to be made")
    world.wait(lambda: _is_waiting(world), "the gang to wait for room")
    assert not owner.running()
    world.delete("somebody")
    owner.wait_whole()

    for chosen in (owner.worker, owner.leader):
        pod = chosen()
        world.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
        owner.wait_whole(but=pod["metadata"]["uid"])

    uid = world.cluster.api.get(GANGS.format(world.namespace))["metadata"]["uid"]
    owner.set_active("false")
    world.wait(lambda: not owner.running() and not world.leases(), "the gang to be off")
    owner.set_active("true")
    owner.wait_whole()
    assert world.cluster.api.get(GANGS.format(world.namespace))["metadata"]["uid"] == uid


def _is_waiting(world: RealCluster) -> bool:
    conditions = world.cluster.api.get(GANGS.format(world.namespace)).get("status", {}).get("conditions", [])
    return any(one["type"] == "Admitted" and one["reason"] == "WaitForRoom" for one in conditions)
