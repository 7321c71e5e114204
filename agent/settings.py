"""Settings of the agent.

In: flags, environment variables that begin with ATOLL_AGENT_, a file. Out: one frozen value. Units stand in the names.
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
    """Where the devices come from."""

    NVML = "nvml"
    AMD = "amd"
    SIMULATED = "simulated"


class AgentSettings(settings.Settings):
    """Reports the GPUs of one node: devices, links, health, and which pods still use them."""

    node: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the Node."""
    backend: BackendName = BackendName.NVML
    """nvml reads NVIDIA's driver, amd AMD's by the module amdsmi; simulated plays a machine of a known shape."""
    poll_seconds: Seconds = 30.0
    """How often the machine is read when nothing special happens."""
    urgent_seconds: Seconds = 1.0
    """How often it is read while a pod that is gone from the API is still seen on the machine."""
    read_timeout_seconds: Seconds = 20.0
    """How long one look at the machine may take before its devices count as unreadable."""
    step_seconds: Seconds = 3.0
    """How long the driver may take for one step of one device; one that takes longer is left out of that look."""
    driver_restart_seconds: Seconds = 300.0
    """How long the driver's library as a whole may refuse (it is unknown, missing, or does not fit the driver) until
    liveness fails: only a new container sees a new driver. Readiness says so at once. No card's own fault counts."""
    heartbeat_seconds: Seconds = 60.0
    """How often the heartbeat Lease is renewed; silent for three periods means stale."""
    start_jitter_seconds: Annotated[float, Field(ge=0, le=600)] = 5.0
    """An agent waits up to this before it asks the API server for anything, each node's as its name has it, so that a
    whole cluster of agents does not start at once. Each start makes some twenty requests: for thousands of nodes, wait
    longer."""
    once: bool = False
    """Print the report of this machine as JSON and end; nothing is written to the cluster, which need not exist."""

    kubeconfig: Path | None = None
    """Kubeconfig; the pod's own account when absent."""
    kubelet_url: Annotated[str, Field(max_length=512, pattern="^(https?://.+)?$")] = ""
    """Where this node's kubelet answers, such as https://10.0.0.7:10250; by default the Node's internal address."""
    kubelet_ca: Path | None = None
    """CA that signed the kubelet's serving certificate. Without one it is not verified: the certificate is self-signed
    by default, and the connection goes from the node to its own address."""
    cgroup_root: Annotated[str, Field(max_length=1024)] = "/"
    """The kubelet's cgroupRoot."""
    cgroup_mount: Path = Path("/sys/fs/cgroup")
    """Where the machine's cgroup file systems are mounted."""
    proc_mount: Path = Path("/proc")
    """Where the machine's processes are listed."""
    pod_resources: Path | None = None
    """The kubelet's pod-resources socket, where the agent may open it: usually as root only,
    /var/lib/kubelet/pod-resources/kubelet.sock. It shows pods that device plugins gave GPUs to."""
    pci_devices: Path = PCI_DEVICES
    """Where the kernel lists the machine's PCI devices, among them the network adapters near its GPUs."""
    boot_id_file: Path = BOOT_ID_PATH
    """Where the identity of the current boot is read; development clusters give each node its own."""

    profile: Annotated[str, Field(max_length=64)] = ""
    """Machine that the simulated backend plays, such as dgx1-v100."""
    seed: Annotated[str, Field(max_length=253)] = ""
    """What simulated uuids follow from; the node's name when empty."""
    simulated_order: Annotated[str, Field(max_length=512)] = ""
    """NVML order of the simulated devices: shuffled, reversed, or positions joined by commas."""
    simulated_uuids: Annotated[str, Field(max_length=65_536)] = ""
    """Uuids of the simulated devices, joined by commas, instead of those that follow from the seed."""
    simulated_state: Path | None = None
    """JSON file that says what is wrong with the simulated devices; read at every look."""

    health_host: str = "127.0.0.1"
    """Address of /livez, /readyz and /metrics."""
    health_port: Annotated[int, Field(ge=0, le=65_535)] = 9433
    """Port of the same; 0 takes any free one."""
    log_level: str = "info"
    """debug, info, warning or error."""

    @model_validator(mode="after")
    def check(self) -> Self:
        """The simulated backend needs a profile, and only that one takes it."""
        if (self.backend is BackendName.SIMULATED) != bool(self.profile):
            raise ValueError("backend simulated needs a profile, and a profile is for backend simulated only")
        return self
