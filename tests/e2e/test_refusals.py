"""Every request that Atoll does not grant is answered as documented: refused with a message, stripped, or waiting."""

import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from atoll.api import names
from devcluster.installation import Installation
from tests.e2e.world import HOLD, STAY, RealCluster

pytestmark = pytest.mark.e2e

Body = dict[str, Any]
MakePod = Callable[[RealCluster], Body]


def claim_body(name: str, *, spec: Body | None = None, **devices: Any) -> Body:
    """Return a GpuClaim; keywords go to spec.devices."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "GpuClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"count": 1, **devices}, **(spec or {})},
    }


@pytest.fixture(scope="module")
def counter(installation: Installation) -> Iterator[RealCluster]:
    """One namespace for all requests that must leave nothing behind, with a claim `one` and a gang's claim `member`."""
    world = RealCluster.enter(installation, f"counter-{uuid4().hex[:8]}")
    world.claim("one", 1)
    world.kubectl("create", "-f", "-", text=json.dumps(claim_body("member", spec={"gangRef": "train"})))
    yield world
    world.leave()


@pytest.mark.parametrize(
    ("claim", "answer"),
    [
        pytest.param(claim_body("c", count=0), "should be greater than or equal to 1", id="zero-gpus"),
        pytest.param(claim_body("c", count=-2), "should be greater than or equal to 1", id="negative-count"),
        pytest.param(claim_body("c", count=65), "should be less than or equal to 64", id="absurd-count"),
        pytest.param(claim_body("c", policy="closest"), 'Unsupported value: "closest"', id="unknown-policy"),
        pytest.param(claim_body("c", policy="spread", interconnect="nvlink"), "choose either", id="contradiction"),
        pytest.param(claim_body("c", cuont=1), 'unknown field "spec.devices.cuont"', id="misspelled-field"),
    ],
)
def test_a_claim_that_makes_no_sense_is_never_stored(counter: RealCluster, claim: Body, answer: str) -> None:
    """The API server itself refuses it, and says which value and why."""
    done = counter.kubectl("create", "-f", "-", text=json.dumps(claim))

    assert done.returncode != 0
    assert answer in done.stderr


def with_env(world: RealCluster) -> Body:
    """Return a pod that chooses its GPUs itself."""
    body = world.pod_body("p", "one")
    body["spec"]["containers"][0]["env"] = [{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}]
    return body


def with_gate(world: RealCluster) -> Body:
    """Return a pod behind Atoll's gate, put there by the user."""
    return world.pod_body("p", "one", schedulingGates=[{"name": names.GANG_GATE}])


def with_other_gang(world: RealCluster) -> Body:
    """Return a pod that names another gang than its claim does."""
    body = world.pod_body("p", "member")
    body["metadata"]["annotations"][names.GANG] = "other"
    return body


def with_asking_init_container(world: RealCluster) -> Body:
    """Return a pod whose init container asks for the GPU."""
    return world.pod_body("p", "one", initContainers=[world.container("prepare", gpus=1)])


@pytest.mark.parametrize(
    ("make_pod", "answer"),
    [
        pytest.param(lambda w: w.pod_body("p", "nobody"), "GpuClaim 'nobody' does not exist", id="missing-claim"),
        pytest.param(lambda w: w.pod_body("p", "in gang"), "is no name of a GpuClaim", id="impossible-claim-name"),
        pytest.param(with_other_gang, "a pod belongs to one gang", id="another-gang-than-the-claim"),
        pytest.param(with_gate, "would never be removed", id="gate-set-by-the-user"),
        pytest.param(with_env, "sets CUDA_VISIBLE_DEVICES itself", id="variable-set-by-the-user"),
        pytest.param(with_asking_init_container, "init container 'prepare' asks for", id="init-container-asks"),
        pytest.param(
            lambda w: w.pod_body("p", "one", containers=[w.container("main", gpus=2)]),
            "make the sums equal",
            id="containers-ask-for-more-than-the-claim",
        ),
        pytest.param(
            lambda w: w.pod_body("p", None, containers=[w.container("main", gpus=0)]),
            "ask for 1 to 64, or remove the resource",
            id="no-claim-and-zero",
        ),
        pytest.param(
            lambda w: w.pod_body("p", None, containers=[w.container("main", gpus=-1)]),
            "write a whole number from 0 to 64",
            id="no-claim-and-negative",
        ),
        pytest.param(
            lambda w: w.pod_body("p", "one", schedulerName="volcano"), "remove schedulerName", id="foreign-scheduler"
        ),
        pytest.param(
            lambda w: w.pod_body("p", "one", nodeName="volta"), "use nodeSelector or node affinity", id="node-by-hand"
        ),
        pytest.param(
            lambda w: w.pod_body("p", None, runtimeClassName=names.RUNTIME_CLASS),
            "is for pods that ask Atoll for GPUs",
            id="runtime-class-by-hand",
        ),
    ],
)
def test_a_pod_that_cannot_be_served_is_refused_at_once(counter: RealCluster, make_pod: MakePod, answer: str) -> None:
    """The user is told what to change, and no trace of the pod is left."""
    done = counter.kubectl("create", "-f", "-", text=json.dumps(make_pod(counter)))

    assert done.returncode != 0
    assert answer in done.stderr
    assert counter.pods() == []


def test_forged_annotations_are_taken_off_with_a_warning(world: RealCluster) -> None:
    """A pod that brings an allocation is given one of its own, and its container sees that one."""
    stolen = world.report("hopper")["status"]["devices"][0]["uuid"]
    forged = {names.ALLOCATED: "hopper:0", names.UUIDS: stolen, f"{names.CONTAINER_UUIDS_PREFIX}main": stolen}
    world.claim("one", 1, models=["nvidia-v100"])
    body = world.pod_body("forger", "one")
    body["metadata"]["annotations"].update(forged)

    done = world.kubectl("create", "-f", "-", text=json.dumps(body))
    world.wait_running("forger")

    assert "Warning: only Atoll writes these annotations" in done.stderr
    allocation = world.allocation("forger")
    assert allocation is not None
    assert allocation.node == "volta"
    assert world.seen("forger").nvidia == allocation.uuids


def test_a_dry_run_takes_nothing(world: RealCluster) -> None:
    """`--dry-run=server` answers with the shaped pod and leaves neither pod nor Lease."""
    world.claim("one", 1)
    body = json.dumps(world.pod_body("dry", "one"))

    done = world.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", text=body)

    assert json.loads(done.stdout)["spec"]["schedulerName"] == names.SCHEDULER_NAME
    assert world.pods() == []
    assert world.leases() == []


def test_claim_and_pod_stand_in_one_file(world: RealCluster) -> None:
    """Claim first: one `kubectl apply` does. Pod first: the refusal says so; the same command then works."""
    claim, pod = json.dumps(claim_body("one")), json.dumps(world.pod_body("first", "one"))
    late_claim, late_pod = json.dumps(claim_body("late")), json.dumps(world.pod_body("second", "late"))

    in_order = world.kubectl("apply", "-f", "-", text=f"{claim}\n---\n{pod}")
    reverse = world.kubectl("apply", "-f", "-", text=f"{late_pod}\n---\n{late_claim}")
    again = world.kubectl("apply", "-f", "-", text=f"{late_pod}\n---\n{late_claim}")

    assert in_order.returncode == 0, in_order.stderr
    assert "GpuClaim 'late' does not exist" in reverse.stderr
    assert again.returncode == 0, again.stderr
    for name in ("first", "second"):
        world.wait_running(name)
        assert len(world.seen(name).nvidia) == 1


def test_more_gpus_than_any_node_has_wait_with_a_reason(world: RealCluster) -> None:
    """Such a pod is admitted, for a larger machine may come; meanwhile it says what is missing."""
    world.claim("nine", 9)
    world.pod("large", "nine")

    assert f"4 Insufficient {names.GPU_RESOURCE}" in world.wait_rejected("large")
    note = world.wait(lambda: waiting_note(world, "large"), "the pod to be told what is missing")
    assert f"9 GPUs asked, fits no machine of the 4 here, not even an empty one: 4 {names.REJECT_NEVER_FITS};" in note
    assert f"`atoll explain pod/large -n {world.namespace}`" in note


def test_a_model_that_nobody_has_waits_with_a_reason(world: RealCluster) -> None:
    """kube-scheduler's own message carries the extender's reason, counted over the nodes."""
    world.claim("future", 1, models=["nvidia-r300"])
    world.pod("early", "future")

    assert f"4 {names.REJECT_NO_MODEL}" in world.wait_rejected("early")


def test_a_claim_that_goes_away_takes_its_waiting_pods_hope(world: RealCluster) -> None:
    """Claim deleted: the pod says so. Created again under the name: another claim, so the pod still gets nothing."""
    world.claim("four", 4, models=["nvidia-gb200"])
    world.pod("holder", "four")
    world.wait_running("holder")
    world.pod("waiting", "four")
    world.wait_rejected("waiting")

    world.kubectl("delete", "gpuclaim", "four")
    world.delete("holder")
    world.wait(lambda: names.REJECT_CLAIM_MISSING in world.message("waiting"), "the missing claim to be named")
    world.claim("four", 4, models=["nvidia-gb200"])
    world.wait(lambda: is_told_after_a_nudge(world, names.REJECT_CLAIM_REPLACED), "the other claim to be noticed")

    world.pod("successor", "four")
    world.wait_running("successor")
    assert world.leases(world.get("waiting")["metadata"]["uid"]) == []


def is_told_after_a_nudge(world: RealCluster, reason: str) -> bool:
    """Make kube-scheduler look at the pod `waiting` again; tell whether its message names the reason."""
    world.kubectl("annotate", "--overwrite", "pod", "waiting", f"example.com/nudged={uuid4().hex}")
    return reason in world.message("waiting")


def test_a_running_pod_outlives_its_claim(world: RealCluster) -> None:
    """A claim is a template: deleting it takes nothing from pods that have their GPUs, not even at a restart."""
    world.claim("one", 1)
    pod = world.pod("train", "one")
    world.wait_running("train")
    before = world.seen("train")

    world.kubectl("delete", "gpuclaim", "one")
    world.restart_container("train")

    assert world.seen("train") == before
    assert len(world.leases(pod["metadata"]["uid"])) == 1


@pytest.fixture
def without_webhook(world: RealCluster) -> Iterator[RealCluster]:
    """The world while the webhook is dead; afterwards it serves again."""
    world.installation.kill("webhook")
    yield world
    if not world.cluster.processes()["webhook"].running:
        world.installation.start("webhook")


def test_with_the_webhook_down_only_gpu_pods_wait(without_webhook: RealCluster) -> None:
    """GPU pods are refused, plain ones start; with the webhook back the same manifest works."""
    world = without_webhook
    world.claim("one", 1)
    body = json.dumps(world.pod_body("closed", "one"))

    refused = world.kubectl("create", "-f", "-", text=body)
    world.pod("plain", None, script=HOLD + STAY)
    world.wait_running("plain")
    world.installation.start("webhook")
    world.wait(lambda: world.kubectl("create", "-f", "-", text=body).returncode == 0, "the pod to be admitted")
    world.wait_running("closed")

    assert refused.returncode != 0
    assert "failed calling webhook" in refused.stderr
    assert world.seen("plain").nvidia == ()
    assert len(world.seen("closed").nvidia) == 1


def waiting_note(world: RealCluster, name: str) -> str:
    """Return what the event about the waiting pod says, empty while there is none."""
    events = [event for event in world.events(name) if event["reason"] == names.REASON_WAITING]
    return events[0]["note"] if events else ""


def test_a_replicaset_whose_pods_kubelet_refuses_makes_few_of_them(world: RealCluster) -> None:
    """A pod for another operating system is refused again and again: soon the next one waits, and says so."""
    world.claim("one", 1)
    template = world.pod_body("x", "one")
    metadata = {"annotations": template["metadata"]["annotations"], "labels": {"app": "odd"}}
    spec = {**template["spec"], "os": {"name": "windows"}}
    body = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": "odd"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": "odd"}},
            "template": {"metadata": metadata, "spec": spec},
        },
    }
    path = f"/apis/apps/v1/namespaces/{world.namespace}/replicasets"
    world.cluster.api.request("POST", path, body)
    try:
        world.wait(lambda: any_told(world, names.REJECT_REFUSED), "the next pod to be told that it waits")
        assert [pod["status"]["phase"] for pod in world.pods()].count("Failed") < 20
        world.wait(lambda: world.leases() == [], "the refused pods to hold nothing")
    finally:
        world.cluster.api.request("DELETE", f"{path}/odd?propagationPolicy=Background")


def any_told(world: RealCluster, reason: str) -> bool:
    """Tell whether the message of some pod names the reason."""
    return any(reason in world.message(pod["metadata"]["name"]) for pod in world.pods())
