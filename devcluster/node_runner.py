"""Starts, stops and repairs the real nodes of a running cluster.

A node has three processes under the supervisor: `node@NAME` holds the node's namespaces, and `containerd@NAME` and
`kubelet@NAME` run in them, so either can restart while containers keep running.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from devcluster import cgroups
from devcluster.api import AdminApi
from devcluster.build import Binaries
from devcluster.certificates import CertificateAuthority
from devcluster.control import Control
from devcluster.control_plane import Layout
from devcluster.errors import ClusterStateError, ControlError, StartError
from devcluster.launch import NAMESPACE_FLAGS
from devcluster.node import CONTAINERD_SOCKET, NodeFiles, network_commands
from devcluster.state import NodeRecord, cgroup_root
from devcluster.system_programs import SystemPrograms
from devcluster.waiting import wait_until

_TAINT_PREFIX = "node.kubernetes.io/"
_STOP_SECONDS = 60.0
_CTR_SECONDS = 300.0


class NodeRunner:
    """Runs the nodes of one cluster."""

    def __init__(self, cluster: str, layout: Layout, *, control: Control, api: AdminApi, binaries: Binaries) -> None:
        """Work through the cluster's supervisor and API server."""
        self._cluster = cluster
        self._layout = layout
        self._control = control
        self._api = api
        self._binaries = binaries

    def prepare(
        self, record: NodeRecord, *, authority: CertificateAuthority, system: SystemPrograms, images: list[Path]
    ) -> None:
        """Create the node's namespaces, join them to the network and start containerd with its images.

        Needs no API server. Raises StartError, or ClusterStateError if another cluster's pods use its cgroup.
        """
        root = cgroup_root(self._cluster, record.name)
        if cgroups.process_count(root):
            raise ClusterStateError(f"cgroup {root} is in use: a cluster of that name runs under another state folder")
        cgroups.create(root)
        files = self._files(record)
        files.write(self._binaries, system, authority)
        self._furnish(files)
        self._start_containerd(files, system)
        for image in images:
            self.import_image(record.name, image)

    def start_kubelet(self, record: NodeRecord) -> None:
        """Start the node's kubelet; needs the API server."""
        name = f"kubelet@{record.name}"
        command = self._files(record).kubelet_command(self._binaries)
        self._control.spawn(name, command, log=self._log(name), node=record.name, cwd=Path("/"))

    def wait_answering(self, name: str) -> None:
        """Wait until a node's kubelet answers through the API server, since its Node object may be stale."""
        path, process = f"/api/v1/nodes/{name}/proxy/healthz", f"kubelet@{name}"
        self._wait(process, process, lambda: self._api.get(path) == "ok", timeout_seconds=180)

    def wait_ready(self, name: str, *, timeout_seconds: float = 240.0) -> None:
        """Wait until the node accepts pods. Raises StartError with the end of kubelet's log."""

        def ready() -> bool:
            node = self._api.get(f"/api/v1/nodes/{name}")
            conditions = {row["type"]: row["status"] for row in node["status"].get("conditions", [])}
            taints = [taint["key"] for taint in node["spec"].get("taints", [])]
            return conditions.get("Ready") == "True" and not any(key.startswith(_TAINT_PREFIX) for key in taints)

        self._wait(f"node {name}", f"kubelet@{name}", ready, timeout_seconds=timeout_seconds)

    def restart_kubelet(self, record: NodeRecord) -> None:
        """Restart kubelet while containers keep running; return when kubelet lists its pods again."""
        name = f"kubelet@{record.name}"
        with suppress(ControlError):
            self._control.signal(name, "CONT")
            self._control.signal(name, "TERM")
        if self._control.wait(name, timeout_seconds=_STOP_SECONDS) is None:
            self._control.signal(name, "KILL")
            self._control.wait(name, timeout_seconds=_STOP_SECONDS)
        self.start_kubelet(record)
        self.wait_answering(record.name)
        self._wait(name, name, lambda: self._knows_its_pods(record.name), timeout_seconds=180)

    def stop(self, record: NodeRecord) -> None:
        """Kill every process of the node at once; its Node object stays."""
        name = f"node@{record.name}"
        self._control.signal(name, "KILL")
        for process in (name, f"kubelet@{record.name}", f"containerd@{record.name}"):
            if self._control.wait(process, timeout_seconds=_STOP_SECONDS) is None:
                raise ControlError(f"{process} did not end within {_STOP_SECONDS:.0f} s after its node was killed")
        cgroups.remove(cgroup_root(self._cluster, record.name))

    def _knows_its_pods(self, node: str) -> bool:
        """True if kubelet lists all pods of the node; it serves logs and exec only for listed pods."""
        placed = self._api.get(f"/api/v1/pods?fieldSelector=spec.nodeName={node}")
        listed = self._api.get(f"/api/v1/nodes/{node}/proxy/pods")
        uids = [{pod["metadata"]["uid"] for pod in answer["items"] or []} for answer in (placed, listed)]
        return uids[0] <= uids[1]

    def _furnish(self, files: NodeFiles) -> None:
        name = f"node@{files.record.name}"
        files.ready.unlink(missing_ok=True)
        command = ["unshare", *NAMESPACE_FLAGS, "--", "/bin/sh", str(files.folder / "setup.sh")]
        pid = self._control.spawn(name, command, log=self._log(name), cwd=Path("/"))
        self._wait(f"the namespaces of {name}", name, files.ready.exists, timeout_seconds=120)
        for step in network_commands(files.record, self._layout.network, pid=pid):
            result = self._control.run(step)
            if result.returncode != 0:
                problem = f"refused `{' '.join(step)}`"
                raise StartError(f"the network of {name}", problem=problem, log_tail=result.stderr)

    def _start_containerd(self, files: NodeFiles, system: SystemPrograms) -> None:
        name, node = f"containerd@{files.record.name}", files.record.name
        libraries = {"LD_LIBRARY_PATH": str(system.runc_libraries)} if system.runc_libraries else {}
        # containerd finds its shim through PATH; CNI plugins and kubelet find ip and mount through it.
        path = f"{self._binaries['containerd'].parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        command = files.containerd_command(self._binaries)
        environment = {"PATH": path, **libraries}
        self._control.spawn(name, command, log=self._log(name), env=environment, node=node, cwd=Path("/"))

        def answers() -> bool:
            return self._ctr(node, "version").returncode == 0

        self._wait(name, name, answers, timeout_seconds=180)

    def import_image(self, node: str, image: Path) -> None:
        """Import an image on a running node. Raises StartError with containerd's message."""
        result = self._ctr(node, "images", "import", str(image))
        if result.returncode != 0:
            raise StartError(f"image {image.name}", problem=f"was refused by {node}", log_tail=result.stderr)

    def _ctr(self, node: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self._binaries["ctr"]), "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io", *arguments]
        return self._control.run(command, node=node, timeout_seconds=_CTR_SECONDS)

    def _files(self, record: NodeRecord) -> NodeFiles:
        return NodeFiles(layout=self._layout, record=record, cluster=self._cluster)

    def _log(self, process: str) -> Path:
        return self._layout.logs / f"{process}.log"

    def _wait(self, what: str, process: str, question: Callable[[], bool], *, timeout_seconds: float) -> None:
        wait_until(
            question,
            what=what,
            timeout_seconds=timeout_seconds,
            control=self._control,
            process=process,
            log=self._log(process),
        )
