"""Helper of end-to-end tests: claims, pods, and the GPUs that their containers saw.

Every container holds an exclusive lock per uuid while it runs, in a folder that all nodes share. If two containers have
the same GPU at a time, one writes a file, and the test fails.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from atoll.api import names
from atoll.cluster.allocations import Allocation, parse_allocation
from atoll.cluster.consistency import Problem
from atollctl.audit import find_twice
from devcluster import DevCluster
from devcluster.demo.observer import CONTENTION, LOCK, STAY, pod_body
from devcluster.errors import AdminApiError
from devcluster.installation import Installation

WAIT_SECONDS = 240.0
"""Timeout for what takes seconds, even on slow machines."""
AUDIT_SECONDS = 60.0
PAUSE_SECONDS = 0.2
REVIVAL_SECONDS = 10.0
"""Delay before a part that lost leadership on a busy machine is restarted."""
TELL = 'echo "CUDA=$CUDA_VISIBLE_DEVICES NVIDIA=$NVIDIA_VISIBLE_DEVICES ORDER=$CUDA_DEVICE_ORDER"'
HOLD = f"{LOCK}{TELL}\n"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen:
    """Output of one start of a container."""

    cuda: tuple[str, ...]
    nvidia: tuple[str, ...]
    order: str


@contextmanager
def unless_missing() -> Iterator[None]:
    """Ignore an API error in the block that says that the object does not exist."""
    try:
        yield
    except AdminApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise


class RealCluster:
    """One namespace of a cluster with Atoll."""

    def __init__(self, installation: Installation, namespace: str) -> None:
        self.installation = installation
        self.cluster: DevCluster = installation.cluster
        self.namespace = namespace

    @classmethod
    def enter(cls, installation: Installation, namespace: str) -> RealCluster:
        """Create the namespace and wait for its ServiceAccount."""
        installation.revive()
        world = cls(installation, namespace)
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        world.cluster.api.request("POST", "/api/v1/namespaces", body)
        world.wait(
            lambda: world.maybe(f"/api/v1/namespaces/{namespace}/serviceaccounts/default"), "the default account"
        )
        return world

    @classmethod
    @contextmanager
    def of_one_test(cls, installation: Installation) -> Iterator[RealCluster]:
        """Yield a new namespace; clean it up and check it afterwards."""
        world = cls.enter(installation, f"t-{uuid4().hex[:8]}")
        yield world
        world.leave()

    def leave(self) -> None:
        """Delete all pods gracefully, wait until no Lease is left, and check that Atoll kept its promises."""
        for pod in sorted(self.pods(), key=lambda pod: "nodeName" in pod["spec"]):  # or waiting ones would still start
            self.delete(pod["metadata"]["name"])
        self.wait(lambda: not self.pods(), "every pod of the test to be gone")
        self.wait(lambda: not self.leases(), "every GPU Lease of the test to be released")
        self.check_no_contention()
        self.check_audit()
        self.cluster.api.request("DELETE", f"/api/v1/namespaces/{self.namespace}")

    def check_no_contention(self) -> None:
        """Fail if two containers ever had the same GPU at a time."""
        contention = self.locks / CONTENTION
        assert not contention.exists(), f"two containers held one GPU: {contention.read_text()}"

    def check_audit(self, *, seconds: float = AUDIT_SECONDS) -> None:
        """Fail if `atoll audit` keeps finding anything in the cluster.

        Findings that Atoll is about to repair are tolerated for a moment; double use is never tolerated.
        """
        deadline = time.monotonic() + seconds
        while findings := asyncio.run(find_twice(self.cluster.kubeconfig)):
            is_over = time.monotonic() > deadline or any(f.problem is Problem.DOUBLE_USE for f in findings)
            assert not is_over, "\n".join(map(str, findings))

    @property
    def locks(self) -> Path:
        """Folder of the lock files, shared by all nodes."""
        return self.cluster.shared_dir

    # Objects

    def claim(self, name: str, count: int, **devices: Any) -> None:
        """Create a GpuClaim; keywords go to spec.devices, except visibleDevices."""
        spec: dict[str, Any] = {"devices": {"count": count, **devices}}
        if "visibleDevices" in devices:
            spec["visibleDevices"] = spec["devices"].pop("visibleDevices")
        body = {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": {"name": name}, "spec": spec}
        self.cluster.api.request("POST", f"/apis/gpu.scheduling/v1/namespaces/{self.namespace}/gpuclaims", body)

    def container(self, name: str, *, script: str = HOLD + STAY, gpus: int | None = None) -> dict[str, Any]:
        """Return a container that runs `script`; with `gpus` it requests that many."""
        limits = {} if gpus is None else {names.GPU_RESOURCE: str(gpus)}
        return {
            "name": name,
            "image": "localhost/busybox:1",
            "imagePullPolicy": "Never",
            "command": ["/bin/sh", "-c", script],
            "resources": {"limits": limits},
            "volumeMounts": [{"name": "locks", "mountPath": "/locks"}],
        }

    def pod_body(self, name: str, claim: str | None, *, script: str = HOLD + STAY, **spec: Any) -> dict[str, Any]:
        """Return a pod with one container `main` that runs `script`; keywords go to its spec."""
        body = pod_body(name, claim=claim, locks=self.locks)
        body["spec"] |= {"containers": [self.container("main", script=script)], **spec}
        return body

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Create a pod and return it as admitted."""
        created: dict[str, Any] = self.cluster.api.request("POST", f"/api/v1/namespaces/{self.namespace}/pods", body)
        return created

    def pod(self, name: str, claim: str | None, **options: Any) -> dict[str, Any]:
        """Create a pod that holds the GPUs of `claim` until it is deleted."""
        return self.create(self.pod_body(name, claim, **options))

    def delete(self, name: str, *, force: bool = False) -> None:
        """Delete a pod, with `force` without waiting for kubelet; a missing pod is no error."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", **({"gracePeriodSeconds": 0} if force else {})}
        with unless_missing():
            self.cluster.api.request("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{name}", options)

    def kubectl(self, *arguments: str, text: str = "", user: str = "") -> subprocess.CompletedProcess[str]:
        """Run kubectl in the namespace, as administrator or as `user`, with `text` as input."""
        identity = (f"--as={user}", "--as-group=system:authenticated") if user else ()
        return self.cluster.kubectl("-n", self.namespace, *identity, *arguments, input=text)

    def restart_container(self, name: str, container: str = "main") -> None:
        """End the container's first process and wait until kubelet has restarted it."""
        inside = ("exec", name, "-c", container, "--")
        self.wait(lambda: self._starts(name, container) >= 0, f"container {container} of {name} to run")
        self.wait(lambda: self.kubectl(*inside, "true").returncode == 0, "kubelet to know its containers again")
        before = self._starts(name, container)
        self.kubectl(*inside, "kill", "-TERM", "1")
        self.wait(lambda: self._starts(name, container) > before, f"container {container} of {name} to start again")

    # Reads

    def _starts(self, name: str, container: str) -> int:
        """Return the restart count of a container; -1 while it is not running."""
        statuses = self.get(name)["status"].get("containerStatuses", [])
        return next((s["restartCount"] for s in statuses if s["name"] == container and "running" in s["state"]), -1)

    def maybe(self, path: str) -> Any:
        """Return the object at `path`, or None."""
        with unless_missing():
            return self.cluster.api.get(path)
        return None

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a pod."""
        path = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        items: list[dict[str, Any]] = self.cluster.api.get(path)["items"]
        return [item for item in items if item["regarding"].get("name") == name]

    def pods(self) -> list[dict[str, Any]]:
        """Return all pods of the namespace."""
        items: list[dict[str, Any]] = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        return items

    def get(self, name: str) -> dict[str, Any]:
        """Return one pod."""
        pod: dict[str, Any] = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/pods/{name}")
        return pod

    def leases(self, pod_uid: str = "") -> list[dict[str, Any]]:
        """Return the GPU Leases of holders in the namespace, or of the pod with that uid."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{names.SYSTEM_NAMESPACE}/leases"
        leases = [item for item in self.cluster.api.get(path)["items"] if item["metadata"]["name"].startswith("gpu-")]
        holders = ((lease, lease["spec"].get("holderIdentity", "")) for lease in leases)
        return [
            lease
            for lease, holder in holders
            if (holder.endswith(f"/{pod_uid}") if pod_uid else holder.startswith(f"{self.namespace}/"))
        ]

    def allocation(self, name: str) -> Allocation | None:
        """Return the GPUs in a pod's annotations."""
        return parse_allocation(self.get(name)["metadata"].get("annotations", {}))

    def report(self, node: str) -> dict[str, Any]:
        """Return the GpuNodeStatus of a node."""
        report: dict[str, Any] = self.cluster.api.get(f"/apis/gpu.scheduling/v1/gpunodestatuses/{node}")
        return report

    def logs(self, name: str, container: str = "main") -> str:
        """Return a container's output from the API server."""
        return self.cluster.kubectl("logs", "-n", self.namespace, name, "-c", container).stdout

    def seen(self, name: str, container: str = "main") -> Seen:
        """Wait for and return what the container of a running pod saw."""
        text = self.wait(
            lambda: "CUDA=" in (log := self.logs(name, container)) and log, f"{name} to print what it sees"
        )
        line = next(line for line in reversed(text.splitlines()) if line.startswith("CUDA="))
        fields = dict(word.partition("=")[::2] for word in line.split(" "))
        return Seen(_split(fields["CUDA"]), _split(fields["NVIDIA"]), fields["ORDER"])

    def message(self, name: str) -> str:
        """Return the message of a pod's PodScheduled condition."""
        conditions = self.get(name)["status"].get("conditions", [])
        return next(
            (c.get("message", "") for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False"), ""
        )

    # Waiting

    def wait_event(self, name: str, reason: str) -> None:
        """Wait for an event of the pod with that reason; events come after the change they report."""
        self.wait(
            lambda: reason in {event["reason"] for event in self.events(name)}, f"the event {reason} about {name}"
        )

    def wait(self, question: Callable[[], T], what: str, *, seconds: float = WAIT_SECONDS) -> T:
        """Return the first true answer; fail with `what` on timeout."""
        started = time.monotonic()
        revival = started + REVIVAL_SECONDS
        while True:
            answer = question()
            if answer:
                return answer
            now = time.monotonic()
            assert now < started + seconds, f"waited {seconds:.0f} s for {what}"
            if now > revival:
                self.installation.revive()
                revival = now + REVIVAL_SECONDS
            time.sleep(PAUSE_SECONDS)

    def wait_phase(self, name: str, *phases: str) -> dict[str, Any]:
        """Wait until the pod is in one of the phases."""
        self.wait(lambda: self.get(name)["status"]["phase"] in phases, f"pod {name} to be {' or '.join(phases)}")
        return self.get(name)

    def wait_running(self, name: str) -> dict[str, Any]:
        """Wait until the pod runs."""
        return self.wait_phase(name, "Running")

    def wait_rejected(self, name: str) -> str:
        """Wait until kube-scheduler marks the pod unschedulable; return the message."""
        return self.wait(lambda: self.message(name), f"pod {name} to be rejected")


def _split(value: str) -> tuple[str, ...]:
    return tuple(value.split(",")) if value else ()
