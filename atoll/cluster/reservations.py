"""Which GPUs a GpuReservation takes and frees now. Pure.

From a reservation, its Leases, the nodes' free GPUs and the time follows a frozen decision: Leases to create, Leases to
delete, and the status. `reservation_use` decides who may use one.

A reservation holds GPUs by Leases like a pod, with its own uid as the holder. A pod that names it takes over Leases and
returns them when it ends; each Lease names its reservation throughout. A reservation takes free GPUs and evicts nobody.
While it has too few GPUs it takes more as they become free. It exchanges an unhealthy GPU, and one whose Node was
deleted. Pods that use it when it ends keep their GPUs until they end.

Total order of taking: the domain that can hold all of it and has the most free GPUs, then by name; nodes that can give
the most missing GPUs, of these the fullest, then by name; on a node the best-connected set.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.api.claims import COUNT_MAX
from atoll.api.reservations import (
    GpuReservation,
    GpuReservationStatus,
    ReservationPhase,
    ReservationShape,
    ReservationUnit,
    ReservedNode,
)
from atoll.api.times import seconds_of, text_of
from atoll.cluster.leases import LeaseRecord
from atoll.cluster.machines import NodeDevices
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Request, bare_request
from atoll.cluster.reservation_use import asked_timeout_seconds, has_one_user
from atoll.cluster.selection import Candidate, device_groups, select
from topology.islands import islands

NEVER_TEXT: Final = "no {level} has machines with {count} such GPUs"


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """One node with a fresh report: free GPUs as a mask of positions, and its domain at the shape's level."""

    devices: NodeDevices
    free: int
    domain: str = ""


@dataclass(frozen=True, slots=True, order=True)
class ReservedDevice:
    """A GPU to take."""

    node: str
    device_id: int
    uuid: str


@dataclass(frozen=True, slots=True)
class ReservationDecision:
    """Create Leases for `taken`, delete those of `released`, write `status`; decide again after `again_seconds`."""

    status: GpuReservationStatus
    taken: tuple[ReservedDevice, ...] = ()
    released: tuple[LeaseRecord, ...] = ()
    again_seconds: float | None = None


def decide(
    reservation: GpuReservation,
    leases: Sequence[LeaseRecord],
    offers: Mapping[str, NodeOffer],
    now_seconds: float,
    *,
    gone: Collection[str] = (),
    users: Collection[Pod] = (),
) -> ReservationDecision:
    """Decide about one reservation. `leases`: all that belong to it; `offers`: every node with a fresh report; `gone`:
    nodes of Leases that were deleted, unlike those that are only silent; `users`: the known pods of Leases."""
    before, spec = reservation.status or GpuReservationStatus(), reservation.spec
    idle = [record for record in leases if record.holder.uid == reservation.metadata.uid]
    used = [record for record in leases if record.holder.uid != reservation.metadata.uid]
    unused_since = None if used else before.unused_since or text_of(now_seconds)
    asked = asked_timeout_seconds(users) if users else before.asked_timeout_seconds
    phase, message, again = _phase(reservation, before, unused_since, now_seconds)
    if phase is not ReservationPhase.FILLING:
        status = _status(reservation, phase, message, (), used)
        return ReservationDecision(status, released=tuple(idle), again_seconds=again)
    sick = [record for record in idle if record.node in gone or _is_withheld(record, offers)]
    well = [record for record in idle if record not in sick]
    surplus = well[max(0, spec.shape.count - len(used)) :]
    kept = well[: len(well) - len(surplus)]
    missing = spec.shape.count - len(used) - len(kept)
    taken, hindrance = _take(spec.shape, missing, [*kept, *used], offers)
    missing -= len(taken)
    if missing > 0:
        message = hindrance or f"{missing} of {spec.shape.count} GPUs are missing; it takes them as they become free"
    else:
        phase = ReservationPhase.ACTIVE
    devices = [*taken, *(ReservedDevice(one.node, one.device_id, one.device_uuid) for one in kept)]
    status = _status(reservation, phase, message, devices, used)
    status = status.model_copy(update={"unused_since": unused_since, "asked_timeout_seconds": asked})
    return ReservationDecision(status, taken, (*sick, *surplus), again)


def inherited(decision: ReservationDecision, ending: Sequence[LeaseRecord]) -> tuple[str, ...]:
    """Return the names of Leases, all of one node, that a reservation takes over from the pod that has ended.

    All or none: a reservation of whole nodes or islands that has only a part of one would never complete it.
    """
    by_place = {(one.node, one.device_id): one.lease_name for one in ending}
    nodes = {one.node for one in ending}
    taken = [by_place.get((one.node, one.device_id), "") for one in decision.taken if one.node in nodes]
    return tuple(taken) if all(taken) else ()


def _phase(
    reservation: GpuReservation, before: GpuReservationStatus, unused_since: str | None, now_seconds: float
) -> tuple[ReservationPhase, str, float | None]:
    """Return the phase by time alone (Filling while in force), its message, and when it changes next."""
    spec = reservation.spec
    starts, ends = seconds_of(spec.starts or ""), seconds_of(spec.ends or "")
    if before.phase is ReservationPhase.RELEASED:
        return before.phase, before.message, None
    if (spec.ends is not None and ends is None) or (spec.starts is not None and starts is None):
        return ReservationPhase.ENDED, "starts or ends is not a valid time; correct it", None
    if ends is not None and now_seconds >= ends:
        return ReservationPhase.ENDED, f"ended at {spec.ends}; pods that use it keep their GPUs until they end", None
    if starts is not None and now_seconds < starts:
        return ReservationPhase.PENDING, f"begins at {spec.starts}", starts - now_seconds
    waits = [] if ends is None else [ends - now_seconds]
    idle_since = seconds_of(unused_since or "")
    timeouts = (spec.unused_timeout_seconds, before.asked_timeout_seconds if has_one_user(reservation) else None)
    timeout = min((one for one in timeouts if one is not None), default=None)
    if timeout is not None and idle_since is not None:
        rest = idle_since + timeout - now_seconds
        if rest <= 0:
            text = f"no pod used it for {timeout} s, so its GPUs were released; create another one"
            return ReservationPhase.RELEASED, text, None
        waits.append(rest)
    return ReservationPhase.FILLING, "", min(waits, default=None)


def _status(
    reservation: GpuReservation,
    phase: ReservationPhase,
    message: str,
    idle: Iterable[ReservedDevice],
    used: Sequence[LeaseRecord],
) -> GpuReservationStatus:
    waiting = list(idle)
    by_node: dict[str, set[int]] = {}
    places = [(one.node, one.device_id) for one in waiting] + [(one.node, one.device_id) for one in used]
    for node, device_id in places:
        by_node.setdefault(node, set()).add(device_id)
    return GpuReservationStatus(
        phase=phase,
        message=message,
        idle=len(waiting),
        used=len(used),
        nodes=tuple(ReservedNode(node=node, ids=tuple(sorted(ids))) for node, ids in sorted(by_node.items())),
        observed_generation=reservation.metadata.generation or None,
    )


def _is_withheld(record: LeaseRecord, offers: Mapping[str, NodeOffer]) -> bool:
    """Return whether the GPU of an idle Lease may not be given out; a silent node does not count."""
    offer = offers.get(record.node)
    if offer is None:
        return False
    position = offer.devices.position_by_uuid.get(record.device_uuid)
    return position is None or not offer.devices.usable >> position & 1


def _take(
    shape: ReservationShape, missing: int, has: Sequence[LeaseRecord], offers: Mapping[str, NodeOffer]
) -> tuple[tuple[ReservedDevice, ...], str]:
    """Return which of the missing GPUs to take, and why no more can ever be had, or an empty string."""
    matching = {name: _matching(shape, offer.devices) for name, offer in offers.items()}
    allowed = dict(offers)
    if shape.level is not None:
        domain = _domain(shape, has, offers, matching)
        if domain is None:
            return (), NEVER_TEXT.format(level=shape.level, count=shape.count)
        allowed = {name: offer for name, offer in offers.items() if offer.domain == domain}
    taken: list[ReservedDevice] = []
    left = {name: offer.free & offer.devices.usable & matching[name] for name, offer in allowed.items()}
    while missing > len(taken):
        sets = (
            (size, fullness, name, mask)
            for name, offer in allowed.items()
            for size, fullness, mask in _sets(shape, offer.devices, left[name], matching[name], missing - len(taken))
        )
        best = min(sets, default=None)
        if best is None:
            break
        _, _, name, mask = best
        left[name] &= ~mask
        devices = allowed[name].devices
        taken += [ReservedDevice(name, one.id, one.uuid) for i, one in enumerate(devices.devices) if mask >> i & 1]
    return tuple(taken), ""


def _domain(
    shape: ReservationShape,
    has: Sequence[LeaseRecord],
    offers: Mapping[str, NodeOffer],
    matching: Mapping[str, int],
) -> str | None:
    """Return the domain for all GPUs: the one that already has some, or else one whose machines have enough."""
    for record in has:
        if record.node in offers:
            return offers[record.node].domain
    room: dict[str, tuple[int, int]] = {}
    for name, offer in offers.items():
        if offer.domain:
            able, free = room.get(offer.domain, (0, 0))
            usable = matching[name] & offer.devices.usable
            room[offer.domain] = able + usable.bit_count(), free + (usable & offer.free).bit_count()
    large = [(-free, domain) for domain, (able, free) in room.items() if able >= shape.count]
    return min(large)[1] if large else None


def _sets(
    shape: ReservationShape, devices: NodeDevices, free: int, matching: int, missing: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the sets that one node could give, each with its sort key."""
    fullness = free.bit_count()
    if shape.unit is ReservationUnit.GPU:
        count = min(missing, fullness, COUNT_MAX)
        answer = select(devices, free, _request(shape, count)) if count else None
        while count and not isinstance(answer, Candidate):
            count -= 1
            answer = select(devices, free, _request(shape, count)) if count else None
        if isinstance(answer, Candidate):
            yield -count, fullness, _mask(answer.choice.positions)
        return
    whole = (
        [matching]
        if shape.unit is ReservationUnit.NODE
        else [_mask(island.positions) & matching for island in islands(devices.machine)]
    )
    for mask in whole:
        if mask and mask & ~free == 0 and mask.bit_count() <= missing:
            yield -mask.bit_count(), fullness, mask


def _request(shape: ReservationShape, count: int) -> Request:
    return bare_request(count, models=shape.models, mig_profile=shape.mig_profile)


def _matching(shape: ReservationShape, devices: NodeDevices) -> int:
    """Return the mask of GPUs that match the shape, free or not."""
    groups = device_groups(devices.shape, _request(shape, 1))
    if not isinstance(groups, tuple):
        return 0
    mask = 0
    for group in groups:
        mask |= group.mask
    return mask


def _mask(positions: Iterable[int]) -> int:
    return sum(1 << position for position in positions)
