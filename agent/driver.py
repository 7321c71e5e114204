"""NVIDIA's management library, asked step by step. Runs in the worker process (agent.driver_worker) and in tests.

A step of one device gives plain facts that fit in JSON: None for what the library refused, `lost` and `fault` in words
where a refusal says that the device is unhealthy. agent.nvml_reading makes a reading of the facts. Everything here may
hang or crash with the driver, so no step depends on another. Each failed call costs one fact.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_void_p, cast, pointer
from typing import Any, Final

Library = Any
"""The module pynvml or its replacement in tests; untyped, like the library itself."""
Handle = Any
Answer = Any
Facts = dict[str, Any]

NVLINKS_MAX: Final = 64
PROCESSES_MAX: Final = 1024
MASK_WORDS: Final = 16
"""Number of 64-bit words requested for a set of NUMA nodes or CPUs."""
EVENTS_MAX: Final = 256
MIG_DEVICES_MAX: Final = 64

_P2P_READ: Final = 0
"""nvmlGpuP2PCapsIndex_t; the constant of the bindings is a tuple by mistake, and passing it on breaks the call."""
_FIELD_NVLINK_MBPS: Final = 90
_FIELD_RECOVERY_ACTION: Final = 230
_UNCORRECTED, _CORRECTED, _VOLATILE = 1, 0, 0
_EVENTS: Final = 0x8 | 0x2
"""XID errors and double-bit ECC errors."""


class Driver:
    """The open library. Only `open` and `count` raise the library's own NVMLError."""

    def __init__(self, library: Library) -> None:
        self._nvml = library
        self._events: Handle = None
        self._uuid_by_handle: dict[int | None, str | None] = {}
        """A card that has fallen off the bus no longer gives its uuid, and its last event comes after that."""
        self._is_open = False
        self._lost = ""
        self._fault = ""

    def open(self) -> Facts:
        """Open the library if it is closed, and count devices."""
        if not self._is_open:
            self._nvml.nvmlInit()
            self._is_open = True
        return {"count": int(self._nvml.nvmlDeviceGetCount())}

    def close(self) -> None:
        """Close the driver; the next `open` opens it again."""
        if self._is_open:
            self._is_open, self._events = False, None
            self._uuid_by_handle.clear()
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                return

    def step(self, name: str, index: int, others: Sequence[int] = ()) -> Facts:
        """Run one step for one device. others: the devices to compare it with, for `pairs`."""
        self._lost = self._fault = ""
        handle = self._handle(index)
        facts = {} if handle is None else _STEPS[name](self, handle, others)
        return facts | {"lost": self._lost, "fault": self._fault}

    def events(self) -> list[list[Any]]:
        """Events of the registered devices since the last call, as [uuid, type, data]."""
        nvml = self._nvml
        if self._events is None:
            return []
        found: list[list[Any]] = []
        while len(found) < EVENTS_MAX:
            event = self._plain(nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:
                break
            uuid = self._uuid_by_handle.get(_address(event.device))
            found.append([uuid, int(event.eventType), int(event.eventData)])
        return found

    def _listen(self, handle: Handle, _others: Sequence[int]) -> Facts:
        """Register a device for events, once. This is a step of its own, so a card that hangs in it does not cost the
        events of all others."""
        nvml = self._nvml
        if self._events is None:
            self._events = self._plain(nvml.nvmlEventSetCreate)
        if self._events is None or _address(handle) in self._uuid_by_handle:
            return {}
        self._uuid_by_handle[_address(handle)] = _text(self._plain(nvml.nvmlDeviceGetUUID, handle))
        supported = self._plain(nvml.nvmlDeviceGetSupportedEventTypes, handle)
        if supported and supported & _EVENTS:
            self._plain(nvml.nvmlDeviceRegisterEvents, handle, supported & _EVENTS, self._events)
        return {}

    def _handle(self, index: int) -> Handle:
        return self._ask(self._nvml.nvmlDeviceGetHandleByIndex, index)

    def _ask(self, call: Callable[..., Any], *arguments: Handle) -> Answer:
        """Call the library for this step's device; None when it refuses. Notes what a refusal says about the device."""
        return self._told(call, *arguments)[0]

    def _told(self, call: Callable[..., Any], *arguments: Handle) -> tuple[Answer, bool]:
        """As `_ask`, plus True if the library gave an answer or said that there is nothing of the kind."""
        if self._lost:
            return None, False
        answer, error = self._try(call, *arguments)
        if error is None:
            return answer, True
        code = getattr(error, "value", None)
        if code in {self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_GPU_NOT_FOUND}:
            self._lost = str(error)
        elif code == self._nvml.NVML_ERROR_RESET_REQUIRED or call == self._nvml.nvmlDeviceGetHandleByIndex:
            self._fault = self._fault or str(error)
        return None, self._means_nothing_there(error)

    def _means_nothing_there(self, error: Exception) -> bool:
        nvml = self._nvml
        nothing = {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_FUNCTION_NOT_FOUND}
        return getattr(error, "value", None) in nothing

    def _plain(self, call: Callable[..., Any], *arguments: Handle) -> Answer:
        """Call the library without noting anything about a device; None when it refuses."""
        return self._try(call, *arguments)[0]

    def _try(self, call: Callable[..., Any], *arguments: Handle) -> tuple[Answer, Exception | None]:
        """Return the answer or the refusal. The refusal is the library's, or the bindings' for an answer that they
        cannot read, such as a name that is not text."""
        try:
            return call(*arguments), None
        except Exception as error:  # noqa: BLE001 - whatever the bindings raise costs one fact
            return None, error

    def _identity(self, handle: Handle, _others: Sequence[int]) -> Facts:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        pci = self._ask(nvml.nvmlDeviceGetPciInfo, handle)
        return {
            "uuid": _text(self._ask(nvml.nvmlDeviceGetUUID, handle)),
            "product_name": _text(self._ask(nvml.nvmlDeviceGetName, handle)),
            "serial": _text(self._ask(nvml.nvmlDeviceGetSerial, handle)),
            "memory_bytes": int(memory.total) if memory is not None else None,
            "compute_capability": _list(self._ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)),
            "bus_id": _text(pci.busId) if pci is not None else None,
            "minor": self._ask(nvml.nvmlDeviceGetMinorNumber, handle),
            "architecture": self._ask(nvml.nvmlDeviceGetArchitecture, handle),
            "numa_mask": _mask(self._ask(nvml.nvmlDeviceGetMemoryAffinity, handle, MASK_WORDS, 0)),
            "cpu_mask": _mask(self._ask(nvml.nvmlDeviceGetCpuAffinityWithinScope, handle, MASK_WORDS, 0)),
            "pcie_generation": self._ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        }

    def _health(self, handle: Handle, _others: Sequence[int]) -> Facts:
        nvml = self._nvml
        fields = self._fields(handle, _FIELD_NVLINK_MBPS, _FIELD_RECOVERY_ACTION)
        uncorrected = self._ask(nvml.nvmlDeviceGetTotalEccErrors, handle, _UNCORRECTED, _VOLATILE)
        retired = self._ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        return {
            "ecc": _first(self._ask(nvml.nvmlDeviceGetEccMode, handle)),
            "power_management": self._ask(nvml.nvmlDeviceGetPowerManagementMode, handle),
            "ecc_uncorrected": uncorrected,
            "ecc_corrected": self._ask(nvml.nvmlDeviceGetTotalEccErrors, handle, _CORRECTED, _VOLATILE),
            "remapped": _list(self._ask(nvml.nvmlDeviceGetRemappedRows, handle)),
            "retired_pending": retired,
            "throttle": self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
            "link_mbps": fields.get(_FIELD_NVLINK_MBPS),
            "recovery_action": fields.get(_FIELD_RECOVERY_ACTION),
        }

    def _fields(self, handle: Handle, *wanted: int) -> Mapping[int, int]:
        values = self._ask(self._nvml.nvmlDeviceGetFieldValues, handle, list(wanted))
        return {
            number: int(value.value.uiVal)
            for number, value in zip(wanted, values or (), strict=False)
            if value.nvmlReturn == self._nvml.NVML_SUCCESS
        }

    def _processes(self, handle: Handle, _others: Sequence[int]) -> Facts:
        """Pids with their GPU and compute instance; None if the library does not list compute processes.
        unlisted: there may be others, because there are too many or graphics processes were not listed."""
        nvml = self._nvml
        computing = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        drawing, is_told = self._told(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle)
        if computing is None:
            return {"processes": None}
        found = {
            (int(process.pid), getattr(process, "gpuInstanceId", None), getattr(process, "computeInstanceId", None))
            for process in (*computing, *(drawing or ()))
        }
        listed = sorted(found, key=str)[:PROCESSES_MAX]
        return {"processes": [list(one) for one in listed], "unlisted": not is_told or len(found) > len(listed)}

    def _links(self, handle: Handle, _others: Sequence[int]) -> Facts:
        """Every link as [active, kind of the far end, its bus id]; None if the library answers anything but yes, no, or
        no such link."""
        nvml = self._nvml
        ends = {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT}
        found: list[list[Any]] = []
        for link in range(NVLINKS_MAX):
            state, error = self._try(nvml.nvmlDeviceGetNvLinkState, handle, link)
            if error is not None:
                code = getattr(error, "value", None)
                if code in ends:
                    break
                self._lost = str(error) if code == nvml.NVML_ERROR_GPU_IS_LOST else ""
                return {"links": None}
            found.append(self._link(handle, link) if state == nvml.NVML_FEATURE_ENABLED else [False, None, None])
        return {"links": found}

    def _link(self, handle: Handle, link: int) -> list[Any]:
        kind = self._ask(self._nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        pci = self._ask(self._nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        return [True, kind, _text(pci.busId) if pci is not None else None]

    def _fabric(self, handle: Handle, _others: Sequence[int]) -> Facts:
        """The fabric by the card: empty if there is none, None if unknown."""
        info = self._nvml.c_nvmlGpuFabricInfo_v2_t()
        answer, is_told = self._told(self._nvml.nvmlDeviceGetGpuFabricInfoV, handle, pointer(info))
        if answer is None:
            return {"fabric": {} if is_told else None}
        told = {"state": int(info.state), "status": int(info.status), "clique": int(info.cliqueId)}
        return {"fabric": told | {"mask": int(info.healthMask), "cluster": bytes(info.clusterUuid).hex()}}

    def _mig(self, handle: Handle, _others: Sequence[int]) -> Facts:
        """MIG mode and instances. uninstanced: there may be others, because a query failed."""
        nvml = self._nvml
        mode = _first(self._ask(nvml.nvmlDeviceGetMigMode, handle))
        if not mode:
            return {"mig": mode, "instances": []}
        count = self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle)
        answers = [
            self._told(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, position)
            for position in range(min(count or 0, MIG_DEVICES_MAX))
        ]
        found = [self._instance(instance) for instance, _ in answers if instance is not None]
        is_whole = count is not None and all(is_told for _, is_told in answers)
        is_whole &= all(one["uuid"] and one["product_name"] for one in found)
        return {"mig": mode, "instances": found, "uninstanced": not is_whole}

    def _instance(self, handle: Handle) -> Facts:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        return {
            "uuid": _text(self._ask(nvml.nvmlDeviceGetUUID, handle)),
            "product_name": _text(self._ask(nvml.nvmlDeviceGetName, handle)),
            "memory_bytes": int(memory.total) if memory is not None else None,
            "gpu_instance": self._ask(nvml.nvmlDeviceGetGpuInstanceId, handle),
            "compute_instance": self._ask(nvml.nvmlDeviceGetComputeInstanceId, handle),
        }

    def _pairs(self, handle: Handle, others: Sequence[int]) -> Facts:
        """[device, PCIe level, P2P status] for every other device where both are known. An error cannot be attributed
        to either device, so none is noted."""
        nvml = self._nvml
        found = []
        for other in others:
            peer = self._plain(nvml.nvmlDeviceGetHandleByIndex, other)
            if peer is None:
                continue
            level, no_level = self._try(nvml.nvmlDeviceGetTopologyCommonAncestor, handle, peer)
            status, no_status = self._try(nvml.nvmlDeviceGetP2PStatus, handle, peer, _P2P_READ)
            if all(error is None or self._means_nothing_there(error) for error in (no_level, no_status)):
                found.append([other, level, status])
        return {"pairs": found}


STEPS: Final = ("identity", "health", "mig", "processes", "links", "fabric", "listen")
"""Steps of one device, in order; `pairs` follows when all devices are known."""
_STEPS: Final = {
    "identity": Driver._identity,
    "health": Driver._health,
    "mig": Driver._mig,
    "processes": Driver._processes,
    "links": Driver._links,
    "fabric": Driver._fabric,
    "listen": Driver._listen,
    "pairs": Driver._pairs,
}


def _address(handle: Handle) -> int | None:
    return cast(handle, c_void_p).value


def _text(value: object) -> str | None:
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _list(value: Answer) -> list[int] | None:
    return [int(one) for one in value] if value is not None else None


def _first(value: Answer) -> int | None:
    return int(value[0]) if value is not None else None


def _mask(words: Answer) -> int | None:
    """Join the words of a bit set into one number."""
    if words is None:
        return None
    return sum(int(word) << (64 * position) for position, word in enumerate(words))
