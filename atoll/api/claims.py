"""GpuClaim: the GPU request of a pod. It is a template: every pod that names it gets its own GPUs.

Rules over several fields are in `DEVICE_RULES` and `SPEC_RULES` as CEL, for the API server, and in `check` here, for
objects that were stored before the rules.
"""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from atoll.api.base import Conditions, Model, ObjectMeta, ShortText, list_map, rules

COUNT_MAX = 64
"""Limit of GPUs per pod: more than any existing machine has, few enough to bound every search."""
ALLOCATIONS_MAX = 256
"""Limit of `status.allocations` entries; `status.allocatedPods` counts all of them."""


class PlacementPolicy(StrEnum):
    """Arrangement of a pod's GPUs."""

    CONTIGUOUS = "contiguous"
    ISLAND = "island"
    PACKED = "packed"
    SPREAD = "spread"


class InterconnectKind(StrEnum):
    """Link that every pair of the pod's GPUs must have."""

    ANY = "any"
    NVLINK = "nvlink"
    PCIE = "pcie"


class Vendor(StrEnum):
    """Vendor whose variable the webhook injects; fixed at CREATE."""

    NVIDIA = "nvidia"
    AMD = "amd"


class VisibleDevices(StrEnum):
    """Content of `CUDA_VISIBLE_DEVICES`."""

    UUID = "uuid"
    INDEX = "index"


ModelSlug = Annotated[str, Field(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]

MigProfile = Annotated[
    str,
    Field(
        max_length=24,
        pattern="^([1-9]g\\.[0-9]{1,4}gb(\\+[a-z]+)?)?$",
        description="count MIG instances of this profile",
    ),
]


DEVICE_RULES = (
    (
        "!(has(self.policy) && self.policy == 'spread' && has(self.interconnect) && self.interconnect == 'nvlink')",
        "policy spread puts GPUs on different islands, interconnect nvlink keeps them on one; choose either",
    ),
    (
        "!(has(self.migProfile) && self.migProfile != '' && has(self.interconnect) && self.interconnect == 'nvlink')",
        "MIG instances have no NVLink; leave interconnect at any",
    ),
    (
        "!has(self.models) || self.models.all(m, self.models.exists_one(o, o == m))",
        "models names one model twice; each may stand once",
    ),
)
SPEC_RULES = (("self == oldSelf", "spec of a GpuClaim is immutable; create a claim under another name"),)


class DeviceClaim(Model):
    """The GPUs of one pod."""

    model_config = ConfigDict(json_schema_extra=rules(*DEVICE_RULES))

    count: Annotated[int, Field(ge=1, le=COUNT_MAX, description="GPUs of each pod")]
    policy: Annotated[
        PlacementPolicy,
        Field(
            description="contiguous: the best-connected set, never refused for links; "
            "island: one island or wait; packed: ignore links, fragment least; spread: different islands or NUMA nodes",
        ),
    ] = PlacementPolicy.CONTIGUOUS
    models: Annotated[
        tuple[ModelSlug, ...],
        Field(
            max_length=16, description="any of these models, in order of preference; matched by dash-separated prefix"
        ),
    ] = ()
    mixed_models: Annotated[bool, Field(description="allow GPUs of several models for one pod")] = False
    memory: Annotated[
        str | None,
        Field(max_length=24, pattern="^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$", description="least memory of each GPU"),
    ] = None
    compute_capability: Annotated[
        str | None,
        Field(max_length=7, pattern="^[0-9]{1,3}(\\.[0-9]{1,3})?$", description="least compute capability"),
    ] = None
    interconnect: Annotated[
        InterconnectKind,
        Field(description="nvlink: every pair of the set is joined by NVLink, directly or by a switch"),
    ] = InterconnectKind.ANY
    min_bandwidth_gbps: Annotated[
        float,
        Field(alias="minBandwidthGBps", ge=0, le=100_000, description="ring bandwidth in GB/s that the set must reach"),
    ] = 0.0
    mig_profile: MigProfile = ""
    vendor: Vendor = Vendor.NVIDIA

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse contradictions; the same rules are in DEVICE_RULES as CEL."""
        if self.policy is PlacementPolicy.SPREAD and self.interconnect is InterconnectKind.NVLINK:
            msg = "policy spread puts GPUs on different islands, interconnect nvlink keeps them on one; choose either"
            raise ValueError(msg)
        if self.mig_profile and self.interconnect is InterconnectKind.NVLINK:
            msg = f"MIG instances ({self.mig_profile}) have no NVLink; leave interconnect at any"
            raise ValueError(msg)
        if len(set(self.models)) < len(self.models):
            msg = "models names one model twice; each may stand once"
            raise ValueError(msg)
        return self


class GpuClaimSpec(Model):
    """The immutable request."""

    model_config = ConfigDict(json_schema_extra=rules(*SPEC_RULES))

    devices: DeviceClaim
    visible_devices: Annotated[
        VisibleDevices | None,
        Field(description="content of CUDA_VISIBLE_DEVICES; the cluster's setting by default"),
    ] = None
    gang_ref: Annotated[
        str | None,
        Field(max_length=253, pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", description="a GpuGang in this namespace"),
    ] = None


class ClaimAllocation(Model):
    """The GPUs of one pod that uses the claim."""

    pod: Annotated[str, Field(description="name of the pod", max_length=253)]
    uid: Annotated[str, Field(description="uid of the pod; another pod may have the same name", max_length=64)]
    node: Annotated[str, Field(description="node of the GPUs", max_length=253)]
    ids: Annotated[
        tuple[int, ...],
        Field(description="Atoll's ids of the GPUs on that node, as in Leases", max_length=COUNT_MAX),
    ]
    uuids: Annotated[
        tuple[Annotated[str, Field(max_length=96)], ...],
        Field(description="the same GPUs, in the same order, by uuid", max_length=COUNT_MAX),
    ]


class ClaimPhase(StrEnum):
    """Unused: no pod names the claim. Waiting: some pod waits. Allocated: every pod that names it has its GPUs."""

    UNUSED = "Unused"
    WAITING = "Waiting"
    ALLOCATED = "Allocated"


class GpuClaimStatus(Model):
    """Status of the pods that name the claim."""

    phase: ClaimPhase = ClaimPhase.UNUSED
    allocations: Annotated[
        tuple[ClaimAllocation, ...],
        Field(
            description="the GPUs of the pods that use the claim",
            max_length=ALLOCATIONS_MAX,
            json_schema_extra=list_map("uid"),
        ),
    ] = ()
    allocated_pods: Annotated[int, Field(description="pods that have their GPUs", ge=0)] = 0
    waiting_pods: Annotated[int, Field(description="pods that wait; atoll explain says why", ge=0)] = 0
    observed_generation: (
        Annotated[int, Field(description="generation of the spec that this describes", ge=0)] | None
    ) = None
    conditions: Conditions = ()


class GpuClaim(Model):
    """A GpuClaim as the API server stores it."""

    api_version: ShortText = "gpu.scheduling/v1"
    kind: ShortText = "GpuClaim"
    metadata: ObjectMeta
    spec: GpuClaimSpec
    status: GpuClaimStatus | None = None
