"""Devices that NVIDIA's runtime offers on a node with simulated GPUs."""

from __future__ import annotations

import json
from typing import Any

from devcluster import nvidia
from devcluster.mock_nvml import MachineFile
from topology.profiles import profile


def machine(*order: int) -> MachineFile:
    """A DGX-1 whose NVML order is given."""
    return MachineFile(profile("dgx1-v100"), seed="s", order=order or None)


def listed(file: MachineFile) -> dict[str, set[str]]:
    """The device nodes that each name stands for."""
    devices: list[dict[str, Any]] = json.loads(
        nvidia.device_list(nvidia.cdi_devices(file.facts), nvidia.MountedDriver())
    )["devices"]
    return {one["name"]: {node["path"] for node in one["containerEdits"]["deviceNodes"]} for one in devices}


def test_a_uuid_leads_to_its_own_device_node_whatever_the_index() -> None:
    """The node is named by the minor number, which a boot that renumbers does not change with the uuid."""
    before, after = listed(machine(0, 1, 2, 3, 4, 5, 6, 7)), listed(machine(7, 6, 5, 4, 3, 2, 1, 0))
    uuids = {name for name in before if name.startswith("GPU-")}

    assert len(uuids) == 8
    assert {uuid: before[uuid] for uuid in uuids} == {uuid: after[uuid] for uuid in uuids}
    assert before["0"] == after["7"] == {"/dev/nvidia0"}
    assert before["all"] == {f"/dev/nvidia{minor}" for minor in range(8)}


def test_a_split_gpu_is_handed_out_by_instance_only() -> None:
    """Each instance needs its GPU's node and a capability of its own; the whole GPU has no name."""
    file = machine().split(1, ("3g.40gb", 40_000), ("3g.40gb", 40_000))
    names = listed(file)
    instances = [name for name in names if name.startswith("MIG-")]

    assert len(instances) == 2
    assert file.uuid_of(1) not in names
    assert "1" not in names
    assert all("/dev/nvidia1" in names[name] for name in instances)
    assert names[instances[0]] != names[instances[1]]


def test_a_lost_gpu_is_handed_out_to_nobody() -> None:
    """A driver that cannot reach a GPU lists no device of it."""
    names = listed(machine().fail(2))

    assert "2" not in names
    assert "/dev/nvidia2" not in names["all"]
    assert len(names) == 7 * 2 + 1
