"""Helper for the real Kueue: queues with a GPU quota, their workloads, and the results."""

from __future__ import annotations

from typing import Any

from atoll.api import names
from tests.e2e.world import HOLD, STAY, RealCluster, unless_missing

KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
HIGH = "tests-high"
FLAVOR = "gpus"
RACK = "example.com/rack"
TOPOLOGY_FLAVOR = "gpus-in-racks"
QUEUE = "queue"
JOBS = "/apis/batch/v1/namespaces/{}/jobs"
GANGS = "/apis/gpu.scheduling/v1/namespaces/{}/gpugangs"


def kueue_object(kind: str, name: str, spec: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return an object of Kueue's."""
    found = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, **fields}
    return found if spec is None else {**found, "spec": spec}


def make_flavors(world: RealCluster) -> None:
    """Create what is there once per cluster: two flavors, one of them with Kueue's topology, and a priority."""
    levels = [{"nodeLabel": RACK}, {"nodeLabel": "kubernetes.io/hostname"}]
    in_racks = {"nodeLabels": {"kubernetes.io/os": "linux"}, "topologyName": "racks"}
    post = world.cluster.api.request
    post("POST", f"{KUEUE}/topologies", kueue_object("Topology", "racks", {"levels": levels}))
    post("POST", f"{KUEUE}/resourceflavors", kueue_object("ResourceFlavor", FLAVOR, {}))
    post("POST", f"{KUEUE}/resourceflavors", kueue_object("ResourceFlavor", TOPOLOGY_FLAVOR, in_racks))
    post("POST", f"{KUEUE}/workloadpriorityclasses", kueue_object("WorkloadPriorityClass", HIGH, value=1000))


class Queues:
    """One ClusterQueue and its LocalQueue in the namespace of a test; the namespace's Jobs are completed."""

    def __init__(self, world: RealCluster, *, quota: int, flavor: str = FLAVOR, completes: bool = True) -> None:
        self.world = world
        self.api = world.cluster.api
        self.name = world.namespace
        if completes:
            done = world.cluster.kubectl("label", "namespace", world.namespace, f"{names.COMPLETE_JOBS}=true")
            assert done.returncode == 0, done.stderr
        resources = [{"name": names.GPU_RESOURCE, "nominalQuota": quota}]
        groups = [{"coveredResources": [names.GPU_RESOURCE], "flavors": [{"name": flavor, "resources": resources}]}]
        spec = {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": groups,
        }
        self.api.request("POST", f"{KUEUE}/clusterqueues", kueue_object("ClusterQueue", self.name, spec))
        local = kueue_object("LocalQueue", QUEUE, {"clusterQueue": self.name})
        self.api.request("POST", f"{KUEUE}/namespaces/{self.name}/localqueues", local)

    def leave(self) -> None:
        """Delete Jobs, pods and Workloads. Kueue keeps the pods of a group, until they are replaced: that is waived."""
        for path in (JOBS.format(self.name), f"/api/v1/namespaces/{self.name}/pods", self.workloads_path):
            self.api.request("DELETE", f"{path}?propagationPolicy=Background")
        for pod in self.world.pods():
            if GROUP_LABEL in pod["metadata"].get("labels", {}):
                waived = '{"metadata":{"finalizers":null}}'
                self.world.kubectl("patch", "pod", pod["metadata"]["name"], "--type=merge", "-p", waived)
        self.world.wait(lambda: not self.world.pods(), "the pods of the queue to be gone")
        self.api.request("DELETE", f"{KUEUE}/clusterqueues/{self.name}")

    @property
    def workloads_path(self) -> str:
        """Where the Workloads of the namespace are."""
        return f"{KUEUE}/namespaces/{self.name}/workloads"

    def hold(self, policy: str) -> None:
        """Stop the queue (`Hold`), or let it go on (`None`)."""
        patch = f'{{"spec":{{"stopPolicy":"{policy}"}}}}'
        done = self.world.kubectl("patch", "clusterqueue", self.name, "--type=merge", "-p", patch)
        assert done.returncode == 0, done.stderr

    # What is asked for

    def gang(self, name: str, *, count: int, gpus: int, **spec: Any) -> None:
        """Create a GpuGang with one pod set, and the claim of its members, which bears the same name."""
        body = {
            "apiVersion": names.API_VERSION,
            "kind": "GpuGang",
            "metadata": {"name": name},
            "spec": {"podSets": [{"name": "workers", "count": count}], **spec},
        }
        self.api.request("POST", GANGS.format(self.name), body)
        claim = {"gangRef": name, "devices": {"count": gpus}}
        body = {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": {"name": name}, "spec": claim}
        self.api.request("POST", f"/apis/gpu.scheduling/v1/namespaces/{self.name}/gpuclaims", body)

    def job(
        self,
        name: str,
        *,
        count: int,
        script: str = HOLD + STAY,
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        is_elastic: bool = False,
        **container: Any,
    ) -> None:
        """Create a Job in the queue; its template names the claim `name` and says nothing of GPUs. It may not fail.
        An elastic one may grow while it runs: Kueue then makes a larger Workload in place of the first."""
        pod = self.world.pod_body("x", name, script=script, restartPolicy="Never", terminationGracePeriodSeconds=120)
        pod["spec"]["containers"][0].update(container)
        metadata = {"annotations": {**pod["metadata"]["annotations"], **(annotations or {})}}
        spec = {"completions": count, "parallelism": count, "completionMode": "Indexed", "backoffLimit": 0}
        body = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": name,
                "labels": {QUEUE_LABEL: QUEUE, **(labels or {})},
                "annotations": {"kueue.x-k8s.io/elastic-job": "true"} if is_elastic else {},
            },
            "spec": {**spec, "template": {"metadata": metadata, "spec": pod["spec"]}},
        }
        self.api.request("POST", JOBS.format(self.name), body)

    def group_pod(self, group: str, number: int, *, count: int, annotations: dict[str, str] | None = None) -> None:
        """Create a pod of a group of Kueue's, which is a member of the gang of that name."""
        body = self.world.pod_body(f"{group}-{number}", group, restartPolicy="Never")
        body["metadata"]["labels"] = {QUEUE_LABEL: QUEUE, GROUP_LABEL: group}
        body["metadata"]["annotations"] |= {"kueue.x-k8s.io/pod-group-total-count": str(count), **(annotations or {})}
        self.world.create(body)

    # What became of it

    def get_job(self, name: str) -> dict[str, Any]:
        """Return a Job."""
        found: dict[str, Any] = self.api.get(f"{JOBS.format(self.name)}/{name}")
        return found

    def delete_job(self, name: str) -> None:
        """Delete a Job and its pods."""
        with unless_missing():
            self.api.request("DELETE", f"{JOBS.format(self.name)}/{name}?propagationPolicy=Background")

    def workload(self, owner: str) -> dict[str, Any]:
        """Return the Workload of a Job or a pod group, empty while there is none."""
        for found in self.api.get(self.workloads_path)["items"]:
            owners = {one["name"] for one in found["metadata"].get("ownerReferences", [])}
            if owner in owners or found["metadata"]["name"] == owner:
                workload: dict[str, Any] = found
                return workload
        return {}

    def is_admitted(self, owner: str) -> bool:
        """Tell whether Kueue has admitted a Job or group."""
        conditions = self.workload(owner).get("status", {}).get("conditions", [])
        return any(one["type"] == "Admitted" and one["status"] == "True" for one in conditions)

    def wait_admitted(self, owner: str) -> None:
        """Wait until Kueue has admitted a Job or group."""
        self.world.wait(lambda: self.is_admitted(owner), f"Kueue to admit {owner}")

    def wait_pending(self, owner: str) -> None:
        """Wait until Kueue has looked at a Job or group and has not admitted it."""

        def says_no() -> bool:
            conditions = self.workload(owner).get("status", {}).get("conditions", [])
            return any(one["type"] == "QuotaReserved" and one["status"] == "False" for one in conditions)

        self.world.wait(says_no, f"Kueue to keep {owner} waiting")

    def counted(self, owner: str) -> int:
        """Return how many GPUs Kueue has taken from the quota for a Job or group."""
        assigned = self.workload(owner)["status"]["admission"]["podSetAssignments"]
        return sum(int(one.get("resourceUsage", {}).get(names.GPU_RESOURCE, "0")) for one in assigned)

    def pods(self, gang: str) -> list[dict[str, Any]]:
        """Return the members of a gang."""
        return [pod for pod in self.world.pods() if pod["metadata"]["annotations"].get(names.GANG) == gang]

    def wait_running(self, gang: str, count: int) -> list[dict[str, Any]]:
        """Wait until so many members run, and return them."""

        def running() -> list[dict[str, Any]]:
            found = [pod for pod in self.pods(gang) if pod["status"]["phase"] == "Running"]
            return found if len(found) == count else []

        return self.world.wait(running, f"{count} members of {gang} to run")

    def held(self, gang: str) -> int:
        """Return how many GPUs a gang holds."""
        prefix = f"{self.name}/{gang}/"
        owners = (lease["metadata"]["annotations"].get(names.LEASE_GANG, "") for lease in self.world.leases())
        return sum(owner.startswith(prefix) for owner in owners)

    def reason(self, gang: str, kind: str = names.CONDITION_ADMITTED) -> str:
        """Return the reason of a gang's condition, empty while there is none."""
        found = self.api.get(f"{GANGS.format(self.name)}/{gang}").get("status", {}).get("conditions", [])
        return next((str(one["reason"]) for one in found if one["type"] == kind), "")

    def wait_reason(self, gang: str, reason: str, kind: str = names.CONDITION_ADMITTED) -> None:
        """Wait until a condition of the gang has the reason."""
        self.world.wait(lambda: self.reason(gang, kind) == reason, f"gang {gang} to say {reason} in {kind}")
