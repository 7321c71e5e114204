"""Settings of the controllers."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from atoll.service.settings import Settings


class ControllersSettings(Settings):
    """Frees GPUs on proof, repairs Leases, wakes waiting pods that fit, keeps claim status and webhook certificates."""

    kubeconfig: Path | None = None
    """Kubeconfig; the pod's own service account when absent."""
    once: bool = False
    """Lead once, look at everything once, and end."""
    health_host: str = "127.0.0.1"
    """Address of /livez, /readyz and /metrics."""
    health_port: Annotated[int, Field(ge=0, le=65535)] = 8082
    """Port of /livez, /readyz and /metrics."""
    resync_seconds: Annotated[float, Field(ge=1, le=3600)] = 30.0
    """How often everything is looked at again although no change was seen."""
    lease_duration_seconds: Annotated[float, Field(ge=2, le=300)] = 15.0
    """After this long without renewal another replica may lead."""
    renew_deadline_seconds: Annotated[float, Field(ge=1, le=300)] = 10.0
    """A leader that could not renew for this long stops writing."""
    retry_seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """How often leadership is renewed or sought."""
    wakes_per_second: Annotated[float, Field(gt=0, le=1000)] = 50.0
    """Pods woken per second."""
    wakes_burst: Annotated[int, Field(ge=1, le=1000)] = 50
    """Pods woken at once."""
    claim_status_seconds: Annotated[float, Field(ge=0, le=600)] = 10.0
    """The status of one claim is written at most once in this time."""
    preemption: bool = True
    """Evict pods of lower priority for a pod whose claim wants joined GPUs, where enough are free but not joined."""
    preemption_delay_seconds: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """How long such a pod has waited before that."""
    preemptions_per_minute: Annotated[float, Field(gt=0, le=600)] = 6.0
    """Pods for which others are evicted, per minute."""
    preemption_timeout_seconds: Annotated[float, Field(ge=10, le=86400)] = 600.0
    """After this the GPUs of victims that do not end are no longer kept for the pod."""
    webhook_names: tuple[str, ...] = ()
    """Further DNS names and addresses of the webhook's certificate."""
    requests_per_second: Annotated[float, Field(gt=0)] = 200.0
    """Requests to the API server per second."""
    burst: Annotated[int, Field(ge=1)] = 400
    """Requests that may go out at once."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged."""
