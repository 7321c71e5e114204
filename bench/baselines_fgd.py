"""Fragmentation gradient descent, re-created (Weng et al., ATC'23, and hkust-adsl/kubernetes-scheduler-simulator).

From the free resources of nodes (CPU in milli-CPU, each GPU in thousandths) and the typical pods of a cluster: the free
amount that no typical pod can use, in thousandths of a GPU, and the score of a node for a pod.

For each typical pod, weighted by its share: all free GPUs count as lost if the pod does not fit on the node (too little
CPU, too few GPUs, or it asks for no GPU at all); if it fits, only the GPUs that are too small for it. The score of a
node is 100 x sigmoid(lost before - lost after, in GPUs), truncated to a whole number.

The published rule breaks its many ties at random; here the caller breaks them by the fullest node, which is the best of
the tie-breaks tried for this rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

MILLI: Final = 1000
TYPICAL_SHARE: Final = 0.95
"""The most frequent kinds of pods that make up this share of all are typical."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FgdPodKind:
    """A pod's request: milli-CPU, GPUs, thousandths of each GPU (1000: whole ones), models it may run on ("": any)."""

    cpu_milli: int
    gpus: int
    gpu_milli: int = MILLI
    models: str = ""

    def may_run_on(self, model: str) -> bool:
        """True if a node of that GPU model is allowed."""
        return not self.models or model in self.models.split("|")


@dataclass(frozen=True, slots=True, eq=False)
class Typical:
    """Kinds as arrays, with shares."""

    kinds: tuple[FgdPodKind, ...]
    cpu_milli: Ints
    gpus: Ints
    gpu_milli: Ints
    shares: Floats

    def allowed_on(self, model: str) -> Bools:
        """For each kind, whether it may run on a model."""
        return np.array([kind.may_run_on(model) for kind in self.kinds], dtype=np.bool_)


def typical(kinds: Iterable[tuple[FgdPodKind, float]]) -> Typical:
    """Typical pods from kinds with shares."""
    pairs = list(kinds)
    return Typical(
        kinds=tuple(kind for kind, _ in pairs),
        cpu_milli=np.array([kind.cpu_milli for kind, _ in pairs], dtype=np.int64),
        gpus=np.array([kind.gpus for kind, _ in pairs], dtype=np.int64),
        gpu_milli=np.array([kind.gpu_milli if kind.gpus else 0 for kind, _ in pairs], dtype=np.int64),
        shares=np.array([share for _, share in pairs]),
    )


def typical_of(pods: Iterable[FgdPodKind]) -> Typical:
    """The most frequent kinds up to TYPICAL_SHARE of all pods, shares summing to one."""
    counts = Counter(pods).most_common()
    total = sum(count for _, count in counts)
    chosen: list[tuple[FgdPodKind, float]] = []
    seen = 0
    for kind, count in counts:
        if seen >= TYPICAL_SHARE * total:
            break
        chosen.append((kind, count))
        seen += count
    return typical((kind, count / seen) for kind, count in chosen)


def lost(pods: Typical, cpu_milli: Ints, gpu_milli: Ints, allowed: Bools) -> Floats:
    """Thousandths of GPUs that typical pods cannot use, per node.

    cpu_milli: per node; gpu_milli: per node and GPU, 0 where there is none; allowed: per node and typical pod, whether
    the GPU model suits it.
    """
    free = gpu_milli.sum(axis=1)[:, None]
    large = gpu_milli[:, None, :] >= np.maximum(pods.gpu_milli, 1)[None, :, None]
    small = np.where(large, 0, gpu_milli[:, None, :]).sum(axis=2)
    fits = (large.sum(axis=2) >= pods.gpus) & (cpu_milli[:, None] >= pods.cpu_milli) & allowed & (pods.gpus > 0)
    result: Floats = np.where(fits, small, free) @ pods.shares
    return result


def scores(before: Floats, after: Floats) -> Ints:
    """Score of each node for a pod, 0 to 100, from the loss before and after."""
    return (100 / (1 + np.exp((after - before) / MILLI))).astype(np.int64)
