"""Settings of the webhook process."""

from pathlib import Path

from atoll.api.claims import VisibleDevices
from atoll.service.settings import Settings
from webhook.autoscalers import KeepNodes


class WebhookSettings(Settings):
    """Shapes pods that ask for GPUs while they are created."""

    kubeconfig: Path | None = None
    """Kubeconfig of the API server; the pod's own account when absent."""
    host: str = "*"
    """Address to serve reviews on; `*` means every address, IPv4 and IPv6."""
    port: int = 8443
    """Port to serve reviews on, always TLS with the certificate of the Secret atoll-webhook-tls."""
    client_ca: Path | None = None
    """CA that must have signed the API server's client certificate; without it any client may ask."""
    health_host: str = "127.0.0.1"
    """Address of /livez, /readyz and /metrics, plain HTTP; `*` means every address, IPv4 and IPv6."""
    health_port: int = 8081
    """Port of /livez, /readyz and /metrics."""
    visible_devices: VisibleDevices = VisibleDevices.UUID
    """What CUDA_VISIBLE_DEVICES carries where the claim does not say: uuid or index; the extender needs the same."""
    inject_runtime_class: bool = False
    """Put pods with NVIDIA claims into the RuntimeClass atoll-nvidia; the class must exist."""
    keep_nodes: KeepNodes = KeepNodes.NONE
    """Annotate pods so that autoscalers leave their nodes alone: none, gangs (their members) or all with GPUs."""
    log_level: str = "info"
    """debug, info, warning or error."""
