"""GpuNodeStatus: what is really in a machine. Cluster-scoped, named like its node.

`spec` belongs to administrators (cordons), `status` to the agent of that node alone. The agent reports evidence and
decides nothing. In: the agent's readings or the API server's JSON. Out: a frozen, bounded model.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from atoll.api.base import Conditions, LabelText, Model, ObjectMeta, ShortText, list_map

DEVICES_MAX = 512
"""Devices of one machine at most, MIG instances included."""
PODS_MAX = 1024

Uuid = Annotated[str, Field(min_length=1, max_length=96)]
Cell = Annotated[str, Field(min_length=1, max_length=8)]
Row = Annotated[tuple[Cell, ...], Field(max_length=DEVICES_MAX)]


class HealthState(StrEnum):
    """healthy: may be used. unhealthy: must not be given out. unknown: not readable; nothing new is placed there."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class Health(Model):
    """Health of one device as the agent reads it."""

    state: HealthState = HealthState.HEALTHY
    reason: ShortText = ""
    since: Annotated[str, Field(max_length=64)] | None = None


class Mig(Model):
    """MIG facts of one device: its own mode, or the profile and parent of an instance."""

    enabled: bool = False
    profile: Annotated[str, Field(max_length=24)] = ""
    parent_uuid: Annotated[str, Field(max_length=96)] = ""


class Device(Model):
    """One GPU or MIG instance."""

    id: Annotated[int, Field(ge=0, le=65535, description="stable per node, kept by uuid over reboots")]
    uuid: Uuid
    model: Annotated[str, Field(max_length=63, description="slug of the product name")]
    product_name: Annotated[str, Field(max_length=128)] = ""
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    compute_capability: Annotated[str, Field(max_length=7)] = ""
    island: LabelText = ""
    numa_node: Annotated[int, Field(ge=-1)] | None = None
    pci_bus_id: Annotated[str, Field(max_length=32)] = ""
    index: Annotated[int, Field(ge=0, description="NVML index of the current boot")]
    minor: Annotated[int, Field(ge=0)] | None = None
    vendor: Annotated[str, Field(max_length=16)] = "nvidia"
    health: Health = Health()
    mig: Mig | None = None
    bandwidth_gbps: Annotated[
        float, Field(alias="bandwidthGBps", ge=0, description="best link inside the island, PCIe where it has none")
    ] = 0.0


class Links(Model):
    """Link matrix in the order of `devices`, and what two machines of one matrix may differ in."""

    nvlink: Annotated[tuple[Row, ...], Field(max_length=DEVICES_MAX)] = ()
    pcie: Annotated[tuple[Row, ...], Field(max_length=DEVICES_MAX)] = ()
    nvlink_generation: Annotated[int, Field(ge=0, le=99)] | None = None
    nvswitch: bool = False
    link_gbps: Annotated[float | None, Field(alias="linkGBps", ge=0)] = None
    pcie_generation: Annotated[int, Field(ge=0, le=99)] | None = None
    inter_socket_gbps: Annotated[float | None, Field(alias="interSocketGBps", ge=0)] = None


class Fabric(Model):
    """NVLink fabric of the machine; both ids are needed, a clique id alone is not unique."""

    cluster_uuid: Annotated[str, Field(alias="clusterUUID", max_length=64)] = ""
    clique_id: Annotated[str, Field(max_length=32)] = ""
    state: Annotated[str, Field(max_length=32)] = ""


class PodEvidence(Model):
    """What the machine shows of one pod; absent entries mean not seen, never 'unknown'."""

    uid: Annotated[str, Field(max_length=64)]
    live: Annotated[bool, Field(description="a sandbox or cgroup of the pod exists")] = False
    kubelet: Annotated[bool, Field(description="kubelet lists it, and not as terminal")] = False
    uuids: Annotated[tuple[Uuid, ...], Field(max_length=64, description="GPUs that its processes use")] = ()


class Evidence(Model):
    """How far a report can be trusted as proof of release.

    `pod_resource_version` is the position in the watch of this node's pods that the report has processed. A report
    whose source could not be read says so here, and proves nothing.
    """

    sequence: Annotated[int, Field(ge=0, description="grows with every reading that was published")] = 0
    pod_resource_version: Annotated[str, Field(max_length=32)] = ""
    live_read: bool = False
    kubelet_read: bool = False


class GpuNodeStatusReport(Model):
    """The agent's report."""

    agent_version: Annotated[str, Field(max_length=64)] = ""
    boot_id: Annotated[str, Field(max_length=64)] = ""
    node_uid: Annotated[str, Field(max_length=64)] = ""
    observed_time: Annotated[str, Field(max_length=64)] | None = None
    devices: Annotated[tuple[Device, ...], Field(max_length=DEVICES_MAX, json_schema_extra=list_map("uuid"))] = ()
    links: Links = Links()
    fabric: Fabric | None = None
    pods: Annotated[tuple[PodEvidence, ...], Field(max_length=PODS_MAX, json_schema_extra=list_map("uid"))] = ()
    evidence: Evidence = Evidence()
    conditions: Conditions = ()
    device_count: Annotated[int, Field(ge=0)] = 0
    healthy_count: Annotated[int, Field(ge=0)] = 0
    models: Annotated[str, Field(max_length=256)] = ""


class Cordon(Model):
    """One GPU that an administrator keeps from new pods."""

    uuid: Uuid
    reason: Annotated[str, Field(max_length=256)] = ""
    by: Annotated[str, Field(max_length=256)] = ""


class GpuNodeStatusSpec(Model):
    """What administrators want."""

    cordons: Annotated[tuple[Cordon, ...], Field(max_length=DEVICES_MAX, json_schema_extra=list_map("uuid"))] = ()


class GpuNodeStatus(Model):
    """A GpuNodeStatus as the API server stores it."""

    api_version: ShortText = "gpu.scheduling/v1"
    kind: ShortText = "GpuNodeStatus"
    metadata: ObjectMeta
    spec: GpuNodeStatusSpec = GpuNodeStatusSpec()
    status: GpuNodeStatusReport | None = None
