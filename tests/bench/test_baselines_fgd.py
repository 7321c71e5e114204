"""Fragmentation gradient descent gives the fragmentation of its published tests."""

from __future__ import annotations

import numpy as np
import pytest

from bench.baselines_fgd import FgdPodKind, Typical, lost, scores, typical, typical_of

SMALL = FgdPodKind(6000, 1, 465)
HEAVY = [
    (FgdPodKind(15_700, 1), 28.69),
    (FgdPodKind(11_900, 1), 18.93),
    (FgdPodKind(11_400, 1), 12.27),
    (FgdPodKind(1000, 0, 0), 7.36),
    (FgdPodKind(18_710, 1), 4.85),
    (FgdPodKind(8200, 1), 3.79),
    (FgdPodKind(16_400, 1), 3.31),
    (FgdPodKind(9810, 1), 1.97),
    (FgdPodKind(15_200, 1), 1.87),
    (FgdPodKind(11_200, 1), 1.81),
    (FgdPodKind(14_200, 1), 1.76),
    (FgdPodKind(12_000, 0, 0), 1.65),
    (FgdPodKind(14_900, 1), 1.39),
    (FgdPodKind(60_200, 4), 1.23),
    (FgdPodKind(64_200, 8), 1.07),
    (FgdPodKind(32_200, 4), 1.01),
    (FgdPodKind(17_400, 2), 0.91),
    (FgdPodKind(30_200, 2), 0.69),
    (FgdPodKind(16_000, 1), 0.64),
    (FgdPodKind(15_000, 1), 0.59),
    (FgdPodKind(64_000, 8), 0.53),
    (FgdPodKind(15_000, 0, 0), 0.53),
    (FgdPodKind(11_910, 1), 0.53),
    (FgdPodKind(120_200, 8), 0.48),
    (FgdPodKind(11_300, 1), 0.37),
    (FgdPodKind(30_000, 2), 0.32),
    (FgdPodKind(9800, 1), 0.32),
    (FgdPodKind(8000, 1), 0.32),
    (FgdPodKind(2000, 1), 0.27),
    (FgdPodKind(2000, 1, 80), 0.27),
    (FgdPodKind(1000, 1), 0.27),
]
"""The typical pods of the published test, with shares in percent."""
PUBLISHED = typical((kind, share / 100) for kind, share in HEAVY)


def lost_on(pods: Typical, cpu_milli: int, gpus: list[int]) -> float:
    """What is lost on one node whose model suits every pod."""
    everything = np.ones((1, len(pods.kinds)), dtype=np.bool_)
    return float(lost(pods, np.array([cpu_milli]), np.array([gpus]), everything)[0])


@pytest.mark.parametrize(
    ("cpu_milli", "gpus", "wanted"),
    [(64_000, [1000] * 8, 887.20), (32_000, [1000] * 4 + [0] * 4, 554.40), (0, [1000] * 4 + [0] * 4, 4000.0)],
    ids=["empty", "half used", "no CPU left"],
)
def test_fragments_of_an_eight_gpu_node(cpu_milli: int, gpus: list[int], wanted: float) -> None:
    """hkust-adsl/kubernetes-scheduler-simulator, pkg/utils/frag_test.go, TestNodeGpuShareFragAmountWithNonGpu."""
    assert lost_on(PUBLISHED, cpu_milli, gpus) == pytest.approx(wanted, abs=0.01)


def test_fragments_where_cpu_is_short() -> None:
    """hkust-adsl/kubernetes-scheduler-simulator, pkg/utils/frag_test.go, TestNodeGpuShareFragAmount: one typical pod of
    9.33 % does not fit, so that its share of all 2.7 GPUs is lost."""
    assert lost_on(typical([(SMALL, 0.0933)]), 1000, [200, 1000, 1000, 500]) == pytest.approx(251.91, abs=0.01)


@pytest.mark.parametrize(
    ("gpus", "milli", "wanted"),
    [
        ([200, 1000, 1000, 500], 1000, 700),
        ([1000] * 4, 1000, 0),
        ([1000] * 8, 1000, 0),
        ([200, 1000, 1000, 500], 200, 0),
    ],
    ids=["two GPUs too small", "four whole", "eight whole", "all large enough"],
)
def test_gpus_too_small_for_a_pod_that_fits(gpus: list[int], milli: int, wanted: int) -> None:
    """hkust-adsl/kubernetes-scheduler-simulator, pkg/utils/frag_test.go, TestGetGpuFragMilliByNodeResAndPodRes."""
    assert lost_on(typical([(FgdPodKind(100, 2, milli), 1.0)]), 1000, gpus) == wanted


def test_score_is_a_cut_sigmoid() -> None:
    """hkust-adsl/kubernetes-scheduler-simulator, pkg/simulator/plugin/fgd_score.go: no change scores 50, a GPU less
    lost 73, a GPU more 26."""
    assert list(scores(np.array([1000.0, 1000.0, 0.0]), np.array([1000.0, 0.0, 1000.0]))) == [50, 73, 26]


def test_typical_pods_are_the_frequent_ones() -> None:
    """Kinds are taken by frequency until 95 % of the pods are covered, and their shares sum to one."""
    pods = [FgdPodKind(1, 1)] * 60 + [FgdPodKind(2, 1)] * 36 + [FgdPodKind(3, 1)] * 4

    found = typical_of(pods)

    assert found.kinds == (FgdPodKind(1, 1), FgdPodKind(2, 1))
    assert found.shares.sum() == pytest.approx(1)
