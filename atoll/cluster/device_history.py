"""What the ledger's evidence says of one device: its occupancy, its availability, its story.

In: a ledger and a device. Out: the states of `atoll.cluster.transitions`, and the last things that happened. Separate
from the ledger, which answers for whole nodes at a time; this is for the check before an assumption, and for people.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atoll.cluster.holds import Hold, HoldSource
from atoll.cluster.transitions import Availability, HealthSignal, Occupancy, Verb, availability_of, occupancy_of, step

if TYPE_CHECKING:
    from atoll.cluster.ledger import Ledger

STORY_MAX = 4
"""Things that happened to a device which are remembered."""


class DeviceHistory:
    """The last things that happened to each device, oldest first."""

    def __init__(self) -> None:
        self._stories: dict[tuple[str, int], tuple[tuple[Verb, str], ...]] = {}

    def tell(self, node: str, device_ids: Iterable[int], verb: Verb, key: str) -> None:
        """Add one thing to the stories of some devices."""
        for device_id in device_ids:
            story = self._stories.get((node, device_id), ())
            self._stories[node, device_id] = (*story[1 - STORY_MAX :], (verb, key))

    def of(self, node: str, device_id: int) -> tuple[str, ...]:
        """Return the story of a device."""
        return tuple(f"{verb} {key}" for verb, key in self._stories.get((node, device_id), ()))


def occupancy(ledger: "Ledger", node: str, device_id: int, uuid: str) -> Occupancy:
    """Return who has a device, by all that is known of it."""
    holds = ledger.holds(node, device_id, uuid)
    is_lost = any(hold.source is HoldSource.LOST for hold in holds)
    records = [ledger.leases[hold.key] for hold in holds if hold.source == "lease"]
    return occupancy_of(
        assumed=any(hold.source == "assumed" for hold in holds),
        leased=bool(records) or is_lost or ledger.is_blocked(node, device_id),
        bound=any(hold.source == "pod" for hold in holds),
        holder_left=any(ledger.has_left(record.holder.uid) for record in records),
        doubted=is_lost or any(record.doubt for record in records),
    )


def availability(ledger: "Ledger", node: str, device_id: int, *, now_seconds: float) -> Availability:
    """Return what the ledger goes by when it gives devices out: the report's state, unknown in silence."""
    devices = ledger.nodes.get(node)
    position = devices.position_by_id.get(device_id) if devices is not None else None
    if devices is None or position is None or ledger.is_stale(node, now_seconds):
        return availability_of(HealthSignal.SILENCE)
    return devices.availability[position]


def check_assumable(ledger: "Ledger", node: str, device_id: int, uuid: str, own: "set[Hold]") -> None:
    """Raise IllegalTransition unless the device is free, or held by the very pod whose holds are `own`."""
    holds = set(ledger.holds(node, device_id, uuid))
    is_own = bool(holds) and holds <= own and not ledger.is_blocked(node, device_id)
    state = occupancy(ledger, node, device_id, uuid)
    step(f"{node}/{device_id}", state, Verb.ASSUME, is_own=is_own, story=ledger.stories.of(node, device_id))
