"""NVIDIA's container runtime on a node with simulated GPUs: its configuration and its list of devices.

Gives texts; starts and writes nothing. The runtime is the real one in the mode without a driver and libnvidia-container
(CDI): it reads NVIDIA_VISIBLE_DEVICES from the container's environment and adds the device nodes listed under that
name.
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
"""The handler that deploy/runtimeclass.yaml names: the variable chooses the devices, for whoever runs under it."""
STRICT_HANDLER: Final = "nvidia-strict"
"""The same runtime told to believe the variable only in privileged containers."""
KIND: Final = "nvidia.com/gpu"

DEVICE_MAJOR: Final = 195
CONTROL_MINOR: Final = 255
CAPABILITIES_MAJOR: Final = 236
"""Linux gives /dev/nvidia-caps any free number; here it is always this one."""
_CAPABILITIES_PER_GPU: Final = 16


class NvidiaRuntime(StrEnum):
    """What a node's containerd makes of NVIDIA's runtime."""

    NONE = ""
    HANDLER = "handler"
    """A handler beside runc, which stays the default."""
    DEFAULT = "default"
    """The default for every container, as many installers leave it."""


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """What a name in NVIDIA_VISIBLE_DEVICES stands for: device nodes as (path, major, minor)."""

    names: tuple[str, ...]
    nodes: tuple[tuple[str, int, int], ...]


def runtime_configuration(folder: Path, *, runc: Path, hook: Path, accept_variable: bool) -> str:
    """The runtime's TOML; `folder` holds the list of devices."""
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
    """A program for containerd's BinaryName: the runtime with a configuration of its own."""
    return f'#!/bin/sh\nexport NVIDIA_CTK_CONFIG_FILE_PATH="{configuration}"\nexec "{program}" "$@"\n'


def handler_lines(table: str, *, program: Path) -> list[str]:
    """The lines of containerd's configuration that make a handler of a program."""
    return [
        f"[{table}]",
        "runtime_type = 'io.containerd.runc.v2'",
        f"[{table}.options]",
        f"BinaryName = '{program}'",
        "SystemdCgroup = false",
    ]


@dataclass(frozen=True, slots=True)
class MountedDriver:
    """What comes into a container with any device: files (path in the container -> path on the node), variables."""

    files: Mapping[str, Path] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def device_list(devices: Sequence[CdiDevice], driver: MountedDriver) -> str:
    """A CDI file: every device under each of its names, and all of them together as `all`."""
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
    """The devices of a machine by the facts of its mock: GPUs by index and uuid, of a split one its instances.

    A lost GPU has no entry, as a driver that cannot reach it makes none.
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
    """An instance needs its GPU's node and the node of its capability."""
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
