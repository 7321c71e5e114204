"""Settings of the controllers."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from atoll.api import names
from atoll.api.gangs import RequeueTimestamp
from atoll.cluster.gangs.readiness_policy import PolicyBounds, ReadinessPolicy, Requeuing
from atoll.service.http import is_loopback
from atoll.service.settings import Settings


class RequeuingSettings(Settings):
    """When an evicted gang is tried again."""

    timestamp: RequeueTimestamp = RequeueTimestamp.EVICTION
    """Eviction: behind those that came meanwhile. Creation: an evicted gang keeps its age."""
    backoff_base_seconds: Annotated[float, Field(ge=1, le=86_400)] = 60.0
    """Pause after the first eviction; doubled with each further one."""
    backoff_max_seconds: Annotated[float, Field(ge=1, le=604_800)] = 3600.0
    """Longest pause."""
    backoff_limit_count: Annotated[int | None, Field(ge=0, le=1000)] = None
    """Evictions after which the next one puts the gang out of action; without it, it is tried for ever."""


class WaitForPodsReadySettings(Settings):
    """What is demanded of admitted gangs. A gang may choose for itself inside the bounds."""

    enable: bool = False
    """Evict gangs whose members are not ready in time."""
    timeout_seconds: Annotated[float, Field(ge=1, le=86_400)] = 300.0
    """From the moment when the members may start until they must be ready."""
    recovery_timeout_seconds: Annotated[float | None, Field(ge=1, le=86_400)] = None
    """How long a gang that was ready may lack members; without it, for ever."""
    recovery_limit_count: Annotated[int | None, Field(ge=0, le=1000)] = None
    """How often a gang may lose ready members in one admission; the next loss evicts it, which counts as an eviction.
    No limit by default."""
    block_admission: bool = False
    """Admit no gang while an admitted one is not ready. It needs a recovery timeout, and gangs may only choose shorter
    timeouts than these."""
    requeuing: RequeuingSettings = RequeuingSettings()
    """Pauses after evictions."""
    may_enable: bool = True
    """Gangs may ask for readiness where it is off."""
    may_disable: bool = True
    """Gangs may refuse it where it is on."""
    timeout_seconds_min: Annotated[float, Field(ge=1, le=86_400)] = 1.0
    """Shortest timeout that a gang may choose."""
    timeout_seconds_max: Annotated[float, Field(ge=1, le=604_800)] = 86_400.0
    """Longest timeout that a gang may choose."""
    backoff_seconds_max: Annotated[float, Field(ge=1, le=604_800)] = 86_400.0
    """Longest pause that a gang may choose."""
    limit_count_max: Annotated[int, Field(ge=0, le=1000)] = 1000
    """Most evictions that a gang may choose."""

    @model_validator(mode="after")
    def _blocks_for_a_time(self) -> Self:
        if self.block_admission and self.recovery_timeout_seconds is None:
            raise ValueError(
                "block_admission needs recovery_timeout_seconds, for example 600: a gang that was ready and lacks a "
                "member would keep all others waiting for ever"
            )
        return self

    def policy(self) -> ReadinessPolicy:
        """Return what holds for gangs without wishes."""
        requeuing = Requeuing(
            timestamp=self.requeuing.timestamp,
            base_seconds=self.requeuing.backoff_base_seconds,
            max_seconds=self.requeuing.backoff_max_seconds,
            limit_count=self.requeuing.backoff_limit_count,
        )
        return ReadinessPolicy(
            enable=self.enable,
            timeout_seconds=self.timeout_seconds,
            recovery_timeout_seconds=self.recovery_timeout_seconds,
            block_admission=self.block_admission,
            recovery_limit_count=self.recovery_limit_count,
            requeuing=requeuing,
        )

    def bounds(self) -> PolicyBounds:
        """Return what a gang may choose."""
        return PolicyBounds(
            may_enable=self.may_enable,
            may_disable=self.may_disable,
            timeout_seconds_min=self.timeout_seconds_min,
            timeout_seconds_max=self.timeout_seconds_max,
            backoff_seconds_max=self.backoff_seconds_max,
            limit_count_max=self.limit_count_max,
        )


class PageSettings(Settings):
    """The web page: the cluster as islands of GPUs, and what waits for what."""

    serve: bool = True
    """Serve it."""
    host: str = "127.0.0.1"
    """Address of the page. Off loopback it takes a certificate, and callers show a bearer token whose account may get
    /page; on loopback whoever can connect may look, in a pod by `kubectl port-forward`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8083
    """Port of the page."""
    tls_cert: Path | None = None
    """Certificate of the page."""
    tls_key: Path | None = None
    """Key of that certificate."""
    watchers_max: Annotated[int, Field(ge=1, le=100)] = 16
    """Browsers that may watch at a time; more are told so."""

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together")
        if self.serve and self.tls_cert is None and not is_loopback(self.host):
            raise ValueError(f"host {self.host} is not loopback: set tls_cert and tls_key, for tokens are shown there")
        return self


class ControllersSettings(Settings):
    """Frees GPUs on proof, repairs Leases, wakes waiting pods that fit, keeps claim status and webhook certificates."""

    kubeconfig: Path | None = None
    """Kubeconfig; the pod's own service account when absent."""
    once: bool = False
    """Lead once, look at everything once, and end."""
    health_host: str = "127.0.0.1"
    """Address of /livez, /readyz and /metrics; `*` means every address, IPv4 and IPv6."""
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
    node_hints: bool = True
    """Name in a waiting pod's `status.nominatedNodeName` the node where it fits, where kube-scheduler looks at a sample
    of the nodes only; the extender has the same setting."""
    claim_status_seconds: Annotated[float, Field(ge=0, le=600)] = 10.0
    """The status of one claim is written at most once in this time."""
    preemption: bool = True
    """Evict pods of lower priority for a pod whose claim wants joined GPUs, where enough are free but not joined, and
    for a gang that finds no place."""
    preemption_delay_seconds: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """How long such a pod has waited before that."""
    preemptions_per_minute: Annotated[float, Field(gt=0, le=600)] = 6.0
    """Pods for which others are evicted, per minute."""
    preemption_timeout_seconds: Annotated[float, Field(ge=10, le=86400)] = 600.0
    """After this the GPUs of victims that do not end are no longer kept for the pod."""
    gang_order: Literal["best-effort", "strict"] = "best-effort"
    """strict: a gang that finds no place keeps those behind it waiting; best-effort: they may pass it."""
    gang_hold_after_seconds: Annotated[float, Field(ge=0, le=86400)] = 60.0
    """When GPUs that fall free begin to be kept for the waiting gang that is first in order."""
    gang_hold_seconds: Annotated[float, Field(ge=0, le=86400)] = 600.0
    """How long they are kept, at most; then other gangs and pods may have them for as long. 0: never."""
    start_taint: str = ""
    """Key of a taint that new nodes start with; the controllers remove it once their GPUs are reported and counted. By
    default no taint is removed. Needs deploy/rbac/optional/start-taint.yaml."""
    wait_for_pods_ready: WaitForPodsReadySettings = WaitForPodsReadySettings()
    """What is demanded of admitted gangs."""
    stranded_pods: Literal["evict", "tell"] = "evict"
    """What to do with a pod that is not Ready and whose GPUs are gone, so that it cannot start again. evict: evict it,
    its owner creates a new one. tell: only an event and the audit report it."""
    stranded_after_seconds: Annotated[float, Field(ge=0, le=86_400)] = 120.0
    """How long the GPUs of a pod must be away before that: after a boot the MIG layout may be made again."""
    forget_nodes_after_seconds: Annotated[float, Field(ge=1, le=31_536_000)] = 3600.0
    """How long after its Node is gone a silent node's report and heartbeat are deleted. GPUs in doubt stay in doubt."""
    page: PageSettings = PageSettings()
    """The web page."""
    keep_certificates: bool = True
    """Make, publish and renew the webhook's certificates. Off where somebody else does: then the Secret
    atoll-webhook-tls and the caBundle of zz-atoll-webhook are left alone."""
    webhook_names: tuple[str, ...] = ()
    """Further DNS names and addresses of the webhook's certificate."""
    requests_per_second: Annotated[float, Field(gt=0)] = 200.0
    """Requests to the API server per second."""
    burst: Annotated[int, Field(ge=1)] = 400
    """Requests that may go out at once."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged."""

    @model_validator(mode="after")
    def _takes_off_taints_of_a_start(self) -> Self:
        prefixes = names.START_TAINT_PREFIXES
        if self.start_taint and not self.start_taint.startswith(prefixes):
            raise ValueError(f"start_taint is {self.start_taint!r}; its key must begin with {' or '.join(prefixes)}")
        return self
