"""The agent's reading of a mock machine through the real NVML bindings, without a cluster.

A `Bench` makes observations one after another as the agent does: reading, ids, report, each based on the last one.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from agent.evidence import EvidenceReading, GpuUse, PodInventory, collect_evidence
from agent.identities import LeaseLookup, assign
from agent.nvml import NvmlBackend
from agent.report import ReportContext, build_report, inventory_of, uuids_by_slot
from atoll.api.node_status import Device, GpuNodeStatusReport
from atoll.api.times import format_microtime
from devcluster.mock_nvml import MachineFile
from topology.profiles import profile

STEP_SECONDS = 0.5
NOWHERE = Path("/nonexistent")
"""Instead of the PCI tree of the machine that runs the tests."""
START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Bench:
    """One machine, its file and the reports so far. `boot_id` and `minute` are the test's to move."""

    path: Path
    machine: MachineFile
    backend: NvmlBackend = field(default_factory=lambda: NvmlBackend(step_seconds=STEP_SECONDS, pci_devices=NOWHERE))
    report: GpuNodeStatusReport | None = None
    boot_id: str = "b1"
    minute: int = 0

    def look(self) -> GpuNodeStatusReport:
        """Write the machine as it is now, and take the next look at it."""
        self.machine.write(self.path)
        self.report = report_of(self.backend, self.report, boot_id=self.boot_id, minute=self.minute)
        return self.report

    def device(self, device_id: int) -> Device:
        """A device of the last report by its id."""
        assert self.report is not None
        return next(device for device in self.report.devices if device.id == device_id)


def report_of(
    backend: NvmlBackend, previous: GpuNodeStatusReport | None, *, boot_id: str = "b1", minute: int = 0
) -> GpuNodeStatusReport:
    """One look and the report of it. Raises ReadingFailed."""
    reading = backend.read()
    context = ReportContext(
        agent_version="test",
        boot_id=boot_id,
        node_uid="",
        position="",
        now=format_microtime(START + timedelta(minutes=minute)),
    )
    known = inventory_of(previous, reading, context).ids
    leases: dict[int, str | None] = {}
    while isinstance(step := assign(uuids_by_slot(reading), known=known, leases=leases), LeaseLookup):
        leases |= dict.fromkeys(step.ids)
    evidence: EvidenceReading = collect_evidence(
        PodInventory(), cgroups=None, kubelet=None, use=GpuUse(unread=reading.uuids_unread()), last_pods=()
    )
    return build_report(reading, ids=step.ids, evidence=evidence, previous=previous, context=context)


def machine_of(name: str, *, seed: str = "golden") -> MachineFile:
    """A known machine, in good health."""
    return MachineFile(profile(name), seed=seed)
