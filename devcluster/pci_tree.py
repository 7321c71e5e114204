"""A simulated PCI tree: folders as in /sys, with the bridges above each device.

It replaces /sys/bus/pci/devices, where the agent reads which network adapters are near which GPUs; no GPU vendor's
library reports that.
"""

from collections.abc import Sequence
from pathlib import Path

GPU_CLASS = "0x030200"
ETHERNET_CLASS = "0x020000"
INFINIBAND_CLASS = "0x020700"


class PlayedPciTree:
    """A simulated tree; `devices` replaces /sys/bus/pci/devices."""

    def __init__(self, folder: Path) -> None:
        """Use the tree in a folder; the folder may contain one already."""
        self._folder = folder
        self.devices = folder / "bus" / "pci" / "devices"
        self.devices.mkdir(parents=True, exist_ok=True)

    def plug(
        self,
        *path: str,
        kind: str = GPU_CLASS,
        numa: int = 0,
        rdma: str = "",
        network: str = "",
        function_of: str = "",
        driver: str = "nvidia",
    ) -> None:
        """Add a device by its path: host bridge, bridges, device. rdma, network: names of an adapter; function_of:
        adapter of a virtual function; driver: kernel driver."""
        place = self._folder / "devices" / "/".join(path)
        place.mkdir(parents=True, exist_ok=True)
        (place / "class").write_text(f"{kind}\n")
        (place / "numa_node").write_text(f"{numa}\n")
        for group, name in (("infiniband", rdma), ("net", network)):
            if name:
                (place / group / name).mkdir(parents=True, exist_ok=True)
        if function_of:
            self._link(place / "physfn", self.devices / function_of)
        if kind == GPU_CLASS:
            self._link(place / "driver", self._folder / "bus" / "pci" / "drivers" / driver)
        self._link(self.devices / path[-1], place)

    def below_switches(self, bus_ids: Sequence[str], groups: Sequence[Sequence[int]]) -> None:
        """Put the GPUs of each group below their own PCIe switch, with an RDMA adapter: mlx5_0, mlx5_1, ..."""
        for number, group in enumerate(groups):
            domain = f"{number + 1:04x}"
            switch = (f"pci{domain}:00", f"{domain}:00:01.0", f"{domain}:01:00.0")
            for port, position in enumerate(group):
                self.plug(*switch, f"{domain}:02:{port:02x}.0", bus_ids[position].removeprefix("0000"))
            adapter = (f"{domain}:02:{len(group):02x}.0", f"{domain}:f0:00.0")
            self.plug(*switch, *adapter, kind=INFINIBAND_CLASS, rdma=f"mlx5_{number}")

    @staticmethod
    def _link(link: Path, target: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(target)
