"""Attempts of a user on running pods with real kubelets: none gives access to another pod's GPUs.

tests/deploy tests each policy alone, with dry runs. This module combines webhook, policies and kubelets; the user has
more rights than the role `edit`, and the container's output after a restart shows its GPUs.
"""

import json
import re
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from atoll.api import names
from tests.e2e.world import HOLD, STAY, RealCluster, Seen

pytestmark = pytest.mark.e2e

USER = "mallory"
RIGHTS = """
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: edit}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{kind: User, name: mallory}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: more-than-edit}
rules:
  - apiGroups: [""]
    resources: [pods/status, pods/binding, bindings, pods/ephemeralcontainers]
    verbs: [get, create, update, patch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: more-than-edit}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: more-than-edit}
subjects: [{kind: User, name: mallory}]
"""
Attempt = Callable[[RealCluster, str], "CompletedProcess[str]"]
"""Tries to show the pod `victim` the GPU of that uuid."""


@pytest.fixture
def stage(world: RealCluster) -> RealCluster:
    """A namespace whose user has every right that a careless administrator may give, and a pod `victim` that runs."""
    done = world.kubectl("apply", "-f", "-", text=RIGHTS)
    assert done.returncode == 0, done.stderr
    world.claim("one", 1, models=["nvidia-v100"])
    world.pod("victim", "one")
    world.wait_running("victim")
    world.seen("victim")
    return world


def other_uuid(world: RealCluster) -> str:
    """Return a GPU of the victim's machine that the victim does not hold."""
    own = world.seen("victim").nvidia
    return next(d["uuid"] for d in world.report("volta")["status"]["devices"] if d["uuid"] not in own)


def allocation_of(uuid: str) -> dict[str, str]:
    """Return the annotations that would show a container `main` this GPU."""
    return {
        names.ALLOCATED: "volta:7",
        names.UUIDS: uuid,
        f"{names.CONTAINER_UUIDS_PREFIX}main": uuid,
        f"{names.CONTAINER_DEVICES_PREFIX}main": uuid,
    }


def patch(world: RealCluster, uuid: str, *options: str) -> "CompletedProcess[str]":
    """Write another GPU into the annotations that the victim's variables refer to."""
    body = json.dumps({"metadata": {"annotations": allocation_of(uuid)}})
    return world.kubectl("patch", "pod", "victim", "--type=merge", "-p", body, *options, user=USER)


def say_that_it_has_ended(world: RealCluster, _uuid: str) -> "CompletedProcess[str]":
    """Write into the status what kubelet writes at the end, so that the GPUs would go to the next pod."""
    ended = {"terminated": {"exitCode": 0, "reason": "Completed"}}
    statuses = [{**one, "ready": False, "state": ended} for one in world.get("victim")["status"]["containerStatuses"]]
    body = json.dumps({"status": {"phase": "Failed", "containerStatuses": statuses}})
    return world.kubectl("patch", "pod", "victim", "--subresource=status", "--type=merge", "-p", body, user=USER)


def add_ephemeral_container(world: RealCluster, uuid: str) -> "CompletedProcess[str]":
    """Add a container that brings the variables itself."""
    container = {
        "name": "debugger",
        "image": "localhost/busybox:1",
        "command": ["sleep", "600"],
        "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": uuid}],
    }
    body = json.dumps({"spec": {"ephemeralContainers": [container]}})
    return world.kubectl("patch", "pod", "victim", "--subresource=ephemeralcontainers", "-p", body, user=USER)


def copy_to_the_same_node(world: RealCluster, uuid: str) -> "CompletedProcess[str]":
    """Copy the pod with its annotations past the scheduler."""
    image = "--set-image=main=localhost/busybox:1"
    return world.kubectl("debug", "victim", "--copy-to=copy", "--same-node", image, user=USER)


@pytest.mark.parametrize(
    ("attempt", "answer"),
    [
        pytest.param(patch, "only Atoll writes the annotation", id="pods"),
        pytest.param(
            lambda w, uuid: patch(w, uuid, "--subresource=status"), "only Atoll writes the annotation", id="pods-status"
        ),
        pytest.param(say_that_it_has_ended, "only the kubelet says what became of the containers", id="forged-end"),
        pytest.param(add_ephemeral_container, "an ephemeral container may not choose GPUs", id="ephemeral-containers"),
        pytest.param(copy_to_the_same_node, "spec.nodeName", id="kubectl-debug-same-node"),
    ],
)
def test_a_running_pod_keeps_its_own_gpus(stage: RealCluster, attempt: Attempt, answer: str) -> None:
    """The attempt is refused in plain words, and the container's next start shows the GPUs that it holds."""
    before = stage.seen("victim")

    done = attempt(stage, other_uuid(stage))
    stage.restart_container("victim")

    assert done.returncode != 0
    assert answer in done.stderr
    assert stage.seen("victim") == before
    assert len(stage.pods()) == 1


def test_a_copy_for_debugging_gets_gpus_of_its_own(stage: RealCluster) -> None:
    """`kubectl debug --copy-to` copies all annotations; the webhook takes the allocation off, bind writes a new one."""
    before = stage.seen("victim")

    image = "--set-image=main=localhost/busybox:1"
    done = stage.kubectl("debug", "victim", "--copy-to=copy", image, user=USER)
    assert done.returncode == 0, done.stderr
    copy = stage.wait_running("copy")

    seen = stage.seen("copy")
    assert len(seen.nvidia) == 1
    assert set(seen.nvidia).isdisjoint(before.nvidia)
    assert len(stage.leases(copy["metadata"]["uid"])) == 1


def test_a_debugging_container_sees_no_gpu(stage: RealCluster) -> None:
    """Ephemeral containers without variables are let in; nothing shows them a GPU."""
    command = ["sh", "-c", "echo CUDA=$CUDA_VISIBLE_DEVICES NVIDIA=$NVIDIA_VISIBLE_DEVICES ORDER="]
    done = stage.kubectl(
        "debug", "victim", "--image=localhost/busybox:1", "--container=look", "--", *command, user=USER
    )

    assert done.returncode == 0, done.stderr
    assert stage.seen("victim", "look") == Seen((), (), "")


def binding(name: str, uuid: str | None) -> dict[str, Any]:
    """Return a Binding of a pod to volta, with an allocation where a uuid is given."""
    annotations = allocation_of(uuid) if uuid else {}
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "annotations": annotations},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "volta"},
    }


def post(world: RealCluster, path: str, body: dict[str, Any]) -> "CompletedProcess[str]":
    """Create something at a path of the namespace, as the user."""
    url = f"/api/v1/namespaces/{world.namespace}/{path}"
    return world.kubectl("create", "--raw", url, "-f", "-", text=json.dumps(body), user=USER)


@pytest.mark.parametrize("path", ["pods/waiting/binding", "bindings"])
def test_a_user_binds_no_pod_to_gpus(stage: RealCluster, path: str) -> None:
    """With an allocation the Binding is refused. Without one it lands, and the container sees no GPU: it holds none."""
    stage.claim("nowhere", 1, models=["nvidia-r300"])
    stage.pod("waiting", "nowhere")
    stage.wait_rejected("waiting")

    forged = post(stage, path, binding("waiting", other_uuid(stage)))
    bare = post(stage, path, binding("waiting", None))
    pod = stage.wait_running("waiting")

    assert forged.returncode != 0
    assert "only Atoll's scheduler writes Atoll's annotations while binding" in forged.stderr
    assert bare.returncode == 0, bare.stderr
    assert stage.seen("waiting") == Seen((), (), "")
    assert stage.leases(pod["metadata"]["uid"]) == []


def test_a_static_pods_look_is_no_disguise(stage: RealCluster) -> None:
    """The mark of a mirror pod, which Atoll leaves alone where a kubelet writes it, opens nothing to users."""
    body = stage.pod_body("mirror", None, script=HOLD + STAY, nodeName="volta")
    uuid = other_uuid(stage)
    body["metadata"]["annotations"] = {names.MIRROR: "x", **allocation_of(uuid)}
    reference = {"fieldRef": {"fieldPath": f"metadata.annotations['{names.CONTAINER_UUIDS_PREFIX}main']"}}
    body["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": reference}]

    done = stage.kubectl("create", "-f", "-", text=yaml.safe_dump(body), user=USER)

    assert done.returncode != 0
    refusals = re.findall(r"ValidatingAdmissionPolicy '(atoll-\w+)'", done.stderr)
    assert refusals
    assert set(refusals) <= {"atoll-shape", "atoll-mirrors"}, "the API server asks both, in any order"
    assert len(stage.pods()) == 1
