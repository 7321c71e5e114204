"""GpuReservation: GPUs that are held for some, from one time until another, whether they use them or not.

Cluster-scoped, written by administrators: the machines are everybody's. In: a manifest or the API server's JSON. Out: a
frozen, validated model. Which GPUs it takes is decided in `atoll.cluster.reservations`.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from atoll.api.base import Model, ObjectMeta, ShortText, list_map, rules
from atoll.api.claims import ModelSlug
from atoll.api.topologies import NodeLabel

COUNT_MAX = 4096
USERS_MAX = 64

Moment = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
NamespaceName = Annotated[str, Field(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
AccountName = Annotated[
    str, Field(min_length=3, max_length=317, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]


class ReservationUnit(StrEnum):
    """What is taken at a time: single GPUs, all GPUs of an island, all GPUs of a node."""

    GPU = "gpu"
    ISLAND = "island"
    NODE = "node"


class ReservationShape(Model):
    """Which GPUs are held."""

    count: Annotated[int, Field(ge=1, le=COUNT_MAX, description="GPUs in all")]
    models: Annotated[
        tuple[ModelSlug, ...],
        Field(max_length=16, description="any of these models; matched by dash-separated prefix; omit for any"),
    ] = ()
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
        "nobody may use it; name namespaces or serviceAccounts",
    ),
)


class GpuReservationSpec(Model):
    """What is held, for whom, and when."""

    model_config = ConfigDict(json_schema_extra=rules(*RESERVATION_RULES))

    shape: ReservationShape
    namespaces: Annotated[
        tuple[NamespaceName, ...], Field(max_length=USERS_MAX, description="every pod of these may use it")
    ] = ()
    service_accounts: Annotated[
        tuple[AccountName, ...],
        Field(max_length=USERS_MAX, description="pods with one of these accounts may use it: NAMESPACE/NAME"),
    ] = ()
    starts: Annotated[Moment | None, Field(description="when GPUs are taken; at once when absent")] = None
    ends: Annotated[Moment | None, Field(description="when they are given back; never when absent")] = None
    unused_timeout_seconds: Annotated[
        int | None,
        Field(ge=1, le=31_622_400, description="given back, for good, when no pod has used any of it for so long"),
    ] = None


class ReservationPhase(StrEnum):
    """Pending: not begun. Filling: holds less than it should. Active: holds all. Ended, Released: holds no more."""

    PENDING = "Pending"
    FILLING = "Filling"
    ACTIVE = "Active"
    ENDED = "Ended"
    RELEASED = "Released"


class ReservedNode(Model):
    """What the reservation has on one node, its pods' GPUs included."""

    node: Annotated[str, Field(description="name of the node", max_length=253)]
    ids: Annotated[
        tuple[int, ...], Field(description="Atoll's own numbers of the GPUs there, as in Leases", max_length=64)
    ]


class GpuReservationStatus(Model):
    """What became of it."""

    phase: ReservationPhase = ReservationPhase.PENDING
    message: Annotated[str, Field(description="a sentence for people", max_length=1024)] = ""
    idle: Annotated[int, Field(description="GPUs that wait for pods", ge=0)] = 0
    used: Annotated[int, Field(description="GPUs that pods have", ge=0)] = 0
    nodes: Annotated[
        tuple[ReservedNode, ...],
        Field(description="where they are", max_length=COUNT_MAX, json_schema_extra=list_map("node")),
    ] = ()
    unused_since: Annotated[Moment | None, Field(description="since when no pod has used any of it")] = None
    observed_generation: Annotated[int, Field(description="generation of the spec that this is about", ge=0)] | None = (
        None
    )


class GpuReservation(Model):
    """A GpuReservation as the API server stores it."""

    api_version: ShortText = "gpu.scheduling/v1"
    kind: ShortText = "GpuReservation"
    metadata: ObjectMeta
    spec: GpuReservationSpec
    status: GpuReservationStatus | None = None
