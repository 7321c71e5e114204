"""Whether a pod may use the GpuReservation that it names. Pure.

Returns the reason as one of the short phrases of atoll.api.names, or an empty string. The controllers write the phase,
so that this module needs no clock.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from atoll.api import job_names, names
from atoll.api.reservations import TIMEOUT_SECONDS_MAX, GpuReservation, GpuReservationStatus, ReservationPhase
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


def has_one_user(reservation: GpuReservation) -> bool:
    """Return whether it is for one namespace or one account alone, so that its pods may shorten it for nobody else."""
    return len(reservation.spec.namespaces) + len(reservation.spec.service_accounts) == 1


def asked_timeout_seconds(pods: Iterable[Pod]) -> int | None:
    """Return for how long pods want their reservation kept after them: the longest time; None if one sets no time."""
    asked = [_timeout_seconds(pod) for pod in pods]
    known = [seconds for seconds in asked if seconds is not None]
    return max(known) if known and len(known) == len(asked) else None


def _timeout_seconds(pod: Pod) -> int | None:
    text = pod.metadata.annotations.get(job_names.RESERVATION_TIMEOUT, "")
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(TIMEOUT_SECONDS_MAX))
    return int(text) if is_number and 1 <= int(text) <= TIMEOUT_SECONDS_MAX else None
