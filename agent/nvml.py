"""The real machine, read through NVIDIA's management library.

Runs the driver's steps (agent.driver) one by one, each with a deadline, and makes a MachineReading. A device whose step
hangs or crashes the library loses only its own remaining facts. While it stays silent it is asked ever more rarely, so
that one dead card does not cost every look its deadline.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from agent.backends import BOOT_ID_PATH, kernel_boot_id
from agent.driver import EVENTS_MAX, STEPS, Driver, Facts, Library
from agent.driver_client import DriverRefused, DriverSilent, DriverWorker, OwnDriver, Steps
from agent.errors import ReadingFailed
from agent.nvml_reading import machine_reading
from agent.pci import PCI_DEVICES, PciTree
from agent.readings import MachineReading
from agent.sanitize import DEVICES_MAX, sanitize

STEP_SECONDS: Final = 3.0
SKIPPED_LOOKS_MAX: Final = 16
"""A silent device is asked at least once in this many looks."""
DEVICE_FILES: Final = Path("/dev")
LISTEN: Final = "listen"
HANGS_OF_ONE: Final = 2
"""A device that hangs with this many others is the cause, not they."""


class NvmlBackend:
    """NVML of this machine. `library` replaces the module pynvml in tests, in this process."""

    driver = "NVML"
    kernel_driver = "nvidia"
    device_steps: tuple[str, ...] = STEPS

    def __init__(
        self,
        library: Library = None,
        *,
        step_seconds: float = STEP_SECONDS,
        boot_id_path: Path = BOOT_ID_PATH,
        pci_devices: Path = PCI_DEVICES,
        device_files: Path = DEVICE_FILES,
    ) -> None:
        own = OwnDriver(Driver(library)) if library is not None else None
        self.steps: Steps = own or DriverWorker(step_seconds=step_seconds)
        self._silent: dict[int, _Silence] = {}
        self._incomparable: dict[int, _Silence] = {}
        self._known: dict[int, Facts] = {}
        self._untold: list[list[Any]] = []
        self._look = 0
        self._is_closed = False
        self._boot_id_path = boot_id_path
        self._pci = PciTree(pci_devices)
        self._device_files = device_files

    def read(self) -> MachineReading:
        """Look at every device once. Raises ReadingFailed when the driver does not answer at all."""
        self._look += 1
        self._is_closed = False
        count = self._count()
        self._untold += self._events()
        worker = self._worker()
        facts = recognized([sanitize(self._asked_facts(index)) for index in range(count)], self._known)
        is_unknown = bool(facts) and all(one.get("fault") == UNKNOWN_ERROR and not one.get("uuid") for one in facts)
        if is_unknown and (len(facts) > 1 or self._is_denied()):
            problem = f"{UNKNOWN_ERROR} for every device; the container may have lost access to them"
            raise ReadingFailed(self.driver, problem, is_refused=True)
        self._known |= {one["index"]: {key: one.get(key) for key in FACE} for one in facts if one.get("uuid")}
        self._compare(facts)
        if worker != self._worker():
            self._listen_again(facts)
        events = self._untold + self._events()
        self._untold = []
        reading = self.assemble(facts, events)
        self._pci.refresh()
        slots = [device.pci_bus_id for device in reading.devices]
        unseen = self._pci.slots_unseen(slots, kernel_driver=self.kernel_driver)
        return replace(
            reading,
            links=replace(reading.links, nics=self._pci.nics(slots)),
            slots_unseen=unseen,
            slots_removed=self._pci.slots_removed,
        )

    def _is_denied(self) -> bool:
        """Return whether this container may not use a device file that it has. Asks without opening, which may hang."""
        files = self._device_files.glob("nvidia[0-9]*")
        return any(not os.access(file, os.R_OK | os.W_OK) for file in files)

    def assemble(self, facts: Sequence[Facts], events: Sequence[Sequence[Any]]) -> MachineReading:
        """Make a reading of all facts and of the events since the last look."""
        return machine_reading(facts, events=events)

    def boot_id(self) -> str:
        """Boot id of the kernel. Raises ReadingFailed."""
        return kernel_boot_id(self._boot_id_path)

    def close(self) -> None:
        """Close the driver; the next reading opens it again. A reading in another thread ends with its current step."""
        self._is_closed = True
        self.steps.close()

    def _count(self) -> int:
        try:
            count = int(self.steps.ask("open")["count"])
        except (DriverSilent, DriverRefused) as error:
            problem = f"{error}; check that the driver is loaded and its library is visible here"
            raise ReadingFailed(self.driver, problem, is_refused=isinstance(error, DriverRefused)) from error
        if not 0 <= count <= DEVICES_MAX:
            raise ReadingFailed(self.driver, f"counts {count} devices, which is impossible")
        return count

    def _asked_facts(self, index: int) -> Facts:
        """Facts of all steps of one device, up to the first that fails."""
        silence = self._silent.get(index)
        if silence is not None and self._look < silence.ask_again_at:
            return {"index": index, "silent": silence.message}
        facts: Facts = {"index": index}
        for step in self.device_steps:
            answer = self._ask(step, index)
            facts |= {key: value for key, value in answer.items() if value or key not in facts}
            if facts.get("silent") or facts.get("lost"):
                return facts
        self._silent.pop(index, None)
        return facts

    def _worker(self) -> int | None:
        return self.steps.pid if isinstance(self.steps, DriverWorker) else None

    def _listen_again(self, facts: Sequence[Facts]) -> None:
        """Register every answering device for events again: a worker lost in this look loses its registrations."""
        for one in facts:
            if LISTEN in self.device_steps and not (one.get("silent") or one.get("lost")):
                self._ask(LISTEN, one["index"])

    def _ask(self, step: str, index: int, others: Sequence[int] = ()) -> Facts:
        try:
            self._reopened()
            return self.steps.ask(step, index, others)
        except (DriverSilent, DriverRefused) as error:
            self._silent[index] = _Silence.after(self._silent.get(index), str(error), look=self._look)
            return {"silent": str(error)}

    def _reopened(self) -> None:
        """Open the driver again after a worker was lost; a failure here is no device's fault. Raises ReadingFailed."""
        if self._is_closed:
            raise ReadingFailed(self.driver, "closed during the reading")
        if isinstance(self.steps, DriverWorker) and self.steps.pid is None:
            self._count()

    def _compare(self, facts: Sequence[Facts]) -> None:
        """Ask each device for its relation to the others, as far as they answer. A hang may come from either card of a
        pair, so neither counts as unhealthy; a card that hangs is left out of comparisons for ever longer."""
        able = {one["index"]: one for one in facts if one.get("uuid") and not (one.get("silent") or one.get("lost"))}
        for index, awaited in self._incomparable.items():
            if self._look < awaited.ask_again_at:
                able.pop(index, None)
        for index in tuple(able):
            if index in able:
                answer, hanging = self._pairs(index, [other for other in able if other != index])
                able[index] |= {key: value for key, value in answer.items() if value or key not in able[index]}
                for one in hanging:
                    del able[one]

    def _pairs(self, index: int, others: Sequence[int]) -> tuple[Facts, frozenset[int]]:
        """Relations of one device to the others, and the devices that hang: of a pair, the one that also hangs with a
        third."""
        answer = self._relations(index, others)
        if answer is not None:
            self._incomparable.pop(index, None)
            return answer, frozenset()
        found: list[Any] = []
        hanging: list[int] = []
        for other in others:
            answer = self._relations(index, [other]) if len(hanging) < HANGS_OF_ONE else {}
            if answer is None:
                hanging.append(other)
            else:
                found += answer.get("pairs", ())
        culprits = frozenset({index} if len(hanging) == HANGS_OF_ONE else hanging)
        for one in culprits:
            self._incomparable[one] = _Silence.after(self._incomparable.get(one), "pairs", look=self._look)
        return {"pairs": found}, culprits

    def _relations(self, index: int, others: Sequence[int]) -> Facts | None:
        try:
            self._reopened()
            return self.steps.ask("pairs", index, others)
        except (DriverSilent, DriverRefused):
            return None

    def _events(self) -> list[list[Any]]:
        """Events since the last call. Called before a look, because a hanging worker loses pending events, and after
        it, for the last event of a card that is lost."""
        try:
            self._reopened()
            return list(self.steps.ask("events")["events"])[: EVENTS_MAX - len(self._untold)]
        except (DriverSilent, DriverRefused, ReadingFailed):
            return []


UNKNOWN_ERROR: Final = "Unknown Error"
"""NVML's error for a device whose file can no longer be opened. For one device among others it is that device's fault;
for every device it is the container's."""
FACE: Final = ("uuid", "bus_id")


def recognized(facts: Sequence[Facts], known: Mapping[int, Facts]) -> list[Facts]:
    """Devices with unique uuids. An unhealthy device without a uuid gets the uuid last known at its index, unless
    another device has it; of two with one uuid, the second loses it. Pure."""
    told = {one["uuid"] for one in facts if one.get("uuid")}
    taken: set[str] = set()
    found = []
    for one in facts:
        uuid = one.get("uuid")
        if uuid in taken:
            found.append({**one, "uuid": None, "fault": f"reports the uuid of another device: {uuid}"})
            continue
        face = known.get(one["index"], {}) if one.get("lost") or one.get("silent") else {}
        if uuid is None and face and face["uuid"] not in told:
            uuid = face["uuid"]
            found.append({**one, **face})
        else:
            found.append(one)
        taken |= {uuid} if uuid else set()
    return [_with_own_instances(one, taken) for one in found]


def _with_own_instances(facts: Facts, taken: set[str]) -> Facts:
    """Drop instances whose uuid another device or instance has; add the rest to `taken`."""
    instances = facts.get("instances")
    if not instances:
        return facts
    own = [one for one in instances if one["uuid"] not in taken]
    taken |= {one["uuid"] for one in own}
    return {**facts, "instances": own, "uninstanced": bool(facts.get("uninstanced")) or len(own) < len(instances)}


class _Silence:
    """A device that did not answer: the fault, and the look at which it is asked again."""

    @classmethod
    def after(cls, last: "_Silence | None", message: str, *, look: int) -> "_Silence":
        """Silence of a device at a look; each further one lasts longer."""
        looks = min(SKIPPED_LOOKS_MAX, 2 * last.looks if last is not None else 1)
        return cls(message, looks, look + looks)

    def __init__(self, message: str, looks: int, ask_again_at: int) -> None:
        self.message = message
        self.looks = looks
        self.ask_again_at = ask_again_at
