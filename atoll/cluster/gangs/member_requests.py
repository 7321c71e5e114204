"""What the members of a gang ask for, or why one of them cannot be served whatever is free. Pure."""

from collections.abc import Callable, Iterable, Mapping

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.api.reservations import GpuReservation
from atoll.cluster import pods
from atoll.cluster.gangs.lifecycle import Obstacle
from atoll.cluster.gangs.membership import GangMember
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Request, request_of

_ADVICE = {
    names.REJECT_CLAIM_MISSING: "create GpuClaim {claim!r}",
    names.REJECT_CLAIM_REPLACED: "create the pod anew too, which names GpuClaim {claim!r}",
    names.REJECT_COUNT_MISMATCH: "a member asks for as many GPUs as its claim says, without a claim for one or more",
}


def member_requests(
    members: Iterable[GangMember],
    claim_of: Callable[[Pod], GpuClaim | None],
    reservation_of: Callable[[Pod], GpuReservation | None],
) -> dict[str, Request] | Obstacle:
    """Return what each member asks for, by uid, without those that need no GPUs; or why one cannot be served. All of
    them name the same GpuReservation, or none."""
    found: dict[str, Request] = {}
    for member in members:
        pod = member.pod
        if pod.spec.resource_claims:
            message = f"pod {pod.metadata.name} uses ResourceClaims, whose devices a gang cannot be placed by"
            return Obstacle("Invalid", f"{message}; remove spec.resourceClaims, or the pod from the gang")
        if not pods.is_gpu_pod(pod):
            continue
        request = request_of(pod, claim_of(pod), is_admitted=True, reservation=reservation_of(pod))
        if not isinstance(request, Request):
            advice = _ADVICE.get(request.reason, "").format(claim=pods.claim_name(pod))
            message = f"pod {pod.metadata.name}: {request.reason}{'; ' if advice else ''}{advice}"
            return Obstacle("Invalid", message)
        found[member.uid] = request
    if len({request.reservation for request in found.values()}) > 1:
        message = "members name different GpuReservations; name one on all of them, or on none"
        return Obstacle("Invalid", message)
    return found


def shared_reservation(requests: Mapping[str, Request]) -> str:
    """Return the uid of the GpuReservation that all members use; empty for none."""
    return next((request.reservation for request in requests.values()), "")
