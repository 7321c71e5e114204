"""Resolves what a pod asks for, by its claim or its bare resource request, into one frozen `ResolvedRequest`.

A request that cannot be served becomes a `Denial` that says what to change.
"""

import re
from dataclasses import dataclass
from typing import Final

from atoll.api import names
from atoll.api.claims import GpuClaim, Vendor, VisibleDevices
from webhook.autoscalers import KeepNodes
from webhook.gangs import gang_of
from webhook.pods import AdmittedPod, atoll_resources
from webhook.review import Denial

CLAIM_NAME: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9.]*[a-z0-9])?\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class ClaimMissing:
    """Neither the watch nor a live GET knows a claim of that name."""


@dataclass(frozen=True, slots=True)
class ClaimUnreadable:
    """The stored claim breaks its own schema; `detail` names the field."""

    detail: str


@dataclass(frozen=True, slots=True)
class ClaimUnavailable:
    """The API server could not be asked; nothing is known about the claim."""


ClaimLookup = GpuClaim | ClaimMissing | ClaimUnreadable | ClaimUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The administrator's choices that shape pods."""

    visible_devices: VisibleDevices = VisibleDevices.UUID
    inject_runtime_class: bool = False
    keep_nodes: KeepNodes = KeepNodes.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """What the pod gets: GPUs counted under `resource`, shown to its containers in the vendor's way."""

    claim_name: str = ""
    claim_uid: str = ""
    count: int | None = None
    """What the claim says; None without a claim, when the containers' own sum decides."""
    resource: str = names.GPU_RESOURCE
    """What its containers count; empty for a member of a gang that needs no GPUs."""
    vendor: Vendor = Vendor.NVIDIA
    gang: str = ""
    """The GpuGang that the pod belongs to; empty for none."""
    by_index: bool = False
    """CUDA_VISIBLE_DEVICES carries numbers, so that their order must be fixed too."""

    @property
    def is_mig(self) -> bool:
        """True when MIG instances are counted instead of whole GPUs."""
        return self.resource not in {names.GPU_RESOURCE, ""}


def concerns_atoll(pod: AdmittedPod) -> bool:
    """Tell whether the pod asks for what Atoll gives: by one of the user's annotations, a resource or the gate."""
    has_gate = any(gate.name == names.GANG_GATE for gate in pod.spec.scheduling_gates)
    return has_gate or any(key in pod.annotations for key in names.USER_ANNOTATIONS) or bool(atoll_resources(pod))


def claim_name_of(pod: AdmittedPod) -> str | Denial | None:
    """Return the claim that the pod names, None without one, or the denial of a name that no object can have."""
    name = pod.annotations.get(names.CLAIM)
    if name is None or CLAIM_NAME.match(name):
        return name
    return Denial(
        f"annotation {names.CLAIM} is {name[:80]!r}, which is no name of a GpuClaim; write the claim's metadata.name",
        400,
    )


def resolve_request(
    pod: AdmittedPod, *, namespace: str, claim: ClaimLookup | None, defaults: Defaults, pod_group: str = ""
) -> ResolvedRequest | Denial:
    """Resolve what the pod asks for; `claim` is the lookup of the name that `claim_name_of` gave, None without one;
    `pod_group` is the PodGroup of policy gang that the pod belongs to."""
    if claim is None:
        gang = gang_of(pod, None, pod_group)
        if isinstance(gang, Denial):
            return gang
        resource = "" if gang and not atoll_resources(pod) else names.GPU_RESOURCE
        return ResolvedRequest(resource=resource, gang=gang, by_index=defaults.visible_devices is VisibleDevices.INDEX)
    name = pod.annotations[names.CLAIM]
    if not isinstance(claim, GpuClaim):
        return _refuse_lookup(claim, name=name, namespace=namespace)
    if claim.metadata.deletion_timestamp is not None:
        return Denial(
            f"GpuClaim {name!r} is being deleted; wait until it is gone and create it again, or name another one"
        )
    gang = gang_of(pod, claim, pod_group)
    return gang if isinstance(gang, Denial) else _resolved(claim, name=name, gang=gang, defaults=defaults)


def _resolved(claim: GpuClaim, *, name: str, gang: str, defaults: Defaults) -> ResolvedRequest:
    devices = claim.spec.devices
    mode = claim.spec.visible_devices or defaults.visible_devices
    is_whole_nvidia = devices.vendor is Vendor.NVIDIA and not devices.mig_profile
    return ResolvedRequest(
        claim_name=name,
        claim_uid=claim.metadata.uid,
        count=devices.count,
        resource=names.mig_resource(devices.mig_profile) if devices.mig_profile else names.GPU_RESOURCE,
        vendor=devices.vendor,
        gang=gang,
        by_index=mode is VisibleDevices.INDEX and is_whole_nvidia,
    )


def _refuse_lookup(lookup: ClaimMissing | ClaimUnreadable | ClaimUnavailable, *, name: str, namespace: str) -> Denial:
    match lookup:
        case ClaimMissing():
            return Denial(
                f"GpuClaim {name!r} does not exist in namespace {namespace!r}; "
                f"create it before the pod, or correct the annotation {names.CLAIM}"
            )
        case ClaimUnreadable(detail=detail):
            return Denial(f"GpuClaim {name!r} cannot be used: {detail[:200]}; delete it and create a valid one", 400)
        case ClaimUnavailable():
            return Denial(
                f"GpuClaim {name!r} could not be looked up: the API server did not answer the webhook; try again", 503
            )
