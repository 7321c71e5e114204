"""Does a request fit, will it, may it, or never: the four answers for pods and gangs."""

from collections.abc import Iterable
from enum import StrEnum

from atoll.cluster.machines import NodeDevices, cell_of, is_mig_parent
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import offer, plain


class Verdict(StrEnum):
    """What may be said of a request now."""

    FITS = "fits"
    BUSY = "busy"
    """It fits once others have left."""
    UNKNOWN = "not known yet"
    """A fact is missing or may change: a report, a claim, a cordon, a card that is withheld."""
    NEVER = "never"
    """No machine as it is can hold it, even empty."""


def all_positions(devices: NodeDevices) -> int:
    """Return the mask of everything that could be given out if it were free and well."""
    return sum(1 << i for i, device in enumerate(devices.devices) if not is_mig_parent(device))


def could_serve(devices: NodeDevices, request: Request, *, only_well: bool = False) -> bool:
    """Tell whether the machine could serve the request with nobody on it; `only_well`: without what is withheld."""
    mask = devices.usable if only_well else all_positions(devices)
    return not isinstance(offer(cell_of(devices.shape, mask), plain(request)), Rejection)


def fits_none(machines: Iterable[NodeDevices], request: Request) -> bool:
    """Tell whether no machine could ever serve the request."""
    one_of_each = {devices.shape: devices for devices in machines}
    return not any(could_serve(devices, request) for devices in one_of_each.values())
