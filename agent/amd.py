"""The real machine, read through AMD's management library.

Makes a MachineReading of the answers of agent.amd_driver's steps. agent.nvml has the code that keeps one card from
hiding the others. Where the two ends of an xGMI link disagree, both are reported; the weaker side counts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.amd_driver import AMD_STEPS, AmdDriver
from agent.backends import BOOT_ID_PATH
from agent.driver import Facts, Library
from agent.driver_client import DriverWorker, OwnDriver
from agent.faults import device_faults, unread_kinds
from agent.links import plain_bus_id
from agent.nvml import STEP_SECONDS, NvmlBackend
from agent.pci import PCI_DEVICES
from agent.readings import UNTOLD, Cells, DeviceReading, LinksReading, MachineReading
from topology.links import SELF, WORST

SAME_NODE = "NODE"
NUMA_NODES_MAX = 1024
"""The library reports an unknown node as the greatest 32-bit number."""


class AmdBackend(NvmlBackend):
    """Reads this machine's cards through amdsmi. `library` replaces that module in tests."""

    driver = "AMD SMI"
    kernel_driver = "amdgpu"
    device_steps = AMD_STEPS

    def __init__(
        self,
        library: Library = None,
        *,
        step_seconds: float = STEP_SECONDS,
        boot_id_path: Path = BOOT_ID_PATH,
        pci_devices: Path = PCI_DEVICES,
    ) -> None:
        super().__init__(step_seconds=step_seconds, boot_id_path=boot_id_path, pci_devices=pci_devices)
        own = OwnDriver(AmdDriver(library)) if library is not None else None
        self.steps = own or DriverWorker(step_seconds=step_seconds, library="amdsmi")

    def assemble(self, facts: Sequence[Facts], events: Sequence[Sequence[Any]]) -> MachineReading:  # noqa: ARG002
        """Make a reading of all facts; there are no events."""
        return MachineReading(
            devices=tuple(_device(one) for one in facts),
            links=LinksReading(
                links=_cells(facts),
                unread=frozenset(one["index"] for one in facts if one.get("pairs") is None and len(facts) > 1),
            ),
            expected_count=len(facts),
            vendor="amd",
        )


def _device(facts: Facts) -> DeviceReading:
    capability, processes = facts.get("compute_capability"), facts.get("processes")
    bus_id = facts.get("bus_id")
    return DeviceReading(
        index=facts["index"],
        uuid=facts.get("uuid"),
        product_name=facts.get("product_name"),
        memory_bytes=facts.get("memory_bytes"),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        numa_node=_numa_node(facts),
        pci_bus_id=plain_bus_id(bus_id) if bus_id is not None else None,
        process_ids=tuple(sorted({one[0] for one in processes})) if processes is not None else None,
        processes_unread=bool(facts.get("unlisted")),
        fault=facts.get("lost") or facts.get("fault") or facts.get("silent") or "",
        is_lost=bool(facts.get("lost")),
        serial=facts.get("serial"),
        mig_enabled=False,
        signs=device_faults(facts),
        signs_unread=unread_kinds(facts),
    )


def _numa_node(facts: Facts) -> int | None:
    node = facts.get("numa_node")
    return node if isinstance(node, int) and 0 <= node < NUMA_NODES_MAX else None


def _cells(facts: Sequence[Facts]) -> Cells:
    told = {(one["index"], other): links for one in facts for other, links in one.get("pairs") or ()}
    order = range(len(facts))

    def cell(first: int, second: int) -> str:
        if first == second:
            return SELF
        links = told.get((first, second))
        if links is None:
            return UNTOLD
        if links:
            return f"XGMI{links}"
        nodes = {_numa_node(facts[first]), _numa_node(facts[second])}
        return SAME_NODE if len(nodes) == 1 and nodes != {None} else WORST

    return tuple(tuple(cell(first, second) for second in order) for first in order)
