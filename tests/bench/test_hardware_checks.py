"""Comparisons of the script for GPU machines, on real output of nvidia-smi."""

from typing import Any

import pytest

from bench.hardware.checks import adapter_findings

TEXT = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity
GPU0\tX\tNV18\tPIX\tSYS\t0-7\t0
GPU1\tNV18\tX\tSYS\tPIX\t8-15\t1
NIC0\tPIX\tSYS\tX\tSYS
NIC1\tSYS\tPIX\tSYS\tX

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
DEVICES = [{"index": 1}, {"index": 0}]
"""Ids and indices differ: cells of the report are in the order of its devices, those of nvidia-smi by index."""


def links(*nics: tuple[str, str, str]) -> dict[str, Any]:
    return {"nics": [{"name": name, "cells": cells} for name, *cells in nics]}


@pytest.mark.parametrize(
    ("told", "failing"),
    [
        pytest.param(links(("mlx5_0", "SYS", "PIX"), ("mlx5_1", "PIX", "SYS")), [], id="alike"),
        pytest.param(
            links(("mlx5_0", "PIX", "SYS"), ("mlx5_1", "PIX", "SYS")), ["adapter mlx5_0"], id="a cell differs"
        ),
        pytest.param(links(("mlx5_0", "SYS", "PIX")), ["names of network adapters"], id="one is missing"),
        pytest.param({}, ["names of network adapters"], id="the agent tells none"),
    ],
)
def test_adapters_are_compared_by_name_and_index(told: dict[str, Any], failing: list[str]) -> None:
    """Every adapter that nvidia-smi names, under its own name, with its relation to each GPU."""
    assert [one.what for one in adapter_findings(told, DEVICES, TEXT) if not one.holds] == failing


def test_where_nvidia_smi_names_no_adapter_there_is_nothing_to_compare() -> None:
    """It names those that do RDMA; the agent falls back to all network adapters."""
    text = "\tGPU0\tCPU Affinity\nGPU0\tX\t0-7\n"
    assert all(one.holds for one in adapter_findings(links(("eth0", "SYS")), DEVICES[1:], text))
