"""A control plane without nodes, with the real controllers; the test acts as all other parts.

The test acts as user, scheduler, kubelet and agent, each with its own identity, so the shipped policies and roles
apply. The controllers are the real process with their own ServiceAccount.
"""

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from atoll.cluster.allocations import Allocation
from atoll.cluster.leases import Holder, Reservation, lease_body, lease_name
from devcluster import DevCluster
from tests.builders import report_json
from tests.deploy.api_server import RealApi, collection, manifests, wait_for
from tests.deploy.requests import MERGE, shaped, shaped_container

PODS = "/api/v1/namespaces/team/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/atoll-system/leases"
HEARTBEATS = "/apis/coordination.k8s.io/v1/namespaces/atoll-nodes/leases"
REPORTS = "/apis/gpu.scheduling/v1/gpunodestatuses"
CLAIMS = "/apis/gpu.scheduling/v1/namespaces/team/gpuclaims"
FILES = ("namespaces.yaml", "crds/*.yaml", "rbac/*.yaml", "runtimeclass.yaml", "policies/*.yaml")
Json = dict[str, Any]


def moment(seconds_from_now: float = 0.0) -> str:
    """Return a time as MicroTime."""
    return (datetime.now(UTC) + timedelta(seconds=seconds_from_now)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class ReconcilerHarness:
    """One cluster, and actions on it."""

    cluster: DevCluster
    api: RealApi
    sequences: Any = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def setup(cls, cluster: DevCluster) -> "ReconcilerHarness":
        """Apply the shipped manifests and start the controllers."""
        running = cls(cluster, RealApi(cluster.kubeconfig))
        for manifest in manifests(*FILES):
            running.api.apply(manifest, path=collection(manifest))
        wait_for(lambda: all(running.api.send("GET", path).status == 200 for path in (REPORTS, CLAIMS)), "CRDs served")
        running.api.send("POST", "/api/v1/namespaces", {"metadata": {"name": "team"}})
        account = {"metadata": {"name": "default"}}
        running.api.send("POST", "/api/v1/namespaces/team/serviceaccounts", account)
        running.start_controllers()
        return running

    def start_controllers(self, *more: str, name: str = "controllers") -> None:
        kubeconfig = self.cluster.service_account_kubeconfig("atoll-system", "atoll-controllers")
        arguments = ("--health-port", "0", "--resync-seconds", "5", "--claim-status-seconds", "1")
        seconds = ("--lease-duration-seconds", "3", "--renew-deadline-seconds", "2", "--retry-seconds", "0.5")
        command = [sys.executable, "-m", "controllers", "--kubeconfig", str(kubeconfig), *arguments, *seconds, *more]
        terms = self.terms()
        self.cluster.spawn(name, command)
        if name == "controllers":
            self.until(lambda: self.terms() > terms, "the controllers lead")

    def terms(self) -> int:
        """Return the number of leadership terms so far."""
        log = self.cluster.logs("controllers")
        return log.read_text().count('"Reconciling"') if log.exists() else 0

    def kill_controllers(self) -> None:
        self.cluster.signal("controllers", "KILL")
        self.cluster.wait_exit("controllers")

    # Reads

    def get(self, path: str) -> Json | None:
        answer = self.api.send("GET", path)
        return json.loads(answer.message) if answer.status == 200 else None

    def lease(self, node: str, device_id: int) -> Json | None:
        return self.get(f"{LEASES}/{lease_name(node, device_id)}")

    def pod(self, name: str) -> Json:
        found = self.get(f"{PODS}/{name}")
        assert found is not None
        return found

    def events(self, reason: str, name: str) -> list[Json]:
        listed = self.get("/apis/events.k8s.io/v1/events") or {"items": []}
        return [event for event in listed["items"] if event["reason"] == reason and event["regarding"]["name"] == name]

    # Actions

    def do(self, method: str, path: str, body: Any = None, *, identity: str = "", kind: str = "") -> Json:
        answer = self.api.send(method, path, body, identity=identity, content_type=kind or "application/json")
        assert answer.is_accepted, f"{method} {path}: {answer}"
        found: Json = json.loads(answer.message)
        return found

    def add_node(self, node: str, profile: str = "dgx1-v100") -> None:
        self.do("POST", "/api/v1/nodes", {"metadata": {"name": node}})
        self.do("POST", REPORTS, {**report_json(node), "metadata": {"name": node}}, identity=f"agent@{node}")
        spec = {"holderIdentity": node, "leaseDurationSeconds": 3600, "renewTime": moment()}
        self.do("POST", HEARTBEATS, {"metadata": {"name": node}, "spec": spec}, identity=f"agent@{node}")
        self.report(node, profile=profile)

    def report(
        self,
        node: str,
        *,
        profile: str = "dgx1-v100",
        live: tuple[str, ...] = (),
        listed: tuple[str, ...] = (),
        indices: tuple[int, ...] | None = None,
    ) -> None:
        """Publish a complete report that covers all pod changes so far."""
        position = self.do("GET", "/api/v1/pods?limit=1")["metadata"]["resourceVersion"]
        registered = self.get(f"/api/v1/nodes/{node}")
        node_uid = registered["metadata"]["uid"] if registered else None
        status = report_json(node, profile, node_uid=node_uid, indices=indices)["status"]
        status["pods"] = [{"uid": uid, "live": uid in live, "kubelet": uid in listed} for uid in {*live, *listed}]
        status["evidence"] = {
            "sequence": next(self.sequences),
            "podResourceVersion": position,
            "liveRead": True,
            "kubeletRead": True,
        }
        self.do("PATCH", f"{REPORTS}/{node}/status", {"status": status}, identity=f"agent@{node}", kind=MERGE)

    def create_pod(self, name: str, gpus: int = 1, **options: Any) -> Json:
        options.setdefault("annotations", {})
        body = shaped(name, shaped_container(gpus=gpus), **options)
        return self.do("POST", PODS, body, identity="admin")

    def reserve(self, pod: Json, node: str, *device_ids: int, deadline_seconds: float = 60.0) -> None:
        """Create the Leases of a bind."""
        metadata = pod["metadata"]
        holder = Holder(metadata["namespace"], metadata["name"], metadata["uid"])
        deadline = moment(deadline_seconds)
        reservation = Reservation(node, f"uid-of-{node}", holder, "", "token", moment(), deadline)
        for device_id in device_ids:
            body = lease_body(reservation, device_id, f"GPU-{node}-{device_id:04d}")
            self.do("POST", LEASES, body, identity="scheduler")

    def bind(self, pod: Json, node: str, *device_ids: int, cuda: str = "") -> Any:
        """Create the fenced Binding; CUDA variable by uuid, or `cuda`; return the API server's answer."""
        from atoll.cluster.allocations import ContainerDevices, allocation_annotations

        uuids = tuple(f"GPU-{node}-{device_id:04d}" for device_id in device_ids)
        values = ContainerDevices("main", cuda or ",".join(uuids), ",".join(uuids))
        metadata = {key: pod["metadata"][key] for key in ("name", "uid", "resourceVersion")}
        metadata["annotations"] = allocation_annotations(Allocation(node, device_ids, uuids), (values,))
        body = {"metadata": metadata, "target": {"kind": "Node", "name": node}}
        return self.api.send("POST", f"{PODS}/{metadata['name']}/binding", body, identity="scheduler")

    def run_pod(self, name: str, node: str, *device_ids: int) -> Json:
        """Create, reserve and bind a pod; return it."""
        pod = self.create_pod(name, len(device_ids))
        self.reserve(pod, node, *device_ids)
        answer = self.bind(pod, node, *device_ids)
        assert answer.is_accepted, answer
        return self.pod(name)

    def reject(self, name: str) -> None:
        """Mark a pod unschedulable, as kube-scheduler does."""
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPUs"}
        self.do(
            "PATCH", f"{PODS}/{name}/status", {"status": {"conditions": [condition]}}, identity="scheduler", kind=MERGE
        )

    def end(self, name: str, node: str, *, phase: str = "Succeeded") -> None:
        """End a pod as kubelet does: terminal phase, terminated containers."""
        state = {"terminated": {"exitCode": 0}}
        status = {"name": "main", "state": state, "ready": False, "restartCount": 0, "image": "", "imageID": ""}
        body = {"status": {"phase": phase, "containerStatuses": [status]}}
        self.do("PATCH", f"{PODS}/{name}/status", body, identity=f"kubelet@{node}", kind=MERGE)

    def force_delete(self, name: str) -> None:
        self.do("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition; on timeout fail with the end of the controllers' log."""
        try:
            wait_for(lambda: bool(condition()), what)
        except AssertionError:
            log = self.cluster.logs("controllers").read_text()[-4000:]
            raise AssertionError(f"never came true: {what}\n{log}") from None
