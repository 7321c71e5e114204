"""Fragmentation gradient descent gives the fragments that its own tests publish."""

from __future__ import annotations

import numpy as np
import pytest

from bench.baselines_fgd import Kind, Typical, lost, scores, typical, typical_of

SMALL = Kind(6000, 1, 465)
HEAVY = [
    (Kind(15_700, 1), 28.69),
    (Kind(11_900, 1), 18.93),
    (Kind(11_400, 1), 12.27),
    (Kind(1000, 0, 0), 7.36),
    (Kind(18_710, 1), 4.85),
    (Kind(8200, 1), 3.79),
    (Kind(16_400, 1), 3.31),
    (Kind(9810, 1), 1.97),
    (Kind(15_200, 1), 1.87),
    (Kind(11_200, 1), 1.81),
    (Kind(14_200, 1), 1.76),
    (Kind(12_000, 0, 0), 1.65),
    (Kind(14_900, 1), 1.39),
    (Kind(60_200, 4), 1.23),
    (Kind(64_200, 8), 1.07),
    (Kind(32_200, 4), 1.01),
    (Kind(17_400, 2), 0.91),
    (Kind(30_200, 2), 0.69),
    (Kind(16_000, 1), 0.64),
    (Kind(15_000, 1), 0.59),
    (Kind(64_000, 8), 0.53),
    (Kind(15_000, 0, 0), 0.53),
    (Kind(11_910, 1), 0.53),
    (Kind(120_200, 8), 0.48),
    (Kind(11_300, 1), 0.37),
    (Kind(30_000, 2), 0.32),
    (Kind(9800, 1), 0.32),
    (Kind(8000, 1), 0.32),
    (Kind(2000, 1), 0.27),
    (Kind(2000, 1, 80), 0.27),
    (Kind(1000, 1), 0.27),
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
    assert lost_on(typical([(Kind(100, 2, milli), 1.0)]), 1000, gpus) == wanted


def test_score_is_a_cut_sigmoid() -> None:
    """hkust-adsl/kubernetes-scheduler-simulator, pkg/simulator/plugin/fgd_score.go: no change scores 50, a GPU less
    lost 73, a GPU more 26."""
    assert list(scores(np.array([1000.0, 1000.0, 0.0]), np.array([1000.0, 0.0, 1000.0]))) == [50, 73, 26]


def test_typical_pods_are_the_frequent_ones() -> None:
    """Kinds are taken by frequency until 95 % of the pods are covered, and their shares sum to one."""
    pods = [Kind(1, 1)] * 60 + [Kind(2, 1)] * 36 + [Kind(3, 1)] * 4

    found = typical_of(pods)

    assert found.kinds == (Kind(1, 1), Kind(2, 1))
    assert found.shares.sum() == pytest.approx(1)
