"""Interface between the agent and a machine, real (agent.nvml, agent.amd) or simulated (agent.simulated)."""

from pathlib import Path
from typing import Protocol

from agent.errors import ReadingFailed
from agent.readings import MachineReading

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class Backend(Protocol):
    """One machine. Both calls block and may be slow; the agent bounds them."""

    def read(self) -> MachineReading:
        """Look at every device once. Raises ReadingFailed when nothing at all could be read."""
        ...

    def boot_id(self) -> str:
        """Identity of the current boot. Raises ReadingFailed."""
        ...

    def close(self) -> None:
        """Close the driver."""
        ...


def kernel_boot_id(path: Path = BOOT_ID_PATH) -> str:
    """Boot id of the running kernel, the same that the kubelet reports. Raises ReadingFailed."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError as error:
        raise ReadingFailed(str(path), str(error)) from error
    if not text or len(text) > 64:
        raise ReadingFailed(str(path), f"not a boot id: {text[:64]!r}")
    return text
