"""Settings of the agent.

Read from flags, environment variables that begin with ATOLL_AGENT_, and a file. Names end in their unit.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from agent.backends import BOOT_ID_PATH
from agent.pci import PCI_DEVICES
from atoll.service import settings

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class BackendName(StrEnum):
    """Source of the devices."""

    NVML = "nvml"
    AMD = "amd"
    SIMULATED = "simulated"


class AgentSettings(settings.Settings):
    """Reports the GPUs of one node: devices, links, health, and the pods that still use them."""

    node: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the Node."""
    backend: BackendName = BackendName.NVML
    """nvml reads NVIDIA's driver, amd AMD's through the module amdsmi; simulated plays a machine of a known shape."""
    poll_seconds: Seconds = 30.0
    """Interval of regular looks at the machine."""
    urgent_seconds: Seconds = 1.0
    """Interval of looks while a pod that is gone from the API is still seen on the machine."""
    read_timeout_seconds: Seconds = 20.0
    """Longest time of one look at the machine; after it the devices count as unreadable."""
    step_seconds: Seconds = 3.0
    """Longest time of one driver step for one device; a slower device is left out of that look."""
    driver_restart_seconds: Seconds = 300.0
    """How long the driver library as a whole may fail (unknown error, missing, or not the driver's version) until
    liveness fails: only a new container sees a new driver. Readiness fails at once. Faults of cards do not count."""
    heartbeat_seconds: Seconds = 60.0
    """Interval of heartbeat Lease renewals; an agent is stale after three missed ones."""
    start_jitter_seconds: Annotated[float, Field(ge=0, le=600)] = 5.0
    """Longest wait before an agent's first request to the API server. The node's name decides the wait, so that a
    cluster's agents do not start all at once. Each start makes some twenty requests: raise this for thousands of
    nodes."""
    once: bool = False
    """Print this machine's report as JSON and exit. Needs no cluster and writes nothing to one."""

    kubeconfig: Path | None = None
    """Kubeconfig; the pod's service account if absent."""
    kubelet_url: Annotated[str, Field(max_length=512, pattern="^(https?://.+)?$")] = ""
    """URL of this node's kubelet, such as https://10.0.0.7:10250; by default the Node's internal address."""
    kubelet_ca: Path | None = None
    """CA that signed the kubelet's serving certificate; by default that of the API server. A kubelet that it did not
    sign is not asked for its pods, so that GPUs of some deleted pods stay in doubt."""
    kubelet_insecure: bool = False
    """Accept any certificate of the kubelet, and plain HTTP. Whoever can answer in its place on the node's address then
    gets the agent's token and says which pods are gone."""
    cgroup_root: Annotated[str, Field(max_length=1024)] = "/"
    """The kubelet's cgroupRoot."""
    cgroup_mount: Path = Path("/sys/fs/cgroup")
    """Mount point of the machine's cgroup file systems."""
    proc_mount: Path = Path("/proc")
    """Folder that lists the machine's processes."""
    pod_resources: Path | None = None
    """The kubelet's pod-resources socket, usually /var/lib/kubelet/pod-resources/kubelet.sock and readable by root
    only. It shows pods that got GPUs from device plugins."""
    pci_devices: Path = PCI_DEVICES
    """Folder that lists the machine's PCI devices, including the network adapters near its GPUs."""
    boot_id_file: Path = BOOT_ID_PATH
    """File with the current boot id; development clusters give each node its own."""

    profile: Annotated[str, Field(max_length=64)] = ""
    """Machine profile that the simulated backend plays, such as dgx1-v100."""
    seed: Annotated[str, Field(max_length=253)] = ""
    """Seed of the simulated uuids; the node's name if empty."""
    simulated_order: Annotated[str, Field(max_length=512)] = ""
    """NVML order of the simulated devices: shuffled, reversed, or positions separated by commas."""
    simulated_uuids: Annotated[str, Field(max_length=65_536)] = ""
    """Uuids of the simulated devices, separated by commas, instead of those from the seed."""
    simulated_state: Path | None = None
    """JSON file with the faults of the simulated devices; read at every look."""

    health_host: str = "127.0.0.1"
    """Address of /livez, /readyz and /metrics; `*` means every address, IPv4 and IPv6."""
    health_port: Annotated[int, Field(ge=0, le=65_535)] = 9433
    """Port of these pages; 0 takes any free one."""
    log_level: str = "info"
    """debug, info, warning or error."""

    @model_validator(mode="after")
    def check(self) -> Self:
        """The simulated backend, and no other, needs a profile; a CA verifies or nothing does."""
        if self.kubelet_insecure and self.kubelet_ca is not None:
            raise ValueError("kubelet_ca verifies the kubelet and kubelet_insecure does not; set one of them")
        if (self.backend is BackendName.SIMULATED) != bool(self.profile):
            raise ValueError("backend simulated needs a profile, and a profile is for backend simulated only")
        return self
