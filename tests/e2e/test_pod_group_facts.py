"""What kube-scheduler's cycle for a PodGroup asks an extender: the real one with the gate on, and a stub extender."""

import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from atoll.api import names
from devcluster import DevCluster
from devcluster.installation import DEPLOY, shipped_scheduler_flags
from tests.e2e.test_scheduler_facts import STUB, Stage

pytestmark = pytest.mark.e2e

GROUPS = "/apis/scheduling.k8s.io/v1beta1/namespaces/default/podgroups"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A control plane with the gate, a node of two GPUs, and the stub, which lets every pod fit and holds all binds."""
    folder = tmp_path_factory.mktemp("stub")
    gates = ("GenericWorkload",)
    with DevCluster.start(f"pg-{uuid4().hex[:6]}", nodes=[], scheduler=False, feature_gates=gates) as cluster:
        for file in ("namespaces.yaml", "crds", "rbac"):
            cluster.kubectl("apply", "-f", str(DEPLOY / file), check=True)
        stage = Stage(cluster, Path(folder))
        stage.create_node("two", {"cpu": "8", "memory": "16Gi", "pods": "110", names.GPU_RESOURCE: "2"})
        cluster.spawn("stub", [sys.executable, str(STUB), str(folder)])
        identity = cluster.service_account_kubeconfig(names.SYSTEM_NAMESPACE, "atoll-scheduler")
        cluster.start_scheduler(DEPLOY / "scheduler" / "config.yaml", identity, flags=shipped_scheduler_flags())
        yield stage


def make_group(stage: Stage, min_count: int) -> str:
    """Create a PodGroup; return its name."""
    name = f"group-{uuid4().hex[:6]}"
    spec = {"schedulingPolicy": {"gang": {"minCount": min_count}}}
    body = {"apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup", "metadata": {"name": name}, "spec": spec}
    stage.cluster.api.request("POST", GROUPS, body)
    return name


def member(stage: Stage, group: str) -> str:
    """Create a pod of a group; return its name."""
    return stage.create_pod(schedulingGroup={"podGroupName": group})


def test_a_group_is_asked_about_pod_by_pod_and_bound_at_once_if_all_fit(stage: Stage) -> None:
    """Three pods on two GPUs: two fit, by kube-scheduler's own count the third does not, none is bound, and nobody
    tells the extender. A group of two waits for its second pod, then both binds are under way at the same time."""
    large = make_group(stage, 3)
    three = [member(stage, large) for _ in range(3)]
    stage.wait(lambda: any("Insufficient" in stage.message(pod) for pod in three), "the large group to be refused")
    assert set(stage.order(*three)) == {"filter"}
    stage.cluster.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", check=True)

    small = make_group(stage, 2)
    first = member(stage, small)
    alone = stage.create_pod()
    stage.wait(lambda: stage.calls("bind", alone) == 1, "a pod of no group to be bound meanwhile")
    assert stage.calls("filter", first) == 0
    stage.switch("answer-binds", on=True)
    stage.wait(lambda: stage.unanswered_binds() == 0, "its bind to fail")
    stage.cluster.kubectl("delete", "pod", alone, "--force", "--grace-period=0", check=True)
    stage.wait(lambda: stage.unanswered_binds() == 0, "no bind to be under way")
    stage.switch("answer-binds", on=False)

    second = member(stage, small)
    stage.wait(lambda: stage.calls("bind", first) and stage.calls("bind", second), "both to be bound")
    assert stage.order(first, second)[-4:] == ["filter", "filter", "bind", "bind"]
    stage.switch("answer-binds", on=True)
