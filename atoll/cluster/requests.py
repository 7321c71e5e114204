"""What one pod asks for, resolved from its GpuClaim and its containers, or the reason why that is nothing.

Filter, bind, wake-ups and explanations all resolve a request here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final

from atoll.api import names
from atoll.api.claims import COUNT_MAX, DeviceClaim, GpuClaim, VisibleDevices
from atoll.api.reservations import GpuReservation
from atoll.cluster import pods
from atoll.cluster.allocations import OTHER_BYTES_MAX, pod_annotations_bytes
from atoll.cluster.leases import LeaseRecord
from atoll.cluster.machines import parse_capability
from atoll.cluster.objects import Pod
from atoll.cluster.quantities import parse_bytes
from atoll.cluster.reservation_use import reservation_name, reservation_of, why_unusable
from topology.device_requests import DeviceRequest, Interconnect, Policy


class Verdict(StrEnum):
    """What may be said of a request now."""

    FITS = "fits"
    BUSY = "busy"
    """It fits once others have left."""
    UNKNOWN = "not known yet"
    """A fact is missing or may change: a report, a claim, a cordon, a card that is withheld."""
    NEVER = "never"
    """No machine as it is can hold it, even empty."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request or a node is refused: a short constant phrase from atoll.api.names or topology, and the verdict as
    far as it follows from what was looked at."""

    reason: str
    verdict: Verdict = Verdict.NEVER


UNSETTLED: Final = frozenset(
    (names.REJECT_CLAIM_MISSING, names.REJECT_GANG, names.REJECT_RESERVATION_MISSING, names.REJECT_RESERVATION_EARLY)
)
"""Refusals of a request that end without anybody changing the pod."""


def refused_request(reason: str) -> Rejection:
    """Return the refusal of a request that no node can serve as it is."""
    return Rejection(reason, Verdict.UNKNOWN if reason in UNSETTLED else Verdict.NEVER)


@dataclass(frozen=True, slots=True)
class Request:
    """What every GPU and the set must satisfy. `container_counts` is empty when all containers see the whole set."""

    ask: DeviceRequest
    models: tuple[str, ...]
    mixed_models: bool
    memory_bytes: int
    compute_capability: tuple[int, int]
    mig_profile: str
    vendor: str
    claim: str
    visible_devices: VisibleDevices | None
    container_counts: tuple[tuple[str, int], ...]
    reservation: str = ""
    """uid of the GpuReservation whose GPUs alone the pod may use; empty for any free GPU."""


def request_of(
    pod: Pod,
    claim: GpuClaim | None,
    *,
    is_admitted: bool = False,
    reservation: GpuReservation | None = None,
    holds: Sequence[LeaseRecord] = (),
) -> Request | Rejection:
    """Resolve what `pod` asks for. `claim` and `reservation` are the objects that the pod names, or None if they do not
    exist. So a caller that knows no reservations places no pod that names one.

    A member of a gang is refused unless `is_admitted`: it gets the GPUs that its gang's admission took for it, or none.
    Those that it `holds` from a reservation stay its own, whatever becomes of the reservation until it is bound.
    """
    found = _request_of(pod, claim, is_admitted=is_admitted)
    if isinstance(found, Rejection) or not reservation_name(pod):
        return found
    if names.GANG in pod.metadata.annotations and (held := reservation_of(holds)):
        return replace(found, reservation=held)
    reason = why_unusable(pod, reservation, found.ask.count)
    if reason or reservation is None:
        return refused_request(reason)
    return replace(found, reservation=reservation.metadata.uid)


def _request_of(pod: Pod, claim: GpuClaim | None, *, is_admitted: bool) -> Request | Rejection:
    claim_name = pods.claim_name(pod)
    if pod_annotations_bytes(pod) > OTHER_BYTES_MAX:
        return refused_request(names.REJECT_ANNOTATIONS)
    if names.GANG in pod.metadata.annotations and not is_admitted:
        return refused_request(names.REJECT_GANG)
    if not claim_name:
        total, counts = _counts(pod, names.GPU_RESOURCE)
        if not 0 < total <= COUNT_MAX:
            return refused_request(names.REJECT_COUNT_MISMATCH)
        return bare_request(total, counts)
    if claim is None:
        return refused_request(names.REJECT_CLAIM_MISSING)
    if pod.metadata.annotations.get(names.CLAIM_UID) != claim.metadata.uid:
        return refused_request(names.REJECT_CLAIM_REPLACED)
    if claim.spec.gang_ref and pod.metadata.annotations.get(names.GANG) != claim.spec.gang_ref:
        return refused_request(names.REJECT_GANG)
    devices = claim.spec.devices
    total, counts = _counts(pod, names.mig_resource(devices.mig_profile) if devices.mig_profile else names.GPU_RESOURCE)
    if total != devices.count:
        return refused_request(names.REJECT_COUNT_MISMATCH)
    return device_request(devices, claim_name, claim.spec.visible_devices, counts)


def _counts(pod: Pod, resource: str) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Return the pod's total, and the counts of its containers where each sees its own part."""
    counts = pods.device_counts(pod, resource)
    return sum(count for _, count in counts), counts if pods.has_own_counts(pod, resource) else ()


@lru_cache(maxsize=1024)
def bare_request(
    total: int, counts: tuple[tuple[str, int], ...] = (), *, models: tuple[str, ...] = (), mig_profile: str = ""
) -> Request:
    """Return what a pod without a claim asks for: most pods of a cluster ask for one of a few counts."""
    return device_request(DeviceClaim(count=total, models=models, mig_profile=mig_profile), counts=counts)


def device_request(
    devices: DeviceClaim,
    claim: str = "",
    visible_devices: VisibleDevices | None = None,
    counts: tuple[tuple[str, int], ...] = (),
) -> Request:
    """Return what a search for a claim's GPUs must satisfy; without `counts` all containers see the whole set."""
    return Request(
        ask=DeviceRequest(
            count=devices.count,
            policy=Policy(devices.policy.value),
            interconnect=Interconnect(devices.interconnect.value),
            min_bandwidth_gbps=devices.min_bandwidth_gbps,
        ),
        models=devices.models,
        mixed_models=devices.mixed_models,
        memory_bytes=parse_bytes(devices.memory) if devices.memory else 0,
        compute_capability=parse_capability(devices.compute_capability or "0"),
        mig_profile=devices.mig_profile,
        vendor=devices.vendor.value,
        claim=claim,
        visible_devices=visible_devices,
        container_counts=counts,
    )
