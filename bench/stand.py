"""A control plane, fake nodes, and Atoll, the no-op extender or no extender at all behind the same kube-scheduler.

Creates, binds and deletes pods on demand, and measures the CPU and memory of each process. Everything in deploy/ is
applied unchanged, including policies and webhook; only the agents' objects (GpuNodeStatus and heartbeat) are written
here, once.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import yaml

from atoll.api import names
from atoll.api.times import format_microtime
from atoll.kube import paths
from atoll.kube.patches import MERGE_PATCH, delete_options
from atoll.service.clock import SystemClock
from bench.extender_calls import PROFILES, report
from bench.figures import cpu_seconds, read_requests
from bench.journal import Journal, TooSlow
from devcluster import DevCluster
from devcluster.api import AdminRequest
from devcluster.errors import AdminApiError, StartError
from devcluster.installation import DEPLOY, EXTENDER_PORT, AtollPart, Installation
from topology.profiles import profile

NAMESPACE = "bench"
CONFIG = DEPLOY / "scheduler" / "config.yaml"
GPUS = 8
UPSTREAM_PORT = EXTENDER_PORT + 1
DAY_SECONDS = 24 * 3600
WAIT_SECONDS = 240.0
REVIVE_SECONDS = 10.0
STARTS_MAX = 3
GRACE_SECONDS = 1
CLAIMS = {1: "one-gpu", 2: "two-gpus", 4: "four-gpus", GPUS: "whole-machine"}
CONTENDERS = {
    "atoll": ("controllers", "extender"),
    "unhinted": ("controllers", "extender"),
    "sampled": ("controllers", "extender"),
    "timed": ("controllers", "extender", "proxy"),
    "noop": ("noop",),
    "plain": (),
}
"""Processes beside the control plane and the webhook, by what kube-scheduler asks: Atoll, Atoll with `nodeHints` off,
Atoll while kube-scheduler looks at a sample of the nodes, Atoll behind a proxy that times each call and with a clock in
each event loop, an extender that only binds, nobody."""
SAMPLED = ("plain", "noop", "sampled")
"""Contenders for which kube-scheduler looks at as many nodes as it does by default."""
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
        self.blocks_log = cluster.shared_dir / "blocks"
        self.nodes: list[str] = []
        self._created = 0
        self._contender = ""
        self._scheduler_config = CONFIG
        parts = self.installation.parts
        self._shipped = {name: parts[name] for name in ("controllers", "extender")}
        account = self._shipped["extender"].account
        parts["noop"] = AtollPart("noop", "bench.noop_extender", account, (), EXTENDER_PORT)
        parts["proxy"] = AtollPart("proxy", "bench.timing_proxy", account, (), EXTENDER_PORT)
        self._running = dict(parts)

    def set_up(self, nodes: int) -> None:
        """Install Atoll and fake nodes; every part runs afterwards."""
        self.cluster.start_kwok()
        self.cluster.create_fake_nodes(nodes, labels={}, allocatable={names.GPU_RESOURCE: str(GPUS)})
        self.nodes = [node["metadata"]["name"] for node in self.cluster.api.get(paths.nodes())["items"]]
        self.installation.apply_manifests()
        write_reports(self.cluster)
        self.installation.start("webhook", wait=False)
        self.use("atoll")
        self.start_scheduler()
        self.installation.wait_ready(["webhook"])
        for count, claim in CLAIMS.items():
            spec = {"devices": {"count": count}}
            body = {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": {"name": claim}, "spec": spec}
            self.cluster.api.request("POST", paths.gpuclaims(NAMESPACE), body)

    def use(self, contender: str) -> None:
        """Select what stands behind kube-scheduler; with `noop` and `plain` no process of Atoll watches pods."""
        wanted, parts = CONTENDERS[contender], self.installation.parts
        if contender == self._contender:
            return
        parts |= {name: self._variant(part, contender) for name, part in self._shipped.items()}
        changed = [name for name in ("proxy", "noop", "extender", "controllers") if parts[name] != self._running[name]]
        self._end(*changed, *(name for name in ("proxy", "noop", "extender", "controllers") if name not in wanted))
        for name in wanted:
            if not self._runs(name):
                self._start(name)
        self._contender = contender
        self._wait_ready(wanted)
        self._use_scheduler(contender)

    def _wait_ready(self, wanted: Sequence[str], tries: int = STARTS_MAX) -> None:
        """Wait, and restart what lost leadership on a busy machine before it was ready. Raises StartError."""
        try:
            self.installation.wait_ready(wanted)
        except StartError:
            ended = [name for name in wanted if not self._runs(name)]
            if not ended or tries == 1:
                raise
            for name in ended:
                self._start(name)
            self._wait_ready(wanted, tries - 1)

    def _variant(self, part: AtollPart, contender: str) -> AtollPart:
        """Return the part as this contender has it."""
        if contender == "unhinted":
            return replace(part, arguments=(*part.arguments, "--no-node-hints"))
        if contender != "timed":
            return part
        clock = {"ATOLL_BENCH_PART": part.module, "ATOLL_BENCH_LOG": str(self.blocks_log)}
        part = replace(part, module="bench.timed_loop", environment=clock)
        if part.name != "extender":
            return part
        return replace(part, arguments=("--port", str(UPSTREAM_PORT)), health_port=UPSTREAM_PORT)

    def _use_scheduler(self, contender: str) -> None:
        """Restart kube-scheduler if it is to have another configuration."""
        config = CONFIG
        if contender in SAMPLED:
            config = self.cluster.shared_dir / f"scheduler-{contender}.yaml"
            shipped = yaml.safe_load(CONFIG.read_text())
            shipped["profiles"] = [{"schedulerName": one["schedulerName"]} for one in shipped["profiles"]]
            shipped |= {"extenders": []} if contender == "plain" else {}
            config.write_text(yaml.safe_dump(shipped))
        if config != self._scheduler_config:
            self._scheduler_config = config
            self.start_scheduler()

    def start_scheduler(self) -> None:
        """Start kube-scheduler anew with the configuration of the contender. It need not wait for the leadership of the
        one before, which is dead."""
        self.cluster.stop_scheduler()
        lease = paths.leases(names.SYSTEM_NAMESPACE, names.SCHEDULER_LEADER_LEASE)
        self.cluster.api.request_all([AdminRequest("DELETE", lease)] if self._has_lease(lease) else [])
        self.installation.start_scheduler(self._scheduler_config)

    def _has_lease(self, path: str) -> bool:
        try:
            return bool(self.cluster.api.get(path))
        except AdminApiError as error:
            if error.status != 404:
                raise
            return False

    @property
    def has_leases(self) -> bool:
        """True if pods hold Leases."""
        return "extender" in CONTENDERS[self._contender]

    def create(self, count: int, *, gpus: int = 1, annotations: Mapping[str, str] | None = None) -> list[str]:
        """Create pods, with further annotations, and return their names."""
        first, self._created = self._created, self._created + count
        created = [f"pod-{number}" for number in range(first, self._created)]
        self.cluster.api.request_all(
            AdminRequest("POST", paths.pods(NAMESPACE), pod_body(name, CLAIMS[gpus], annotations or {}))
            for name in created
        )
        return created

    def wait_bound(self, pods: Sequence[str]) -> None:
        """Raises TooSlow."""
        bound = self.journal.bound_at
        self.wait(lambda: all(pod in bound for pod in pods), f"the binding of {len(pods)} pods")

    def wait(self, question: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait, and restart processes that lost leadership on a busy machine and exited. Raises TooSlow."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self.journal.wait(question, what, min(seconds, REVIVE_SECONDS))
            except TooSlow:
                if time.monotonic() > deadline:
                    raise TooSlow(f"{what} did not come within {seconds:.0f} s") from None
            for name in self.revive():
                print(f"{name} had ended, and was started again", file=sys.stderr, flush=True)

    def delete(self, pods: Sequence[str]) -> None:
        """Delete pods gracefully."""
        options = delete_options(grace_period_seconds=GRACE_SECONDS)
        self.cluster.api.request_all(AdminRequest("DELETE", paths.pods(NAMESPACE, pod), options) for pod in pods)

    def clear(self) -> None:
        """Delete all pods; return when they and their Leases are gone. Raises TooSlow."""
        journal = self.journal
        self.delete(sorted(journal.present))
        self.wait(lambda: not journal.present and not journal.leases, "an empty cluster")

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

    def requests(self) -> dict[str, float]:
        """Return the requests that the API server has answered so far, by kind."""
        return read_requests(self.cluster.api.get("/metrics"))

    def _processes(self) -> dict[str, Any]:
        return {name: status for name, status in self.cluster.processes().items() if status.running}

    def revive(self) -> list[str]:
        """Restart processes that exited because they lost leadership; return their names."""
        ended = [name for name in (*CONTENDERS[self._contender], "webhook", "kube-scheduler") if not self._runs(name)]
        for name in ended:
            if name == "kube-scheduler":
                self.start_scheduler()
            else:
                self._start(name)
        return ended

    def _runs(self, name: str) -> bool:
        return name in self._processes()

    def _start(self, name: str) -> None:
        self._running[name] = self.installation.parts[name]
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


def pod_body(name: str, claim: str, annotations: Mapping[str, str]) -> dict[str, Any]:
    """Return a pod with that claim."""
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
