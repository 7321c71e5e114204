"""Command lines and configuration files that decide what a cluster and its nodes do."""

from __future__ import annotations

import json
import os
import re
import tomllib
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path

import pytest
import yaml

from devcluster import control_plane, fake_nodes, node
from devcluster.addresses import ClusterNetwork, IpFamily
from devcluster.build import Binaries
from devcluster.certificates import CertificateAuthority
from devcluster.control_plane import Layout
from devcluster.errors import StartError
from devcluster.node import DevNodeSpec, NodeFiles
from devcluster.nvidia import NvidiaRuntime
from devcluster.system_programs import SystemPrograms

PROGRAMS = (
    *("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "kwok"),
    *("bridge", "pause", "kubelet", "containerd", "nvidia-container-runtime", "nvidia-cdi-hook"),
)
BINARIES = Binaries(paths={name: Path("/cache") / name for name in PROGRAMS})
SYSTEM = SystemPrograms(runc=Path("/cache/runc"), runc_libraries=None, busybox=Path("/cache/busybox"))


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        pytest.param("api_server", "--authorization-mode=Node,RBAC", id="rights are checked"),
        pytest.param("api_server", "--enable-admission-plugins=NodeRestriction", id="kubelets write only their node"),
        pytest.param("api_server", "--enable-aggregator-routing=true", id="webhooks by Service work"),
        pytest.param("api_server", "--bind-address=10.255.0.1", id="the API server is on the bridge"),
        pytest.param("controller_manager", "--bind-address=127.0.0.1", id="the controller manager is on loopback"),
        pytest.param("controller_manager", "--node-monitor-grace-period=50s", id="a silent node is lost soon"),
        pytest.param("etcd", "--listen-client-urls=http://127.0.0.1:2379", id="etcd is on loopback"),
    ],
)
def test_the_control_plane_is_started_with(command: str, flag: str, tmp_path: Path) -> None:
    """Flags on which promises of the cluster rest."""
    line = getattr(control_plane, f"{command}_command")(BINARIES, Layout(tmp_path))

    assert flag in line


def test_the_schedulers_configuration_is_kept_but_for_its_connection() -> None:
    """The shipped configuration runs as it is; only who the scheduler is, and where, is set."""
    given = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {qps: 7, kubeconfig: /etc/somewhere}
extenders: [{urlPrefix: "http://127.0.0.1:8888"}]
"""

    config = yaml.safe_load(control_plane.scheduler_configuration(given, kubeconfig=Path("/inside")))

    assert config["extenders"] == [{"urlPrefix": "http://127.0.0.1:8888"}]
    assert config["clientConnection"] == {"qps": 7, "burst": 1000, "kubeconfig": "/inside"}


@pytest.mark.parametrize("text", ["", "[]", "kind: Pod"])
def test_what_is_no_scheduler_configuration_is_refused(text: str) -> None:
    """A wrong file is named at once instead of a scheduler that never gets healthy."""
    with pytest.raises(StartError, match="not a KubeSchedulerConfiguration"):
        control_plane.scheduler_configuration(text, kubeconfig=Path("/inside"))


@pytest.fixture
def files(tmp_path: Path) -> NodeFiles:
    """The written files of a node."""
    layout = Layout(tmp_path)
    written = NodeFiles(layout=layout, record=DevNodeSpec("dgx1", labels={"a": "b"}).numbered(3), cluster="demo")
    written.write(BINARIES, SYSTEM, control_plane.authority(layout))
    return written


def test_a_nodes_pods_live_below_a_cgroup_of_its_own(files: NodeFiles) -> None:
    """Agents and sweeps find a node's pods by the cgroup that its kubelet uses."""
    config = yaml.safe_load((files.folder / "kubelet.yaml").read_text())

    assert config["cgroupRoot"] == "/atoll-demo-dgx1" == node.describe("demo", files.record, files.layout).cgroup_root


def test_kubelet_asks_the_api_server_who_may_read_it(files: NodeFiles) -> None:
    """An agent's token may read pods from the kubelet, a stranger may not."""
    config = yaml.safe_load((files.folder / "kubelet.yaml").read_text())

    assert config["authorization"]["mode"] == "Webhook"
    assert config["authentication"]["webhook"]["enabled"] is True
    assert config["authentication"]["anonymous"]["enabled"] is False


def test_kubelet_makes_no_folder_outside_of_its_own(files: NodeFiles) -> None:
    """Where it may choose, kubelet writes below the node's folder; the defaults would leave folders on the machine."""
    config = yaml.safe_load((files.folder / "kubelet.yaml").read_text())

    for setting in ("staticPodPath", "volumePluginDir", "resolvConf"):
        assert Path(config[setting]).is_relative_to(files.folder), setting


def test_containerd_keeps_to_the_nodes_folder_and_pulls_nothing(files: NodeFiles) -> None:
    """The configuration is valid TOML and names no path that another node or the host uses."""
    config = tomllib.loads((files.folder / "containerd.toml").read_text())

    assert Path(config["root"]).is_relative_to(files.folder)
    assert Path(config["plugins"]["io.containerd.internal.v1.opt"]["path"]).is_relative_to(files.folder)
    assert config["plugins"]["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"] == "localhost/pause:1"
    runc = config["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]["runc"]
    assert runc["options"] == {"BinaryName": "/cache/runc", "SystemdCgroup": False}


def test_runc_is_the_default_unless_the_node_is_to_be_careless(tmp_path: Path) -> None:
    """NVIDIA's runtime is a handler beside runc; only where it is asked for it is everybody's."""
    layout = Layout(tmp_path)
    found = {}
    for runtime in NvidiaRuntime:
        written = NodeFiles(layout=layout, record=DevNodeSpec("dgx1", nvidia=runtime).numbered(3), cluster="demo")
        written.write(BINARIES, SYSTEM, control_plane.authority(layout))
        config = tomllib.loads((written.folder / "containerd.toml").read_text())
        containerd = config["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]
        found[runtime] = (containerd["default_runtime_name"], set(containerd["runtimes"]))

    handlers = {"runc", "nvidia", "nvidia-strict"}
    assert found == {
        NvidiaRuntime.NONE: ("runc", {"runc"}),
        NvidiaRuntime.HANDLER: ("runc", handlers),
        NvidiaRuntime.DEFAULT: ("nvidia", handlers),
    }


def test_nvidias_runtime_has_a_configuration_per_handler(tmp_path: Path) -> None:
    """Both run the same program and the real runc; they differ in whom they believe the variable."""
    layout = Layout(tmp_path)
    record = DevNodeSpec("dgx1", nvidia=NvidiaRuntime.HANDLER).numbered(3)
    written = NodeFiles(layout=layout, record=record, cluster="demo")
    written.write(BINARIES, SYSTEM, control_plane.authority(layout))

    accepts = {}
    for handler in ("nvidia", "nvidia-strict"):
        config = tomllib.loads((written.folder / f"{handler}.toml").read_text())
        accepts[handler] = config["accept-nvidia-visible-devices-envvar-when-unprivileged"]
        assert config["nvidia-container-runtime"]["runtimes"] == ["/cache/runc"]
        assert config["nvidia-container-runtime"]["modes"]["cdi"]["spec-dirs"] == [str(written.folder / "gpu")]
        script = written.folder / f"{handler}.sh"
        assert os.access(script, os.X_OK)
        assert f"{handler}.toml" in script.read_text()

    assert accepts == {"nvidia": True, "nvidia-strict": False}


def test_kubelet_registers_the_nodes_labels_and_address(files: NodeFiles) -> None:
    """Labels are there from the node's first moment, also when it registers anew."""
    command = files.kubelet_command(BINARIES)

    assert "--node-labels=a=b" in command
    assert "--node-ip=10.255.0.14" in command


@pytest.mark.parametrize(("family", "versions"), [("ipv4", [4]), ("ipv6", [6]), ("dual", [4, 6])])
def test_nodes_of_a_cluster_never_share_addresses(family: str, versions: list[int]) -> None:
    """Every number that may be given leads to addresses of its own, of each family of the cluster."""
    network, numbers = ClusterNetwork(IpFamily(family)), range(node.NODES_MAX)
    lengths = {4: 24, 6: 64}
    bridges = [ip_interface(f"{one}/{lengths[ip_address(one).version]}") for one in network.bridges]

    for position, version in enumerate(versions):
        own = {ip_address(network.node(number)[position]) for number in numbers}
        pods = {ip_network(network.pods(number)[position]) for number in numbers}
        assert len(own - {bridges[position].ip}) == len(pods) == node.NODES_MAX
        assert all(one in bridges[position].network for one in own)
        assert {one.version for one in own} == {one.version for one in pods} == {version}
    assert [ip_network(one).version for one in network.service_networks.split(",")] == versions
    assert ip_address(network.service) in ip_network(network.service_networks.split(",")[0])


def test_a_cluster_of_ipv6_names_no_other_address(tmp_path: Path) -> None:
    """But for loopback: API server, kubelet and pods have addresses and URLs of IPv6 alone."""
    layout = Layout(tmp_path, ClusterNetwork(IpFamily.IPV6))
    record = DevNodeSpec("n").numbered(3)
    files = NodeFiles(layout, record, "dev")
    lines = [
        *control_plane.api_server_command(BINARIES, layout),
        *files.kubelet_command(BINARIES),
        json.dumps(node.cni_configuration(tmp_path, record, layout.network)),
        *(" ".join(command) for command in node.network_commands(record, layout.network, pid=7)),
        *layout.network.bridge_commands("atoll0"),
    ]

    assert layout.server_inside == "https://[fd00:255::1]:6443"
    assert not re.findall(r"\b10\.\d+\.\d+\.\d+", "\n".join(lines))
    assert "--node-ip=fd00:255::14" in lines


def test_a_node_offers_what_it_is_told_to() -> None:
    """The rest of the machine is held back."""
    record = DevNodeSpec("small", cpu=1, memory_bytes=1000).numbered(0)

    assert node.reserved(record, cpus=4, memory_bytes=5000) == {"cpu": "3", "memory": "4000"}
    assert node.reserved(DevNodeSpec("whole").numbered(0), cpus=4, memory_bytes=5000) == {}


def test_a_node_cannot_offer_more_than_there_is() -> None:
    """Asking for more is an error with both numbers, not a node that never gets Ready."""
    with pytest.raises(StartError, match="cannot offer 8 of cpu: this machine has 4"):
        node.reserved(DevNodeSpec("big", cpu=8).numbered(0), cpus=4, memory_bytes=5000)


def test_fake_nodes_are_ready_and_labelled_by_number() -> None:
    """Thousands of nodes of a rack structure are one call."""
    requests = list(
        fake_nodes.node_requests(
            3, prefix="f", labels=lambda number: {"rack": str(number // 2)}, allocatable={"gpu": "8"}
        )
    )

    objects = [request.body for request in requests]
    assert [item["metadata"]["name"] for item in objects] == ["f-0", "f-1", "f-2"]
    assert [item["metadata"]["labels"]["rack"] for item in objects] == ["0", "0", "1"]
    assert all(item["status"]["allocatable"]["gpu"] == "8" for item in objects)
    assert all({"type": "Ready", "status": "True"} in item["status"]["conditions"] for item in objects)


def test_fake_pods_end_before_they_go() -> None:
    """A deleted pod shows terminated containers first, as under a kubelet; otherwise nothing proves its end."""
    stages = {stage["metadata"]["name"]: stage["spec"] for stage in yaml.safe_load_all(fake_nodes.stages())}

    assert "terminated" in stages["pod-ends"]["next"]["statusTemplate"]
    assert "PodCompleted" in stages["pod-ends"]["next"]["statusTemplate"]
    assert stages["pod-goes"]["next"] == {"delete": True}
    phases = stages["pod-goes"]["selector"]["matchExpressions"][1]["values"]
    assert set(phases) == {"Succeeded", "Failed"}


def test_an_authority_is_made_once(tmp_path: Path) -> None:
    """Attaching to a cluster must not replace its authority."""
    layout = Layout(tmp_path)
    first = control_plane.authority(layout).pair.certificate.read_bytes()

    again = CertificateAuthority(layout.pki, now=control_plane.authority(layout)._now)

    assert again.pair.certificate.read_bytes() == first


def test_a_machine_that_has_run_out_says_of_what() -> None:
    """The log of a kubelet that dies for want of inotify instances is turned into the way out, in front of the log."""
    log_tail = 'E1128 kubelet.go:1833] "Failed to start cAdvisor" err="inotify_init: too many open files"'
    error = StartError("kubelet@hopper", problem="has ended", log_tail=log_tail)

    assert str(error).startswith("kubelet@hopper has ended; this machine's inotify instances are used up")
    assert "sysctl fs.inotify.max_user_instances=1024" in str(error)
    assert str(error).endswith(log_tail)
