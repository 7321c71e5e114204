"""The reimplemented rules of other allocators give the results of their published tests and papers."""

from __future__ import annotations

import pytest

from bench.baselines import (
    aligned_table,
    best_combination,
    best_effort,
    by_scope,
    lowest,
    pair_scores,
    partition,
    prefer_partition,
    scope_tree,
    worst_card,
)
from topology.profiles import profile

ALL8 = range(8)
HAMI_TRIANGLE = [[0, 100, 200], [100, 0, 150], [200, 150, 0]]


@pytest.mark.parametrize(
    ("free", "required", "count", "wanted"),
    [
        ([0, 2, 4, 5], [], 2, (4, 5)),
        ([0, 4, 5, 6], [], 2, (5, 6)),
        ([0, 1, 3], [], 2, (0, 3)),
        ([0, 1, 4], [], 2, (0, 4)),
        (ALL8, [4], 1, (4,)),
        (ALL8, [4], 2, (4, 7)),
        (ALL8, [4], 4, (4, 5, 6, 7)),
        (ALL8, [0, 2, 4, 6], 4, (0, 2, 4, 6)),
        ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3], 4, None),
        (ALL8, [1, 2, 3, 4, 5, 6], 4, None),
    ],
    ids=[
        "one link, one switch",
        "two links beat one",
        "two links in a socket",
        "two links across sockets",
        "required, one",
        "required, its partner",
        "required, its quad",
        "required, all",
        "required is not free",
        "too many required",
    ],
)
def test_best_effort_on_the_volta_cube(
    free: list[int], required: list[int], count: int, wanted: tuple[int, ...] | None
) -> None:
    """NVIDIA/go-gpuallocator, gpuallocator/besteffort_test.go, TestBestEffortAllocate (DGX-1 Volta)."""
    scores = pair_scores(profile("dgx1-v100").machine, through_switch=False)

    assert best_effort(scores, tuple(free), count, required=required) == wanted


@pytest.mark.parametrize(
    ("shape", "count", "wanted"),
    [
        ("dgx1-v100", 2, [(0, 3), (1, 2), (4, 7), (5, 6)]),
        ("dgx1-v100", 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("dgx1-p100", 2, [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("dgx1-p100", 8, [tuple(ALL8)]),
        ("rtx8000x4-bridged", 2, [(0, 3), (1, 2)]),
        ("rtx8000x4-bridged", 1, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_best_effort_in_turn(shape: str, count: int, wanted: list[tuple[int, ...]]) -> None:
    """NVIDIA/go-gpuallocator, gpuallocator/besteffort_test.go, TestBestEffort...GPUAlloc...: ask after ask, then
    nothing is left."""
    machine = profile(shape).machine
    scores, free = pair_scores(machine, through_switch=False), list(range(machine.count))
    given = []
    while (members := best_effort(scores, free, count)) is not None:
        given.append(members)
        free = [one for one in free if one not in members]

    assert given == wanted


def test_best_effort_sees_no_links_behind_a_switch() -> None:
    """NVIDIA/go-gpuallocator counts a link only when its far end is a GPU (its README and the note in device.go)."""
    assert pair_scores(profile("dgx-h100").machine, through_switch=False)[0][1] < 100
    assert pair_scores(profile("dgx-h100").machine, through_switch=True)[0][1] >= 1800


def test_worst_card_is_the_least_connected() -> None:
    """Project-HAMi/HAMi, pkg/device/nvidia/device_test.go, TestComputeWorstSingleCard: sums 300, 250, 350 give gpu1."""
    assert worst_card(HAMI_TRIANGLE, [0, 1, 2]) == (1,)


def test_best_combination_is_the_best_connected() -> None:
    """Project-HAMi/HAMi, pkg/device/nvidia/device_test.go, TestComputeBestCombination: of sums 100, 200 and 150
    the pair gpu0, gpu2."""
    assert best_combination(HAMI_TRIANGLE, [0, 1, 2], 2) == (0, 2)


@pytest.mark.parametrize(
    ("used", "count", "wanted"),
    [
        ([], 1, (0,)),
        ([], 2, (0, 1)),
        ([], 3, None),
        ([], 4, (0, 1, 2, 3)),
        ([], 6, None),
        ([], 8, tuple(ALL8)),
        ([2, 3], 2, (0, 1)),
        ([4], 2, (6, 7)),
        ([4], 1, (5,)),
    ],
    ids=["one", "two", "three", "four", "six", "eight", "two beside two", "two beside one", "one beside one"],
)
def test_partitions_of_a_hopper_machine(used: list[int], count: int, wanted: tuple[int, ...] | None) -> None:
    """koordinator-sh/koordinator, pkg/scheduler/plugins/deviceshare/allocator_gpu_test.go, TestAllocateByPartition
    (H800 and H100, policy Honor)."""
    assert partition(aligned_table(8), [one for one in ALL8 if one not in used], count) == wanted


def test_preferred_partition_falls_back_to_the_tree() -> None:
    """koordinator-sh/koordinator, allocator_gpu_test.go, TestAllocateByPartition: three GPUs, policy Prefer, two
    are used."""
    tree = scope_tree(profile("dgx-h100").machine)

    assert prefer_partition(aligned_table(8), tree, [0, 1, 4, 5, 6, 7], 3) == (4, 5, 6)


@pytest.mark.parametrize(
    ("count", "wanted"), [(1, (4,)), (2, (6, 7)), (4, (0, 1, 2, 3))], ids=["same switch", "same socket", "other socket"]
)
def test_tree_packs_into_used_scopes(count: int, wanted: tuple[int, ...]) -> None:
    """koordinator-sh/koordinator, allocator_gpu_test.go, TestAllocateByTopology: GPU 5 of two sockets with two switches
    of two each is used."""
    tree = scope_tree(profile("dgx1-v100").machine)

    assert by_scope(tree, [one for one in ALL8 if one != 5], count) == wanted


def test_lowest_takes_what_comes_first() -> None:
    """NVIDIA/go-gpuallocator, gpuallocator/simple_test.go: the lowest free devices, nothing when too few are free."""
    assert [lowest(list(ALL8), count) for count in (1, 3, 6, 8)] == [tuple(range(count)) for count in (1, 3, 6, 8)]
    assert lowest([0, 1], 3) is None
