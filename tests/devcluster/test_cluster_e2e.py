"""A whole cluster with real nodes: its promises to tests, demo and users, and that it leaves nothing."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from devcluster import DevCluster, DevNodeSpec, cgroups, state
from devcluster.errors import AdminApiError, ClusterStateError
from devcluster.images import BUSYBOX

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="real nodes need root on Linux"),
]

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """Two real nodes and a stock scheduler."""
    nodes = [DevNodeSpec("dgx1", profile="dgx1-v100", labels={"gpu.scheduling/test": "yes"}), DevNodeSpec("dgx2")]
    with DevCluster.start(unique("dev"), nodes=nodes) as running:
        yield running


def unique(prefix: str) -> str:
    """A cluster name that no other run uses."""
    return f"{prefix}-{uuid4().hex[:6]}"


def eventually(question: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail with its name. An error of the API server is no answer yet."""
    deadline = time.monotonic() + WAIT_SECONDS
    last = ""
    while True:
        try:
            if question():
                return
        except AdminApiError as error:
            last = f" ({error})"
        assert time.monotonic() < deadline, f"{what} did not come true{last}"
        time.sleep(0.1)


def start_pod(cluster: DevCluster, script: str, **spec: object) -> str:
    """Create a pod of one busybox container; give its name."""
    name = unique("pod")
    container = {"name": "main", "image": BUSYBOX, "imagePullPolicy": "Never", "command": ["sh", "-c", script]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"dnsPolicy": "Default", "restartPolicy": "Never", "containers": [container], **spec},
    }
    cluster.api.request("POST", "/api/v1/namespaces/default/pods", pod)
    return name


def pod_status(cluster: DevCluster, name: str) -> dict[str, object]:
    """A pod's status."""
    status: dict[str, object] = cluster.api.get(f"/api/v1/namespaces/default/pods/{name}")["status"]
    return status


def only_container(cluster: DevCluster, name: str) -> dict[str, object]:
    """The status of a pod's one container."""
    statuses = pod_status(cluster, name)["containerStatuses"]
    assert isinstance(statuses, list)
    (status,) = statuses
    return dict(status)


def wait_phase(cluster: DevCluster, name: str, phase: str) -> None:
    """Wait until a pod is in a phase."""
    eventually(lambda: pod_status(cluster, name)["phase"] == phase, f"phase {phase} of {name}")


def test_nodes_are_ready_with_their_labels_and_addresses(cluster: DevCluster) -> None:
    """What the caller is told about a node is what Kubernetes knows of it."""
    for described in cluster.nodes:
        node = cluster.api.get(f"/api/v1/nodes/{described.name}")
        addresses = {row["type"]: row["address"] for row in node["status"]["addresses"]}
        assert addresses["InternalIP"] == described.ip
        assert node["status"]["nodeInfo"]["kubeletVersion"] == f"v{cluster.kubernetes}"
    assert cluster.api.get("/api/v1/nodes/dgx1")["metadata"]["labels"]["gpu.scheduling/test"] == "yes"


def test_a_scheduled_pod_runs_and_its_output_is_read_through_the_api(cluster: DevCluster) -> None:
    """The whole path: scheduler, kubelet, containerd, runc, CNI, and kubelet's log endpoint."""
    name = start_pod(cluster, "echo hello from $HOSTNAME")

    wait_phase(cluster, name, "Succeeded")

    eventually(lambda: cluster.kubectl("logs", name).stdout == f"hello from {name}\n", "the output of the pod")


def test_a_command_can_be_executed_in_a_container(cluster: DevCluster) -> None:
    """kubectl exec works through the relay."""
    name = start_pod(cluster, "exec sleep 600")
    wait_phase(cluster, name, "Running")

    def command_line() -> str:
        return cluster.kubectl("exec", name, "--", "cat", "/proc/1/cmdline").stdout

    eventually(
        lambda: command_line() == "sleep\x00600\x00", "the command line of the container, once its shell is gone"
    )


def test_pods_of_all_nodes_share_a_folder_with_locks(cluster: DevCluster) -> None:
    """An exclusive lock that a pod of one node holds is seen by a pod of the other: the witness against double use."""
    volumes = [{"name": "shared", "hostPath": {"path": str(cluster.shared_dir)}}]
    mounts = [{"name": "shared", "mountPath": "/shared"}]

    def start(node: str, script: str) -> str:
        container = {"name": "main", "image": BUSYBOX, "imagePullPolicy": "Never", "volumeMounts": mounts}
        container["command"] = ["sh", "-c", script]
        return start_pod(cluster, "", nodeName=node, volumes=volumes, containers=[container])

    holder = start("dgx1", "exec 9>/shared/gpu; flock -n 9 && touch /shared/held; exec sleep 600")
    eventually((cluster.shared_dir / "held").exists, "the lock of the first pod")
    contender = start("dgx2", "exec 9>/shared/gpu; flock -n 9")

    wait_phase(cluster, contender, "Failed")
    cluster.kubectl("delete", "pod", holder, "--grace-period=0", "--force", check=True)


def test_a_container_outlives_a_restart_of_its_kubelet(cluster: DevCluster) -> None:
    """kubelet and containers are separate processes, as on a real machine."""
    name = start_pod(cluster, "exec sleep 600", nodeName="dgx1")
    wait_phase(cluster, name, "Running")
    before = only_container(cluster, name)
    pid = cluster.processes()["kubelet@dgx1"].pid

    cluster.restart_kubelet("dgx1")

    assert cluster.processes()["kubelet@dgx1"].pid != pid
    eventually(lambda: cluster.kubectl("exec", name, "--", "true").returncode == 0, "a command in the container")
    eventually(lambda: only_container(cluster, name) == before, "the container to be ready as before")
    assert only_container(cluster, name)["containerID"] == before["containerID"]


def test_a_stopped_kubelet_keeps_its_containers_and_goes_on(cluster: DevCluster) -> None:
    """SIGSTOP plays a silent node: its containers run, and it answers again after SIGCONT."""

    def state_of_kubelet() -> str:
        script = 'grep ^State: "/proc/$(pidof kubelet)/status"'
        return cluster.run("sh", "-c", script, node="dgx2").stdout.split()[1]

    cluster.signal("kubelet@dgx2", "STOP")
    eventually(lambda: state_of_kubelet() == "T", "a stopped kubelet")
    cluster.signal("kubelet@dgx2", "CONT")

    eventually(lambda: cluster.api.get("/api/v1/nodes/dgx2/proxy/healthz") == "ok", "an answering kubelet")
    assert cluster.processes()["kubelet@dgx2"].running


def test_a_nodes_token_carries_the_nodes_name(cluster: DevCluster) -> None:
    """Policies can tell the agent of one node from that of another."""
    kubeconfig = cluster.service_account_kubeconfig("default", "default", node="dgx1")

    token = json.loads(kubeconfig.read_text())["users"][0]["user"]["token"]
    payload = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    assert claims["kubernetes.io"]["node"]["name"] == "dgx1"
    kubectl = cluster.api.get("/version")["gitVersion"]
    assert kubectl == f"v{cluster.kubernetes}"


def test_kubelet_answers_those_who_may_read_it(cluster: DevCluster) -> None:
    """Who is denied by RBAC or has no token gets nothing from a kubelet, who is allowed gets its pods."""
    account = "system:serviceaccount:default:default"
    kubeconfig = cluster.service_account_kubeconfig("default", "default", node="dgx1")
    token = json.loads(kubeconfig.read_text())["users"][0]["user"]["token"]
    url = f"https://{cluster.node('dgx1').ip}:{cluster.node('dgx1').kubelet_port}/pods"
    script = (
        "import ssl, sys, urllib.error, urllib.request as u\n"
        "request = u.Request(sys.argv[1], headers={'Authorization': f'Bearer {sys.argv[3]}'})\n"
        "try:\n    answer = u.urlopen(request, context=ssl.create_default_context(cafile=sys.argv[2]))\n"
        "except urllib.error.HTTPError as error:\n    answer = error\n"
        "print(answer.status)"
    )

    def status(bearer: str) -> str:
        authority = cluster.layout.pki / "ca.crt"
        result = cluster.run(sys.executable, "-c", script, url, authority, bearer, node="dgx1")
        return result.stdout.strip()

    assert status("nonsense") == "401"
    assert status(token) == "403"
    cluster.kubectl("create", "clusterrole", "kubelet-reader", "--verb=get", "--resource=nodes/proxy", check=True)
    cluster.kubectl(
        "create",
        "clusterrolebinding",
        "kubelet-reader",
        "--clusterrole=kubelet-reader",
        f"--user={account}",
        check=True,
    )
    eventually(lambda: status(token) == "200", "an allowed reader")


def test_the_scheduler_runs_under_a_service_account(cluster: DevCluster) -> None:
    """The scheduler can be started late, as whoever the manifests say, and replaces the one that ran."""
    cluster.kubectl("create", "serviceaccount", "scheduler", check=True)
    for role in ("system:kube-scheduler", "system:volume-scheduler"):
        binding = ["create", "clusterrolebinding", f"test-{role.rpartition(':')[2]}", f"--clusterrole={role}"]
        cluster.kubectl(*binding, "--serviceaccount=default:scheduler", check=True)

    cluster.start_scheduler(None, cluster.service_account_kubeconfig("default", "scheduler"))

    name = start_pod(cluster, "true")
    wait_phase(cluster, name, "Succeeded")


def test_a_spawned_process_sees_its_node(cluster: DevCluster) -> None:
    """An agent finds the node's own processes, kubelet folder and cgroups."""
    name = start_pod(cluster, "exec sleep 600", nodeName="dgx1")
    wait_phase(cluster, name, "Running")
    uid = cluster.api.get(f"/api/v1/namespaces/default/pods/{name}")["metadata"]["uid"]
    root = cluster.node("dgx1").cgroup_root
    script = (
        f'pidof kubelet && ls -d /var/lib/kubelet/pods/{uid} && find /sys/fs/cgroup -path "*{root}/*pod{uid}" | head -1'
    )

    cluster.spawn("probe", ["sh", "-c", script], node="dgx1")

    assert cluster.wait_exit("probe") == 0
    lines = cluster.logs("probe").read_text().split()
    assert len(lines) == 3
    assert uid in lines[2]


def test_a_node_cannot_change_the_machines_kernel(cluster: DevCluster) -> None:
    """kubelet sets memory and panic behaviour of its machine; here the machine is somebody's own."""
    for setting in ("vm/overcommit_memory", "kernel/panic"):
        value = Path("/proc/sys", setting).read_text().strip()
        result = cluster.run("sh", "-c", f"echo {value} > /proc/sys/{setting}", node="dgx1")
        assert result.returncode != 0, setting


def test_a_node_can_lose_its_power_and_come_back(cluster: DevCluster) -> None:
    """A stopped node leaves no process; started again it takes pods under its old name and address."""
    added = cluster.add_node(DevNodeSpec("spare"))
    name = start_pod(cluster, "exec sleep 600", nodeName="spare")
    wait_phase(cluster, name, "Running")

    cluster.stop_node("spare")

    eventually(lambda: cgroups.process_count(added.cgroup_root) == 0, "the end of every process of the node")
    assert not cluster.processes()["kubelet@spare"].running
    again = cluster.add_node(DevNodeSpec("spare"))
    assert again == added
    wait_phase(cluster, start_pod(cluster, "true", nodeName="spare"), "Succeeded")
    cluster.stop_node("spare")


def test_a_running_cluster_can_be_attached_to(cluster: DevCluster) -> None:
    """Another process drives the same cluster by its name."""
    attached = DevCluster.attach(cluster.name)

    assert attached.nodes == cluster.nodes
    assert attached.processes().keys() == cluster.processes().keys()
    assert attached.kubectl("get", "nodes", "-o", "name", check=True).stdout.split()[0] == "node/dgx1"


def test_a_second_cluster_uses_the_same_addresses(cluster: DevCluster) -> None:
    """Clusters side by side do not see each other, and ending one leaves the other whole."""
    with DevCluster.start(unique("dev"), nodes=[DevNodeSpec("dgx1")]) as second:
        assert second.node("dgx1").ip == cluster.node("dgx1").ip
        name = start_pod(second, "exec sleep 600", nodeName="dgx1")
        wait_phase(second, name, "Running")
        with pytest.raises(ClusterStateError, match="is running already"):
            DevCluster.start(second.name)
    assert cluster.api.get("/readyz") == "ok"
    eventually(lambda: remains(second.name, nodes=["dgx1"]) == [], "the end of all that was the second cluster's")


def test_fake_nodes_take_pods(cluster: DevCluster) -> None:
    """kwok plays the pods of nodes that do not exist."""
    del cluster
    with DevCluster.start(unique("fake")) as control_plane:
        control_plane.start_kwok()
        control_plane.create_fake_nodes(20, labels={"fake": "yes"}, allocatable={"gpu.scheduling/gpu": "8"})
        name = start_pod(control_plane, "true", nodeSelector={"fake": "yes"})
        wait_phase(control_plane, name, "Running")

        control_plane.kubectl("delete", "pod", name, "--wait=false", check=True)

        def gone() -> bool:
            return control_plane.kubectl("get", "pod", name).returncode != 0

        eventually(gone, "the end of the fake pod")


HARD_CODED = (
    *("/etc/cni", "/etc/kubernetes", "/opt/cni", "/opt/containerd", "/run/containerd", "/run/netns"),
    *("/usr/libexec/kubernetes", "/var/lib/cni", "/var/lib/containerd", "/var/lib/kubelet", "/var/log/pods"),
)
"""Folders that kubelet, containerd and CNI plugins make on a machine unless they are kept from it."""
PRESENT = frozenset(folder for folder in HARD_CODED if Path(folder).exists())

OWNER = """
import sys, time
from devcluster import DevCluster, DevNodeSpec
cluster = DevCluster.start(sys.argv[1], nodes=[DevNodeSpec("dgx1")])
cluster.spawn("component", ["sleep", "86399"])
pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"nodeName": "dgx1", "containers": [
    {"name": "main", "image": "localhost/busybox:1", "imagePullPolicy": "Never", "command": ["sleep", "86399"]}]}}
cluster.api.request("POST", "/api/v1/namespaces/default/pods", pod)
while cluster.api.get("/api/v1/namespaces/default/pods/p")["status"]["phase"] != "Running":
    time.sleep(0.1)
print("running", flush=True)
time.sleep(600)
"""


def remains(name: str, *, nodes: list[str]) -> list[str]:
    """Everything on this machine that still belongs to a cluster: folders, processes, mounts, cgroups, interfaces."""
    folder = state.cluster_folder(name)
    found = [str(folder)] if folder.exists() else []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    for hierarchy in cgroups.hierarchies(Path("/proc/mounts").read_text()):
        found += [
            str(hierarchy / f"atoll-{name}-{node}") for node in nodes if (hierarchy / f"atoll-{name}-{node}").exists()
        ]
    found += [folder for folder in HARD_CODED if Path(folder).exists() and folder not in PRESENT]
    found += [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(("atoll", "node", "pods"))]
    return found


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)  # the last is what tests/devcluster/test_demo_e2e.py sends
def test_nothing_is_left_when_the_owner_dies(number: signal.Signals) -> None:
    """Whatever ends the process that started a cluster, the cluster ends with it: pods, mounts, cgroups and files."""
    name = unique("owned")
    owner = subprocess.Popen([sys.executable, "-c", OWNER, name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "running\n"
        assert remains(name, nodes=["dgx1"]) != []

        owner.send_signal(number)

        owner.wait(timeout=WAIT_SECONDS)
    eventually(lambda: remains(name, nodes=["dgx1"]) == [], "an empty machine")


def left_to_the_kernel(name: str, folder: Path) -> list[str]:
    """What still has to go without anybody's help: all that remains but the cluster's folder and its cgroups."""
    return [item for item in remains(name, nodes=["dgx1"]) if "/atoll-" not in item and item != str(folder)]


def test_a_killed_cluster_is_swept_by_the_next_start() -> None:
    """If the supervisor itself is killed, processes and mounts go with it, folders and cgroups with the next start."""
    name = unique("killed")
    killed = DevCluster.start(name, nodes=[DevNodeSpec("dgx1")])
    assert killed._launched is not None
    killed._launched.process.kill()
    killed._launched.process.wait(timeout=WAIT_SECONDS)
    eventually(lambda: not state.is_alive(killed.layout.folder), "the end of the supervisor")

    eventually(lambda: not left_to_the_kernel(name, killed.layout.folder), "the end of its processes and mounts")
    with DevCluster.start(unique("next")):
        eventually(lambda: remains(name, nodes=["dgx1"]) == [], "an empty machine")
