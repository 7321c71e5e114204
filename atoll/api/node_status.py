"""GpuNodeStatus: the devices of a machine. Cluster-scoped, named like its node.

`spec` belongs to administrators (cordons), `status` only to that node's agent. The agent reports evidence and decides
nothing.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from atoll.api.base import Conditions, LabelText, Model, ObjectMeta, ShortText, list_map

DEVICES_MAX = 512
"""Limit of devices per machine, including MIG instances."""
PODS_MAX = 1024
DEPARTED_MAX = 64
DEPARTED_INSTANCES_MAX = 64
GONE_MAX = 16
"""Most departed cards whose ids are kept: eight swaps of eight cards."""
DEPARTED_INCIDENTS_MAX = 4

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
    reason: Annotated[ShortText, Field(description="the agent's finding, in words")] = ""
    since: Annotated[str, Field(description="time of the first such reading", max_length=64)] | None = None


class IncidentKind(StrEnum):
    """Kind of an incident.

    xid: an error event of the driver, `code` is its number. The others are states: lost (the card does not answer),
    fault (the driver refuses it), silent (a call hung), ecc (uncorrectable errors since the last reset), eccCorrected
    (very many corrected ones), rowRemap (0: pending, 1: failed), retiredPages (pending), recovery (the driver asks for
    an action, `code` is its number), throttle (slowed down by heat or power), nvlink (links are down), fabric (the
    NVLink fabric is not ready), fabricHealth (it is degraded).
    """

    XID = "xid"
    LOST = "lost"
    FAULT = "fault"
    SILENT = "silent"
    ECC = "ecc"
    ECC_CORRECTED = "eccCorrected"
    ROW_REMAP = "rowRemap"
    RETIRED_PAGES = "retiredPages"
    RECOVERY = "recovery"
    THROTTLE = "throttle"
    NVLINK = "nvlink"
    FABRIC = "fabric"
    FABRIC_HEALTH = "fabricHealth"


class Incident(Model):
    """One fault of a device, kept across restarts of the agent.

    Open while `endedTime` is empty. The agent reports facts; atoll.cluster.health decides the consequences.
    """

    kind: IncidentKind
    code: Annotated[int, Field(description="number of the error, if it has one", ge=0, le=65535)] = 0
    count: Annotated[int, Field(ge=1, description="occurrences, or the device's own count")] = 1
    message: Annotated[str, Field(description="in words", max_length=128)] = ""
    first_time: Annotated[str, Field(description="when it was first reported", max_length=64)] = ""
    last_time: Annotated[str, Field(description="when it was last reported", max_length=64)] = ""
    quiet_since: Annotated[str, Field(max_length=64, description="absent since then, and over soon")] = ""
    boot_id: Annotated[str, Field(max_length=64, description="boot in which it was last reported")] = ""
    ended_time: Annotated[str, Field(description="when it ended; empty while it is open", max_length=64)] = ""
    ended_by: Annotated[str, Field(max_length=16, description="recovered, reset or reboot")] = ""


INCIDENTS_MAX = 32


class Mig(Model):
    """MIG facts of one device: its own mode, or the profile and parent of an instance."""

    enabled: Annotated[bool, Field(description="the card is in MIG mode")] = False
    profile: Annotated[
        str, Field(description="profile of an instance, such as 3g.40gb; empty for a whole card", max_length=24)
    ] = ""
    parent_uuid: Annotated[str, Field(description="the card of an instance", max_length=96)] = ""


class Device(Model):
    """One GPU or MIG instance."""

    id: Annotated[int, Field(ge=0, le=65535, description="stable per node, kept by uuid over reboots")]
    uuid: Annotated[Uuid, Field(description="the driver's permanent name for the card")]
    model: Annotated[str, Field(max_length=63, description="slug of the product name")]
    product_name: Annotated[str, Field(description="as the driver prints it", max_length=128)] = ""
    memory_bytes: Annotated[
        int, Field(description="memory as the driver reports it, less than the nominal size; 0 if unknown", ge=0)
    ] = 0
    compute_capability: Annotated[str, Field(description="such as 9.0", max_length=7)] = ""
    island: Annotated[
        LabelText, Field(description="GPUs of one island are joined by NVLink, or are on one NUMA node")
    ] = ""
    numa_node: Annotated[int, Field(description="NUMA node, -1 if unknown", ge=-1)] | None = None
    pci_bus_id: Annotated[str, Field(description="place on the PCI bus", max_length=32)] = ""
    index: Annotated[int, Field(ge=0, description="NVML index of the current boot")]
    minor: Annotated[int, Field(description="number of the device file", ge=0)] | None = None
    serial: Annotated[str, Field(description="serial number", max_length=32)] = ""
    architecture: Annotated[str, Field(description="such as hopper", max_length=16)] = ""
    cpu_affinity: Annotated[str, Field(max_length=256, description="CPUs near the device, such as 0-15,32-47")] = ""
    ecc_enabled: Annotated[bool | None, Field(description="whether memory errors are corrected")] = None
    power_managed: Annotated[bool | None, Field(description="whether the driver manages its power")] = None
    nvlinks: Annotated[
        tuple[Annotated[str, Field(max_length=40)], ...],
        Field(max_length=64, description="links by far end, such as 18 switch"),
    ] = ()
    boot_id: Annotated[str, Field(description="boot in which the driver last named the card", max_length=64)] = ""
    incidents: Annotated[
        tuple[Incident, ...], Field(description="past and present faults", max_length=INCIDENTS_MAX)
    ] = ()
    vendor: Annotated[str, Field(description="nvidia or amd", max_length=16)] = "nvidia"
    health: Health = Health()
    mig: Mig | None = None
    bandwidth_gbps: Annotated[
        float, Field(alias="bandwidthGBps", ge=0, description="best link inside the island, PCIe if it has none")
    ] = 0.0


class DepartedDevice(Model):
    """A card that left the machine, or a MIG instance that a boot did not bring back, so no pod can use it there. Its
    id is kept for it."""

    id: Annotated[
        int, Field(ge=0, le=65535, description="id of the card; no other card gets it while this entry exists")
    ]
    uuid: Annotated[Uuid, Field(description="the card")]
    model: Annotated[str, Field(max_length=63, description="slug of the product name")] = ""
    mig_profile: Annotated[str, Field(description="profile of a MIG instance", max_length=24)] = ""
    vendor: Annotated[str, Field(description="nvidia or amd", max_length=16)] = "nvidia"
    serial: Annotated[str, Field(description="serial number", max_length=32)] = ""
    pci_bus_id: Annotated[str, Field(description="PCI address that it had", max_length=32)] = ""
    boot_id: Annotated[str, Field(description="boot in which it was last seen", max_length=64)] = ""
    left_time: Annotated[str, Field(description="when it was found gone", max_length=64)] = ""
    reason: Annotated[ShortText, Field(description="proof that it is gone")] = ""
    incidents: Annotated[
        tuple[Incident, ...], Field(description="its last incidents", max_length=DEPARTED_INCIDENTS_MAX)
    ] = ()


class FormerNode(Model):
    """A Node that had the name before, and how far its reports went: a later declaration about it may count."""

    node_uid: Annotated[str, Field(description="uid of the Node", min_length=1, max_length=64)]
    sequence: Annotated[int, Field(description="sequence of its last report", ge=0)] = 0


class Nic(Model):
    """One network adapter, and its PCIe relation to each device in the order of `devices`."""

    name: Annotated[str, Field(description="name in programs, such as mlx5_0", min_length=1, max_length=63)]
    cells: Annotated[Row, Field(description="cells such as PIX or SYS, one per device")] = ()


class Links(Model):
    """Link matrix in the order of `devices`, and further facts of the links."""

    nvlink: Annotated[
        tuple[Row, ...], Field(description="cells such as NV12 or SYS, a row per device", max_length=DEVICES_MAX)
    ] = ()
    pcie: Annotated[
        tuple[Row, ...], Field(description="the same by PCIe alone, such as PIX or SYS", max_length=DEVICES_MAX)
    ] = ()
    nvlink_generation: Annotated[int, Field(description="generation of NVLink", ge=0, le=99)] | None = None
    nvswitch: Annotated[bool, Field(description="links end in switches that join all")] = False
    link_gbps: Annotated[float | None, Field(description="GB/s of one link and direction", alias="linkGBps", ge=0)] = (
        None
    )
    pcie_generation: Annotated[int, Field(description="generation of PCIe", ge=0, le=99)] | None = None
    inter_socket_gbps: Annotated[
        float | None, Field(description="GB/s between the sockets", alias="interSocketGBps", ge=0)
    ] = None
    nics: Annotated[
        tuple[Nic, ...],
        Field(max_length=64, json_schema_extra=list_map("name"), description="network adapters near the devices"),
    ] = ()


class Fabric(Model):
    """NVLink fabric of the machine; both ids are needed, a clique id alone is not unique."""

    cluster_uuid: Annotated[
        str, Field(description="NVLink fabric that the machine belongs to", alias="clusterUUID", max_length=64)
    ] = ""
    clique_id: Annotated[
        str, Field(description="part of the fabric in which every GPU reaches every other", max_length=32)
    ] = ""
    state: Annotated[str, Field(description="whether the fabric is ready", max_length=32)] = ""
    health: Annotated[str, Field(max_length=64, description="what is degraded, if anything")] = ""


class PodEvidence(Model):
    """Evidence of one pod on the machine; absent entries mean not seen, never 'unknown'."""

    uid: Annotated[str, Field(description="uid of the pod", max_length=64)]
    live: Annotated[bool, Field(description="a sandbox or cgroup of the pod exists")] = False
    kubelet: Annotated[bool, Field(description="kubelet lists it, and not as terminal")] = False
    static: Annotated[bool, Field(description="kubelet runs it from a file of the machine")] = False
    uuids: Annotated[
        tuple[Uuid, ...], Field(max_length=64, description="GPUs in use by its processes, or given by a device plugin")
    ] = ()


class Evidence(Model):
    """How far a report can be trusted as proof of release.

    `pod_resource_version` is the report's position in the watch of this node's pods. A report with an unreadable
    source says so here, and proves nothing.
    """

    sequence: Annotated[int, Field(ge=0, description="grows with every published reading")] = 0
    pod_resource_version: Annotated[
        str, Field(description="position in the watch of the node's pods", max_length=32)
    ] = ""
    live_read: Annotated[bool, Field(description="sandboxes and cgroups could be read")] = False
    kubelet_read: Annotated[bool, Field(description="kubelet's list of pods could be read")] = False
    unread_since_restore: Annotated[
        bool, Field(description="the API server was restored, and sandboxes and cgroups could not be read since")
    ] = False
    processes_read: Annotated[
        bool, Field(description="processes of every GPU could be read; else the last known use counts")
    ] = True
    uses_unread: Annotated[
        tuple[Uuid, ...], Field(description="GPUs whose users are unknown", max_length=DEVICES_MAX)
    ] = ()


class HostUse(Model):
    """Processes outside pods that use a GPU: Atoll did not place them, and they may use it while they run."""

    uuid: Annotated[Uuid, Field(description="the GPU")]
    count: Annotated[int, Field(description="how many processes", ge=1)] = 1
    pids: Annotated[tuple[int, ...], Field(description="some of them, by the host's pids", max_length=8)] = ()


class GpuNodeStatusReport(Model):
    """The agent's report."""

    agent_version: Annotated[str, Field(description="version of the agent", max_length=64)] = ""
    boot_id: Annotated[str, Field(description="boot of the machine that this describes", max_length=64)] = ""
    node_uid: Annotated[str, Field(description="uid of the Node that this describes", max_length=64)] = ""
    observed_time: Annotated[str, Field(description="when it was read", max_length=64)] | None = None
    devices: Annotated[
        tuple[Device, ...],
        Field(
            description="GPUs and MIG instances of the machine",
            max_length=DEVICES_MAX,
            json_schema_extra=list_map("uuid"),
        ),
    ] = ()
    departed: Annotated[
        tuple[DepartedDevice, ...],
        Field(
            description="cards and MIG instances that left the machine, oldest first",
            max_length=DEPARTED_MAX + DEPARTED_INSTANCES_MAX,
            json_schema_extra=list_map("uuid"),
        ),
    ] = ()
    former_nodes: Annotated[
        tuple[FormerNode, ...],
        Field(description="Nodes that had the name before, latest last", max_length=GONE_MAX),
    ] = ()
    free_ids_from: Annotated[
        int,
        Field(ge=0, le=65536, description="lower ids had cards that are not listed any more; no other card gets them"),
    ] = 0
    links: Links = Links()
    fabric: Fabric | None = None
    pods: Annotated[
        tuple[PodEvidence, ...],
        Field(
            description="evidence of the pods on the machine", max_length=PODS_MAX, json_schema_extra=list_map("uid")
        ),
    ] = ()
    host_uses: Annotated[
        tuple[HostUse, ...],
        Field(
            description="GPUs in use by processes outside pods",
            max_length=DEVICES_MAX,
            json_schema_extra=list_map("uuid"),
        ),
    ] = ()
    evidence: Evidence = Evidence()
    conditions: Conditions = ()
    device_count: Annotated[int, Field(description="number of devices", ge=0)] = 0
    healthy_count: Annotated[int, Field(description="devices that may be given out by the agent's readings", ge=0)] = 0
    models: Annotated[str, Field(description="models of the devices, for people", max_length=256)] = ""


class Cordon(Model):
    """One GPU that an administrator closes to new pods."""

    uuid: Annotated[Uuid, Field(description="the card, whatever its id")]
    reason: Annotated[str, Field(description="reason, shown to waiting users", max_length=256)] = ""
    by: Annotated[str, Field(description="who cordoned it", max_length=256)] = ""


class HealthRelease(Model):
    """An administrator's declaration that a GPU is healthy again: its incidents up to `time` no longer count."""

    uuid: Annotated[Uuid, Field(description="the card")]
    time: Annotated[
        str,
        Field(
            description="incidents up to then no longer count",
            max_length=64,
            pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{6})?Z$",
        ),
    ]
    reason: Annotated[str, Field(description="why it is healthy again", max_length=256)] = ""
    by: Annotated[str, Field(description="who declared it", max_length=256)] = ""


class GoneMachine(Model):
    """Declaration that a machine is gone for good: GPUs of pods that left it are freed."""

    node_uid: Annotated[str, Field(description="uid of the Node that the machine had", min_length=1, max_length=64)]
    reason: Annotated[str, Field(description="how the user knows", max_length=256)] = ""
    by: Annotated[str, Field(description="user who declared it, by name at the API server", max_length=256)] = ""
    time: Annotated[str, Field(description="time of the declaration", max_length=64)] = ""
    sequence: Annotated[
        int,
        Field(
            description="sequence of the machine's last report at that time; a later report voids the declaration", ge=0
        ),
    ] = 0
    forget: Annotated[bool, Field(description="also delete report and heartbeat, once the Node is gone")] = False


class GpuNodeStatusSpec(Model):
    """Settings by administrators."""

    cordons: Annotated[
        tuple[Cordon, ...],
        Field(
            description="GPUs that get no new pod; current holders keep them",
            max_length=DEVICES_MAX,
            json_schema_extra=list_map("uuid"),
        ),
    ] = ()
    releases: Annotated[
        tuple[HealthRelease, ...],
        Field(
            description="GPUs that were declared healthy", max_length=DEVICES_MAX, json_schema_extra=list_map("uuid")
        ),
    ] = ()
    gone: Annotated[
        tuple[GoneMachine, ...],
        Field(
            description="machines of this name that are gone for good; needs the verb declare-gone",
            max_length=GONE_MAX,
            json_schema_extra=list_map("nodeUid"),
        ),
    ] = ()


class GpuNodeStatus(Model):
    """A GpuNodeStatus as the API server stores it."""

    api_version: ShortText = "gpu.scheduling/v1"
    kind: ShortText = "GpuNodeStatus"
    metadata: ObjectMeta
    spec: GpuNodeStatusSpec = GpuNodeStatusSpec()
    status: GpuNodeStatusReport | None = None
