"""A ledger in numbers: GPUs by model and state, the largest requests that fit, waiting pods.

Models are few, but a report may say anything: beyond `MODELS_MAX` of them the rarest are counted together.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from atoll.cluster import pods
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import Cell, NodeDevices, is_mig_parent
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import offer
from atoll.cluster.transitions import Availability, Occupancy
from topology.device_requests import DeviceRequest, Policy

MODELS_MAX: Final = 64
OTHER: Final = "other"


class GpuState(StrEnum):
    """What a GPU is now; each is in one state. Whoever has it comes first, then why nobody may."""

    FREE = "free"
    ASSUMED = "assumed"
    RESERVED = "reserved"
    BOUND = "bound"
    RELEASING = "releasing"
    IN_DOUBT = "in_doubt"
    FOREIGN = "foreign"
    """Somebody uses it who does not hold it."""
    QUARANTINED = "quarantined"
    CORDONED = "cordoned"
    SILENT = "silent"
    """The agent of its node was not heard of for three periods."""
    PARTITIONED = "partitioned"
    """Cut into MIG instances, which are counted by themselves."""


class PendingReason(StrEnum):
    """Why a pod has no node yet."""

    GATED = "gated"
    """A gate holds it: its gang is not admitted, or somebody else's condition is not met."""
    QUEUED = "queued"
    """kube-scheduler has it."""


_OCCUPIED: Final[Mapping[Occupancy, GpuState]] = {
    Occupancy.ASSUMED: GpuState.ASSUMED,
    Occupancy.RESERVED: GpuState.RESERVED,
    Occupancy.BOUND: GpuState.BOUND,
    Occupancy.RELEASING: GpuState.RELEASING,
    Occupancy.IN_DOUBT: GpuState.IN_DOUBT,
}
_UNAVAILABLE: Final[Mapping[Availability, GpuState]] = {
    Availability.UNKNOWN: GpuState.SILENT,
    Availability.QUARANTINED: GpuState.QUARANTINED,
    Availability.CORDONED: GpuState.CORDONED,
}
ASK_POLICIES: Final = (Policy.ISLAND, Policy.CONTIGUOUS)


@dataclass(frozen=True, slots=True)
class GpuStats:
    """gpus: count by (model, MIG profile, state); largest_ask: GPUs by (model, policy); oldest_created: creation time
    of the pod that waits longest, as the API tells it, "" where none waits."""

    gpus: Mapping[tuple[str, str, GpuState], int] = field(default_factory=dict)
    largest_ask: Mapping[tuple[str, Policy], int] = field(default_factory=dict)
    waiting: Mapping[PendingReason, int] = field(default_factory=dict)
    oldest_created: str = ""
    leases: int = 0
    leases_in_doubt: int = 0
    leases_unreadable: int = 0
    silent_nodes: int = 0
    uses_unknown: int = 0


def gpu_stats_of(ledger: Ledger, now_seconds: float, *, gone: Collection[str] = ()) -> GpuStats:
    """Count everything once; costs some microseconds per GPU that is not free. gone: nodes of which only the report is
    kept, as a memory; they are left out."""
    waiting = [pod for pod in ledger.pods.values() if is_waiting(pod)]
    nodes = {node: devices for node, devices in ledger.nodes.items() if node not in gone}
    states = Counter(_states(ledger, nodes, now_seconds))
    kept = _kept_models(states)
    return GpuStats(
        gpus=_merged(states, kept),
        largest_ask=_largest_asks(_cells(ledger, now_seconds), kept),
        waiting={state: sum(why_waiting(pod) is state for pod in waiting) for state in PendingReason},
        oldest_created=min((pod.metadata.creation_timestamp or "" for pod in waiting), default=""),
        leases=len(ledger.leases),
        leases_in_doubt=sum(bool(record.doubt) for record in ledger.leases.values()),
        leases_unreadable=len(ledger.unreadable_leases),
        silent_nodes=sum(ledger.is_stale(node, now_seconds) for node in nodes),
        uses_unknown=sum(
            ledger.is_use_unknown(node, device.uuid) for node, found in nodes.items() for device in found.devices
        ),
    )


def is_waiting(pod: Pod) -> bool:
    """Tell whether a GPU pod has no node yet and may still get one."""
    return not pod.spec.node_name and not pods.is_terminal(pod) and pod.metadata.deletion_timestamp is None


def why_waiting(pod: Pod) -> PendingReason:
    """Return what a waiting pod waits behind."""
    return PendingReason.GATED if pod.spec.scheduling_gates else PendingReason.QUEUED


def largest_ask(cell: Cell, model: str, policy: Policy) -> int:
    """Return how many GPUs of a model one claim of that policy would get here now, by the scheduler's own decision."""
    for count in range(cell.free.bit_count(), 0, -1):
        if not isinstance(offer(cell, _request(model, _vendor(cell, model), count, policy)), Rejection):
            return count
    return 0


def _states(
    ledger: Ledger, nodes: Mapping[str, NodeDevices], now_seconds: float
) -> Iterator[tuple[str, str, GpuState]]:
    for node, devices in nodes.items():
        free = ledger.free(node, now_seconds=now_seconds)
        is_silent = ledger.is_stale(node, now_seconds)
        for position, device in enumerate(devices.devices):
            profile = device.mig.profile if device.mig is not None else ""
            is_plainly_free = not is_silent and bool(free & devices.usable & (1 << position))
            state = GpuState.FREE if is_plainly_free else _state(ledger, devices, position, now_seconds)
            yield device.model, profile, state


def _state(ledger: Ledger, devices: NodeDevices, position: int, now_seconds: float) -> GpuState:
    device, node = devices.devices[position], devices.node
    if ledger.foreign_uses(node, device.uuid):
        return GpuState.FOREIGN
    held = _OCCUPIED.get(ledger.occupancy(node, device.id, device.uuid))
    if held is not None:
        return held
    if is_mig_parent(device):
        return GpuState.PARTITIONED
    told = ledger.availability(node, device.id, now_seconds=now_seconds)
    return _UNAVAILABLE.get(told, GpuState.FREE)


def _kept_models(states: Mapping[tuple[str, str, GpuState], int]) -> frozenset[str]:
    counts: Counter[str] = Counter()
    for (model, _, _), count in states.items():
        counts[model] += count
    ranked = sorted(counts, key=lambda model: (-counts[model], model))
    return frozenset(ranked[:MODELS_MAX])


def _merged(
    states: Mapping[tuple[str, str, GpuState], int], kept: frozenset[str]
) -> dict[tuple[str, str, GpuState], int]:
    merged: Counter[tuple[str, str, GpuState]] = Counter()
    for (model, profile, state), count in states.items():
        known = model in kept
        merged[model if known else OTHER, profile if known else "", state] += count
    return dict(merged)


def _cells(ledger: Ledger, now_seconds: float) -> set[Cell]:
    return set(ledger.cells(now_seconds=now_seconds).values())


def _largest_asks(cells: Iterable[Cell], models: frozenset[str]) -> dict[tuple[str, Policy], int]:
    largest = {(model, policy): 0 for model in models for policy in ASK_POLICIES}
    for cell in cells:
        for model in {card.model for card in cell.shape.cards if not card.mig_profile} & models:
            for policy in ASK_POLICIES:
                if cell.free.bit_count() > largest[model, policy]:
                    largest[model, policy] = max(largest[model, policy], largest_ask(cell, model, policy))
    return largest


def _vendor(cell: Cell, model: str) -> str:
    return next(card.vendor for card in cell.shape.cards if card.model == model)


def _request(model: str, vendor: str, count: int, policy: Policy) -> Request:
    return Request(
        ask=DeviceRequest(count=count, policy=policy),
        models=(model,),
        mixed_models=False,
        memory_bytes=0,
        compute_capability=(0, 0),
        mig_profile="",
        vendor=vendor,
        claim="",
        visible_devices=None,
        container_counts=(),
    )
