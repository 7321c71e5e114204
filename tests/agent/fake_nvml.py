"""Replacement for the module pynvml: real names, constants and errors, with the answers of a known machine.

A function that the real bindings do not have is an AttributeError here too, so a misspelt call cannot pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

UNSET = object()


@dataclass
class FakeGpu:
    """One GPU. links: (remote type, remote bus id) per link, or None for an inactive one. broken: function to error."""

    uuid: str
    bus: int
    numa: int = 0
    numa_mask: int = 0
    architecture: int = pynvml.NVML_DEVICE_ARCH_VOLTA
    links: list[tuple[int, str] | None] = field(default_factory=list)
    pids: tuple[int, ...] = ()
    mig: int = 0
    fabric_state: int = pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
    broken: dict[str, int] = field(default_factory=dict)

    @property
    def bus_id(self) -> str:
        return f"00000000:{self.bus:02X}:00.0"


class FakeNvml:
    """A driver with some GPUs. `levels` and `p2p` are per pair; missing pairs are SYSTEM and OK."""

    def __init__(self, gpus: list[FakeGpu], *, minors: list[int] | None = None) -> None:
        self.gpus = gpus
        self.minors = minors or list(range(len(gpus)))
        self.levels: dict[frozenset[int], int] = {}
        self.p2p: dict[frozenset[int], int] = {}
        self.init_error: int | None = None
        self.is_open = False
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        answer = _ANSWERS.get(name)
        if answer is None:
            assert not name.startswith("nvmlDevice"), f"fake does not answer {name}"
            return real
        return _Call(self, name, answer)

    def nvmlInit(self) -> None:  # noqa: N802 - the library's own name
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802 - the library's own name
        self.is_open = False


@dataclass(frozen=True)
class _Call:
    """One library function, equal to itself however often it is looked up."""

    nvml: FakeNvml = field(compare=False)
    name: str = ""
    answer: Callable[..., Any] = field(default=lambda: None, compare=False)

    def __call__(self, *arguments: Any) -> Any:
        self.nvml.calls += 1
        assert self.nvml.is_open, "driver asked before nvmlInit or after nvmlShutdown"
        first = arguments[0] if arguments else None
        gpu = self.nvml.gpus[first] if isinstance(first, int) and first < len(self.nvml.gpus) else None
        code = gpu.broken.get(self.name, gpu.broken.get("*")) if gpu is not None else None
        if code is not None:
            raise pynvml.NVMLError(code)
        return self.answer(self.nvml, *arguments)


def _link(nvml: FakeNvml, handle: int, link: int) -> tuple[int, str] | None:
    links = nvml.gpus[handle].links
    if link >= len(links):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return links[link]


def _pci(bus_id: str) -> SimpleNamespace:
    return SimpleNamespace(busId=bus_id)


def _fabric(nvml: FakeNvml, handle: int, pointer: Any) -> int:
    info = pointer.contents
    info.state = nvml.gpus[handle].fabric_state
    info.cliqueId = 7
    for position in range(16):
        info.clusterUuid[position] = position + 1
    return pynvml.NVML_SUCCESS


def _field(nvml: FakeNvml, handle: int, fields: list[int]) -> list[SimpleNamespace]:
    known = {pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: 25781}
    return [
        SimpleNamespace(nvmlReturn=0 if one in known else 3, value=SimpleNamespace(uiVal=known.get(one, 0)))
        for one in fields
    ]


def _refuse(*arguments: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


_REFUSED = """GetSerial GetCpuAffinityWithinScope GetTotalEccErrors GetRetiredPagesPendingStatus GetEccMode
GetPowerManagementMode GetRemappedRows GetCurrentClocksEventReasons GetMaxMigDeviceCount GetSupportedEventTypes"""


_ANSWERS: dict[str, Callable[..., Any]] = {
    **{f"nvmlDevice{name}": _refuse for name in _REFUSED.split()},
    "nvmlDeviceGetCount": lambda nvml: len(nvml.gpus),
    "nvmlDeviceGetHandleByIndex": lambda nvml, index: index,
    "nvmlDeviceGetUUID": lambda nvml, handle: nvml.gpus[handle].uuid,
    "nvmlDeviceGetName": lambda nvml, handle: "Tesla V100-SXM2-32GB",
    "nvmlDeviceGetMemoryInfo": lambda nvml, handle: SimpleNamespace(total=32 << 30),
    "nvmlDeviceGetCudaComputeCapability": lambda nvml, handle: (7, 0),
    "nvmlDeviceGetPciInfo": lambda nvml, handle: _pci(nvml.gpus[handle].bus_id),
    "nvmlDeviceGetMinorNumber": lambda nvml, handle: nvml.minors[handle],
    "nvmlDeviceGetMigMode": lambda nvml, handle: [nvml.gpus[handle].mig, nvml.gpus[handle].mig],
    "nvmlDeviceGetMemoryAffinity": lambda nvml, handle, words, scope: [
        nvml.gpus[handle].numa_mask or 1 << nvml.gpus[handle].numa,
        0,
        0,
        0,
    ],
    "nvmlDeviceGetArchitecture": lambda nvml, handle: nvml.gpus[handle].architecture,
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda nvml, handle: 3,
    "nvmlDeviceGetComputeRunningProcesses": lambda nvml, handle: [
        SimpleNamespace(pid=pid) for pid in nvml.gpus[handle].pids
    ],
    "nvmlDeviceGetGraphicsRunningProcesses": lambda nvml, handle: [],
    "nvmlDeviceGetNvLinkState": lambda nvml, handle, link: int(_link(nvml, handle, link) is not None),
    "nvmlDeviceGetNvLinkRemoteDeviceType": lambda nvml, handle, link: _link(nvml, handle, link)[0],
    "nvmlDeviceGetNvLinkRemotePciInfo": lambda nvml, handle, link: _pci(_link(nvml, handle, link)[1]),
    "nvmlDeviceGetTopologyCommonAncestor": lambda nvml, first, second: nvml.levels.get(
        frozenset({first, second}), pynvml.NVML_TOPOLOGY_SYSTEM
    ),
    "nvmlDeviceGetP2PStatus": lambda nvml, first, second, index: nvml.p2p.get(
        frozenset({first, second}), pynvml.NVML_P2P_STATUS_OK
    ),
    "nvmlDeviceGetFieldValues": _field,
    "nvmlDeviceGetGpuFabricInfoV": _fabric,
}
