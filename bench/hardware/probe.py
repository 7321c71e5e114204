"""Makes every driver call that the agent may need, so that a mock can be checked against the real answers.

The Recorder around the bindings keeps the answers; an error is an answer too.
"""

from collections.abc import Callable
from ctypes import byref, pointer
from typing import Any

Nvml = Any
"""The module pynvml or a Recorder around it."""

PLAIN = [
    "GetUUID",
    "GetName",
    "GetSerial",
    "GetPciInfo",
    "GetMinorNumber",
    "GetArchitecture",
    "GetMemoryInfo",
    "GetBAR1MemoryInfo",
    "GetCudaComputeCapability",
    "GetComputeMode",
    "GetPersistenceMode",
    "GetEccMode",
    "GetMigMode",
    "GetMaxMigDeviceCount",
    "GetPowerManagementMode",
    "GetPowerManagementLimit",
    "GetEnforcedPowerLimit",
    "GetPowerUsage",
    "GetPerformanceState",
    "GetCurrentClocksEventReasons",
    "GetSupportedClocksEventReasons",
    "GetCurrentClocksThrottleReasons",
    "GetMaxPcieLinkGeneration",
    "GetMaxPcieLinkWidth",
    "GetCurrPcieLinkGeneration",
    "GetCurrPcieLinkWidth",
    "GetComputeRunningProcesses",
    "GetGraphicsRunningProcesses",
    "GetMPSComputeRunningProcesses",
    "GetRemappedRows",
    "GetRowRemapperHistogram",
    "GetRetiredPagesPendingStatus",
    "GetSupportedEventTypes",
    "GetNumaNodeId",
    "GetGspFirmwareMode",
    "GetVirtualizationMode",
    "GetBoardId",
    "GetMultiGpuBoard",
    "GetBrand",
    "GetIndex",
    "GetDisplayActive",
    "GetVbiosVersion",
    "GetBoardPartNumber",
    "GetInforomImageVersion",
    "GetConfComputeProtectedMemoryUsage",
]
WITH_ARGUMENTS: list[tuple[str, tuple[Any, ...]]] = [
    ("GetMemoryAffinity", (4, 0)),
    ("GetMemoryAffinity", (4, 1)),
    ("GetCpuAffinity", (4,)),
    ("GetCpuAffinityWithinScope", (4, 0)),
    ("GetCpuAffinityWithinScope", (4, 1)),
    ("GetTemperature", (0,)),
    ("GetTotalEccErrors", (0, 0)),
    ("GetTotalEccErrors", (1, 0)),
    ("GetTotalEccErrors", (0, 1)),
    ("GetTotalEccErrors", (1, 1)),
    ("GetMemoryErrorCounter", (1, 0, 2)),
    ("GetRetiredPages", (0,)),
    ("GetRetiredPages", (1,)),
    ("GetMigDeviceHandleByIndex", (0,)),
    ("GetGpuInstanceProfileInfo", (0, 2)),
    ("GetFieldValues", ([90, 91, 92, 138, 139, 140, 141, 142, 143, 160, 161, 164, 229, 230],)),
    ("GetViolationStatus", (1,)),
]
LINKS_MAX = 20


def probe(nvml: Nvml) -> None:
    """Make all calls, for every device and every pair."""
    nvml.nvmlInit()
    for name in ("GetDriverVersion", "GetNVMLVersion", "GetCudaDriverVersion_v2"):
        _ask(nvml, f"nvmlSystem{name}")
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    for handle in handles:
        for name in PLAIN:
            _ask(nvml, f"nvmlDevice{name}", handle)
        for name, arguments in WITH_ARGUMENTS:
            _ask(nvml, f"nvmlDevice{name}", handle, *arguments)
        for link in range(LINKS_MAX):
            for name in ("State", "Version", "RemoteDeviceType", "RemotePciInfo"):
                _ask(nvml, f"nvmlDeviceGetNvLink{name}", handle, link)
            _ask(nvml, "nvmlDeviceGetNvLinkCapability", handle, link, 0)
        _fabric(nvml, handle)
        for peer in handles:
            _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handle, peer)
            for index in range(5):
                _ask(nvml, "nvmlDeviceGetP2PStatus", handle, peer, index)
    _events(nvml, handles)
    nvml.nvmlShutdown()


def _ask(nvml: Nvml, name: str, *arguments: object) -> object:
    try:
        call: Callable[..., object] = getattr(nvml, name)
        return call(*arguments)
    except Exception as error:  # noqa: BLE001 - a refusal is what we came for
        nvml.answers.append({"call": name, "broke": f"{type(error).__name__}: {error}"})
        return None


def _fabric(nvml: Nvml, handle: object) -> None:
    for kind in ("c_nvmlGpuFabricInfo_v2_t", "c_nvmlGpuFabricInfo_v3_t"):
        make = getattr(nvml, kind, None)
        if make is not None:
            info = make()
            _ask(nvml, "nvmlDeviceGetGpuFabricInfoV", handle, pointer(info))
            told = {field[0]: getattr(info, field[0]) for field in info._fields_}
            told = {key: bytes(value).hex() if hasattr(value, "_length_") else value for key, value in told.items()}
            nvml.answers.append({"call": kind, "answer": told})


def _events(nvml: Nvml, handles: list[object]) -> None:
    events = _ask(nvml, "nvmlEventSetCreate")
    for handle in handles:
        for kind in (0x8, 0x2, 0x1, 0x400, 0x800, 0x1000):
            _ask(nvml, "nvmlDeviceRegisterEvents", handle, kind, events)
    data = nvml.c_nvmlEventData_t()
    _ask(nvml, "nvmlEventSetWait_v2", events, 0)
    nvml.answers.append(
        {"call": "c_nvmlEventData_t", "answer": {"eventType": data.eventType, "size": repr(byref(data))}}
    )
    _ask(nvml, "nvmlEventSetFree", events)
