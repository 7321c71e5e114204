"""Settings of the extender."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from atoll.api import names
from atoll.api.claims import VisibleDevices
from atoll.service.settings import Settings


class ExtenderSettings(Settings):
    """Answers kube-scheduler's filter, prioritize, bind and preempt calls."""

    kubeconfig: Path | None = None
    """Kubeconfig; the pod's own service account when absent."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs certificates."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8888
    """Port to listen on."""
    health_host: str = "127.0.0.1"
    """Address of /livez, /readyz and /metrics on a port of their own, without TLS; `*` means every address."""
    health_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """That port; 0: they are served on the other port alone."""
    tls_cert: Path | None = None
    """Serving certificate, followed live. Needed when the address is not loopback."""
    tls_key: Path | None = None
    """Key of the serving certificate."""
    client_ca: Path | None = None
    """Authority of kube-scheduler's client certificate. Needed when the address is not loopback."""
    visible_devices: VisibleDevices = VisibleDevices.UUID
    """What CUDA_VISIBLE_DEVICES carries where the claim does not say; the webhook has the same setting."""
    answer_seconds: Annotated[float, Field(gt=0, le=60)] = 8.0
    """A bind is answered within this; keep it below httpTimeout in the scheduler's configuration."""
    binds_at_once: Annotated[int, Field(ge=1, le=1000)] = 16
    """Binds that write Leases at a time. More wait; who finds no turn in half of answer_seconds is refused."""
    reservation_seconds: Annotated[float, Field(ge=5, le=3600)] = 60.0
    """After this the controllers may take back the Leases of a pod that was never bound."""
    expectation_seconds: Annotated[float, Field(ge=1, le=60)] = 10.0
    """How long the GPUs that a pod will probably get are counted as spoken for while its bind has not arrived."""
    scheduler_lease: Annotated[str, Field(min_length=1, max_length=253)] = names.SCHEDULER_LEADER_LEASE
    """Leader Lease of kube-scheduler in atoll-system (leaderElection.resourceName): each term of it begins anew."""
    node_hints: bool = True
    """Send a pod to a node that kube-scheduler's sample left out, where it fits or gets clearly better GPUs; the
    controllers have the same setting."""
    requests_per_second: Annotated[float, Field(gt=0)] = 1000.0
    """Requests to the API server per second; one bind takes one request per GPU and one more."""
    burst: Annotated[int, Field(ge=1)] = 2000
    """Requests that may go out at once."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged."""
