"""Operators whose objects own pods of gangs, in a development cluster."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from devcluster.build import ensure_owner
from devcluster.certificates import Subject
from devcluster.control_plane import authority
from devcluster.errors import DevclusterError
from devcluster.operators import OperatorProcess
from devcluster.programs import APPWRAPPER, JOBSET, KUBERAY, LWS, MPI_OPERATOR, TRAINER

_TRAINER_PARTS = ("crds", "manager", "rbac", "webhook")
_APPWRAPPER_ADDRESSES = {"health": {"bindAddress": "127.0.0.1:9594"}, "metrics": {"bindAddress": "0"}}
_CONTAINERS = {"spec": {"containers": [{"name": "probe", "image": "probe"}]}}


def _probe(api: str, plural: str, kind: str, spec: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    body = {"apiVersion": api, "kind": kind, "metadata": {"name": "atoll-probe"}, "spec": spec}
    return f"/apis/{api}/namespaces/default/{plural}", body


class _Owners(OperatorProcess):
    """What these operators share."""

    module_folder = "owners"

    def program(self) -> Path:
        """Return the program; build it if missing. Raises BuildError."""
        return ensure_owner(self.name)


class _WithWebhooks(_Owners):
    """Operators with a configuration file and webhooks, made from one template.

    They wait for a certificate of their own in a fixed folder; the cluster's authority issues one instead.
    """

    config_api: ClassVar[str]
    health_port: ClassVar[int]

    def install(self, *, settings: Mapping[str, Any] | None = None) -> None:
        """Issue the certificate, then install. Raises DevclusterError."""
        name = f"{self.webhook_service}.{self.namespace}.svc"
        pair = authority(self.cluster.layout).issue(self.name, Subject(name, dns_names=(name,)))
        self.certificates.mkdir(parents=True, exist_ok=True)
        shutil.copy(pair.certificate, self.certificates / "tls.crt")
        shutil.copy(pair.key, self.certificates / "tls.key")
        super().install(settings=settings)

    @property
    def certificates(self) -> Path:
        """The folder of the certificate."""
        return self.folder

    def adapt(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a shipped object; the API server trusts the cluster's authority for the webhooks."""
        bundle = base64.b64encode(authority(self.cluster.layout).pair.certificate.read_bytes()).decode()
        for webhook in body.get("webhooks", ()):
            webhook["clientConfig"]["caBundle"] = bundle
        return body

    def arguments(self, kubeconfig: Path) -> tuple[str, ...]:
        """Return the arguments of the process."""
        return f"--config={self.folder / 'config.yaml'}", f"--kubeconfig={kubeconfig}"

    def configuration(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of a process whose certificate is in the operator's folder."""
        host = self.cluster.layout.network.bridge
        return {
            "apiVersion": self.config_api,
            "kind": "Configuration",
            "webhook": {"host": host, "port": self.webhook_port, "certDir": str(self.certificates)},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self.health_port}"},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            **settings,
        }


class JobSet(_WithWebhooks):
    """JobSet on one cluster."""

    name = "jobset"
    title = "JobSet"
    go_module = JOBSET
    namespace = "jobset-system"
    account = "jobset-controller-manager"
    webhook_service = "jobset-webhook-service"
    webhook_port = 9553
    health_port = 9554
    config_api = "config.jobset.x-k8s.io/v1alpha1"
    probe = _probe(
        "jobset.x-k8s.io/v1alpha2",
        "jobsets",
        "JobSet",
        {"replicatedJobs": [{"name": "a", "template": {"spec": {"template": _CONTAINERS}}}]},
    )


class LeaderWorkerSet(_WithWebhooks):
    """LeaderWorkerSet on one cluster."""

    name = "lws"
    title = "LeaderWorkerSet"
    go_module = LWS
    namespace = "lws-system"
    account = "lws-controller-manager"
    webhook_service = "lws-webhook-service"
    webhook_port = 9563
    health_port = 9564
    config_api = "config.lws.x-k8s.io/v1alpha1"
    probe = _probe(
        "leaderworkerset.x-k8s.io/v1",
        "leaderworkersets",
        "LeaderWorkerSet",
        {"leaderWorkerTemplate": {"workerTemplate": _CONTAINERS}},
    )


class Trainer(_WithWebhooks):
    """Kubeflow's trainer on one cluster; it needs JobSet, and its manifests would fetch that from the net."""

    name = "trainer"
    title = "Kubeflow's trainer"
    go_module = TRAINER
    namespace = "kubeflow-system"
    account = "kubeflow-trainer-controller-manager"
    webhook_service = "kubeflow-trainer-controller-manager"
    webhook_port = 9583
    webhook_port_name = "webhook-server"
    health_port = 9584
    config_api = "config.trainer.kubeflow.org/v1alpha1"
    probe = _probe(
        "trainer.kubeflow.org/v1alpha1",
        "trainingruntimes",
        "TrainingRuntime",
        {"template": {"spec": {"replicatedJobs": [{"name": "a", "template": {"spec": {"template": _CONTAINERS}}}]}}},
    )

    @property
    def certificates(self) -> Path:
        """The folder of the certificate: the process looks for it in its folder of temporary files."""
        return self.folder / "k8s-webhook-server" / "serving-certs"

    def environment(self) -> Mapping[str, str]:
        """Return the folder of temporary files."""
        return {"TMPDIR": str(self.folder)}

    def configuration(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of a process that finds its certificate by its environment."""
        made = super().configuration(settings)
        del made["internalCertManagement"], made["webhook"]["certDir"]
        return made | {"certManagement": {"enable": False}}

    def kustomization(self, module: Path) -> Path:
        """Return a kustomization of the parts, without JobSet."""
        parts = [os.path.relpath(module / "manifests" / "base" / part, self.folder) for part in _TRAINER_PARTS]
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        (self.folder / "namespace.yaml").write_text(yaml.safe_dump(space))
        made = {"namespace": self.namespace, "resources": ["namespace.yaml", *parts]}
        (self.folder / "kustomization.yaml").write_text(yaml.safe_dump(made))
        return self.folder


class AppWrappers(_Owners):
    """AppWrapper on one cluster. It reads its configuration from a ConfigMap; its webhooks, which check what users may
    wrap, are off."""

    name = "appwrapper"
    title = "AppWrapper"
    go_module = APPWRAPPER
    module_folder = "appwrapper"
    namespace = "appwrapper-system"
    account = "appwrapper-controller-manager"
    left_out = ("Deployment", "ConfigMap", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    probe = _probe("workload.codeflare.dev/v1beta2", "appwrappers", "AppWrapper", {"components": []})

    def start(self, *, wait: bool = True) -> None:
        """Write the configuration, then start. Raises DevclusterError."""
        content = {"webhooksEnabled": False, "controllerManager": _APPWRAPPER_ADDRESSES}
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "appwrapper-operator-config", "namespace": self.namespace},
            "data": {"config.yaml": yaml.safe_dump(content)},
        }
        done = self.cluster.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump(body))
        if done.returncode != 0:
            raise DevclusterError(f"cannot configure {self.title}: {done.stderr.strip()}")
        super().start(wait=wait)

    def arguments(self, kubeconfig: Path) -> tuple[str, ...]:
        """Return the arguments of the process."""
        return (f"--kubeconfig={kubeconfig}",)

    def environment(self) -> Mapping[str, str]:
        """Return the namespace of the configuration."""
        return {"NAMESPACE": self.namespace}


class MpiOperator(_Owners):
    """The MPI operator on one cluster."""

    name = "mpi-operator"
    title = "the MPI operator"
    go_module = MPI_OPERATOR
    manifests = "manifests/overlays/standalone"
    namespace = "mpi-operator"
    account = "mpi-operator"
    probe = _probe(
        "kubeflow.org/v2beta1", "mpijobs", "MPIJob", {"mpiReplicaSpecs": {"Launcher": {"template": _CONTAINERS}}}
    )

    def arguments(self, kubeconfig: Path) -> tuple[str, ...]:
        """Return the arguments of the process."""
        return f"-kubeConfig={kubeconfig}", f"-lock-namespace={self.namespace}"

    def environment(self) -> Mapping[str, str]:
        """Return an environment without KUBECONFIG, which would precede the argument."""
        return {"KUBECONFIG": ""}


class KubeRay(_Owners):
    """KubeRay on one cluster. Its pods may run any program: probes and the wait for the head are left out."""

    name = "kuberay"
    title = "KubeRay"
    go_module = KUBERAY
    module_folder = "kuberay"
    namespace = "default"
    account = "kuberay-operator"
    probe = _probe(
        "ray.io/v1", "rayclusters", "RayCluster", {"headGroupSpec": {"rayStartParams": {}, "template": _CONTAINERS}}
    )

    def arguments(self, kubeconfig: Path) -> tuple[str, ...]:
        """Return the arguments of the process."""
        return (
            f"--kubeconfig={kubeconfig}",
            "--enable-leader-election=false",
            "--metrics-addr=127.0.0.1:9575",
            "--health-probe-bind-address=127.0.0.1:9574",
        )

    def environment(self) -> Mapping[str, str]:
        """Return settings for containers without Ray."""
        return {"ENABLE_INIT_CONTAINER_INJECTION": "false", "ENABLE_PROBES_INJECTION": "false"}
