"""What an end-to-end test says: claims, pods, and what their containers saw.

Every container takes an exclusive lock per uuid it was given, in a folder that all nodes share, and holds it while it
lives. Two containers that hold one GPU at a time therefore leave a file behind, and the test that caused it fails.
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
"""A bound for what should take seconds: slow machines reach it never, broken promises always."""
AUDIT_SECONDS = 60.0
PAUSE_SECONDS = 0.2
REVIVAL_SECONDS = 10.0
"""How soon a part is started again that a busy machine made lose its term."""
TELL = 'echo "CUDA=$CUDA_VISIBLE_DEVICES NVIDIA=$NVIDIA_VISIBLE_DEVICES ORDER=$CUDA_DEVICE_ORDER"'
HOLD = f"{LOCK}{TELL}\n"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one start of a container printed."""

    cuda: tuple[str, ...]
    nvidia: tuple[str, ...]
    order: str


@contextmanager
def unless_missing() -> Iterator[None]:
    """End the block quietly when the API server says that there is no such object."""
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
        """Make the namespace and wait for its account."""
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
        """Yield a namespace of its own; leave it afterwards."""
        world = cls.enter(installation, f"t-{uuid4().hex[:8]}")
        yield world
        world.leave()

    def leave(self) -> None:
        """Delete every pod gracefully, wait until no Lease is left, and check that Atoll kept its promises."""
        for pod in sorted(self.pods(), key=lambda pod: "nodeName" in pod["spec"]):  # or waiting ones would still start
            self.delete(pod["metadata"]["name"])
        self.wait(lambda: not self.pods(), "every pod of the test to be gone")
        self.wait(lambda: not self.leases(), "every GPU Lease of the test to be released")
        self.check_no_contention()
        self.check_audit()
        self.cluster.api.request("DELETE", f"/api/v1/namespaces/{self.namespace}")

    def check_no_contention(self) -> None:
        """Fail when two containers ever held one GPU at a time."""
        contention = self.locks / CONTENTION
        assert not contention.exists(), f"two containers held one GPU: {contention.read_text()}"

    def check_audit(self) -> None:
        """Fail when the product's own audit keeps finding anything, anywhere in the cluster.

        What parts of Atoll are still about to write is found too, and gone a moment later; double use never may be.
        """
        deadline = time.monotonic() + AUDIT_SECONDS
        while findings := asyncio.run(find_twice(self.cluster.kubeconfig)):
            is_over = time.monotonic() > deadline or any(f.problem is Problem.DOUBLE_USE for f in findings)
            assert not is_over, "\n".join(map(str, findings))

    @property
    def locks(self) -> Path:
        """The folder of the lock files, shared by all nodes."""
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
        """Return a container that runs `script`; with `gpus` it asks for them itself."""
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
        """Delete a pod, with `force` without waiting for kubelet; one that has gone meanwhile is fine."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", **({"gracePeriodSeconds": 0} if force else {})}
        with unless_missing():
            self.cluster.api.request("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{name}", options)

    def kubectl(self, *arguments: str, text: str = "", user: str = "") -> subprocess.CompletedProcess[str]:
        """Run kubectl in the namespace, as the administrator or as the named user, with `text` as its input."""
        identity = (f"--as={user}", "--as-group=system:authenticated") if user else ()
        return self.cluster.kubectl("-n", self.namespace, *identity, *arguments, input=text)

    def restart_container(self, name: str, container: str = "main") -> None:
        """End the container's first process once, and wait until kubelet has started it again."""
        inside = ("exec", name, "-c", container, "--")
        self.wait(lambda: self._starts(name, container) >= 0, f"container {container} of {name} to run")
        self.wait(lambda: self.kubectl(*inside, "true").returncode == 0, "kubelet to know its containers again")
        before = self._starts(name, container)
        self.kubectl(*inside, "kill", "-TERM", "1")
        self.wait(lambda: self._starts(name, container) > before, f"container {container} of {name} to start again")

    # Questions

    def _starts(self, name: str, container: str) -> int:
        """Return how often a container was started again; -1 while it is not running."""
        statuses = self.get(name)["status"].get("containerStatuses", [])
        return next((s["restartCount"] for s in statuses if s["name"] == container and "running" in s["state"]), -1)

    def maybe(self, path: str) -> Any:
        """Return the object at `path`, None when there is none."""
        with unless_missing():
            return self.cluster.api.get(path)
        return None

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events about the pod of that name."""
        path = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        items: list[dict[str, Any]] = self.cluster.api.get(path)["items"]
        return [item for item in items if item["regarding"].get("name") == name]

    def pods(self) -> list[dict[str, Any]]:
        """Return every pod of the namespace."""
        items: list[dict[str, Any]] = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        return items

    def get(self, name: str) -> dict[str, Any]:
        """Return one pod."""
        pod: dict[str, Any] = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/pods/{name}")
        return pod

    def leases(self, pod_uid: str = "") -> list[dict[str, Any]]:
        """Return the GPU Leases whose holder lives in the namespace, or is the pod of that uid."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{names.SYSTEM_NAMESPACE}/leases"
        leases = [item for item in self.cluster.api.get(path)["items"] if item["metadata"]["name"].startswith("gpu-")]
        holders = ((lease, lease["spec"].get("holderIdentity", "")) for lease in leases)
        return [
            lease
            for lease, holder in holders
            if (holder.endswith(f"/{pod_uid}") if pod_uid else holder.startswith(f"{self.namespace}/"))
        ]

    def allocation(self, name: str) -> Allocation | None:
        """Return the GPUs of a pod as its annotations say."""
        return parse_allocation(self.get(name)["metadata"].get("annotations", {}))

    def report(self, node: str) -> dict[str, Any]:
        """Return the GpuNodeStatus of a node."""
        report: dict[str, Any] = self.cluster.api.get(f"/apis/gpu.scheduling/v1/gpunodestatuses/{node}")
        return report

    def logs(self, name: str, container: str = "main") -> str:
        """Return what a container printed, through the API server."""
        return self.cluster.kubectl("logs", "-n", self.namespace, name, "-c", container).stdout

    def seen(self, name: str, container: str = "main") -> Seen:
        """Return what the container of a running pod saw, once it has printed it."""
        text = self.wait(
            lambda: "CUDA=" in (log := self.logs(name, container)) and log, f"{name} to print what it sees"
        )
        line = next(line for line in reversed(text.splitlines()) if line.startswith("CUDA="))
        fields = dict(word.partition("=")[::2] for word in line.split(" "))
        return Seen(_split(fields["CUDA"]), _split(fields["NVIDIA"]), fields["ORDER"])

    def message(self, name: str) -> str:
        """Return why a pod is not scheduled, as its condition says."""
        conditions = self.get(name)["status"].get("conditions", [])
        return next(
            (c.get("message", "") for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False"), ""
        )

    # Waiting

    def wait_event(self, name: str, reason: str) -> None:
        """Wait until an event with that reason tells about the pod: events follow what they tell of."""
        self.wait(
            lambda: reason in {event["reason"] for event in self.events(name)}, f"the event {reason} about {name}"
        )

    def wait(self, question: Callable[[], T], what: str, *, seconds: float = WAIT_SECONDS) -> T:
        """Return the first true answer; fail with `what` when none comes."""
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
        """Wait until kube-scheduler gave up on the pod for now, and return why."""
        return self.wait(lambda: self.message(name), f"pod {name} to be rejected")


def _split(value: str) -> tuple[str, ...]:
    return tuple(value.split(",")) if value else ()
