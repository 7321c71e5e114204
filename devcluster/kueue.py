"""Runs the real Kueue in a development cluster: its shipped manifests, and its manager as a process.

The manifests come from the same Go module as the program. This module does the work of a Deployment and kubelet: the
process gets a token of the shipped ServiceAccount, the webhook's Service gets an endpoint, and the certificate from
Kueue's Secret is written where kubelet would mount it.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from devcluster.addresses import ClusterNetwork
from devcluster.build import ensure_binaries
from devcluster.cluster import DevCluster
from devcluster.errors import AdminApiError, BuildError, DevclusterError
from devcluster.paths import MODULES, cache_root
from devcluster.programs import KUEUE
from devcluster.toolchain import find_toolchain
from devcluster.waiting import wait_until

NAMESPACE: Final = "kueue-system"
PROCESS: Final = "kueue"
WEBHOOK_PORT: Final = 9543
READY_SECONDS: Final = 240.0

_ACCOUNT = "kueue-controller-manager"
_SERVICE = "kueue-webhook-service"
_SECRET = "kueue-webhook-server-cert"  # noqa: S105 - the name of a Secret
_FILES = ("ca.crt", "tls.crt", "tls.key")
_LEFT_OUT = ("Deployment", "ConfigMap", "APIService")
"""Omitted: our process replaces the Deployment, and the aggregated API for queues needs its own certificates."""
_PROBE = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "ResourceFlavor",
    "metadata": {"name": "atoll-probe"},
}


class Kueue:
    """Kueue on one cluster."""

    def __init__(self, cluster: DevCluster) -> None:
        """Use the cluster; `install` builds and starts Kueue."""
        self.cluster = cluster
        self._folder = cluster.layout.folder / "kueue"

    def install(self, *, settings: dict[str, Any] | None = None) -> None:
        """Apply the manifests and start the manager; return when it serves. Raises DevclusterError.

        `settings` replaces parts of Kueue's configuration, such as {"waitForPodsReady": {...}}.
        """
        objects = list(fit_for_a_process(shipped_manifests(self.cluster, self._program().parent)))
        objects.append(_endpoints(self.cluster.layout.network))
        done = self.cluster.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(objects))
        if done.returncode != 0:
            raise DevclusterError(f"cannot apply Kueue's manifests:\n{done.stderr.strip()}")
        self._folder.mkdir(exist_ok=True)
        host = self.cluster.layout.network.bridge
        made = configuration(self._folder, settings or {}, host=host)
        (self._folder / "config.yaml").write_text(yaml.safe_dump(made))
        self.start(wait=False)
        wait_until(self._lay_certificate, what="Kueue's certificate", **self._watched())
        self.stop()
        self.start()

    def start(self, *, wait: bool = True) -> None:
        """Start the manager; with `wait`, return when the API server reaches its webhooks. Raises StartError."""
        identity = self.cluster.service_account_kubeconfig(NAMESPACE, _ACCOUNT)
        flags = (f"--config={self._folder / 'config.yaml'}", f"--kubeconfig={identity}")
        self.cluster.spawn(PROCESS, [self._program(), *flags, "--feature-gates=VisibilityOnDemand=false"])
        if wait:
            wait_until(self.is_serving, what="Kueue", **self._watched())

    def stop(self) -> None:
        """Kill the manager; all its state is in the API server."""
        self.cluster.signal(PROCESS, "KILL")
        self.cluster.wait_exit(PROCESS)

    def is_serving(self) -> bool:
        """True if Kueue's webhooks answer; its /readyz reports that a second too early."""
        try:
            path = "/apis/kueue.x-k8s.io/v1beta2/resourceflavors?dryRun=All"
            self.cluster.api.request("POST", path, _PROBE)
        except AdminApiError:
            return False
        return True

    def _program(self) -> Path:
        return ensure_binaries(self.cluster.kubernetes, real_nodes=False, kueue=True)["kueue"]

    def _lay_certificate(self) -> bool:
        """Copy the certificate to where kubelet would mount the Secret; False until Kueue has written it."""
        secret = self.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/{_SECRET}")
        data = secret.get("data") or {}
        if not all(data.get(name) for name in _FILES):
            return False
        for name in _FILES:
            file = self._folder / name
            file.touch(mode=0o600)
            file.write_bytes(base64.b64decode(data[name]))
        return True

    def _watched(self) -> dict[str, Any]:
        return {
            "timeout_seconds": READY_SECONDS,
            "control": self.cluster.control,
            "process": PROCESS,
            "log": self.cluster.logs(PROCESS),
        }


def configuration(folder: Path, settings: dict[str, Any], *, host: str) -> dict[str, Any]:
    """Return Kueue's configuration for a process whose certificate is in `folder`."""
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": "127.0.0.1:9544"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": host, "port": WEBHOOK_PORT, "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": True, "webhookServiceName": _SERVICE, "webhookSecretName": _SECRET},
        "clientConnection": {"qps": 200, "burst": 400},
        "integrations": {"frameworks": ["batch/job", "pod"]},
        **settings,
    }


def shipped_manifests(cluster: DevCluster, folder: Path) -> str:
    """Return the manifests of the pinned Kueue, rendered once and kept in `folder`. Raises BuildError."""
    file = folder / "kueue.yaml"
    if not file.exists():
        rendered = cluster.kubectl("kustomize", str(_module_folder() / "config" / "default"))
        if rendered.returncode != 0:
            raise BuildError(f"cannot render Kueue's manifests: {rendered.stderr.strip()[-500:]}")
        unfinished = file.with_name(f".kueue-{os.getpid()}.yaml")
        unfinished.write_text(rendered.stdout)
        unfinished.rename(file)
    return file.read_text()


def fit_for_a_process(manifests: str) -> Iterator[dict[str, Any]]:
    """Yield the objects to apply if a process outside any pod serves the webhooks."""
    for body in _objects(manifests):
        if body["kind"] in _LEFT_OUT:
            continue
        if body["kind"] == "Service":
            body["spec"].pop("selector", None)
        yield body


def _objects(manifests: str) -> Iterable[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return (body for body in yaml.load_all(manifests, Loader=loader) if body)


def _endpoints(network: ClusterNetwork) -> dict[str, Any]:
    labels = {"kubernetes.io/service-name": _SERVICE, "endpointslice.kubernetes.io/managed-by": "atoll-devcluster"}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"{_SERVICE}-dev", "namespace": NAMESPACE, "labels": labels},
        "addressType": network.slice_type,
        "ports": [{"name": "", "port": WEBHOOK_PORT, "protocol": "TCP"}],
        "endpoints": [{"addresses": [network.bridge], "conditions": {"ready": True}}],
    }


def _module_folder() -> Path:
    """Return Go's folder of the pinned module; fetch it if missing. Raises BuildError."""
    toolchain = find_toolchain(cache_root(), report=lambda _line: None)
    command = [toolchain.command, "mod", "download", "-json", KUEUE]
    environment = {**os.environ, "GOFLAGS": "", "GOWORK": "off"}
    done = subprocess.run(
        command, cwd=MODULES / "kueue", env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode != 0:
        raise BuildError(f"cannot fetch {KUEUE}: {done.stderr.strip()[-500:]}")
    return Path(json.loads(done.stdout)["Dir"])
