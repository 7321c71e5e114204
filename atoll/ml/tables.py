"""Reference tables of GPUs, TPUs and precisions.

An unknown id gives None; a GPU type that is not in the table is matched only by its name. Sizes are nominal, in GB;
atoll.cluster.machines compares a claim with the same size.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Final

from atoll.ml.attributes import MlAttributes, Precision, TpuType

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GpuType:
    """One row. models: the agents' slugs of the card, matched by prefix; compute_capability: None if the vendor
    has none; devices: GPUs per card in the driver, which share its memory."""

    id: str
    memory_gb: tuple[int, ...]
    compute_capability: Capability | None
    models: tuple[str, ...]
    devices: int = 1


def _row(
    gpu: str, memory_gb: tuple[int, ...], capability: Capability | None, *models: str, devices: int = 1
) -> GpuType:
    return GpuType(gpu, memory_gb, capability, models or (gpu,), devices)


GPU_TYPES: Final[Mapping[str, GpuType]] = {
    row.id: row
    for row in (
        _row("nvidia-v100", (16, 32), (7, 0)),
        _row("nvidia-t4", (16,), (7, 5)),
        _row("nvidia-a100", (40, 80), (8, 0)),
        _row("nvidia-a10g", (24,), (8, 6)),
        _row("nvidia-l4", (24,), (8, 9)),
        _row("nvidia-l40s", (48,), (8, 9)),
        _row("nvidia-h100", (80,), (9, 0)),
        _row("nvidia-h200", (141,), (9, 0)),
        _row("nvidia-b200", (192,), (10, 0)),
        _row("amd-mi250", (128,), None, "amd-instinct-mi250", "amd-instinct-mi250x", devices=2),
        _row("amd-mi300x", (192,), None, "amd-instinct-mi300x"),
    )
}
WITHOUT_NVLINK: Final = frozenset({"nvidia-t4", "nvidia-a10g", "nvidia-l4", "nvidia-l40s"})
"""Types whose cards have no NVLink in any form."""
GPU_ALIASES: Final[Mapping[str, str]] = {gpu.partition("-")[2]: gpu for gpu in GPU_TYPES}
"""Names without their vendor, such as a100, to ids."""
VENDORS: Final = ("nvidia", "amd")

GENERATIONS: Final[Mapping[Capability, str]] = {
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 6): "Ampere GA10x",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
}


@dataclass(frozen=True, slots=True)
class PrecisionFacts:
    """Bytes of one parameter, and the lowest compute capability that computes with it."""

    bytes_per_parameter: float
    compute_capability: Capability


PRECISIONS: Final[Mapping[Precision, PrecisionFacts]] = {
    Precision.FP32: PrecisionFacts(4, (7, 0)),
    Precision.FP16: PrecisionFacts(2, (7, 0)),
    Precision.BF16: PrecisionFacts(2, (8, 0)),
    Precision.FP8: PrecisionFacts(1, (8, 9)),
    Precision.INT8: PrecisionFacts(1, (7, 5)),
    Precision.INT4: PrecisionFacts(0.5, (7, 5)),
}


@dataclass(frozen=True, slots=True)
class TpuFacts:
    """Memory of one chip in GB, sides of a slice at most, and how GKE labels the nodes of slices."""

    memory_gb: int
    sides_max: int
    node_label_values: tuple[str, ...]


TPU_TYPES: Final[Mapping[TpuType, TpuFacts]] = {
    TpuType.V4: TpuFacts(32, 3, ("tpu-v4-podslice",)),
    TpuType.V5E: TpuFacts(16, 2, ("tpu-v5-lite-podslice", "tpu-v5-lite-device")),
    TpuType.V5P: TpuFacts(95, 3, ("tpu-v5p-slice",)),
    TpuType.V6E: TpuFacts(32, 2, ("tpu-v6e-slice", "tpu-v6e-device")),
}
TPU_RESOURCE: Final = "google.com/tpu"
TPU_TYPE_LABEL: Final = "cloud.google.com/gke-tpu-accelerator"
TPU_TOPOLOGY_LABEL: Final = "cloud.google.com/gke-tpu-topology"
TPU_CHIPS_PER_HOST: Final = 4
TPU_HOST_CHIPS: Final = (1, 2, 4)
"""Chips that a job may have on one host."""


def gpu_id(name: str) -> str:
    """Return the id of a type of GPU: A100 and a100 are nvidia-a100; other names in lower case."""
    lower = name.strip().lower()
    return GPU_ALIASES.get(lower, lower)


def has_no_capability(gpu_type: str) -> bool:
    """Return whether cards of a type have no compute capability: those of AMD count in another way."""
    return gpu_type.startswith("amd-")


def gpu_models(gpu_type: str) -> tuple[str, ...]:
    """Return the slugs of a GPU type for a GpuClaim, in order of preference."""
    row = GPU_TYPES.get(gpu_type)
    return row.models if row is not None else (gpu_type,)


def claim_memory(memory_gb: float, gpu_type: str | None = None) -> str:
    """Return the `memory` of a GpuClaim for a card's nominal GB.

    A card that is several GPUs in the driver counts per GPU: each of the two GPUs of an amd-mi250 has 64 of 128 GB.
    Fractions of a GB are rounded up to a MB.
    """
    row = GPU_TYPES.get(gpu_type or "")
    share = Decimal(str(memory_gb)) / (row.devices if row is not None else 1)
    if share == share.to_integral_value():
        return f"{int(share)}G"
    return f"{int((share * 1000).to_integral_value(ROUND_CEILING))}M"


def parse_capability(text: str) -> Capability:
    """Return (major, minor) of validated text."""
    major, minor = text.split(".")
    return int(major), int(minor)


def capability_text(capability: Capability) -> str:
    """Return major.minor."""
    return f"{capability[0]}.{capability[1]}"


def tpu_shape(topology: str) -> tuple[int, ...]:
    """Return the sides of a slice, the longest last, without sides of 1: 2x4, 4x2 and 4x2x1 are one shape."""
    return tuple(sorted(side for side in map(int, topology.split("x")) if side > 1))


def tpu_chips(topology: str) -> int:
    """Return the chips of a slice: the product of its sides."""
    return math.prod(map(int, topology.split("x")))


_BILLIONS = re.compile(r"(?:^|[-_/])([0-9]{1,5}(?:\.[0-9]{1,3})?)b(?:$|[-_/.])", re.IGNORECASE)


def parameters_of(model_id: str) -> int | None:
    """Return the number of parameters in a model's name, such as 70b in llama-3.1-70b; None without one."""
    found = _BILLIONS.search(model_id)
    return int(Decimal(found[1]) * 10**9) if found else None


def weights_gb(attributes: MlAttributes) -> float | None:
    """Return the GB of the weights alone, over all GPUs; None if precision or parameters are unknown."""
    parameters = parameters_of(attributes.model_id or "")
    if parameters is None or attributes.precision is None:
        return None
    return parameters * PRECISIONS[attributes.precision].bytes_per_parameter / 1e9
