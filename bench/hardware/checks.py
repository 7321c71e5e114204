"""Comparisons of the agent's report with nvidia-smi and with what CUDA programs see.

Pure; gives one HardwareFinding per promise. bench.hardware.__main__ runs the processes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.links import plain_bus_id
from agent.report import model_slug
from bench.hardware.smi import Facts, mebibytes
from topology.topo_text import read_topology

CUDA_ANSWERS = frozenset({0, 100})
"""CUDA_SUCCESS and CUDA_ERROR_NO_DEVICE; other codes say nothing about visible devices."""
MEMORY_TOLERANCE = 0.02
"""nvidia-smi shows the frame buffer with or without the driver's own part, depending on its version."""
_LEGEND = re.compile(r"^\s*(NIC\d+): (\S+)\s*$", re.MULTILINE)
NOTHING = frozenset({"", "N/A", "[N/A]", "Not Active", "Requested functionality has been deprecated"})


@dataclass(frozen=True, slots=True)
class HardwareFinding:
    """One line of the result."""

    what: str
    holds: bool
    detail: str = ""


def same(what: str, ours: object, theirs: object) -> HardwareFinding:
    """Finding for two values that must be equal."""
    return HardwareFinding(what, ours == theirs, f"agent {ours!r}, nvidia-smi {theirs!r}")


def device_findings(device: Mapping[str, Any], facts: Facts, *, position: int) -> Iterable[HardwareFinding]:
    """Compare one GPU of the report with its entry in `nvidia-smi -q -x`."""
    name = f"gpu {position}"
    yield same(f"{name} uuid", device["uuid"], facts["uuid"])
    yield same(f"{name} index", device["index"], position)
    yield same(f"{name} product", device["productName"], facts["product_name"])
    yield same(f"{name} model", device["model"], model_slug(facts["product_name"], vendor="nvidia"))
    yield same(f"{name} PCI bus id", device["pciBusId"], plain_bus_id(facts["id"]))
    yield same(f"{name} minor", str(device.get("minor")), facts.get("minor_number", ""))
    yield same(
        f"{name} MIG", bool((device.get("mig") or {}).get("enabled")), facts.get("mig_mode/current_mig") == "Enabled"
    )
    total = mebibytes(facts.get("fb_memory_usage/total", ""))
    close = total is not None and abs(device["memoryBytes"] / 2**20 - total) <= MEMORY_TOLERANCE * total
    yield HardwareFinding(
        f"{name} memory", close, f"agent {device['memoryBytes'] / 2**20:.0f} MiB, nvidia-smi {total} MiB"
    )
    yield from _optional_findings(name, device, facts)


OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "serial": ("serial",),
    "architecture": ("product_architecture",),
    "eccEnabled": ("ecc_mode/current_ecc",),
}
"""Fields that some cards lack, and their paths in nvidia-smi."""
_FLAGS = {"enabled": "true", "disabled": "false"}


def _optional_findings(name: str, device: Mapping[str, Any], facts: Facts) -> Iterable[HardwareFinding]:
    for field, paths in OPTIONAL.items():
        theirs = next((facts[path] for path in paths if path in facts), "")
        if field in device and theirs not in NOTHING:
            yield HardwareFinding(
                f"{name} {field}",
                str(device[field]).lower() == _FLAGS.get(theirs.lower(), theirs.lower()),
                f"agent {device[field]!r}, nvidia-smi {theirs!r}",
            )


def fabric_finding(fabric: Mapping[str, Any] | None, facts: Facts) -> HardwareFinding:
    """Compare the NVLink fabric: same state, clique and cluster, or none on both sides."""
    state = facts.get("fabric/state", "N/A")
    if fabric is None:
        return HardwareFinding(
            "fabric", state in NOTHING or state == "Not Supported", f"agent none, nvidia-smi {state!r}"
        )
    ours = (fabric.get("state", ""), fabric.get("cliqueId", ""), fabric.get("clusterUUID", ""))
    theirs = (state, facts.get("fabric/cliqueId", ""), facts.get("fabric/clusterUuid", ""))
    words = {"completed": "completed", "in progress": "inProgress", "not started": "notStarted"}
    holds = words.get(state.lower(), state) == ours[0] and _same_or_nothing(ours[1:], theirs[1:])
    return HardwareFinding("fabric", holds, f"agent {ours}, nvidia-smi {theirs}")


def topology_findings(
    links: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], text: str
) -> Iterable[HardwareFinding]:
    """Compare the link matrix and the NUMA nodes with `nvidia-smi topo -m`; devices in the order of their index."""
    theirs = read_topology(text)
    order = sorted(range(len(devices)), key=lambda position: devices[position]["index"])
    rows = [[links["nvlink"][first][second] for second in order] for first in order]
    yield same("links", rows, [list(row) for row in theirs.links])
    told = [device["cpuAffinity"] for device in sorted(devices, key=lambda device: device["index"])]
    listed = [any(one in row.split() for row in text.splitlines()) for one in told]
    yield HardwareFinding("CPU affinity", all(listed), f"agent {told}, each in a row of nvidia-smi topo -m")
    yield same("NUMA nodes", [devices[position].get("numaNode") for position in order], list(theirs.numa))


def adapter_findings(
    links: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], text: str
) -> Iterable[HardwareFinding]:
    """Compare each network adapter of `nvidia-smi topo -m` and its relation to every GPU in the order of their index.
    nvidia-smi names those that do RDMA; if it names none, the agent may report others."""
    names = dict(_LEGEND.findall(text))
    theirs = {names.get(nic.name, nic.name): nic.cells for nic in read_topology(text).nics}
    order = sorted(range(len(devices)), key=lambda position: devices[position]["index"])
    ours = {nic["name"]: tuple(nic["cells"][position] for position in order) for nic in links.get("nics", ())}
    if not theirs:
        yield HardwareFinding("network adapters", holds=True, detail=f"nvidia-smi names none, agent {sorted(ours)}")
        return
    yield same("names of network adapters", sorted(ours), sorted(theirs))
    for name in sorted(ours.keys() & theirs.keys()):
        yield same(f"adapter {name}", ours[name], theirs[name])


def sees_exactly(what: str, *, promised: Sequence[str], seen: Mapping[str, Any]) -> HardwareFinding:
    """Compare what a CUDA program saw, in order. With nothing promised, CUDA must answer that there is no device."""
    uuids = [f"GPU-{uuid}" for uuid in seen["uuids"]]
    answered = seen["error"] in CUDA_ANSWERS
    return HardwareFinding(
        f"CUDA program {what}", answered and uuids == list(promised), f"promised {list(promised)}, seen {seen}"
    )


def _same_or_nothing(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    empty = NOTHING | {"0", "00000000-0000-0000-0000-000000000000"}
    return all(one.lower() == other.lower() or {one, other} <= empty for one, other in zip(ours, theirs, strict=True))
