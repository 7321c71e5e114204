"""Why a device is not free: what the ledger keeps for each device, and the verbs with which that begins and ends."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from atoll.cluster.leases import LeaseRecord
from atoll.cluster.transitions import Verb

K = TypeVar("K")


class HoldSource(StrEnum):
    """What a hold is known from, strongest last."""

    __hash__ = str.__hash__
    """Enum's own is written in Python, and holds are looked up for every device of every change."""

    FOREIGN = "foreign"
    LOST = "lost"
    ASSUMED = "assumed"
    LEASE = "lease"
    POD = "pod"


@dataclass(frozen=True, slots=True)
class Hold:
    """One reason why a device is not free. `key` is the pod uid, or the Lease name for a Lease."""

    source: HoldSource
    key: str


BEGINNINGS: Final = {
    HoldSource.LOST: Verb.DOUBT,
    HoldSource.ASSUMED: Verb.ASSUME,
    HoldSource.LEASE: Verb.RESERVE,
    HoldSource.POD: Verb.CONFIRM,
}
ENDS: Final = {
    HoldSource.LOST: Verb.RELEASE,
    HoldSource.ASSUMED: Verb.FORGET,
    HoldSource.LEASE: Verb.RELEASE,
    HoldSource.POD: Verb.END,
}
"""Verbs of the table in `atoll.cluster.transitions`; what is foreign has no place in it."""


def pods_of(holds: Iterable[Collection[Hold]], leases: Mapping[str, LeaseRecord]) -> set[str]:
    """Return the uids of the pods that hold anything, whatever it is known from; a Lease that is not known stands for
    one."""
    told = {hold for device in holds for hold in device}
    return {
        leases[hold.key].holder.uid if hold.source is HoldSource.LEASE and hold.key in leases else hold.key
        for hold in told
    }


def discard(index: dict[K, set[Hold]], key: K, hold: Hold) -> None:
    """Take a hold out of an index by device; a device that nothing holds any more leaves the index."""
    holds = index.get(key)
    if holds is not None:
        holds.discard(hold)
        if not holds:
            del index[key]
