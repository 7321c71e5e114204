"""Simulated machine: plays a known profile, so that a cluster without GPUs behaves as if it had some.

Gives a MachineReading like the driver's, from a topology profile, a seed (usually the node's name) and a state file
that may change at any time. A device is identified by its position in the profile; its uuid follows from seed and
position, so a restarted agent plays the same cards. The state file is JSON, read at every look:

    {"bootId": "b2",                      another boot; without it the kernel's own
     "order": [3, 1, 0, 2],               order[i] = position of the device with NVML index i
     "devices": {"2": {"lost": true},     fallen off the bus: neither uuid nor links can be read
                 "3": {"fault": "XID 48", "uuid": "GPU-spare", "processes": [4711]},
                 "5": {"absent": true}}}  not even counted by the driver
"""

import random
import uuid as uuids
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.backends import kernel_boot_id
from agent.errors import ReadingFailed, SettingsMistake
from agent.readings import Cells, DeviceReading, LinksReading, MachineReading
from topology.profiles import Profile

STATE_BYTES_MAX = 1024 * 1024
_NAMESPACE = uuids.UUID("6f2f4d0e-58c1-4b06-9a5f-2f3e0d1c7a55")


class DeviceState(BaseModel):
    """Differences from a healthy device of the profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lost: bool = False
    absent: bool = False
    fault: str = Field("", max_length=256)
    uuid: str = Field("", max_length=96)
    processes: tuple[int, ...] = Field((), max_length=1024)


class SimulatedState(BaseModel):
    """The state file. Unknown keys are refused: a test with a misspelt key would test nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    boot_id: str = Field("", alias="bootId", max_length=64)
    order: tuple[int, ...] | None = None
    devices: dict[int, DeviceState] = Field({}, max_length=1024)


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """One profile under one seed. order[i] is the position of the device with index i."""

    profile: Profile
    seed: str
    order: tuple[int, ...]
    given_uuids: tuple[str, ...] = ()

    def uuid_of(self, position: int) -> str:
        """Given uuid of a position, else the one from the seed."""
        if self.given_uuids:
            return self.given_uuids[position]
        prefix = "GPU-" if self.profile.machine.vendor == "nvidia" else ""
        return f"{prefix}{uuids.uuid5(_NAMESPACE, f'{self.seed}/{position}')}"


def play(profile: Profile, *, seed: str, order: str = "", given_uuids: Sequence[str] = ()) -> SimulatedMachine:
    """Set up a machine. order: empty for the profile's, `shuffled` for one from the seed, `reversed`, or positions
    separated by commas. Raises SettingsMistake."""
    count = profile.machine.count
    if given_uuids and (len(given_uuids) != count or len(set(given_uuids)) != count):
        raise SettingsMistake(
            f"profile {profile.name} has {count} devices and needs as many different uuids: {given_uuids}"
        )
    return SimulatedMachine(profile, seed, _order(order, count=count, seed=seed), tuple(given_uuids))


class SimulatedBackend:
    """Plays a machine, changed by the state file if there is one."""

    def __init__(self, machine: SimulatedMachine, *, state_path: Path | None = None) -> None:
        self._machine = machine
        self._state_path = state_path

    def read(self) -> MachineReading:
        """Look once. Raises ReadingFailed for a state file that makes no sense."""
        state = read_state(self._state_path)
        order = state.order if state.order is not None else self._machine.order
        count = self._machine.profile.machine.count
        if not all(0 <= position < count for position in state.devices):
            problem = f"devices must be positions 0 to {count - 1}, not {list(state.devices)}"
            raise ReadingFailed(str(self._state_path), problem)
        if sorted(order) != list(range(count)):
            raise ReadingFailed(str(self._state_path), f"order must name every position once: {order}")
        return reading_of(self._machine, order=order, states=state.devices)

    def boot_id(self) -> str:
        """Boot id of the state file, else the kernel's. Raises ReadingFailed."""
        return read_state(self._state_path).boot_id or kernel_boot_id()

    def close(self) -> None:
        """Nothing is open."""


def read_state(path: Path | None) -> SimulatedState:
    """Read the state file; without one the machine is as in the profile. Raises ReadingFailed for a broken one."""
    if path is None:
        return SimulatedState()
    try:
        with path.open("rb") as file:
            text = file.read(STATE_BYTES_MAX + 1)
        if len(text) > STATE_BYTES_MAX:
            raise ReadingFailed(str(path), f"larger than {STATE_BYTES_MAX} bytes")
        return SimulatedState.model_validate_json(text)
    except FileNotFoundError:
        return SimulatedState()
    except (OSError, ValidationError) as error:
        raise ReadingFailed(str(path), str(error)) from error


def reading_of(machine: SimulatedMachine, *, order: Sequence[int], states: Mapping[int, DeviceState]) -> MachineReading:
    """Reading of a machine with its devices in these states; positions without a state are healthy."""
    counted = [position for position in order if not states.get(position, DeviceState()).absent]
    geometry = machine.profile.machine
    readable = [not states.get(position, DeviceState()).lost for position in counted]
    return MachineReading(
        devices=tuple(
            _device(machine, index=index, position=position, state=states.get(position, DeviceState()))
            for index, position in enumerate(counted)
        ),
        links=LinksReading(
            links=_picked(geometry.links, counted),
            pcie=_picked(geometry.pcie, counted) if geometry.pcie is not None else None,
            nvlink_generation=geometry.nvlink_generation,
            nvswitch=geometry.nvswitch,
            link_gbps=geometry.link_gbps,
            pcie_generation=geometry.pcie_generation,
            inter_socket_gbps=geometry.inter_socket_gbps,
            unread=frozenset(index for index, is_readable in enumerate(readable) if not is_readable),
        ),
        expected_count=len(counted),
        vendor=geometry.vendor,
    )


def _device(machine: SimulatedMachine, *, index: int, position: int, state: DeviceState) -> DeviceReading:
    bus_id = f"00000000:{position + 1:02x}:00.0"
    if state.lost:
        return DeviceReading(index=index, pci_bus_id=bus_id, fault=state.fault or "GPU is lost", is_lost=True)
    profile = machine.profile
    return DeviceReading(
        index=index,
        uuid=state.uuid or machine.uuid_of(position),
        product_name=profile.product_name,
        memory_bytes=profile.memory_bytes,
        compute_capability=profile.compute_capability,
        numa_node=profile.machine.numa[position],
        pci_bus_id=bus_id,
        minor=position,
        mig_enabled=False,
        process_ids=state.processes,
        fault=state.fault,
    )


def _picked(rows: Cells, positions: Sequence[int]) -> Cells:
    return tuple(tuple(rows[first][second] for second in positions) for first in positions)


def _order(text: str, *, count: int, seed: str) -> tuple[int, ...]:
    positions = list(range(count))
    if text == "shuffled":
        random.Random(seed).shuffle(positions)  # noqa: S311 - the same cards for the same seed, nothing secret
    elif text == "reversed":
        positions.reverse()
    elif text:
        named = [int(part) if part.isascii() and part.isdigit() else -1 for part in text.split(",")]
        if sorted(named) != positions:
            raise SettingsMistake(
                f"order must be shuffled, reversed or every position 0 to {count - 1} once, not {text!r}"
            )
        positions = named
    return tuple(positions)
