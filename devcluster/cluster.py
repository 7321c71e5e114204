"""Interface of a development cluster: start or attach, use, stop.

Tests, the demo and benchmarks use a cluster through DevCluster. Sibling modules define command lines, configurations
and certificates; this module starts the parts in order and waits for them. The cluster's processes run under the
supervisor inside its namespaces; this code runs outside.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from devcluster import control_plane, fake_nodes, state
from devcluster.addresses import ClusterNetwork, IpFamily
from devcluster.api import AdminApi
from devcluster.build import Binaries, Report, ensure_binaries, report_to_stderr
from devcluster.certificates import KeyPairFiles
from devcluster.control import Control, ProcessStatus
from devcluster.control_plane import Layout
from devcluster.errors import ClusterStateError, ControlError
from devcluster.kubeconfigs import write_kubeconfig
from devcluster.launch import Launched, check_machine, launch
from devcluster.node import DevNode, DevNodeSpec, describe
from devcluster.programs import DEFAULT_KUBERNETES
from devcluster.real_nodes import RealNodes
from devcluster.state import ClusterRecord
from devcluster.waiting import wait_until

_SCHEDULER = "kube-scheduler"
_READYZ = "import ssl, sys, urllib.request as u; u.urlopen(sys.argv[1], context=ssl._create_unverified_context())"
_TOKEN_SECONDS = 7 * 24 * 3600
_STOP_SECONDS = 180.0
_PROCESS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]{0,99}")


class DevCluster:
    """A running cluster; create it with start or attach."""

    def __init__(self, record: ClusterRecord, *, launched: Launched | None) -> None:
        """Use the cluster of a record; `launched` is the process that holds it, if this process started it."""
        self.name = record.name
        self._record = record
        self._launched = launched
        self.layout = Layout(state.cluster_folder(record.name), ClusterNetwork(IpFamily(record.ip_family)))
        self.control = Control(self.layout.folder)
        self._authority = control_plane.authority(self.layout)
        pki = self.layout.pki
        administrator = KeyPairFiles(certificate=pki / "admin.crt", key=pki / "admin.key")
        self._binaries = Binaries(paths={name: Path(path) for name, path in record.binaries.items()})
        self.api = AdminApi(record.port, authority=self._authority.pair, client=administrator)
        self._fleet = RealNodes(record.name, self.layout, control=self.control, api=self.api)

    # ---- lifecycle ----

    @classmethod
    def start(
        cls,
        name: str,
        *,
        nodes: Sequence[DevNodeSpec] = (),
        kubernetes: str | None = None,
        scheduler: bool = True,
        scheduler_config: Path | None = None,
        scheduler_kubeconfig: str | Path | None = None,
        persistent: bool = False,
        audit_log: bool = False,
        ip_family: IpFamily = IpFamily.IPV4,
        feature_gates: Sequence[str] = (),
        report: Report = report_to_stderr,
    ) -> DevCluster:
        """Start a cluster and wait until its nodes are Ready.

        Unless persistent, it ends with this process, even if that is killed. scheduler=False starts no kube-scheduler;
        call start_scheduler later. With audit_log the API server writes layout.audit_log. The feature gates are on in
        all parts of the control plane. The default version of Kubernetes comes from ATOLL_KUBERNETES if set. Raises
        DevclusterError with what cannot run here, be built, or start.
        """
        kubernetes = kubernetes or os.environ.get("ATOLL_KUBERNETES") or DEFAULT_KUBERNETES
        check_machine(real_nodes=bool(nodes))
        state.check_name(name, what="cluster")
        state.sweep()
        nvidia = any(node.nvidia for node in nodes)
        binaries = ensure_binaries(kubernetes, real_nodes=bool(nodes), nvidia=nvidia, report=report)
        folder, lock = state.claim_folder(name)
        launched = None
        try:
            layout = Layout(folder, ClusterNetwork(ip_family))
            launched = launch(layout, lock=lock)
            record = ClusterRecord(
                name=name,
                kubernetes=kubernetes,
                port=launched.port,
                persistent=persistent,
                binaries={program: str(path) for program, path in binaries.paths.items()},
                ip_family=ip_family,
                feature_gates=tuple(feature_gates),
            )
            state.write_record(folder, record)
            control_plane.write_identities(layout, port=launched.port)
            if audit_log:
                control_plane.write_audit_policy(layout)
            cluster = cls(record, launched=launched)
            cluster._start_parts(nodes, report=report)
            if scheduler:
                cluster.start_scheduler(scheduler_config, scheduler_kubeconfig)
            if persistent:
                launched.detach(cluster.control)
        except BaseException:
            _abandon(folder, launched)
            raise
        return cluster

    @classmethod
    def attach(cls, name: str) -> DevCluster:
        """Return a cluster that runs already. Raises ClusterStateError if there is none."""
        folder = state.cluster_folder(name)
        if not state.is_alive(folder):
            raise ClusterStateError(_not_running(name))
        return cls(state.read_record(folder), launched=None)

    def restart_control_plane(self, between: Callable[[], object], *, raise_versions_by: int = 0) -> None:
        """Kill controller manager, API server and etcd, call `between`, and start them again; wait until the API server
        is ready. kube-scheduler may end meanwhile, having lost its leadership; kubelets are left alone.
        raise_versions_by: how many versions pass before the API server starts."""
        for name in ("kube-controller-manager", "kube-apiserver", "etcd"):
            self._kill(name)
        between()
        if raise_versions_by:
            self._raise_versions(raise_versions_by)
        self._authority = control_plane.authority(self.layout)
        self.api.reload()
        self._start_control_plane()

    def _raise_versions(self, count: int) -> None:
        self._spawn_part("etcd", control_plane.etcd_command(self._binaries, self.layout))
        self._spawn_part("etcd-writer", [sys.executable, "-m", "devcluster.etcd_writer", str(count)])
        self.wait_exit("etcd-writer")
        self._kill("etcd")

    def stop(self) -> None:
        """Stop the cluster and remove all its files; does nothing if it has ended already."""
        with contextlib.suppress(ControlError):
            self.control.stop()
        _wait_for_end(self.layout.folder, self._launched)

    def __enter__(self) -> Self:
        """Return the cluster."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the cluster."""
        self.stop()

    # ---- addresses and identities ----

    @property
    def kubeconfig(self) -> Path:
        """Administrator's kubeconfig, for use from outside."""
        return self.layout.kubeconfig("admin")

    @property
    def kubeconfig_inside(self) -> Path:
        """Administrator's kubeconfig, for processes inside."""
        return self.layout.kubeconfig("admin-inside")

    @property
    def server_url_inside(self) -> str:
        """URL of the API server for processes inside."""
        return self.layout.server_inside

    @property
    def shared_dir(self) -> Path:
        """Folder on this machine that every node sees under the same path."""
        return self.layout.shared

    @property
    def kubernetes(self) -> str:
        """Version of Kubernetes, such as 1.37.2."""
        return self._record.kubernetes

    def service_account_kubeconfig(
        self, namespace: str, name: str, *, node: str | None = None, audience: str | None = None
    ) -> Path:
        """Write a kubeconfig for use inside, with a token of that ServiceAccount that is valid for a week.

        With `node`, the token is bound to that Node object and carries its name. Raises AdminApiError if the account
        or the node does not exist.
        """
        spec: dict[str, Any] = {"expirationSeconds": _TOKEN_SECONDS, "audiences": [audience] if audience else []}
        if node is not None:
            uid = self.api.get(f"/api/v1/nodes/{node}")["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        token = self.api.request("POST", path, request)["status"]["token"]
        # Names in Kubernetes contain no underscore, so no two accounts share a file.
        file = "_".join(filter(None, ["account", namespace, name, node, audience and re.sub(r"\W", "_", audience)]))
        return write_kubeconfig(
            self.layout.kubeconfig(file),
            server=self.server_url_inside,
            authority=self._authority.pair.certificate,
            token=token,
        )

    def kubectl(
        self,
        *arguments: str,
        input: str | None = None,  # noqa: A002 - the word subprocess uses
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator; return its output. With check, raises CalledProcessError on failure."""
        cache = self.layout.folder / "kubectl-cache"
        command = [
            str(self._binaries["kubectl"]),
            f"--kubeconfig={self.kubeconfig}",
            f"--cache-dir={cache}",
            *arguments,
        ]
        return subprocess.run(command, input=input, capture_output=True, text=True, check=check)

    # ---- processes ----

    def spawn(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        node: str | None = None,
        cwd: Path | None = None,
    ) -> int:
        """Start a supervised process inside the cluster, or inside one of its nodes; return its process id there.

        `env` is added to this process's environment. Raises ControlError if the name is in use or the program is
        missing.
        """
        if not _PROCESS_NAME.fullmatch(name):
            raise ControlError(f"process name {name!r} is not 1 to 100 letters, digits or @._-")
        environment = {**os.environ, **(env or {})}
        return self.control.spawn(name, argv, log=self.logs(name), env=environment, node=node, cwd=cwd)

    def run(
        self,
        *argv: str | Path,
        node: str | None = None,
        input: str = "",  # noqa: A002 - the word subprocess uses
        timeout_seconds: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside the cluster, or one of its nodes, and wait for its end."""
        return self.control.run(argv, node=node, stdin=input, timeout_seconds=timeout_seconds)

    def signal(self, name: str, signal: str) -> None:
        """Send a signal such as KILL, TERM, STOP or CONT to a supervised process."""
        self.control.signal(name, signal)

    def wait_exit(self, name: str, *, timeout_seconds: float = 120.0) -> int:
        """Wait for a process; return its exit code (negative: signal). Raises ControlError on timeout."""
        exit_code = self.control.wait(name, timeout_seconds=timeout_seconds)
        if exit_code is None:
            raise ControlError(f"process {name!r} still runs after {timeout_seconds} s")
        return exit_code

    def logs(self, name: str) -> Path:
        """Log file with the output of all processes of that name."""
        return self.layout.logs / f"{name}.log"

    def processes(self) -> dict[str, ProcessStatus]:
        """All supervised processes by name, including ended ones."""
        return self.control.status()

    # ---- scheduler ----

    def start_scheduler(
        self, config: Path | None = None, kubeconfig: str | Path | None = None, *, flags: Sequence[str] = ()
    ) -> None:
        """Start the stock kube-scheduler, replacing a running one, and wait until it is healthy.

        Defaults: a plain configuration, and the user system:kube-scheduler. `flags` are added to its command line.
        """
        self.stop_scheduler()
        identity = Path(kubeconfig) if kubeconfig else self.layout.kubeconfig(_SCHEDULER)
        file = self.layout.folder / "scheduler.yaml"
        text = config.read_text() if config else None
        file.write_text(control_plane.scheduler_configuration(text, kubeconfig=identity))
        gates = control_plane.gate_flags(self._record.feature_gates)
        command = control_plane.scheduler_command(self._binaries, self.layout, config=file, flags=[*flags, *gates])
        self._spawn_part(_SCHEDULER, command)
        readyz = [sys.executable, "-c", _READYZ, f"https://127.0.0.1:{control_plane.SCHEDULER_PORT}/readyz"]
        self._wait(lambda: self.run(*readyz).returncode == 0, what=_SCHEDULER, process=_SCHEDULER)

    def stop_scheduler(self) -> None:
        """Stop kube-scheduler; does nothing if none runs."""
        self._kill(_SCHEDULER)

    # ---- nodes ----

    @property
    def nodes(self) -> list[DevNode]:
        """Real nodes, in the order they were added."""
        return [describe(self.name, record, self.layout) for record in self._fleet.records]

    def node(self, name: str) -> DevNode:
        """Return one real node. Raises ClusterStateError if none has that name."""
        return describe(self.name, self._fleet.find(name), self.layout)

    def add_node(self, spec: DevNodeSpec) -> DevNode:
        """Start a node and wait until it is Ready; a stopped node of that name starts again with its disk."""
        check_machine(real_nodes=True)
        binaries = ensure_binaries(self.kubernetes, nvidia=bool(spec.nvidia))
        records = self._fleet.prepare([spec], binaries=binaries, authority=self._authority, report=report_to_stderr)
        self._fleet.start_kubelets(records, binaries=binaries)
        return self.node(spec.name)

    def stop_node(self, name: str) -> None:
        """Kill all processes of a node at once; its Node object stays until somebody deletes it."""
        self._fleet.runner(self._binaries).stop(self._fleet.find(name))

    def restart_kubelet(self, name: str) -> None:
        """Restart a node's kubelet and wait until it lists its pods again; containers keep running."""
        self._fleet.runner(self._binaries).restart_kubelet(self._fleet.find(name))

    def wait_node_ready(self, name: str, *, timeout_seconds: float = 240.0) -> None:
        """Wait until a node accepts pods."""
        record = self._fleet.find(name)
        self._fleet.runner(self._binaries).wait_ready(record.name, timeout_seconds=timeout_seconds)

    def load_image(self, archive: Path) -> None:
        """Import an image on every node. Raises StartError."""
        for record in self._fleet.records:
            self._fleet.runner(self._binaries).import_image(record.name, archive)

    def program(self, name: str) -> Path:
        """Path of one of the cluster's programs, such as kube-scheduler."""
        return self._binaries[name]

    # ---- fake nodes ----

    def start_kwok(self) -> None:
        """Let pods on fake nodes run. From now on a node, real or fake, counts as lost only after a day of silence.

        Fake nodes send no heartbeats: thousands of them would use most of a small machine.
        """
        binaries = ensure_binaries(self.kubernetes, real_nodes=False, kwok=True)
        self._kill("kube-controller-manager")
        self._start_controller_manager(node_grace_seconds=24 * 3600)
        stages = self.layout.folder / "kwok.yaml"
        stages.write_text(fake_nodes.stages())
        control_plane.write_kwok_identity(self.layout)
        self.api.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", fake_nodes.rights())
        self._spawn_part("kwok", control_plane.kwok_command(binaries, self.layout, stages=stages))

    def create_fake_nodes(
        self,
        count: int,
        *,
        labels: fake_nodes.Labels,
        allocatable: Mapping[str, str],
        prefix: str = "fake",
    ) -> None:
        """Create the nodes prefix-0, prefix-1, ...; `labels` may be a function of the number. Raises AdminApiError."""
        self.api.request_all(fake_nodes.node_requests(count, prefix=prefix, labels=labels, allocatable=allocatable))

    # ---- start ----

    def _start_parts(self, nodes: Sequence[DevNodeSpec], *, report: Report) -> None:
        """Start control plane and nodes in parallel: a node's containerd and images need no API server."""
        self.shared_dir.mkdir(exist_ok=True)
        with ThreadPoolExecutor(max_workers=1) as pool:
            prepared = pool.submit(
                self._fleet.prepare, nodes, binaries=self._binaries, authority=self._authority, report=report
            )
            self._start_control_plane()
            self._fleet.start_kubelets(prepared.result(), binaries=self._binaries)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._wait(lambda: self.api.get(account), what="the default account", process="kube-controller-manager")

    def _start_control_plane(self) -> None:
        self._spawn_part("etcd", control_plane.etcd_command(self._binaries, self.layout))
        self._spawn_part("kube-apiserver", self._api_server_command())
        self._wait(lambda: self.api.get("/readyz") == "ok", what="the API server", process="kube-apiserver")
        self._start_controller_manager(node_grace_seconds=control_plane.NODE_GRACE_SECONDS)

    def _api_server_command(self) -> list[str]:
        gates = self._record.feature_gates
        return control_plane.api_server_command(self._binaries, self.layout, feature_gates=gates)

    def _start_controller_manager(self, *, node_grace_seconds: int) -> None:
        command = control_plane.controller_manager_command(
            self._binaries,
            self.layout,
            node_grace_seconds=node_grace_seconds,
            feature_gates=self._record.feature_gates,
        )
        self._spawn_part("kube-controller-manager", command)

    def _kill(self, name: str) -> None:
        """Kill a process, unless none of that name was started or it has ended."""
        if name in self.processes():
            self.signal(name, "KILL")
            self.wait_exit(name)

    def _spawn_part(self, name: str, command: Sequence[str]) -> None:
        self.control.spawn(name, command, log=self.logs(name), cwd=self.layout.folder)

    def _wait(self, question: Callable[[], object], *, what: str, process: str, timeout_seconds: float = 180.0) -> None:
        wait_until(
            question,
            what=what,
            timeout_seconds=timeout_seconds,
            control=self.control,
            process=process,
            log=self.logs(process),
        )


def _abandon(folder: Path, launched: Launched | None) -> None:
    """End a cluster that failed to start."""
    if launched is not None:
        launched.process.kill()
    _wait_for_end(folder, launched)


def _wait_for_end(folder: Path, launched: Launched | None) -> None:
    if launched is not None:
        launched.release()
        launched.process.wait(timeout=_STOP_SECONDS)
    wait_until(lambda: not state.is_alive(folder), what=f"the end of {folder.name}", timeout_seconds=_STOP_SECONDS)
    state.sweep()


def _not_running(name: str) -> str:
    others = ", ".join(record.name for record in state.running_clusters())
    return f"no cluster {name!r} is running" + (
        f"; there are: {others}" if others else f": `atoll dev up {name}` starts one"
    )
