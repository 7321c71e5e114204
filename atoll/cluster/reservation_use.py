"""Whether a pod may use the GpuReservation that it names. Pure.

In: a pod and what is found under the name. Out: why it may not, as one of the short phrases of atoll.api.names; empty
where it may. The phase is the controllers' word, so that no clock is read here.
"""

from typing import Final

from atoll.api import names
from atoll.api.reservations import GpuReservation, GpuReservationStatus, ReservationPhase
from atoll.cluster.objects import Pod

OVER: Final = (ReservationPhase.ENDED, ReservationPhase.RELEASED)


def reservation_name(pod: Pod) -> str:
    """Return the GpuReservation that the pod names, or an empty text."""
    return pod.metadata.annotations.get(names.RESERVATION, "")


def mark_of(reservation: GpuReservation) -> str:
    """Return what a Lease says of the reservation that it belongs to: name and uid."""
    return f"{reservation.metadata.name}/{reservation.metadata.uid}"


def may_hold(reservation: GpuReservation) -> bool:
    """Tell whether the reservation is not over yet: what it holds has a purpose."""
    return (reservation.status or GpuReservationStatus()).phase not in OVER


def why_unusable(pod: Pod, reservation: GpuReservation | None, count: int) -> str:
    """Return why the pod, which wants so many GPUs, may not use the reservation that it names; empty where it may."""
    if names.GANG in pod.metadata.annotations:
        return names.REJECT_RESERVATION_GANG
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
