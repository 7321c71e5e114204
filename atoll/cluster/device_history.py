"""The last things that happened to each device, for the message of an illegal transition."""

from collections.abc import Iterable

from atoll.cluster.transitions import Verb

HISTORY_MAX = 4
"""Events that are remembered for each device."""


class DeviceHistory:
    """The last events of each device, oldest first."""

    def __init__(self) -> None:
        self._events: dict[str, dict[int, tuple[tuple[Verb, str], ...]]] = {}

    def record(self, node: str, device_ids: Iterable[int], verb: Verb, key: str) -> None:
        """Add one event to the history of some devices; `key` says of which pod or Lease."""
        for device_id in device_ids:
            events = self._events.setdefault(node, {}).get(device_id, ())
            self._events[node][device_id] = (*events[1 - HISTORY_MAX :], (verb, key))

    def of(self, node: str, device_id: int) -> tuple[str, ...]:
        """Return the history of a device, an event each."""
        return tuple(f"{verb} {key}" for verb, key in self._events.get(node, {}).get(device_id, ()))

    def forget(self, node: str) -> None:
        """Forget the devices of a deleted node."""
        self._events.pop(node, None)
