"""Faulty machines, by name.

Each function adds one fault to a healthy MachineFile with at least four GPUs; tests, the demo and development clusters
share them.
"""

from collections.abc import Callable, Mapping
from typing import Final

from devcluster.mock_nvml.machine_file import MachineFile

ILL: Final = 3
"""Index of the GPU that is ill."""
MIG_MIB: Final = 40448
ECC_ERRORS: Final = 4711
RESET_REQUIRED: Final = 16
FABRIC_NOT_STARTED: Final = 1

Story = Callable[[MachineFile], MachineFile]


def lost(machine: MachineFile) -> MachineFile:
    """XID 79: the card answers nothing any more, from its handle on."""
    return machine.fail(ILL).event(ILL, 79)


def lost_at_the_uuid(machine: MachineFile) -> MachineFile:
    """The handle can still be had, and the first question finds the card lost."""
    return machine.fail(ILL, "nvmlDeviceGetUUID")


def lost_at_the_links(machine: MachineFile) -> MachineFile:
    """The card says who it is, and is lost when its links are asked for."""
    return machine.fail(ILL, "nvmlDeviceGetNvLinkState")


def reset_required(machine: MachineFile) -> MachineFile:
    """The driver refuses the card until it is reset."""
    return machine.fail(ILL, "nvmlDeviceGetMemoryInfo", code=RESET_REQUIRED).set(ILL, **{"field.230": 1})


def silent(machine: MachineFile) -> MachineFile:
    """Every call for the card hangs."""
    return machine.hang(ILL)


def crashing(machine: MachineFile) -> MachineFile:
    """Asking the card for its health takes the library down."""
    return machine.crash(ILL, "nvmlDeviceGetTotalEccErrors")


def dead_links(machine: MachineFile) -> MachineFile:
    """Six links of one card are down; the other ends on a switch do not notice."""
    return machine.cut_links(ILL, *range(6))


def asymmetric(machine: MachineFile) -> MachineFile:
    """The card reports no link at all, its peers still report theirs to it."""
    machine.facts = {key: value for key, value in machine.facts.items() if not key.startswith(f"gpu.{ILL}.link.")}
    return machine


def fabric_not_started(machine: MachineFile) -> MachineFile:
    """Nobody started the fabric manager."""
    for index in range(len(machine.order)):
        machine.set(index, fabric=f"{FABRIC_NOT_STARTED} 0 0 0x0 {'0' * 32}")
    return machine


def ecc_storm(machine: MachineFile) -> MachineFile:
    """Uncorrectable memory errors by the thousand, and a row remapping that failed."""
    return machine.set(ILL, ecc_uncorrected_volatile=ECC_ERRORS, remapped="0 12 0 1")


def mig(machine: MachineFile) -> MachineFile:
    """One card is cut in two halves of 3 slices, another is in MIG mode and cut into nothing yet."""
    return machine.split(ILL, ("3g.40gb", MIG_MIB), ("3g.40gb", MIG_MIB)).set(ILL - 1, mig=1, mig_max=7)


def renumbered(machine: MachineFile) -> MachineFile:
    """After a reboot every card has another index."""
    order = tuple(reversed(machine.order))
    return MachineFile(machine.profile, seed=machine.seed, order=order)


def replaced(machine: MachineFile) -> MachineFile:
    """Another card sits in the slot."""
    spare = MachineFile(machine.profile, seed=f"{machine.seed}/spare")
    return machine.set(ILL, uuid=spare.uuid_of(ILL), serial=spare.facts[f"gpu.{ILL}.serial"])


def gone(machine: MachineFile) -> MachineFile:
    """The driver counts one card less, without any error: the last one is missing."""
    machine.facts["count"] = str(len(machine.order) - 1)
    return machine


def slowed(machine: MachineFile) -> MachineFile:
    """The card is too hot."""
    return machine.set(ILL, throttle="0x48")


STORIES: Final[Mapping[str, Story]] = {
    story.__name__.replace("_", "-"): story
    for story in (
        lost,
        lost_at_the_uuid,
        lost_at_the_links,
        reset_required,
        silent,
        crashing,
        dead_links,
        asymmetric,
        fabric_not_started,
        ecc_storm,
        mig,
        renumbered,
        replaced,
        gone,
        slowed,
    )
}
