"""GpuReservation: GPUs held for certain users, from one time until another, whether they use them or not.

Cluster-scoped and written by administrators, because machines are shared. A frozen, validated model of a manifest or of
the API server's JSON. `atoll.cluster.reservations` decides which GPUs it takes.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from atoll.api.base import Model, ObjectMeta, ShortText, list_map, rules
from atoll.api.claims import MigProfile, ModelSlug
from atoll.api.topologies import NodeLabel

COUNT_MAX = 4096
USERS_MAX = 64
TIMEOUT_SECONDS_MAX = 31_622_400

Moment = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
NamespaceName = Annotated[str, Field(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
AccountName = Annotated[
    str, Field(min_length=3, max_length=317, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]


class ReservationUnit(StrEnum):
    """Unit of taking: single GPUs, all GPUs of an island, or all GPUs of a node."""

    GPU = "gpu"
    ISLAND = "island"
    NODE = "node"


class ReservationShape(Model):
    """Which GPUs are held."""

    count: Annotated[
        int, Field(ge=1, le=COUNT_MAX, description="total number of GPUs, or of MIG instances with migProfile")
    ]
    models: Annotated[
        tuple[ModelSlug, ...],
        Field(max_length=16, description="any of these models; matched by dash-separated prefix; omit for any"),
    ] = ()
    mig_profile: MigProfile = ""
    unit: Annotated[
        ReservationUnit, Field(description="gpu: single GPUs; island: whole islands; node: all GPUs of a node")
    ] = ReservationUnit.GPU
    level: Annotated[
        NodeLabel | None,
        Field(description="node label; all GPUs lie on nodes with one value of it, such as one rack"),
    ] = None


RESERVATION_RULES = (
    ("self.shape == oldSelf.shape", "shape of a GpuReservation is immutable; create one under another name"),
    (
        (
            "(has(self.namespaces) && self.namespaces.size() > 0) || "
            "(has(self.serviceAccounts) && self.serviceAccounts.size() > 0)"
        ),
        "nobody may use it; set namespaces or serviceAccounts",
    ),
)


class GpuReservationSpec(Model):
    """What is held, for whom, and when."""

    model_config = ConfigDict(json_schema_extra=rules(*RESERVATION_RULES))

    shape: ReservationShape
    namespaces: Annotated[
        tuple[NamespaceName, ...], Field(max_length=USERS_MAX, description="every pod in these namespaces may use it")
    ] = ()
    service_accounts: Annotated[
        tuple[AccountName, ...],
        Field(max_length=USERS_MAX, description="pods with one of these accounts may use it: NAMESPACE/NAME"),
    ] = ()
    starts: Annotated[Moment | None, Field(description="when it takes GPUs; omit to start at once")] = None
    ends: Annotated[Moment | None, Field(description="when it releases its GPUs; omit for never")] = None
    unused_timeout_seconds: Annotated[
        int | None,
        Field(
            ge=1,
            le=TIMEOUT_SECONDS_MAX,
            description="releases its GPUs for good after no pod has used any of them for this time",
        ),
    ] = None


class ReservationPhase(StrEnum):
    """Pending: not started. Filling: holds too few GPUs. Active: holds all. Ended, Released: holds none."""

    PENDING = "Pending"
    FILLING = "Filling"
    ACTIVE = "Active"
    ENDED = "Ended"
    RELEASED = "Released"


class ReservedNode(Model):
    """GPUs of the reservation on one node, including those of its pods."""

    node: Annotated[str, Field(description="name of the node", max_length=253)]
    ids: Annotated[tuple[int, ...], Field(description="Atoll's ids of the GPUs there, as in Leases", max_length=64)]


class GpuReservationStatus(Model):
    """Current state of a GpuReservation."""

    phase: ReservationPhase = ReservationPhase.PENDING
    message: Annotated[str, Field(description="a sentence for people", max_length=1024)] = ""
    idle: Annotated[int, Field(description="GPUs that wait for pods", ge=0)] = 0
    used: Annotated[int, Field(description="GPUs that pods hold", ge=0)] = 0
    nodes: Annotated[
        tuple[ReservedNode, ...],
        Field(description="GPUs by node", max_length=COUNT_MAX, json_schema_extra=list_map("node")),
    ] = ()
    unused_since: Annotated[Moment | None, Field(description="since when no pod has used any of its GPUs")] = None
    asked_timeout_seconds: Annotated[
        int | None,
        Field(
            ge=1, le=TIMEOUT_SECONDS_MAX, description="unusedTimeoutSeconds that the pods ask for which used it last"
        ),
    ] = None
    observed_generation: (
        Annotated[int, Field(description="generation of the spec that this status describes", ge=0)] | None
    ) = None


class GpuReservation(Model):
    """A GpuReservation as the API server stores it."""

    api_version: ShortText = "gpu.scheduling/v1"
    kind: ShortText = "GpuReservation"
    metadata: ObjectMeta
    spec: GpuReservationSpec
    status: GpuReservationStatus | None = None
