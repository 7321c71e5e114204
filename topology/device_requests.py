"""A pod's request to one machine, as frozen values.

Webhook, extender and command line build requests; the engine answers them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from topology.errors import DeviceRequestError
from topology.model import DEVICES_MAX


def gpus(count: int) -> str:
    """Return a count in words: 1 GPU, 3 GPUs."""
    return "1 GPU" if count == 1 else f"{count} GPUs"


class Policy(StrEnum):
    """Arrangement of a set's devices."""

    __hash__ = str.__hash__
    """Enum's own hash is written in Python, and tables are looked up by request thousands of times a second."""

    CONTIGUOUS = "contiguous"
    """The best-connected set; one island if one fits; never refused for links."""
    ISLAND = "island"
    """One island or nothing."""
    PACKED = "packed"
    """Ignore links; fragment least and fill machines that are already in use."""
    SPREAD = "spread"
    """Different islands and NUMA nodes; prefer the least used."""


class Interconnect(StrEnum):
    """Links required between the devices of a set."""

    __hash__ = str.__hash__

    ANY = "any"
    NVLINK = "nvlink"
    """Every pair is joined by NVLink (or xGMI), directly or through a switch."""
    PCIE = "pcie"
    """No pair is joined by NVLink, which leaves machines and pairs with NVLink to pods that need it."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """One request to one machine. min_bandwidth_gbps: ring bandwidth in GB/s that a set of two or more must reach."""

    count: int
    policy: Policy = Policy.CONTIGUOUS
    interconnect: Interconnect = Interconnect.ANY
    min_bandwidth_gbps: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= DEVICES_MAX:
            raise DeviceRequestError(f"count must be 1 to {DEVICES_MAX}", value=self.count)
        if not (math.isfinite(self.min_bandwidth_gbps) and self.min_bandwidth_gbps >= 0):
            raise DeviceRequestError("bandwidth must be a number of GB/s, zero or more", value=self.min_bandwidth_gbps)
