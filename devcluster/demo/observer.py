"""Reads and changes the cluster like a user with kubectl, only through the API server.

A wait that times out raises ExpectationFailed, which names the log to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.consistency import Printed
from atoll.cluster.objects import Lease, Pod
from atoll.cluster.pods import is_terminal
from devcluster.cluster import DevCluster
from devcluster.demo.errors import ExpectationFailed
from devcluster.demo.facts import DemoSnapshot, is_printed, parse_printed, told_containers
from devcluster.errors import AdminApiError, StartError
from devcluster.images import BUSYBOX
from devcluster.waiting import wait_until

NAMESPACE = "demo"
WAIT_SECONDS = 240.0
CONTENTION = "contention"
_LOG_BYTES_MAX = 65536

LOCK = f"""
hold() {{ (
  flock -n 9 || echo "$1 wanted by $HOSTNAME" >> /locks/{CONTENTION}
  exec sleep 1000000
) 9>"/locks/$1" & }}
for uuid in $(echo "$NVIDIA_VISIBLE_DEVICES,$ROCR_VISIBLE_DEVICES" | tr , ' '); do hold "$uuid"; done
"""
"""Takes an exclusive lock per GPU in a folder that all nodes share, and records if another container holds it."""
PRINT = 'echo "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES"\n'
STAY = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done"

Answer = TypeVar("Answer")


class Observer:
    """One namespace of one cluster, and the output of its containers so far."""

    def __init__(self, cluster: DevCluster) -> None:
        """Use the cluster; sends no request yet."""
        self.cluster = cluster
        self.printed: dict[tuple[str, str], Printed] = {}
        self.used: set[str] = set()

    # Actions

    def enter(self) -> None:
        """Create the namespace and wait until pods can be created in it."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        self.cluster.api.request("POST", "/api/v1/namespaces", body)
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        self.wait(lambda: self.cluster.api.get(account), "the account of pods", process="kube-controller-manager")

    def apply(self, files: Iterable[Path]) -> None:
        """Apply manifests as a user does. Raises ExpectationFailed with kubectl's message."""
        words = [word for file in files for word in ("-f", str(file))]
        done = self.cluster.kubectl("apply", "-n", NAMESPACE, *words)
        if done.returncode != 0:
            raise ExpectationFailed(f"kubectl apply failed: {done.stderr.strip()}", process="webhook")

    def create_claim(self, name: str, *, count: int, models: tuple[str, ...] = ()) -> None:
        """Create a GpuClaim."""
        devices = {"count": count, **({"models": list(models)} if models else {})}
        metadata = {"name": name}
        body = {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": metadata, "spec": {"devices": devices}}
        self.cluster.api.request("POST", f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/gpuclaims", body)

    def create_pod(self, name: str, *, claim: str | None) -> str:
        """Create a pod that locks and prints the GPUs it sees; return its uid."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        created = self.cluster.api.request("POST", path, pod_body(name, claim=claim, locks=self.cluster.shared_dir))
        uid: str = created["metadata"]["uid"]
        return uid

    def delete_pod(self, name: str, *, force: bool = False) -> None:
        """Delete a pod; with `force` the API server deletes it at once, while its containers may still run."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", **({"gracePeriodSeconds": 0} if force else {})}
        self.cluster.api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}", options)

    # Reads

    def snapshot(self) -> DemoSnapshot:
        """Return the demo's pods, all Leases of Atoll and all reports. Raises AdminApiError, OSError."""
        get = self.cluster.api.get
        leases = get(f"/apis/coordination.k8s.io/v1/namespaces/{names.SYSTEM_NAMESPACE}/leases")["items"]
        reports = get(f"/apis/{names.API_VERSION}/gpunodestatuses")["items"]
        return DemoSnapshot(
            pods=self.pods(),
            leases=tuple(msgspec.convert(lease, Lease) for lease in leases),
            reports=tuple(GpuNodeStatus.model_validate(report) for report in reports),
        )

    def pods(self) -> tuple[Pod, ...]:
        """Return the demo's pods, sorted by name."""
        items = self.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
        return tuple(msgspec.convert(item, Pod) for item in items)

    def pod(self, name: str) -> Pod | None:
        """Return one pod, or None."""
        return next((pod for pod in self.pods() if pod.metadata.name == name), None)

    def events(self, pod: str, reason: str) -> list[dict[str, Any]]:
        """Return a pod's events with that reason, oldest first."""
        items: list[dict[str, Any]] = self.cluster.api.get(f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events")[
            "items"
        ]
        found = [item for item in items if item["regarding"].get("name") == pod and item["reason"] == reason]
        return sorted(found, key=lambda item: item.get("eventTime") or "")

    def read_prints(self, pods: Iterable[Pod]) -> None:
        """Read the output of containers that was not read before."""
        for pod in pods:
            if pod.status.phase == "Pending" or not pod.spec.node_name:
                continue
            for container in told_containers(pod):
                key = (pod.metadata.uid, container)
                if key not in self.printed:
                    value = self._read_print(pod, container)
                    if value is not None:
                        self.printed[key] = value
                        self.used.update(told_containers(pod)[container])

    def read_prints_again(self) -> None:
        """Read the output of all pods that hold GPUs again."""
        live = [pod for pod in self.pods() if pod.spec.node_name and not is_terminal(pod) and told_containers(pod)]
        for pod in live:
            for container in told_containers(pod):
                self.printed.pop((pod.metadata.uid, container), None)

        def question() -> bool:
            self.read_prints(live)
            return all(is_printed(pod, self.printed) for pod in live)

        self.wait(question, "the logs of every pod that holds GPUs", process="kube-apiserver")

    def _read_print(self, pod: Pod, container: str) -> Printed | None:
        query = f"container={container}&limitBytes={_LOG_BYTES_MAX}"
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod.metadata.name}/log?{query}"
        try:
            log = self.cluster.api.get(path)
        except AdminApiError:
            return None  # the container has not started yet
        return parse_printed(str(log), pod_uid=pod.metadata.uid, container=container)

    # Waits

    def wait(
        self,
        question: Callable[[], Answer | None],
        what: str,
        *,
        process: str,
        seconds: float = WAIT_SECONDS,
    ) -> Answer:
        """Return the first true answer. On timeout raises ExpectationFailed with the process whose log to read."""
        try:
            return wait_until(question, what=what, timeout_seconds=seconds)
        except StartError as error:
            raise ExpectationFailed(f"waited {seconds:.0f} s for {what}", process=process) from error

    def wait_printed(self, name: str) -> Pod:
        """Wait until every container of the pod with GPUs has printed what it sees."""

        def question() -> Pod | None:
            pod = self.pod(name)
            if pod is None:
                raise ExpectationFailed(f"pod {name} vanished", process="kube-apiserver")
            self.read_prints([pod])
            return pod if is_printed(pod, self.printed) else None

        return self.wait(question, f"pod {name} to run and print its GPUs", process=self._suspect(name))

    def wait_gone(self, name: str, uid: str) -> None:
        """Wait until the pod is gone and holds nothing."""
        self.wait(
            lambda: self.pod(name) is None and not self.snapshot().held_by(uid),
            f"the GPUs of pod {name} to be free again",
            process="controllers",
        )

    def _suspect(self, name: str) -> str:
        pod = self.pod(name)
        return f"kubelet@{pod.spec.node_name}" if pod is not None and pod.spec.node_name else "extender"


def pod_body(name: str, *, claim: str | None, locks: Path) -> dict[str, Any]:
    """Return a pod with one container that locks and prints the GPUs it sees."""
    container = {
        "name": "main",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", LOCK + PRINT + STAY],
        "volumeMounts": [{"name": "locks", "mountPath": "/locks"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {names.CLAIM: claim} if claim else {}},
        "spec": {
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 5,
            "containers": [container],
            "volumes": [{"name": "locks", "hostPath": {"path": str(locks)}}],
        },
    }
