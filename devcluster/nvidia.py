"""Configuration and device list of NVIDIA's container runtime on a node with simulated GPUs.

Returns texts; starts and writes nothing. The real runtime runs in CDI mode, which needs no driver and no
libnvidia-container: it reads NVIDIA_VISIBLE_DEVICES from the container's environment and adds the device nodes listed
under that name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

PROGRAMS: Final = ("nvidia-container-runtime", "nvidia-ctk", "nvidia-cdi-hook")
HANDLER: Final = "nvidia"
"""Handler in deploy/runtimeclass.yaml: the variable selects the devices of every container that uses it."""
STRICT_HANDLER: Final = "nvidia-strict"
"""The same runtime, set to honour the variable only in privileged containers."""
KIND: Final = "nvidia.com/gpu"

DEVICE_MAJOR: Final = 195
CONTROL_MINOR: Final = 255
CAPABILITIES_MAJOR: Final = 236
"""Fixed major number of /dev/nvidia-caps; Linux assigns any free one."""
_CAPABILITIES_PER_GPU: Final = 16


class NvidiaRuntime(StrEnum):
    """How a node's containerd uses NVIDIA's runtime."""

    NONE = ""
    HANDLER = "handler"
    """As an additional handler; runc stays the default."""
    DEFAULT = "default"
    """As the default for every container, which many installers set."""


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """Device nodes of a name in NVIDIA_VISIBLE_DEVICES, as (path, major, minor)."""

    names: tuple[str, ...]
    nodes: tuple[tuple[str, int, int], ...]


def runtime_configuration(folder: Path, *, runc: Path, hook: Path, accept_variable: bool) -> str:
    """Return the runtime's TOML; `folder` holds the device list."""
    accepted = str(accept_variable).lower()
    lines = [
        f"accept-nvidia-visible-devices-envvar-when-unprivileged = {accepted}",
        "[nvidia-container-runtime]",
        'mode = "cdi"',
        f'runtimes = ["{runc}"]',
        "[nvidia-container-runtime.modes.cdi]",
        f'spec-dirs = ["{folder}"]',
        f'default-kind = "{KIND}"',
        "[nvidia-ctk]",
        f'path = "{hook}"',
    ]
    return "\n".join(lines) + "\n"


def runtime_script(program: Path, *, configuration: Path) -> str:
    """Return a script for containerd's BinaryName that starts the runtime with its own configuration."""
    return f'#!/bin/sh\nexport NVIDIA_CTK_CONFIG_FILE_PATH="{configuration}"\nexec "{program}" "$@"\n'


def handler_lines(table: str, *, program: Path) -> list[str]:
    """Return the lines of containerd's configuration that define a handler for a program."""
    return [
        f"[{table}]",
        "runtime_type = 'io.containerd.runc.v2'",
        f"[{table}.options]",
        f"BinaryName = '{program}'",
        "SystemdCgroup = false",
    ]


@dataclass(frozen=True, slots=True)
class MountedDriver:
    """Added to every container with a device: files (path in the container -> path on the node) and variables."""

    files: Mapping[str, Path] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def device_list(devices: Sequence[CdiDevice], driver: MountedDriver) -> str:
    """Return a CDI file: every device under each of its names, and all of them as `all`."""
    entries = [_entry(name, device.nodes) for device in devices for name in device.names]
    everything = dict.fromkeys(node for device in devices for node in device.nodes)
    if everything:
        entries.append(_entry("all", tuple(everything)))
    control = _edits((("/dev/nvidiactl", DEVICE_MAJOR, CONTROL_MINOR),))
    options = ["ro", "nosuid", "nodev", "bind"]
    control["env"] = [f"{name}={value}" for name, value in driver.environment.items()]
    control["mounts"] = [
        {"containerPath": inside, "hostPath": str(outside), "options": options}
        for inside, outside in driver.files.items()
    ]
    return json.dumps({"cdiVersion": "0.6.0", "kind": KIND, "devices": entries, "containerEdits": control}, indent=1)


def cdi_devices(facts: Mapping[str, str]) -> tuple[CdiDevice, ...]:
    """Return a machine's devices from its mock's facts: GPUs by index and uuid, and instances of a split GPU.

    A lost GPU has no entry, as with a real driver.
    """
    found: list[CdiDevice] = []
    for index in range(int(facts["count"])):
        if f"fail.{index}.*" in facts:
            continue
        gpu = f"gpu.{index}"
        minor = int(facts[f"{gpu}.minor"])
        node = (f"/dev/nvidia{minor}", DEVICE_MAJOR, minor)
        if facts.get(f"{gpu}.mig") == "1":
            found += _instances(facts, gpu, node, minor)
        else:
            found.append(CdiDevice((str(index), facts[f"{gpu}.uuid"]), (node,)))
    return tuple(found)


def _instances(facts: Mapping[str, str], gpu: str, node: tuple[str, int, int], minor: int) -> list[CdiDevice]:
    """Return the instances of a GPU; each needs the GPU's device node and that of its capability."""
    uuids = [facts.get(f"{gpu}.mig.{number}.uuid") for number in range(int(facts.get(f"{gpu}.mig_max", "0")))]
    index = gpu.rpartition(".")[2]
    found = []
    for number, uuid in enumerate(uuids):
        if uuid is not None:
            capability = minor * _CAPABILITIES_PER_GPU + number
            capability_node = (f"/dev/nvidia-caps/nvidia-cap{capability}", CAPABILITIES_MAJOR, capability)
            found.append(CdiDevice((f"{index}:{number}", uuid), (node, capability_node)))
    return found


def _entry(name: str, nodes: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    return {"name": name, "containerEdits": _edits(nodes)}


def _edits(nodes: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    fields = ("path", "major", "minor")
    described = [{**dict(zip(fields, node, strict=True)), "type": "c", "permissions": "rw"} for node in nodes]
    return {"deviceNodes": described}
