"""One real node: configuration of containerd, CNI and kubelet, and the script that sets up the node's namespaces.

Returns files and command lines; starts nothing. The node's number determines its addresses, so nodes of one cluster
never collide; nodes of different clusters are in different network namespaces and may share addresses.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from devcluster import nvidia
from devcluster.addresses import ClusterNetwork
from devcluster.build import Binaries
from devcluster.certificates import CertificateAuthority, Subject
from devcluster.control_plane import Layout, write_inside
from devcluster.errors import StartError
from devcluster.images import PAUSE
from devcluster.nvidia import NvidiaRuntime
from devcluster.state import NodeRecord, cgroup_root
from devcluster.system_programs import SystemPrograms

KUBELET_PORT = 10250
NODES_MAX = 200
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"

_UNUSED_PLUGINS = (
    "nri.v1.nri",
    *(f"snapshotter.v1.{kind}" for kind in ("blockfile", "btrfs", "devmapper", "erofs", "zfs")),
)
_SETUP = """set -eu
# Private /run, /var/log and /var/lib: kubelet and containerd hard-code paths there that the host's kubelet may use.
mount -t tmpfs tmpfs {scratch}
mkdir {scratch}/upper {scratch}/work
mount -t overlay overlay -o lowerdir=/var/lib,upperdir={scratch}/upper,workdir={scratch}/work /var/lib
mkdir -p /var/lib/kubelet
mount --bind {kubelet} /var/lib/kubelet
mount -t tmpfs tmpfs /var/log
mount -t tmpfs tmpfs /run
mkdir -p /run/containerd /run/netns
# kubelet changes kernel settings of the whole machine, which would stay, and ends if it cannot. So it gets read-only
# files that already have the values it wants.
for settings in kernel vm; do
    mount --bind /proc/sys/$settings /proc/sys/$settings
    mount -o remount,bind,ro /proc/sys/$settings
done
for setting in kernel/panic=10 kernel/panic_on_oops=1 vm/overcommit_memory=1 vm/panic_on_oom=0 \
        kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    echo "${{setting#*=}}" > {scratch}/setting-"$(basename "${{setting%=*}}")"
    mount --bind {scratch}/setting-"$(basename "${{setting%=*}}")" /proc/sys/"${{setting%=*}}"
    mount -o remount,bind,ro /proc/sys/"${{setting%=*}}"
done
# A restarted node counts as rebooted: kubelet and agent read another boot id.
mount --bind {boot_id} /proc/sys/kernel/random/boot_id
ip link set lo up
touch {ready}
exec {pause}
"""


@dataclass(frozen=True, slots=True)
class DevNodeSpec:
    """A requested node. `profile` is the caller's name for a machine shape; devcluster does not read it.

    `cpu` (cores) and `memory_bytes` limit what the node offers to pods; default: all of this machine. `nvidia` adds
    NVIDIA's container runtime.
    """

    name: str
    profile: str = ""
    labels: dict[str, str] | None = None
    cpu: int | None = None
    memory_bytes: int | None = None
    nvidia: NvidiaRuntime = NvidiaRuntime.NONE

    def numbered(self, number: int) -> NodeRecord:
        """Return the record of this node with its number."""
        return NodeRecord(
            name=self.name,
            profile=self.profile,
            number=number,
            labels=dict(self.labels or {}),
            cpu=self.cpu,
            memory_bytes=self.memory_bytes,
            nvidia=self.nvidia,
        )


@dataclass(frozen=True, slots=True)
class DevNode:
    """A node of a running cluster, for callers."""

    name: str
    profile: str
    ip: str
    cgroup_root: str
    gpu_folder: Path
    kubelet_port: int = KUBELET_PORT


def describe(cluster: str, record: NodeRecord, layout: Layout) -> DevNode:
    """Convert a node's record to a DevNode."""
    return DevNode(
        name=record.name,
        profile=record.profile,
        ip=layout.network.node(record.number)[0],
        cgroup_root=cgroup_root(cluster, record.name),
        gpu_folder=layout.node(record.name) / "gpu",
    )


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """Files of one node."""

    layout: Layout
    record: NodeRecord
    cluster: str

    @property
    def folder(self) -> Path:
        """Folder of the node."""
        return self.layout.node(self.record.name)

    @property
    def ready(self) -> Path:
        """File that exists once the node's namespaces are set up."""
        return self.folder / "ready"

    def write(self, binaries: Binaries, system: SystemPrograms, authority: CertificateAuthority) -> None:
        """Write configuration and identity of the node."""
        for name in ("kubelet", "scratch", "containerd", "cni", "manifests", "gpu"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.write_identity(authority)
        runtimes = self._write_runtimes(binaries, runc=system.runc)
        plugins = binaries["bridge"].parent
        contents = {
            "setup.sh": self._setup_script(binaries),
            "resolv.conf": "options timeout:1\n",
            "containerd.toml": containerd_configuration(self.folder, runtimes=runtimes, plugins=plugins),
            "boot-id": f"{uuid4()}\n",
            "cni/10-bridge.conflist": json.dumps(
                cni_configuration(self.folder, self.record, self.layout.network), indent=1
            ),
            "kubelet.yaml": yaml.safe_dump(self._kubelet_configuration()),
        }
        for file, content in contents.items():
            (self.folder / file).write_text(content)

    def write_identity(self, authority: CertificateAuthority) -> None:
        """Write certificates and kubeconfig of the node's kubelet."""
        name, addresses = self.record.name, (*self.layout.network.node(self.record.number), "127.0.0.1")
        client = authority.issue(f"kubelet-{name}", Subject(f"system:node:{name}", "system:nodes"))
        authority.issue(f"kubelet-server-{name}", Subject(f"system:node:{name}", None, (name,), addresses))
        write_inside(self.layout, authority, name=f"kubelet-{name}", client=client)

    def _write_runtimes(self, binaries: Binaries, *, runc: Path) -> dict[str, Path]:
        """Write the runtimes; return the program of each of containerd's handlers, default first."""
        runtimes = {"runc": runc}
        if self.record.nvidia:
            for handler, accept in ((nvidia.HANDLER, True), (nvidia.STRICT_HANDLER, False)):
                configuration, script = (self.folder / f"{handler}.{kind}" for kind in ("toml", "sh"))
                hook, program = binaries["nvidia-cdi-hook"], binaries["nvidia-container-runtime"]
                configuration.write_text(
                    nvidia.runtime_configuration(self.folder / "gpu", runc=runc, hook=hook, accept_variable=accept)
                )
                script.write_text(nvidia.runtime_script(program, configuration=configuration))
                script.chmod(0o755)
                runtimes[handler] = script
        if self.record.nvidia == NvidiaRuntime.DEFAULT:
            runtimes = {nvidia.HANDLER: runtimes[nvidia.HANDLER], **runtimes}
        return runtimes

    def containerd_command(self, binaries: Binaries) -> list[str]:
        """Command line of containerd with the node's configuration."""
        return [str(binaries["containerd"]), "--config", str(self.folder / "containerd.toml"), "--log-level", "info"]

    def kubelet_command(self, binaries: Binaries) -> list[str]:
        """Command line of kubelet with the node's configuration and identity."""
        labels = ",".join(f"{key}={value}" for key, value in sorted(self.record.labels.items()))
        return [
            str(binaries["kubelet"]),
            f"--config={self.folder / 'kubelet.yaml'}",
            f"--kubeconfig={self.layout.kubeconfig(f'kubelet-{self.record.name}')}",
            f"--hostname-override={self.record.name}",
            f"--node-ip={','.join(self.layout.network.node(self.record.number))}",
            "--root-dir=/var/lib/kubelet",
            f"--cert-dir={self.folder / 'kubelet' / 'pki'}",
            *([f"--node-labels={labels}"] if labels else []),
            "--v=2",
        ]

    def _setup_script(self, binaries: Binaries) -> str:
        return _SETUP.format(
            scratch=self.folder / "scratch",
            kubelet=self.folder / "kubelet",
            boot_id=self.folder / "boot-id",
            ready=self.ready,
            pause=binaries["pause"],
        )

    def _kubelet_configuration(self) -> dict[str, Any]:
        pki, name = self.layout.pki, self.record.name
        return {
            **_KUBELET,
            "cgroupRoot": cgroup_root(self.cluster, name),
            "resolvConf": str(self.folder / "resolv.conf"),
            "staticPodPath": str(self.folder / "manifests"),
            "volumePluginDir": str(self.folder / "volume-plugins"),
            "tlsCertFile": str(pki / f"kubelet-server-{name}.crt"),
            "tlsPrivateKeyFile": str(pki / f"kubelet-server-{name}.key"),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True, "cacheTTL": "10s"},
                "x509": {"clientCAFile": str(pki / "ca.crt")},
            },
            "systemReserved": reserved(self.record, cpus=os.cpu_count() or 1, memory_bytes=_machine_memory_bytes()),
        }


_KUBELET: dict[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    # Changes of rights must take effect within a test's timeout.
    "authorization": {"mode": "Webhook", "webhook": {"cacheAuthorizedTTL": "10s", "cacheUnauthorizedTTL": "1s"}},
    "cgroupDriver": "cgroupfs",
    "cgroupsPerQOS": True,
    "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
    "enforceNodeAllocatable": [],
    # Kubelet must not evict a test's pods because the machine itself is nearly full.
    "evictionHard": {"memory.available": "10Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    "failCgroupV1": False,
    "failSwapOn": False,
    # Without CAP_SYS_RESOURCE, as in many containers, this gate lets kubelet log the failure instead of ending.
    "featureGates": {"KubeletInUserNamespace": True},
    "fileCheckFrequency": "5s",
    "healthzPort": 10248,
    "imageGCHighThresholdPercent": 100,
    "kubeAPIBurst": 200,
    "kubeAPIQPS": 100,
    "maxPods": 110,
    "podLogsDir": "/var/log/pods",
    "protectKernelDefaults": False,
    "registerNode": True,
    "rotateCertificates": False,
    "shutdownGracePeriod": "0s",
    "syncFrequency": "10s",
}


def reserved(record: NodeRecord, *, cpus: int, memory_bytes: int) -> dict[str, str]:
    """Resources to reserve so that the node offers what its record says. Raises StartError if it asks for too much."""
    wanted = {"cpu": (record.cpu, cpus, ""), "memory": (record.memory_bytes, memory_bytes, " bytes")}
    held = {}
    for resource, (offered, present, unit) in wanted.items():
        if offered is None:
            continue
        if offered > present:
            problem = f"cannot offer {offered}{unit} of {resource}: this machine has {present}{unit}"
            raise StartError(f"node {record.name}", problem=problem, log_tail="")
        held[resource] = str(present - offered)
    return held


def containerd_configuration(folder: Path, *, runtimes: Mapping[str, Path], plugins: Path) -> str:
    """Return containerd's TOML (version 3): all files in the node's folder or its private /run, no image pulls.

    `runtimes` are the programs of the handlers, default first.
    """
    images, runtime = "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"
    lines = [
        "version = 3",
        f"root = '{folder / 'containerd'}'",
        "state = '/run/containerd'",
        f"disabled_plugins = {[f'io.containerd.{plugin}' for plugin in _UNUSED_PLUGINS]}",
        "[grpc]",
        f"address = '{CONTAINERD_SOCKET}'",
        "[plugins.'io.containerd.internal.v1.opt']",
        f"path = '{folder / 'opt'}'",
        f"[plugins.'{images}']",
        f"snapshotter = '{snapshotter(folder)}'",
        f"[plugins.'{images}'.pinned_images]",
        f"sandbox = '{PAUSE}'",
        f"[plugins.'{runtime}']",
        "restrict_oom_score_adj = true",
        "disable_apparmor = true",
        f"[plugins.'{runtime}'.cni]",
        f"bin_dirs = ['{plugins}']",
        f"conf_dir = '{folder / 'cni'}'",
        f"[plugins.'{runtime}'.containerd]",
        f"default_runtime_name = '{next(iter(runtimes))}'",
    ]
    for handler, program in runtimes.items():
        lines += nvidia.handler_lines(f"plugins.'{runtime}'.containerd.runtimes.{handler}", program=program)
    return "\n".join(lines) + "\n"


def snapshotter(folder: Path) -> str:
    """Return overlayfs, or plain copies if the folder is on an overlay itself, as inside a container."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    kinds = {Path(row[1]): row[2] for row in mounts}
    nearest = next(parent for parent in (folder, *folder.parents) if parent in kinds or parent == parent.parent)
    return "native" if kinds.get(nearest) == "overlay" else "overlayfs"


def cni_configuration(folder: Path, record: NodeRecord, network: ClusterNetwork) -> dict[str, Any]:
    """Return a CNI configuration with a bridge per node and no NAT, since the cluster routes to every node's pods."""
    ranges = [[{"subnet": subnet}] for subnet in network.pods(record.number)]
    bridge = {
        "type": "bridge",
        "bridge": "pods0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": ranges,
            "routes": [{"dst": destination} for destination in network.routes_of_pods()],
            "dataDir": str(folder / "pod-addresses"),
        },
    }
    return {"cniVersion": "1.0.0", "name": "atoll", "plugins": [bridge]}


def network_commands(record: NodeRecord, network: ClusterNetwork, *, pid: int) -> list[list[str]]:
    """Return commands, run inside the cluster, that join a node to the bridge; `pid`: a process of the node."""
    outer = f"node{record.number}"
    inside = ["nsenter", f"--net=/proc/{pid}/ns/net"]
    return [
        ["ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", str(pid)],
        ["ip", "link", "set", outer, "master", "atoll0", "up"],
        [*inside, "ip", "link", "set", "eth0", "up"],
        *network.node_commands(record.number, inside=inside),
    ]


def _machine_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
