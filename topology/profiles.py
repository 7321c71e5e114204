"""Known machines as data, for simulated agents, development clusters, tests and benchmarks.

Read from profiles.json beside this module: uniform matrices as one cell, others as rows of cells; `evidence` says
whether the shape comes from a real dump, a test fixture or specifications.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Final

from topology.errors import ProfileError
from topology.links import SELF
from topology.model import Machine, machine

BYTES_PER_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """One known machine. product_name: as the driver prints it; model: its slug in claims; memory_bytes: per
    device, as the driver reports it; compute_capability: "major.minor"; evidence: observed, fixture or derived."""

    name: str
    product_name: str
    model: str
    memory_bytes: int
    compute_capability: str
    machine: Machine
    evidence: str


def profile_names() -> tuple[str, ...]:
    """Names of all known machines, sorted."""
    return tuple(sorted(_records()))


@lru_cache(maxsize=256)
def profile(name: str) -> Profile:
    """The known machine of that name. Raises ProfileError if there is none."""
    record = _records().get(name)
    if record is None:
        raise ProfileError(name, known=profile_names())
    return Profile(
        name=name,
        product_name=record["product"],
        model=record["model"],
        memory_bytes=record["memory_mib"] * BYTES_PER_MIB,
        compute_capability=record["compute_capability"],
        machine=_machine(record),
        evidence=record["evidence"],
    )


@lru_cache(maxsize=1)
def _records() -> dict[str, dict[str, Any]]:
    text = resources.files("topology").joinpath("profiles.json").read_text(encoding="utf-8")
    records: dict[str, dict[str, Any]] = json.loads(text)
    return records


def _machine(record: dict[str, Any]) -> Machine:
    count = record["count"]
    return machine(
        _rows(record["links"], count=count),
        pcie=_rows(record["pcie"], count=count) if "pcie" in record else None,
        numa=record.get("numa"),
        nvlink_generation=record.get("nvlink_generation"),
        nvswitch=record.get("nvswitch", False),
        link_gbps=record.get("link_gbps"),
        pcie_generation=record.get("pcie_generation"),
        inter_socket_gbps=record.get("inter_socket_gbps"),
        vendor=record.get("vendor", "nvidia"),
    )


def _rows(cells: str | list[str], *, count: int) -> list[list[str]]:
    if isinstance(cells, str):
        return [[SELF if row == column else cells for column in range(count)] for row in range(count)]
    return [row.split() for row in cells]
