"""What autoscalers and quotas see of waiting pods on a running cluster, as docs/autoscaler.md says."""

import json
from typing import Any

import pytest

from atoll.api import names
from devcluster.errors import AdminApiError
from tests.e2e.world import RealCluster

pytestmark = pytest.mark.e2e


def scheduled(world: RealCluster, name: str) -> dict[str, Any]:
    """Wait until a pod has the condition PodScheduled, and return it."""

    def found() -> dict[str, Any] | None:
        conditions = world.get(name)["status"].get("conditions", [])
        return next((one for one in conditions if one["type"] == "PodScheduled"), None)

    condition = world.wait(found, f"the condition PodScheduled of {name}")
    assert condition is not None
    return condition


def member(world: RealCluster, name: str, *, size: int) -> dict[str, Any]:
    """Return a pod of a gang of so many."""
    body = world.pod_body(name, "one")
    body["metadata"]["annotations"] |= {names.GANG: "team", names.GANG_SIZE: str(size)}
    return body


def test_a_pod_without_gpus_in_number_is_unschedulable_and_told_how_many(world: RealCluster) -> None:
    """Autoscalers look for the reason Unschedulable, which kube-scheduler itself writes, with what is short."""
    world.claim("endless", 64)
    world.pod("waiting", "endless")
    condition = scheduled(world, "waiting")
    assert condition["reason"] == "Unschedulable"
    assert f"Insufficient {names.GPU_RESOURCE}" in condition["message"]
    world.wait_event("waiting", names.REASON_WAITING)
    notes = [event["note"] for event in world.events("waiting") if event["reason"] == names.REASON_WAITING]
    assert any("64 GPUs asked" in note for note in notes), notes


def test_a_member_that_waits_for_its_gang_buys_no_node(world: RealCluster) -> None:
    """A gated pod is SchedulingGated, never Unschedulable: autoscalers leave it alone."""
    world.claim("one", 1)
    created = world.create(member(world, "first", size=2))
    assert [gate["name"] for gate in created["spec"]["schedulingGates"]] == [names.GANG_GATE]
    assert scheduled(world, "first")["reason"] == "SchedulingGated"


def test_what_keeps_a_node_from_an_autoscaler_stays_on_the_pod(world: RealCluster) -> None:
    """The annotations that autoscalers heed are neither stripped nor changed on a pod with GPUs."""
    wanted = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
    world.claim("one", 1)
    body = world.pod_body("training", "one")
    body["metadata"]["annotations"] |= wanted
    world.create(body)
    world.wait_running("training")
    assert wanted.items() <= world.get("training")["metadata"]["annotations"].items()


TRIES = 20


def quota(world: RealCluster, gpus: int) -> str:
    """Give the namespace a quota of GPUs; return its path once it is counted."""
    spec = {"hard": {f"requests.{names.GPU_RESOURCE}": str(gpus)}}
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": spec}
    path = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    world.cluster.api.request("POST", path, body)
    world.wait(lambda: world.cluster.api.get(f"{path}/gpus").get("status", {}).get("used"), "the quota to be counted")
    return f"{path}/gpus"


def used(world: RealCluster, path: str) -> int:
    """Return how many GPUs of a quota are used."""
    return int(world.cluster.api.get(path)["status"]["used"][f"requests.{names.GPU_RESOURCE}"])


def test_creations_that_fail_or_are_only_tried_cost_nothing(world: RealCluster) -> None:
    """Dry runs, refusals behind the webhook and taken names: the gang and the ledger do not move, and neither does the
    quota; but for a taken name, which Kubernetes counts until it counts anew."""
    world.claim("one", 1)
    world.claim("many", 64)
    path = quota(world, 60)
    world.create(member(world, "first", size=3))

    for _ in range(TRIES):
        pods = f"/api/v1/namespaces/{world.namespace}/pods?dryRun=All"
        tried = world.cluster.api.request("POST", pods, member(world, "second", size=3))
        assert tried["spec"]["schedulerName"] == names.SCHEDULER_NAME
        with pytest.raises(AdminApiError, match="exceeded quota: gpus"):
            world.pod("large", "many")
    assert used(world, path) == 1
    for _ in range(TRIES):
        with pytest.raises(AdminApiError, match="already exists"):
            world.create(member(world, "first", size=3))

    world.create(member(world, "third", size=3))
    gang = f"/apis/gpu.scheduling/v1/namespaces/{world.namespace}/gpugangs/team"
    world.wait(lambda: "2 of 3 members" in json.dumps(world.maybe(gang)), "the gang to have counted two")
    assert sorted(pod["metadata"]["name"] for pod in world.pods()) == ["first", "third"]
    assert world.leases() == []


def test_a_waiting_gang_uses_its_namespaces_quota_and_the_next_is_told(world: RealCluster) -> None:
    """Gated members count from their creation; one too many is refused with the quota's name, and nothing is counted
    twice."""
    world.claim("one", 1)
    path = quota(world, 2)
    for name in ("first", "second"):
        world.create(member(world, name, size=3))
    refused = world.kubectl("create", "-f", "-", text=json.dumps(member(world, "third", size=3)))
    assert refused.returncode != 0
    assert "exceeded quota: gpus" in refused.stderr
    assert used(world, path) == 2
