"""Atoll as a Helm release on real nodes: installed, upgraded, rolled back and uninstalled as by an administrator.

Every part of Atoll runs in a pod: the image is that of `make image`, the scheduler is the chart's own, the agents find
the driver's library where NVIDIA's runtime mounts it, and every part uses the ServiceAccount of its pod.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from atoll.api import names
from devcluster import DevCluster, DevNodeSpec, chart
from devcluster.addresses import IpFamily
from devcluster.atoll_image import write_atoll_image
from devcluster.cgroups import hierarchies
from devcluster.images import ensure_image, program_image
from devcluster.installation import Installation
from devcluster.machines import GpuMachine
from devcluster.nvidia import NvidiaRuntime
from devcluster.paths import cache_root
from devcluster.state import cgroup_root

GPU_LABEL = {"nvidia.com/gpu.present": "true"}
WORKLOADS = (
    "deployment/atoll-controllers",
    "deployment/atoll-webhook",
    "deployment/atoll-scheduler",
    "daemonset/atoll-agent",
)
ROLLOUT = "400s"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/zz-atoll-webhook"


def home(part: str) -> str:
    """Return the namespace of a part: agents, which may see their machines, have one of their own."""
    return names.HEARTBEAT_NAMESPACE if part.endswith("agent") else names.SYSTEM_NAMESPACE


def gpu_node(name: str, profile: str) -> DevNodeSpec:
    """Return a node as NVIDIA's feature discovery and toolkit leave it."""
    return DevNodeSpec(name, profile=profile, nvidia=NvidiaRuntime.HANDLER, labels=GPU_LABEL)


def kill_processes(cluster: str, uid: str) -> set[int]:
    """Kill every process of a pod and return their ids: those in its cgroups, wherever this machine keeps them."""
    found: set[int] = set()
    for hierarchy in hierarchies(Path("/proc/mounts").read_text()):
        for file in hierarchy.glob(f"{cgroup_root(cluster, '*')[1:]}/**/pod{uid}/**/cgroup.procs"):
            found.update(map(int, file.read_text().split()))
    for process in found:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return found


class InPods(Installation):
    """Atoll whose parts are pods: kubelet starts again what ends."""

    def revive(self) -> None:
        """Leave that to kubelet."""

    def log_lines(self, name: str) -> list[str]:
        """Return what all pods of a part have printed."""
        words = ("-n", names.SYSTEM_NAMESPACE, "logs", "-l", f"app.kubernetes.io/component={name}", "--tail=-1")
        return self.cluster.kubectl(*words).stdout.splitlines()


class ChartRelease:
    """The release `atoll` on one cluster."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.installation = InPods(cluster)

    @classmethod
    @contextmanager
    def cluster_for(
        cls, nodes: Sequence[DevNodeSpec], *, ip_family: IpFamily = IpFamily.IPV4
    ) -> Iterator[ChartRelease]:
        """Start a cluster with the GPUs of its profiles, with images, and with nothing of Atoll."""
        name = f"pods-{uuid4().hex[:6]}"
        with DevCluster.start(name, nodes=nodes, scheduler=True, ip_family=ip_family) as cluster:
            release = cls(cluster)
            release.load_image("atoll:0.1.0")
            program = cluster.program("kube-scheduler")
            reference = f"docker.io/library/kube-scheduler:v{cluster.kubernetes}"
            cluster.load_image(ensure_image(cache_root(), program_image(reference, program)))
            for node in filter(lambda node: node.profile, cluster.nodes):
                GpuMachine(node.gpu_folder, node.profile, seed=node.name, library_in_containers=True).plug()
            yield release

    def load_image(self, name: str) -> None:
        """Give every node Atoll's image of today's code under that name."""
        file = self.cluster.layout.folder / "atoll.tar"
        write_atoll_image(file, reference=f"docker.io/library/{name}")
        self.cluster.load_image(file)

    # What an administrator does

    def install(self, *words: str | Path, beside: bool = False) -> None:
        """Install the chart, wait for every part, and stop the scheduler that Atoll's replaces, or leave it beside."""
        place = ("--namespace", chart.NAMESPACE, "--create-namespace")
        self._helm("install", chart.RELEASE, chart.CHART, *place, "--values", self._values(), *words)
        self.wait_rollouts()
        if not beside:
            self.cluster.stop_scheduler()

    def upgrade(self, package: Path, *words: str | Path) -> None:
        """Upgrade to another chart, with the values of this cluster, and wait for every part."""
        self._helm(
            "upgrade", chart.RELEASE, package, "--namespace", chart.NAMESPACE, "--values", self._values(), *words
        )
        self.wait_rollouts()

    def rollback(self, revision: int) -> None:
        """Go back to an earlier revision and wait for every part."""
        self._helm("rollback", chart.RELEASE, str(revision), "--namespace", chart.NAMESPACE)
        self.wait_rollouts()

    def kill(self, pod: str) -> None:
        """End a pod of Atoll's at once, by SIGKILL to its processes: none can give back what it leads."""
        uid = self.kubectl("get", "pod", pod, "-o", "jsonpath={.metadata.uid}").stdout
        killed = kill_processes(self.cluster.name, uid)
        assert killed, f"no process of {pod} was found"
        done = self.kubectl("delete", "pod", pod, "--force", "--grace-period=0")
        assert done.returncode == 0, done.stderr

    def uninstall(self) -> None:
        """Take Atoll away; pods that run go on."""
        self._helm("uninstall", chart.RELEASE, "--namespace", chart.NAMESPACE, "--wait", "--timeout", "5m")

    def _helm(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        done = chart.helm(*words, kubeconfig=self.cluster.kubeconfig)
        assert done.returncode == 0, f"helm {words[0]}: {done.stdout}{done.stderr}{self.describe()}"
        return done

    def wait_rollouts(self) -> None:
        """Wait until every replica of every part is new and available."""
        for target in WORKLOADS:
            done = self.kubectl("rollout", "status", target, f"--timeout={ROLLOUT}", namespace=home(target))
            assert done.returncode == 0, f"{target}: {done.stdout}{done.stderr}{self.describe()}"

    def _values(self) -> Path:
        """Write what differs on this cluster, as its administrator would.

        No node without GPUs, the webhook's RuntimeClass, a poll interval for impatient people, and what several nodes
        on one machine do not share with it: the root of their cgroups, and the id of their boot.
        """
        on_node = {"name": "boot-id", "hostPath": {"path": "/proc/sys/kernel/random/boot_id", "type": "File"}}
        values: dict[str, Any] = {
            "avoidGpuNodes": "preferred",
            "scheduler": {"image": {"repository": "kube-scheduler"}},
            "webhook": {"injectRuntimeClass": True},
            "agent": {
                "extraArgs": [
                    f"--cgroup-root={cgroup_root(self.cluster.name, '$(ATOLL_AGENT_NODE)')}",
                    "--boot-id-file=/host/boot-id",
                    "--poll-seconds=5",
                    "--start-jitter-seconds=0.1",
                ],
                "extraVolumes": [on_node],
                "extraVolumeMounts": [{"name": "boot-id", "mountPath": "/host/boot-id", "readOnly": True}],
            },
        }
        file = self.cluster.layout.folder / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    # What an administrator looks at

    def kubectl(self, *words: str, namespace: str = names.SYSTEM_NAMESPACE) -> subprocess.CompletedProcess[str]:
        """Run kubectl in a namespace of Atoll's."""
        return self.cluster.kubectl("-n", namespace, *words)

    def pods(self, component: str) -> dict[str, dict[str, Any]]:
        """Return the pods of a part that are not on their way out, by name."""
        selector = f"labelSelector=app.kubernetes.io%2Fname%3Datoll%2Capp.kubernetes.io%2Fcomponent%3D{component}"
        items = self.cluster.api.get(f"/api/v1/namespaces/{home(component)}/pods?{selector}")["items"]
        found = {item["metadata"]["name"]: item for item in items}
        return {name: item for name, item in found.items() if "deletionTimestamp" not in item["metadata"]}

    def bundles(self) -> set[str]:
        """Return whom the API server trusts to be the webhook."""
        configuration = self.cluster.api.get(CONFIGURATION)
        return {webhook["clientConfig"]["caBundle"] for webhook in configuration["webhooks"]}

    def leadership(self, lease: str) -> dict[str, Any]:
        """Return what that Lease says: who leads, since when, and when it was heard of last."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{names.SYSTEM_NAMESPACE}/leases/{lease}"
        spec: dict[str, Any] = self.cluster.api.get(path)["spec"]
        return spec

    def leader(self, lease: str) -> str:
        """Return the pod that leads by that Lease, "" when nobody does."""
        holder: str = self.leadership(lease).get("holderIdentity", "")
        return holder.partition("_")[0]

    def describe(self) -> str:
        """Return what an administrator would look at first."""
        told = ""
        for namespace in (names.SYSTEM_NAMESPACE, names.HEARTBEAT_NAMESPACE):
            pods = self.kubectl("get", "pods", "-o", "wide", namespace=namespace).stdout
            events = self.kubectl("get", "events", "--sort-by=.lastTimestamp", namespace=namespace).stdout
            words = ("logs", "-l", "app.kubernetes.io/name=atoll", "--all-containers", "--tail=15", "--prefix")
            told += f"\n{pods}\n{events[-4000:]}\n{self.kubectl(*words, namespace=namespace).stdout[-8000:]}"
        return told
