"""Faulty machines, by name.

Each function adds one fault to a healthy MachineFile with at least four GPUs; tests, the demo and development clusters
share them.
"""

from collections.abc import Callable, Mapping
from typing import Final

from devcluster.mock_nvml.machine_file import MachineFile

ILL: Final = 3
"""Index of the faulty GPU."""
MIG_MIB: Final = 40448
ECC_ERRORS: Final = 4711
RESET_REQUIRED: Final = 16
FABRIC_NOT_STARTED: Final = 1

Story = Callable[[MachineFile], MachineFile]


def lost(machine: MachineFile) -> MachineFile:
    """XID 79: every call for the card fails, starting with its handle."""
    return machine.fail(ILL).event(ILL, 79)


def lost_at_the_uuid(machine: MachineFile) -> MachineFile:
    """The handle call succeeds, and the next call reports the card as lost."""
    return machine.fail(ILL, "nvmlDeviceGetUUID")


def lost_at_the_links(machine: MachineFile) -> MachineFile:
    """Identity calls succeed, and the link calls report the card as lost."""
    return machine.fail(ILL, "nvmlDeviceGetNvLinkState")


def reset_required(machine: MachineFile) -> MachineFile:
    """The driver refuses calls for the card until a reset."""
    return machine.fail(ILL, "nvmlDeviceGetMemoryInfo", code=RESET_REQUIRED).set(ILL, **{"field.230": 1})


def silent(machine: MachineFile) -> MachineFile:
    """Every call for the card hangs."""
    return machine.hang(ILL)


def crashing(machine: MachineFile) -> MachineFile:
    """The health call for the card crashes the library."""
    return machine.crash(ILL, "nvmlDeviceGetTotalEccErrors")


def dead_links(machine: MachineFile) -> MachineFile:
    """Six links of one card are down; the switch still reports its ends as up."""
    return machine.cut_links(ILL, *range(6))


def asymmetric(machine: MachineFile) -> MachineFile:
    """The card reports no links; its peers still report theirs to it."""
    machine.facts = {key: value for key, value in machine.facts.items() if not key.startswith(f"gpu.{ILL}.link.")}
    return machine


def fabric_not_started(machine: MachineFile) -> MachineFile:
    """The fabric manager is not started."""
    for index in range(len(machine.order)):
        machine.set(index, fabric=f"{FABRIC_NOT_STARTED} 0 0 0x0 {'0' * 32}")
    return machine


def ecc_storm(machine: MachineFile) -> MachineFile:
    """Thousands of uncorrectable memory errors and a failed row remapping."""
    return machine.set(ILL, ecc_uncorrected_volatile=ECC_ERRORS, remapped="0 12 0 1")


def mig(machine: MachineFile) -> MachineFile:
    """One card has two MIG instances of 3 slices; another is in MIG mode without instances."""
    return machine.split(ILL, ("3g.40gb", MIG_MIB), ("3g.40gb", MIG_MIB)).set(ILL - 1, mig=1, mig_max=7)


def renumbered(machine: MachineFile) -> MachineFile:
    """Every card has another index after a reboot."""
    order = tuple(reversed(machine.order))
    return MachineFile(machine.profile, seed=machine.seed, order=order)


def replaced(machine: MachineFile) -> MachineFile:
    """The slot holds another card."""
    spare = MachineFile(machine.profile, seed=f"{machine.seed}/spare")
    return machine.set(ILL, uuid=spare.uuid_of(ILL), serial=spare.facts[f"gpu.{ILL}.serial"])


def gone(machine: MachineFile) -> MachineFile:
    """The last card is missing: the driver counts one less and reports no error."""
    machine.facts["count"] = str(len(machine.order) - 1)
    return machine


def slowed(machine: MachineFile) -> MachineFile:
    """The card throttles because it is too hot."""
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
