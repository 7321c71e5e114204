"""Simulated GPUs of a node: facts for the driver's library, and the device list of NVIDIA's runtime.

Writes both files in the node's folder, for its agent and its runtime, and returns the environment with which a
program's bindings see the machine. The files are written together; otherwise a container could get a GPU that the
agent does not report. AMD's cards have no runtime here, and so no list.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from devcluster import mock_amdsmi, mock_nvml, nvidia
from devcluster.errors import BuildError
from devcluster.mock_amdsmi.library import BindingsMissing
from devcluster.mock_nvml import MachineFile
from devcluster.mock_nvml.library import MACHINE_VARIABLE, CompilerMissing
from devcluster.mock_nvml.library import environment as nvml_environment
from devcluster.mock_nvml.machine_file import bus_id
from devcluster.paths import cache_root
from devcluster.pci_tree import PlayedPciTree
from topology.profiles import profile

DEVICE_LIST = "nvidia.json"


class GpuMachine:
    """Simulated GPUs of one node; change `file`, then call `plug`."""

    def __init__(
        self,
        folder: Path,
        profile_name: str,
        *,
        seed: str,
        order: Sequence[int] | None = None,
        switches: Sequence[Sequence[int]] = (),
        library_in_containers: bool = False,
        driver: str = "",
    ) -> None:
        """Simulate the machine in a node's folder. `order[i]` is the position of the GPU with NVML index i; `switches`:
        positions of the GPUs below each PCIe switch, which has a network adapter; `library_in_containers`: mount the
        driver's library into containers with GPUs, for an agent that runs in one; `driver`: version of a driver of the
        machine's own, which can be replaced."""
        self._folder = folder
        self._switches = switches
        self._library_in_containers = library_in_containers
        self._pci = PlayedPciTree(folder / "pci")
        self.is_amd = profile(profile_name).machine.vendor == "amd"
        kind = mock_amdsmi.AmdMachineFile if self.is_amd else MachineFile
        self.file = kind(profile(profile_name), seed=seed, order=order)
        self._library = _library(is_amd=self.is_amd)
        if driver:
            self.install_library(driver)
            self.load_driver(driver)

    @property
    def backend(self) -> str:
        """The agent's backend that reads the machine."""
        return "amd" if self.is_amd else "nvml"

    @property
    def library(self) -> Path:
        """The driver's library."""
        return self._library

    def install_library(self, driver: str) -> None:
        """Install the library of a driver version in the place of the one before; who has that open keeps it."""
        folder = self._folder / "driver"
        (folder / mock_nvml.library.LIBRARY).unlink(missing_ok=True)
        self._library = mock_nvml.build(folder, driver=driver)

    def load_driver(self, driver: str) -> None:
        """Load the driver of that version; takes effect with `plug`."""
        self.file.facts |= {"driver": driver, "nvml": f"13.{driver}"}

    @property
    def environment(self) -> dict[str, str]:
        """Environment with which a program's bindings see this machine."""
        told = mock_amdsmi.environment if self.is_amd else nvml_environment
        return told(self._library, self._folder / "machine")

    @property
    def pci_devices(self) -> Path:
        """Folder that lists the machine's PCI devices."""
        return self._pci.devices

    def plug(self) -> None:
        """Write the current machine for driver and runtime."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._pci.below_switches([bus_id(position) for position in range(len(self.file.order))], self._switches)
        if not self.is_amd:
            self._list_devices()
        self.file.write(self._folder / "machine")

    def _list_devices(self) -> None:
        devices = self._folder / DEVICE_LIST
        unfinished = devices.with_name(f".{DEVICE_LIST}")
        unfinished.write_text(nvidia.device_list(nvidia.cdi_devices(self.file.facts), self._driver()))
        unfinished.replace(devices)

    def _driver(self) -> nvidia.MountedDriver:
        if not self._library_in_containers:
            return nvidia.MountedDriver()
        # Mount the folder, not the file: the file is replaced, and its mount would keep showing the old one.
        inside = "/run/played-gpus"
        files = {f"/usr/lib/{self._library.name}": self._library, inside: self._folder}
        return nvidia.MountedDriver(files, {MACHINE_VARIABLE: f"{inside}/machine"})

    def renumber(self, order: Sequence[int]) -> None:
        """Give the GPUs other NVML indices, as a reboot may; takes effect with `plug`."""
        self.file = type(self.file)(self.file.profile, seed=self.file.seed, order=order)


def _library(*, is_amd: bool) -> Path:
    """Compile the mock of the vendor's library; return its path. Raises BuildError."""
    try:
        return (
            mock_amdsmi.build(cache_root() / "mock-amdsmi") if is_amd else mock_nvml.build(cache_root() / "mock-nvml")
        )
    except (CompilerMissing, BindingsMissing) as error:
        raise BuildError(f"cannot build the mock of a vendor's library: {error}") from error
