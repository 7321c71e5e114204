"""CPU beside GPUs: what pods ask for, and what it costs to leave GPUs on a node without CPU.

A free GPU on a node whose CPU is gone serves nobody, and a whole machine that a small pod broke up may have been one of
the few with the CPU that large pods want. `Fleet.pick` compares nodes by the prices computed here; they
never change the set inside a node.

    price = STRANDED x free GPUs left without the CPU that pods ask for beside a GPU, on average
          + for each kind of ask that few of the machines of its size have the CPU for: its share of all asked GPUs,
            divided by the share of those machines that have it, x free GPUs that it cannot use

Below ASKS_MIN pods nothing is known of the average and nothing has a price; unknown CPU never has one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from topology.demand import FADE

STRANDED: Final = 3.0
"""More than differences of fullness and loss between nodes: GPUs without CPU are worth nothing."""
SCARCE: Final = 0.25
"""An ask is scarce when less than this share of the machines of its size has the CPU for it."""
SUPPLY_MIN: Final = 0.02
ASKS_MIN: Final = 50
RENEWED_EVERY: Final = 64
"""Pods between two derivations of prices."""
KINDS_MAX: Final = 64
MILLI: Final = 1000
CORES_MAX: Final = 255
UNKNOWN: Final = CORES_MAX + 1
"""Stands for the free cores of a node of which nothing is known."""
GPUS_MAX: Final = 16

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def whole_cores(cpu_milli: int) -> int:
    """Return free CPU in whole cores, 0 to CORES_MAX."""
    return max(0, min(cpu_milli // MILLI, CORES_MAX))


def requested_cores(cpu_milli: int) -> int:
    """Return asked CPU in whole cores, rounded up, at most CORES_MAX."""
    return min(-(-cpu_milli // MILLI), CORES_MAX)


@dataclass(frozen=True, slots=True)
class CpuRequestKind:
    """Asks for so many GPUs and whole cores; weight: how many, newer ones more."""

    gpus: int
    cores: int
    weight: float


class CpuRequestCounts:
    """Faded counts of asks by GPUs and cores."""

    def __init__(self) -> None:
        self.seen = 0
        self._weights: dict[tuple[int, int], float] = {}

    def observe(self, gpus: int, cpu_milli: int) -> None:
        """Count one ask of a pod; the rarest kind is forgotten where there are more than KINDS_MAX."""
        self.seen += 1
        for kind in self._weights:
            self._weights[kind] *= FADE
        kind = (min(gpus, GPUS_MAX), requested_cores(cpu_milli))
        self._weights[kind] = self._weights.get(kind, 0.0) + 1.0
        if len(self._weights) > KINDS_MAX:
            del self._weights[min(self._weights, key=lambda one: (self._weights[one], one))]

    def recall(self, kinds: Sequence[CpuRequestKind], seen: int) -> None:
        """Take over what somebody else has counted, instead of what was counted here."""
        self.seen = seen
        self._weights = {(kind.gpus, kind.cores): kind.weight for kind in kinds[:KINDS_MAX]}

    @property
    def kinds(self) -> tuple[CpuRequestKind, ...]:
        """The kinds, in a fixed order."""
        return tuple(CpuRequestKind(*kind, weight) for kind, weight in sorted(self._weights.items()))


def price_table(kinds: Sequence[CpuRequestKind], gpus_of_node: Ints, cores_of_node: Ints) -> Floats:
    """What it costs when so many GPUs and cores are free on a node: one row per number of GPUs, a column per core.

    gpus_of_node, cores_of_node: of every node with known CPU, in all.
    """
    free = np.arange(GPUS_MAX + 1)[:, None]
    cores = np.arange(UNKNOWN + 1)[None, :]
    asked = sum(kind.gpus * kind.weight for kind in kinds)
    per_gpu = sum(kind.cores * kind.weight for kind in kinds) / asked if asked else 0.0
    prices = np.zeros((GPUS_MAX + 1, UNKNOWN + 1))
    if per_gpu:
        prices += STRANDED * np.maximum(free - cores / per_gpu, 0)
    for kind in kinds:
        supply = _supply(kind, gpus_of_node, cores_of_node)
        if supply < SCARCE:
            share = kind.gpus * kind.weight / asked / max(supply, SUPPLY_MIN)
            prices += share * (free - kind.gpus * np.minimum(free // kind.gpus, cores // max(kind.cores, 1)))
    prices[:, UNKNOWN] = 0
    return prices


def _supply(kind: CpuRequestKind, gpus_of_node: Ints, cores_of_node: Ints) -> float:
    """The share of the machines large enough for a kind of ask that have the CPU for it, by the places they offer."""
    places = gpus_of_node // kind.gpus
    able = np.minimum(places, cores_of_node // max(kind.cores, 1))
    return float(able.sum() / places.sum()) if places.any() else 1.0
