"""The real machine, read through NVIDIA's management library.

In: nothing but the driver. Out: a MachineReading. The only module that imports pynvml, and only when it reads, because
the bindings load the driver's library. Every call may fail by itself: it then costs one field of one device. Calls are
not bounded in time here; a hung driver hangs the thread that the agent reads in.
"""

from collections.abc import Callable, Sequence
from ctypes import pointer
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

from agent.backends import kernel_boot_id
from agent.errors import ReadingFailed
from agent.links import link_matrix, plain_bus_id
from agent.readings import Cells, DeviceReading, FabricReading, LinksReading, MachineReading, NvLink, Remote
from topology.links import SELF, WORST

Library = Any
"""The module pynvml, or whatever stands in for it; untyped, like the library itself."""
Handle = Any
Answer = Any

NVLINKS_MAX: Final = 64
PROCESSES_MAX: Final = 1024
NUMA_WORDS: Final = 4
"""Words of 64 NUMA nodes each that are asked for."""

_PCIE_CELLS: Final = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t."""
_NVLINK_GENERATIONS: Final = {4: 1, 5: 2, 6: 2, 7: 3, 9: 4, 10: 5}
"""By nvmlDeviceArchitecture_t (Pascal, Volta, Turing, Ampere, Hopper, Blackwell); the library's own NVLink version is
an enumeration that does not follow the generations."""
_FABRIC_STATES: Final = {0: "notSupported", 1: "notStarted", 2: "inProgress", 3: "completed"}
_P2P_BROKEN: Final = frozenset({1, 3, 4})
"""nvmlGpuP2PStatus_t: chipset or host bridge cannot, or switched off. A model that never can (2) says nothing of a
pair."""
_P2P_READ: Final = 0
"""nvmlGpuP2PCapsIndex_t; the constant of the bindings is a tuple by mistake, and passing it on breaks the call."""
_REMOTES: Final = {0: Remote.GPU, 1: Remote.OTHER, 2: Remote.SWITCH}


class NvmlBackend:
    """NVML of this machine. `library` stands in for the module pynvml in tests."""

    def __init__(self, library: Library = None) -> None:
        self._library = library
        self._is_open = False

    def read(self) -> MachineReading:
        """Look at every device once. Raises ReadingFailed when the driver does not answer at all."""
        nvml = self._open()
        try:
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            self.close()
            raise ReadingFailed("NVML", str(error)) from error
        return _Look(nvml).machine(count)

    def boot_id(self) -> str:
        """Boot id of the kernel. Raises ReadingFailed."""
        return kernel_boot_id()

    def close(self) -> None:
        """Let go of the driver; the next reading opens it again."""
        if self._is_open:
            self._is_open = False
            try:
                self._library.nvmlShutdown()
            except self._library.NVMLError:
                return

    def _open(self) -> Library:
        if self._library is None:
            self._library = import_module("pynvml")
        if not self._is_open:
            try:
                self._library.nvmlInit()
            except self._library.NVMLError as error:
                raise ReadingFailed("NVML", f"{error}; is the driver loaded, and its library visible here?") from error
            self._is_open = True
        return self._library


class _Look:
    """One walk over all devices. Remembers which device a call found lost."""

    def __init__(self, nvml: Library) -> None:
        self._nvml = nvml
        self._faults: dict[int, str] = {}
        self._lost: set[int] = set()

    def machine(self, count: int) -> MachineReading:
        """Read `count` devices, then what joins them; links among the readable ones only."""
        handles = [self._ask(index, self._nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        devices = [self._device(index, handle) for index, handle in enumerate(handles)]
        links = self._links(devices, handles)
        return MachineReading(
            devices=tuple(self._with_fault(device) for device in devices),
            links=links,
            fabric=next(
                (found for index, handle in enumerate(handles) if (found := self._fabric(index, handle))), None
            ),
            expected_count=count,
        )

    def _ask(self, index: int, call: Callable[..., Any], *arguments: Handle) -> Answer:
        """Call the library for one device; None when it refuses. A lost device is remembered as such."""
        if index in self._lost:
            return None
        answer, error = self._try(call, *arguments)
        code = getattr(error, "value", None)
        if code in {self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_GPU_NOT_FOUND}:
            self._lost.add(index)
            self._faults[index] = str(error)
        elif code == self._nvml.NVML_ERROR_RESET_REQUIRED or (error and call == self._nvml.nvmlDeviceGetHandleByIndex):
            self._faults.setdefault(index, str(error))
        return answer

    def _try(self, call: Callable[..., Any], *arguments: Handle) -> tuple[Answer, Exception | None]:
        """Answer and no error, or no answer and the error; neither for a device that has no handle."""
        if arguments[0] is None:
            return None, None
        try:
            return call(*arguments), None
        except self._nvml.NVMLError as error:
            return None, error

    def _device(self, index: int, handle: Handle) -> DeviceReading:
        nvml = self._nvml
        capability = self._ask(index, nvml.nvmlDeviceGetCudaComputeCapability, handle)
        memory = self._ask(index, nvml.nvmlDeviceGetMemoryInfo, handle)
        pci = self._ask(index, nvml.nvmlDeviceGetPciInfo, handle)
        mig = self._ask(index, nvml.nvmlDeviceGetMigMode, handle)
        return DeviceReading(
            index=index,
            uuid=_text(self._ask(index, nvml.nvmlDeviceGetUUID, handle)),
            product_name=_text(self._ask(index, nvml.nvmlDeviceGetName, handle)),
            memory_bytes=int(memory.total) if memory is not None else None,
            compute_capability=f"{capability[0]}.{capability[1]}" if capability is not None else None,
            numa_node=self._numa_node(index, handle),
            pci_bus_id=plain_bus_id(_text(pci.busId) or "") if pci is not None else None,
            minor=self._ask(index, nvml.nvmlDeviceGetMinorNumber, handle),
            mig_enabled=bool(mig[0]) if mig is not None else None,
            process_ids=self._process_ids(index, handle),
        )

    def _with_fault(self, device: DeviceReading) -> DeviceReading:
        if device.index not in self._faults:
            return device
        return replace(device, fault=self._faults[device.index], is_lost=device.index in self._lost)

    def _numa_node(self, index: int, handle: Handle) -> int | None:
        """The one NUMA node whose memory is near; several (a VM that hides them) are as good as unknown."""
        words = self._ask(
            index, self._nvml.nvmlDeviceGetMemoryAffinity, handle, NUMA_WORDS, self._nvml.NVML_AFFINITY_SCOPE_NODE
        )
        if words is None:
            return None
        mask = sum(int(word) << (64 * position) for position, word in enumerate(words))
        return mask.bit_length() - 1 if mask.bit_count() == 1 else None

    def _process_ids(self, index: int, handle: Handle) -> tuple[int, ...] | None:
        calls = (self._nvml.nvmlDeviceGetComputeRunningProcesses, self._nvml.nvmlDeviceGetGraphicsRunningProcesses)
        answers = [answer for call in calls if (answer := self._ask(index, call, handle)) is not None]
        if not answers:
            return None
        return tuple(sorted({int(process.pid) for answer in answers for process in answer[:PROCESSES_MAX]}))

    def _links(self, devices: Sequence[DeviceReading], handles: Sequence[Handle]) -> LinksReading:
        nvml = self._nvml
        pcie = self._pcie_cells(handles)
        nvlinks = [self._nvlinks(index, handle) for index, handle in enumerate(handles)]
        matrix = link_matrix(nvlinks, bus_ids=[device.pci_bus_id for device in devices], pcie=pcie)
        has_nvlink = any(cell.startswith("NV") for row in matrix.cells for cell in row)
        architectures = [
            self._ask(index, nvml.nvmlDeviceGetArchitecture, handle) for index, handle in enumerate(handles)
        ]
        pcie_generations = [
            self._ask(index, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) for index, handle in enumerate(handles)
        ]
        nvlink_generations = [_NVLINK_GENERATIONS[one] for one in architectures if one in _NVLINK_GENERATIONS]
        return LinksReading(
            links=matrix.cells,
            pcie=pcie,
            nvlink_generation=min(nvlink_generations, default=None) if has_nvlink else None,
            nvswitch=matrix.nvswitch,
            link_gbps=self._link_gbps(handles) if has_nvlink else None,
            pcie_generation=min((int(one) for one in pcie_generations if one), default=None),
            unread=frozenset(index for index, links in enumerate(nvlinks) if links is None),
        )

    def _nvlinks(self, index: int, handle: Handle) -> tuple[NvLink, ...] | None:
        """Active links of a device; None where the library gives another answer than yes, no, or no such link."""
        nvml = self._nvml
        ends = {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT}
        found: list[NvLink] = []
        if index in self._lost or handle is None:
            return None
        for link in range(NVLINKS_MAX):
            state, error = self._try(nvml.nvmlDeviceGetNvLinkState, handle, link)
            if error is not None:
                if getattr(error, "value", None) in ends:
                    break
                self._note_if_lost(index, error)
                return None
            if state == nvml.NVML_FEATURE_ENABLED:
                found.append(self._nvlink(index, handle, link))
        return tuple(found)

    def _note_if_lost(self, index: int, error: Exception) -> None:
        if getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST:
            self._lost.add(index)
            self._faults[index] = str(error)

    def _nvlink(self, index: int, handle: Handle, link: int) -> NvLink:
        kind = self._ask(index, self._nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        pci = self._ask(index, self._nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        bus_id = plain_bus_id(_text(pci.busId) or "") if pci is not None else None
        if kind is None:
            return NvLink(Remote.GPU if bus_id else Remote.UNKNOWN, bus_id)
        return NvLink(_REMOTES.get(kind, Remote.UNKNOWN), bus_id)

    def _pcie_cells(self, handles: Sequence[Handle]) -> Cells:
        order = range(len(handles))
        return tuple(
            tuple(SELF if first == second else self._pcie_cell(handles[first], handles[second]) for second in order)
            for first in order
        )

    def _pcie_cell(self, first: Handle, second: Handle) -> str:
        """What lies between two devices. An error is neither's fault for certain, so nobody is blamed."""
        nvml = self._nvml
        if second is None:
            return WORST
        level, _ = self._try(nvml.nvmlDeviceGetTopologyCommonAncestor, first, second)
        status, _ = self._try(nvml.nvmlDeviceGetP2PStatus, first, second, _P2P_READ)
        return WORST if status in _P2P_BROKEN else _PCIE_CELLS.get(level, WORST)

    def _link_gbps(self, handles: Sequence[Handle]) -> float | None:
        """The slowest rate that a device reports for its links, GB/s per direction."""
        field = self._nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
        rates = []
        for index, handle in enumerate(handles):
            values = self._ask(index, self._nvml.nvmlDeviceGetFieldValues, handle, [field])
            if values is not None and values[0].nvmlReturn == self._nvml.NVML_SUCCESS and values[0].value.uiVal > 0:
                rates.append(values[0].value.uiVal / 1000)
        return min(rates, default=None)

    def _fabric(self, index: int, handle: Handle) -> FabricReading | None:
        info = self._nvml.c_nvmlGpuFabricInfo_v2_t()
        if self._ask(index, self._nvml.nvmlDeviceGetGpuFabricInfoV, handle, pointer(info)) is None:
            return None
        state = _FABRIC_STATES.get(int(info.state), "unknown")
        if state == "notSupported":
            return None
        return FabricReading(_uuid_text(bytes(info.clusterUuid)), str(int(info.cliqueId)), state)


def _text(value: object) -> str | None:
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _uuid_text(raw: bytes) -> str:
    digits = raw.hex()
    return "" if not any(raw) else "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
