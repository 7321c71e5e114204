"""Runs operators in a development cluster: their shipped manifests, and their manager as a process.

The manifests come from the same Go module as the program. This module does the work of a Deployment and kubelet: the
process gets a token of the shipped ServiceAccount, the webhook's Service gets an endpoint, and the certificate from
the operator's Secret is written where kubelet would mount it.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from devcluster.addresses import ClusterNetwork
from devcluster.cluster import DevCluster
from devcluster.errors import AdminApiError, BuildError, DevclusterError
from devcluster.paths import MODULES, cache_root
from devcluster.toolchain import find_toolchain
from devcluster.waiting import wait_until

READY_SECONDS: Final = 240.0

_FILES = ("ca.crt", "tls.crt", "tls.key")
_LEFT_OUT = ("Deployment", "ConfigMap", "APIService")
"""Omitted: our process replaces the Deployment, and the aggregated API for queues needs its own certificates."""


class OperatorProcess(ABC):
    """An operator on one cluster. Subclasses say where it comes from and how its process is called."""

    name: ClassVar[str]
    """Of the program, the process and the operator's folder in the cluster."""
    title: ClassVar[str]
    go_module: ClassVar[str]
    module_folder: ClassVar[str]
    """The folder in devcluster/modules that pins the Go module."""
    manifests: ClassVar[str] = "config/default"
    left_out: ClassVar[tuple[str, ...]] = _LEFT_OUT
    namespace: ClassVar[str]
    account: ClassVar[str]
    webhook_service: ClassVar[str] = ""
    webhook_secret: ClassVar[str] = ""
    webhook_port: ClassVar[int] = 0
    webhook_port_name: ClassVar[str] = ""
    """As in the Service."""
    probe: ClassVar[tuple[str, Mapping[str, Any]]]
    """Path and body of a creation that is accepted once the operator serves."""

    def __init__(self, cluster: DevCluster) -> None:
        """Use the cluster; `install` builds and starts the operator."""
        self.cluster = cluster
        self.folder = cluster.layout.folder / self.name

    @abstractmethod
    def program(self) -> Path:
        """Return the program; build it if missing. Raises BuildError."""

    def configuration(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:  # noqa: ARG002 - for subclasses
        """Return the content of config.yaml, with parts replaced by `settings`; None for an operator without one."""
        return None

    @abstractmethod
    def arguments(self, kubeconfig: Path) -> tuple[str, ...]:
        """Return the arguments of the process."""

    def adapt(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a shipped object as it is applied."""
        return body

    def environment(self) -> Mapping[str, str]:
        """Return what the process gets beside this process's environment."""
        return {}

    def install(self, *, settings: Mapping[str, Any] | None = None) -> None:
        """Apply the manifests and start the manager; return when it serves. Raises DevclusterError.

        `settings` replaces parts of the configuration, such as Kueue's {"waitForPodsReady": {...}}.
        """
        program = self.program()
        self.folder.mkdir(exist_ok=True)
        manifests = self._shipped_manifests(program.parent)
        objects = [self.adapt(body) for body in fit_for_a_process(manifests, self.left_out)]
        if self.webhook_service:
            objects.append(self._endpoints(self.cluster.layout.network))
        done = self.cluster.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(objects))
        if done.returncode != 0:
            raise DevclusterError(f"cannot apply the manifests of {self.title}:\n{done.stderr.strip()}")
        self.cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        made = self.configuration(settings or {})
        if made is not None:
            (self.folder / "config.yaml").write_text(yaml.safe_dump(made))
        if self.webhook_secret:
            self.start(wait=False)
            wait_until(self._lay_certificate, what=f"the certificate of {self.title}", **self._watched())
            self.stop()
        self.start()

    def start(self, *, wait: bool = True) -> None:
        """Start the manager; with `wait`, return when the API server reaches its webhooks. Raises StartError."""
        identity = self.cluster.service_account_kubeconfig(self.namespace, self.account)
        self.cluster.spawn(self.name, [self.program(), *self.arguments(identity)], env=self.environment())
        if wait:
            wait_until(self.is_serving, what=self.title, **self._watched())

    def stop(self) -> None:
        """Kill the manager; all its state is in the API server."""
        self.cluster.signal(self.name, "KILL")
        self.cluster.wait_exit(self.name)

    def is_serving(self) -> bool:
        """True if the webhooks answer; Kueue's /readyz reports that a second too early."""
        path, body = self.probe
        try:
            self.cluster.api.request("POST", f"{path}?dryRun=All", dict(body))
        except AdminApiError:
            return False
        return True

    def _lay_certificate(self) -> bool:
        """Copy the certificate to where kubelet would mount the Secret; False until the operator has written it."""
        secret = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/secrets/{self.webhook_secret}")
        data = secret.get("data") or {}
        if not all(data.get(name) for name in _FILES):
            return False
        for name in _FILES:
            file = self.folder / name
            file.touch(mode=0o600)
            file.write_bytes(base64.b64decode(data[name]))
        return True

    def _watched(self) -> dict[str, Any]:
        return {
            "timeout_seconds": READY_SECONDS,
            "control": self.cluster.control,
            "process": self.name,
            "log": self.cluster.logs(self.name),
        }

    def _shipped_manifests(self, folder: Path) -> str:
        """Return the manifests of the pinned version, rendered once and kept in `folder`. Raises BuildError."""
        file = folder / f"{self.name}.yaml"
        if not file.exists():
            rendered = self.cluster.kubectl("kustomize", str(self.kustomization(self._module())))
            if rendered.returncode != 0:
                raise BuildError(f"cannot render the manifests of {self.title}: {rendered.stderr.strip()[-500:]}")
            unfinished = file.with_name(f".{self.name}-{os.getpid()}.yaml")
            unfinished.write_text(rendered.stdout)
            unfinished.rename(file)
        return file.read_text()

    def kustomization(self, module: Path) -> Path:
        """Return the folder of the kustomization of the manifests."""
        return module / self.manifests

    def _module(self) -> Path:
        """Return Go's folder of the pinned module; fetch it if missing. Raises BuildError."""
        toolchain = find_toolchain(cache_root(), report=lambda _line: None)
        command = [toolchain.command, "mod", "download", "-json", self.go_module]
        environment = {**os.environ, "GOFLAGS": "", "GOWORK": "off"}
        folder = MODULES / self.module_folder
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"cannot fetch {self.go_module}: {done.stderr.strip()[-500:]}")
        return Path(json.loads(done.stdout)["Dir"])

    def _endpoints(self, network: ClusterNetwork) -> dict[str, Any]:
        service = self.webhook_service
        labels = {"kubernetes.io/service-name": service, "endpointslice.kubernetes.io/managed-by": "atoll-devcluster"}
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"{service}-dev", "namespace": self.namespace, "labels": labels},
            "addressType": network.slice_type,
            "ports": [{"name": self.webhook_port_name, "port": self.webhook_port, "protocol": "TCP"}],
            "endpoints": [{"addresses": [network.bridge], "conditions": {"ready": True}}],
        }


def fit_for_a_process(manifests: str, left_out: Collection[str] = _LEFT_OUT) -> Iterator[dict[str, Any]]:
    """Yield the objects to apply if a process outside any pod serves the webhooks; none of the kinds in `left_out`."""
    for body in _objects(manifests):
        if body["kind"] in left_out:
            continue
        if body["kind"] == "Service":
            body["spec"].pop("selector", None)
        yield body


def _objects(manifests: str) -> Iterable[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return (body for body in yaml.load_all(manifests, Loader=loader) if body)
