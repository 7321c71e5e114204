"""Whether a pod may use the GpuReservation that it names. Pure.

Returns the reason as one of the short phrases of atoll.api.names, or an empty string. The controllers write the phase,
so that this module needs no clock.
"""

from collections.abc import Sequence
from typing import Final

from atoll.api import names
from atoll.api.reservations import GpuReservation, GpuReservationStatus, ReservationPhase
from atoll.cluster.leases import LeaseRecord
from atoll.cluster.objects import Pod

OVER: Final = (ReservationPhase.ENDED, ReservationPhase.RELEASED)


def reservation_name(pod: Pod) -> str:
    """Return the name of the pod's GpuReservation, or an empty string."""
    return pod.metadata.annotations.get(names.RESERVATION, "")


def mark_of(reservation: GpuReservation) -> str:
    """Return the mark of a reservation on its Leases: NAME/UID."""
    return f"{reservation.metadata.name}/{reservation.metadata.uid}"


def reservation_of(leases: Sequence[LeaseRecord]) -> str:
    """Return the uid of the reservation that a pod's Leases return to; empty for none."""
    return next((record.reservation.rpartition("/")[2] for record in leases if record.reservation), "")


def may_hold(reservation: GpuReservation) -> bool:
    """Return whether the reservation is not over, so that it may hold GPUs."""
    return (reservation.status or GpuReservationStatus()).phase not in OVER


def why_unusable(pod: Pod, reservation: GpuReservation | None, count: int) -> str:
    """Return why the pod, which asks for `count` GPUs, may not use its reservation; empty if it may."""
    if reservation is None or reservation.metadata.deletion_timestamp is not None:
        return names.REJECT_RESERVATION_MISSING
    spec, namespace = reservation.spec, pod.metadata.namespace
    account = f"{namespace}/{pod.spec.service_account_name or 'default'}"
    if namespace not in spec.namespaces and account not in spec.service_accounts:
        return names.REJECT_RESERVATION_FOREIGN
    phase = (reservation.status or GpuReservationStatus()).phase
    if phase is ReservationPhase.PENDING:
        return names.REJECT_RESERVATION_EARLY
    if not may_hold(reservation):
        return names.REJECT_RESERVATION_OVER
    return names.REJECT_RESERVATION_SMALL if count > spec.shape.count else ""
