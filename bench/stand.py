"""A control plane, fake nodes, and either Atoll or the no-op extender behind the same kube-scheduler.

Creates, binds and deletes pods on demand, and measures the CPU and memory of each process. Everything in deploy/ is
applied unchanged, including policies and webhook; only the agents' objects (GpuNodeStatus and heartbeat) are written
here, once.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from atoll.api import names
from atoll.api.times import format_microtime
from atoll.kube import paths
from atoll.kube.patches import MERGE_PATCH, delete_options
from atoll.service.clock import SystemClock
from bench.extender_calls import PROFILES, report
from bench.figures import cpu_seconds
from bench.journal import Journal
from devcluster import DevCluster
from devcluster.api import AdminRequest
from devcluster.errors import AdminApiError
from devcluster.installation import EXTENDER_PORT, AtollPart, Installation
from topology.profiles import profile

NAMESPACE = "bench"
GPUS = 8
UPSTREAM_PORT = EXTENDER_PORT + 1
DAY_SECONDS = 24 * 3600
WAIT_SECONDS = 90.0
GRACE_SECONDS = 1
CLAIMS = {1: "one-gpu", GPUS: "whole-machine"}
CONTENDERS = {
    "atoll": ("controllers", "extender"),
    "timed": ("controllers", "extender", "proxy"),
    "noop": ("noop",),
}
"""Processes beside the control plane and the webhook, by the extender in use."""
WATCHED = ("kube-scheduler", "kube-apiserver", "etcd", "extender", "noop", "controllers", "webhook")


@contextmanager
def open_stand(name: str, nodes: int, *, audit_log: bool = False) -> Iterator["Stand"]:
    """A cluster of that name with Atoll and fake nodes; deleted afterwards. Raises DevclusterError."""
    with DevCluster.start(name, scheduler=False, audit_log=audit_log) as cluster:
        make_namespace(cluster)
        with Journal(cluster.kubeconfig, NAMESPACE) as journal:
            stand = Stand(cluster, journal)
            stand.set_up(nodes)
            yield stand


class Stand:
    """One cluster; `use` selects the extender."""

    def __init__(self, cluster: DevCluster, journal: Journal) -> None:
        self.cluster = cluster
        self.journal = journal
        self.installation = Installation(cluster)
        self.calls_log = cluster.shared_dir / "calls"
        self._created = 0
        self._contender = ""
        parts = self.installation.parts
        self._direct = parts["extender"]
        self._upstream = replace(self._direct, arguments=("--port", str(UPSTREAM_PORT)), health_port=UPSTREAM_PORT)
        parts["noop"] = AtollPart("noop", "bench.noop_extender", self._direct.account, (), EXTENDER_PORT)
        parts["proxy"] = AtollPart("proxy", "bench.timing_proxy", self._direct.account, (), EXTENDER_PORT)

    def set_up(self, nodes: int) -> None:
        """Install Atoll and fake nodes; every part runs afterwards."""
        self.cluster.start_kwok()
        self.cluster.create_fake_nodes(nodes, labels={}, allocatable={names.GPU_RESOURCE: str(GPUS)})
        self.installation.apply_manifests()
        write_reports(self.cluster)
        self.installation.start("webhook", wait=False)
        self.use("atoll")
        self.installation.start_scheduler()
        self.installation.wait_ready(["webhook"])
        for count, claim in CLAIMS.items():
            spec = {"devices": {"count": count}}
            body = {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": {"name": claim}, "spec": spec}
            self.cluster.api.request("POST", paths.gpuclaims(NAMESPACE), body)

    def use(self, contender: str) -> None:
        """Select `atoll`, the same `timed` by a proxy that records every call, or `noop`.

        With `noop`, no process of Atoll that watches pods runs.
        """
        wanted = CONTENDERS[contender]
        if contender == self._contender:
            return
        self._end(*(name for name in ("proxy", "noop", "extender", "controllers") if name not in wanted))
        if "extender" in wanted:
            self._end("extender")
            self.installation.parts["extender"] = self._upstream if contender == "timed" else self._direct
        for name in wanted:
            if not self._runs(name):
                self._start(name)
        self.installation.wait_ready(wanted)
        self._contender = contender

    @property
    def has_leases(self) -> bool:
        """True if pods hold Leases."""
        return self._contender != "noop"

    def create(self, count: int, *, gpus: int = 1, annotations: Mapping[str, str] | None = None) -> list[str]:
        """Create pods, with further annotations, and return their names."""
        first, self._created = self._created, self._created + count
        created = [f"pod-{number}" for number in range(first, self._created)]
        self.cluster.api.request_all(
            AdminRequest("POST", paths.pods(NAMESPACE), _pod(name, CLAIMS[gpus], annotations or {})) for name in created
        )
        return created

    def wait_bound(self, pods: Sequence[str]) -> None:
        """Raises TooSlow."""
        bound = self.journal.bound_at
        self.journal.wait(lambda: all(pod in bound for pod in pods), f"the binding of {len(pods)} pods", WAIT_SECONDS)

    def delete(self, pods: Sequence[str]) -> None:
        """Delete pods gracefully."""
        options = delete_options(grace_period_seconds=GRACE_SECONDS)
        self.cluster.api.request_all(AdminRequest("DELETE", paths.pods(NAMESPACE, pod), options) for pod in pods)

    def clear(self) -> None:
        """Delete all pods; return when they and their Leases are gone. Raises TooSlow."""
        journal = self.journal
        self.delete(sorted(journal.present))
        journal.wait(lambda: not journal.present and not journal.leases, "an empty cluster", WAIT_SECONDS)

    @contextmanager
    def paused(self, *processes: str) -> Iterator[None]:
        """Pause processes inside the block; they continue afterwards."""
        for name in processes:
            self.cluster.signal(name, "STOP")
        try:
            yield
        finally:
            for name in processes:
                self.cluster.signal(name, "CONT")

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each running process so far."""
        running = {name: status.pid for name, status in self._processes().items() if name in WATCHED}
        stats = self.cluster.run("cat", *(f"/proc/{pid}/stat" for pid in running.values())).stdout.splitlines()
        ticks = os.sysconf("SC_CLK_TCK")
        return {name: cpu_seconds(stat, ticks_per_second=ticks) for name, stat in zip(running, stats, strict=True)}

    def memory_bytes(self) -> dict[str, int]:
        """Return the resident memory of each running process."""
        return {name: status.rss_bytes for name, status in self._processes().items()}

    def _processes(self) -> dict[str, Any]:
        return {name: status for name, status in self.cluster.processes().items() if status.running}

    def revive(self) -> list[str]:
        """Restart processes that exited because they lost leadership; return their names."""
        ended = [name for name in (*CONTENDERS[self._contender], "webhook", "kube-scheduler") if not self._runs(name)]
        for name in ended:
            if name == "kube-scheduler":
                self.installation.start_scheduler()
            else:
                self._start(name)
        return ended

    def _runs(self, name: str) -> bool:
        return name in self._processes()

    def _start(self, name: str) -> None:
        if name != "proxy":
            self.installation.start(name, wait=False)
            return
        upstream = f"http://127.0.0.1:{UPSTREAM_PORT}"
        command = ["-m", "bench.timing_proxy", "--upstream", upstream, "--log", str(self.calls_log)]
        self.cluster.spawn(name, [sys.executable, *command])

    def _end(self, *processes: str) -> None:
        for name in processes:
            if self._runs(name):
                self.cluster.signal(name, "TERM")
                self.cluster.wait_exit(name)


def write_reports(cluster: DevCluster, shapes: Sequence[str] = PROFILES, *, prefix: str = "") -> None:
    """Write the agents' objects: reports of machines of these shapes in turn, and heartbeats that last for a day.

    With `prefix`, only for nodes whose names begin with it.
    """
    nodes = [
        (number, node["metadata"]["name"], node["metadata"]["uid"])
        for number, node in enumerate(cluster.api.get(paths.nodes())["items"])
        if node["metadata"]["name"].startswith(prefix)
    ]
    now = format_microtime(SystemClock().now())
    reports = {
        name: report(name, profile(shapes[number % len(shapes)])).model_dump(
            mode="json", by_alias=True, exclude_defaults=True
        )
        for number, name, _ in nodes
    }
    api = cluster.api
    kind = {"apiVersion": names.API_VERSION, "kind": "GpuNodeStatus"}
    api.request_all(
        AdminRequest("POST", paths.gpunodestatuses(), {**kind, "metadata": {"name": name}}) for name in reports
    )
    api.request_all(
        AdminRequest(
            "PATCH",
            paths.gpunodestatuses(name, "status"),
            {"status": {**reports[name]["status"], "nodeUid": uid}},
            MERGE_PATCH,
        )
        for _, name, uid in nodes
    )
    api.request_all(
        AdminRequest("POST", paths.leases(names.HEARTBEAT_NAMESPACE), _heartbeat(name, now)) for name in reports
    )


def make_namespace(cluster: DevCluster) -> None:
    """Create the namespace of the benchmark's pods, with its account."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    cluster.api.request("POST", paths.namespaces(), body)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    try:
        cluster.api.request("POST", paths.core("serviceaccounts", namespace=NAMESPACE), account)
    except AdminApiError as error:
        if error.status != 409:
            raise


def _pod(name: str, claim: str, annotations: Mapping[str, str]) -> dict[str, Any]:
    container = {"name": "main", "image": "none", "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {names.CLAIM: claim, **annotations}},
        "spec": {"containers": [container]},
    }


def _heartbeat(node: str, now: str) -> dict[str, Any]:
    spec = {"holderIdentity": node, "leaseDurationSeconds": DAY_SECONDS, "acquireTime": now, "renewTime": now}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": node, "namespace": names.HEARTBEAT_NAMESPACE},
        "spec": spec,
    }
