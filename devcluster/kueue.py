"""The real Kueue in a development cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devcluster.build import ensure_binaries
from devcluster.operators import OperatorProcess
from devcluster.programs import KUEUE


class Kueue(OperatorProcess):
    """Kueue on one cluster."""

    name = "kueue"
    title = "Kueue"
    go_module = KUEUE
    module_folder = "kueue"
    namespace = "kueue-system"
    account = "kueue-controller-manager"
    webhook_service = "kueue-webhook-service"
    webhook_secret = "kueue-webhook-server-cert"  # noqa: S105 - the name of a Secret
    webhook_port = 9543
    probe = (
        "/apis/kueue.x-k8s.io/v1beta2/resourceflavors",
        {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "atoll-probe"}},
    )

    def program(self) -> Path:
        """Return Kueue; build it if missing. Raises BuildError."""
        return ensure_binaries(self.cluster.kubernetes, real_nodes=False, kueue=True)["kueue"]

    def arguments(self, kubeconfig: Path) -> tuple[str, ...]:
        """Return the arguments of the process."""
        config = self.folder / "config.yaml"
        return f"--config={config}", f"--kubeconfig={kubeconfig}"

    def configuration(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of a process whose certificate is in the operator's folder."""
        host = self.cluster.layout.network.bridge
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": self.namespace,
            "health": {"healthProbeBindAddress": "127.0.0.1:9544"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": host, "port": self.webhook_port, "certDir": str(self.folder)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {
                "enable": True,
                "webhookServiceName": self.webhook_service,
                "webhookSecretName": self.webhook_secret,
            },
            "clientConnection": {"qps": 200, "burst": 400},
            "integrations": {"frameworks": ["batch/job", "pod"]},
            **settings,
            "featureGates": {"VisibilityOnDemand": False, **settings.get("featureGates", {})},
        }
