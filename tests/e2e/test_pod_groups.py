"""Kubernetes' own gangs: PodGroups of policy gang, with the gate GenericWorkload on in the real control plane."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import orjson
import pytest

from atoll.api import names
from devcluster import DevCluster, DevNodeSpec
from devcluster.errors import AdminApiError
from devcluster.installation import Installation
from tests.e2e.conftest import OPTIONS
from tests.e2e.world import HOLD, RealCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

GATES = ("GenericWorkload", "TopologyAwareWorkloadScheduling")
GROUPS = "/apis/scheduling.k8s.io/v1beta1/namespaces/{}/podgroups"
GANGS = "/apis/gpu.scheduling/v1/namespaces/{}/gpugangs"
RACK = "example.com/rack"
STAY = "trap 'exit 1' TERM; while :; do sleep 1 & wait $!; done"
PRIORITIES = {"urgent": 1000}


@pytest.fixture(scope="module")
def with_gate() -> Iterator[Installation]:
    """A cluster with the gates on and Atoll: 16 GPUs on two machines, each a rack of its own."""
    nodes = [DevNodeSpec(f"hopper-{number}", profile="dgx-h100", labels={RACK: f"r{number}"}) for number in range(2)]
    name = f"groups-{uuid4().hex[:6]}"
    with DevCluster.start(name, nodes=nodes, scheduler=False, feature_gates=GATES) as cluster:
        for priority, value in PRIORITIES.items():
            body = {"metadata": {"name": priority}, "value": value}
            cluster.api.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", body)
        installed = Installation(cluster, options=OPTIONS)
        installed.install()
        levels = [{"nodeLabel": RACK}, {"nodeLabel": "kubernetes.io/hostname"}]
        topology = {"apiVersion": names.API_VERSION, "kind": "Topology", "metadata": {"name": "racks"},
                    "spec": {"levels": levels}}  # fmt: skip
        cluster.api.request("POST", "/apis/gpu.scheduling/v1/topologies", topology)
        yield installed


@pytest.fixture
def groups(with_gate: Installation) -> Iterator[Groups]:
    """A namespace with claims of two and four GPUs."""
    with RealCluster.of_one_test(with_gate) as world:
        made = Groups(world)
        yield made
        world.kubectl("delete", "jobs,podgroups", "--all", "--wait=false")


class Groups:
    """PodGroups and their Jobs in the namespace of a test."""

    def __init__(self, world: RealCluster) -> None:
        self.world = world
        world.claim("four", 4)
        world.claim("two", 2)

    def create(self, name: str, *, min_count: int, **spec: Any) -> None:
        """Create a PodGroup of policy gang."""
        policy = {"schedulingPolicy": {"gang": {"minCount": min_count}}}
        body = {"apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup", "metadata": {"name": name},
                "spec": {**policy, **spec}}  # fmt: skip
        self.world.cluster.api.request("POST", GROUPS.format(self.world.namespace), body)

    def job(
        self,
        name: str,
        *,
        pods: int,
        claim: str | None = "four",
        group: str = "",
        notes: dict[str, str] | None = None,
        **spec: Any,
    ) -> None:
        """Create a Job whose pods belong to the PodGroup; `notes` are annotations of the pods."""
        group = group or name
        body = self.world.pod_body("x", claim, script=HOLD + STAY, terminationGracePeriodSeconds=30)
        annotations = body["metadata"].get("annotations", {}) | (notes or {})
        template = {
            "metadata": {"annotations": annotations, "labels": {"group": group}},
            "spec": {
                **body["spec"], "restartPolicy": "Never", "schedulingGroup": {"podGroupName": group}, **spec
            },
        }  # fmt: skip
        job = {"parallelism": pods, "completions": pods, "backoffLimit": 20, "template": template}
        body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job}
        self.world.cluster.api.request("POST", f"/apis/batch/v1/namespaces/{self.world.namespace}/jobs", body)

    def pods(self, group: str) -> list[dict[str, Any]]:
        """Return the pods of a group that are not ending."""
        return [
            pod
            for pod in self.world.pods()
            if pod["metadata"].get("labels", {}).get("group") == group and "deletionTimestamp" not in pod["metadata"]
        ]

    def running(self, group: str) -> set[str]:
        """Return the names of the group's pods that run."""
        return {pod["metadata"]["name"] for pod in self.pods(group) if pod["status"]["phase"] == "Running"}

    def bound(self, group: str) -> list[str]:
        """Return the nodes of the group's pods."""
        return [pod["spec"]["nodeName"] for pod in self.pods(group) if "nodeName" in pod["spec"]]

    def held(self, group: str) -> int:
        """Return how many GPUs the group's pods hold."""
        uids = {pod["metadata"]["uid"] for pod in self.pods(group)}
        return sum(lease["spec"]["holderIdentity"].rpartition("/")[2] in uids for lease in self.world.leases())

    def wait_whole(self, group: str, count: int) -> None:
        """Wait until as many pods of the group run."""
        self.world.wait(lambda: len(self.running(group)) == count, f"{count} pods of {group} to run")

    def gang(self, name: str) -> dict[str, Any]:
        """Return the GpuGang of a group; empty if there is none."""
        found: dict[str, Any] = self.world.maybe(f"{GANGS.format(self.world.namespace)}/{name}") or {}
        return found

    def reason(self, name: str) -> str:
        """Return the reason of the gang's condition Admitted."""
        conditions = self.gang(name).get("status", {}).get("conditions", [])
        return next((one["reason"] for one in conditions if one["type"] == "Admitted"), "")

    def scheduled(self, group: str) -> str:
        """Return kube-scheduler's own condition of the PodGroup."""
        found = self.world.cluster.api.get(f"{GROUPS.format(self.world.namespace)}/{group}")
        conditions = found.get("status", {}).get("conditions", [])
        return next((one["status"] for one in conditions if one["type"] == "PodGroupInitiallyScheduled"), "")


def test_two_groups_that_fit_alone_but_not_together_run_one_after_the_other(groups: Groups) -> None:
    """Three times four of sixteen GPUs each, created at the same time: one runs whole, the other holds nothing and
    binds nothing, for kube-scheduler as for Atoll. It runs whole when the first is gone."""
    for name in ("one", "other"):
        groups.create(name, min_count=3)
        groups.job(name, pods=3)
    groups.world.wait(lambda: groups.held("one") + groups.held("other"), "a group to hold GPUs")
    first = "one" if groups.held("one") else "other"
    second = "other" if first == "one" else "one"
    groups.wait_whole(first, 3)
    groups.world.wait(lambda: groups.reason(second) == "WaitForRoom", "the second group to wait")

    assert (groups.held(first), groups.held(second)) == (12, 0)
    assert not groups.bound(second)
    assert groups.scheduled(first) == "True"
    groups.world.kubectl("delete", "job", first, "--wait=false")
    groups.wait_whole(second, 3)
    assert groups.held(second) == 12


def test_a_member_that_dies_is_replaced_and_the_gang_ends_with_its_group(groups: Groups) -> None:
    """A Job makes a successor, which gets the place. A leader without GPUs joins by the annotation with the group's
    name. When the PodGroup is deleted, so is the GpuGang that was made for it."""
    groups.create("training", min_count=4)
    groups.job("workers", pods=3, group="training", notes={names.POD_SET: "workers"})
    groups.world.wait(lambda: len(groups.pods("training")) == 3, "the workers to exist")
    assert not groups.bound("training")
    leader = {names.GANG: "training", names.POD_SET: "leader"}
    groups.job("leader", pods=1, claim=None, group="training", notes=leader)
    groups.wait_whole("training", 4)

    for prefix in ("workers", "leader"):
        name = next(one for one in groups.running("training") if one.startswith(prefix))
        groups.world.kubectl("delete", "pod", name, "--wait=false")
        groups.world.wait(lambda name=name: name not in groups.running("training"), "the member to be gone")
        groups.wait_whole("training", 4)
    groups.world.kubectl("delete", "jobs", "--all", "--wait=false")
    groups.world.kubectl("delete", "podgroup", "training", "--wait=false")
    groups.world.wait(lambda: not groups.gang("training"), "the gang to end with its group")


def test_a_group_follows_min_count_and_grows_beyond_it(groups: Groups) -> None:
    """Five pods of two GPUs wait for a minCount of six. They start when it is set to four, the fifth with them."""
    groups.create("elastic", min_count=6)
    groups.job("elastic", pods=5, claim="two")
    groups.world.wait(lambda: len(groups.pods("elastic")) == 5, "the pods to exist")
    groups.world.wait_event(groups.pods("elastic")[0]["metadata"]["name"], names.REASON_GANG_WAITING)
    assert not groups.gang("elastic")
    patch = '{"spec":{"schedulingPolicy":{"gang":{"minCount":4}}}}'
    done = groups.world.kubectl("patch", "podgroup", "elastic", "--type=merge", "-p", patch)
    assert done.returncode == 0, done.stderr
    groups.wait_whole("elastic", 5)
    assert groups.gang("elastic")["spec"]["minMember"] == 4


def test_a_group_that_requires_a_domain_gets_one(groups: Groups) -> None:
    """A single pod has four GPUs of one rack, so four times two GPUs fit only into the other."""
    groups.world.pod("somebody", "four")
    groups.world.wait_running("somebody")
    taken = groups.world.get("somebody")["spec"]["nodeName"]
    groups.create("racked", min_count=4, schedulingConstraints={"topology": [{"key": RACK}]})
    groups.job("racked", pods=4, claim="two")
    groups.wait_whole("racked", 4)
    (node,) = set(groups.bound("racked"))
    assert node != taken
    for key in (RACK, "kubernetes.io/hostname"):
        change = orjson.dumps({"spec": {"schedulingConstraints": {"topology": [{"key": key}]}}}).decode()
        done = groups.world.kubectl("patch", "podgroup", "racked", "--type=merge", "-p", change)
        assert (done.returncode == 0) is (key == RACK)
    assert "field is immutable" in done.stderr


def test_a_written_gang_starts_once_it_requires_the_domain_of_its_group(groups: Groups) -> None:
    """Two members fill both machines: kube-scheduler would bind neither. It says so, and starts where both fit."""
    world = groups.world
    groups.create("wide", min_count=2, schedulingConstraints={"topology": [{"key": RACK}]})
    gang = {"apiVersion": names.API_VERSION, "kind": "GpuGang", "metadata": {"name": "wide"},
            "spec": {"podSets": [{"name": "pods", "count": 2}]}}  # fmt: skip
    world.cluster.api.request("POST", GANGS.format(world.namespace), gang)
    groups.job("wide", pods=2, claim="four")
    world.wait(lambda: f"required and level {RACK}" in str(groups.gang("wide").get("status")), "the contradiction")
    assert not groups.held("wide")
    change = orjson.dumps({"spec": {"topology": {"mode": "required", "level": RACK}}}).decode()
    done = world.kubectl("patch", "gpugang", "wide", "--type=merge", "-p", change)
    assert done.returncode == 0, done.stderr
    groups.wait_whole("wide", 2)
    assert len(set(groups.bound("wide"))) == 1


def test_an_urgent_group_evicts_one_of_lower_priority_whole(groups: Groups) -> None:
    """kube-scheduler preempts nobody for GPUs that Atoll gives; Atoll does, gang by gang."""
    groups.create("low", min_count=3)
    groups.job("low", pods=3)
    groups.wait_whole("low", 3)
    groups.create("urgent", min_count=3, priorityClassName="urgent")
    groups.job("urgent", pods=3, priorityClassName="urgent")
    groups.wait_whole("urgent", 3)
    assert (groups.held("urgent"), groups.held("low")) == (12, 0)
    assert not groups.bound("low")


def test_what_cannot_be_kept_is_refused_in_words(groups: Groups) -> None:
    """A pod without its PodGroup, of another priority than it, in another gang, or in a GpuGang with a lower quorum."""
    world = groups.world

    def refusal(group: str, **metadata: str) -> str:
        body = world.pod_body("refused", "two", schedulingGroup={"podGroupName": group})
        body["metadata"]["annotations"] |= metadata
        with pytest.raises(AdminApiError) as caught:
            world.create(body)
        return str(caught.value)

    groups.create("urgent", min_count=2, priorityClassName="urgent")
    assert "'none' of scheduling.k8s.io/v1beta1 does not exist" in refusal("none")
    assert "set the same priorityClassName on both" in refusal("urgent")
    groups.create("pair", min_count=2)
    assert "a pod is of one gang" in refusal("pair", **{names.GANG: "other"})
    gang = {"apiVersion": names.API_VERSION, "kind": "GpuGang", "metadata": {"name": "pair"},
            "spec": {"minMember": 1, "podSets": [{"name": "pods", "count": 2}]}}  # fmt: skip
    world.cluster.api.request("POST", GANGS.format(world.namespace), gang)
    groups.job("pair", pods=2, claim="two")
    world.wait(lambda: "set minMember to 2 or more" in str(groups.gang("pair").get("status")), "the contradiction")
    assert not groups.held("pair")
    done = world.kubectl("patch", "gpugang", "pair", "--type=merge", "-p", '{"spec":{"minMember":2}}')
    assert done.returncode == 0, done.stderr
    groups.wait_whole("pair", 2)
