"""Thin, frozen views of the core Kubernetes objects that Atoll watches.

In: the API server's JSON. Out: msgspec structs of the few fields that Atoll reads; everything else is skipped while
decoding, and the structs are not tracked by the garbage collector, which keeps thousands of pods small and cheap.
Separate from the custom resources (atoll.api), whose models we own.
Never written back: a write is always a patch of named fields.
"""

from typing import Any

import msgspec


class OwnerReference(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Who made the object."""

    kind: str
    name: str
    uid: str
    controller: bool = False


class Metadata(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Identity and annotations of an object."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    owner_references: tuple[OwnerReference, ...] = ()


class Resources(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Requests and limits of a container; quantities stay text (or a number, as hand-written manifests have it)."""

    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}


class Container(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """One container of a pod."""

    name: str
    resources: Resources = Resources()
    restart_policy: str | None = None


class Toleration(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Which taints a pod endures."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class SchedulingGate(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Holds a pod back from scheduling."""

    name: str


class PodSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What a pod wants."""

    node_name: str = ""
    scheduler_name: str = ""
    priority: int = 0
    preemption_policy: str = "PreemptLowerPriority"
    runtime_class_name: str = ""
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    scheduling_gates: tuple[SchedulingGate, ...] = ()


class ContainerState(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """State of one container; exactly one is set, none before kubelet looked at it."""

    running: dict[str, Any] | None = None
    waiting: dict[str, Any] | None = None
    terminated: dict[str, Any] | None = None


class ContainerStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What kubelet says of one container."""

    name: str
    state: ContainerState = ContainerState()


class PodCondition(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """One condition of a pod."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class PodStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What became of a pod."""

    phase: str = "Pending"
    reason: str = ""
    nominated_node_name: str = ""
    conditions: tuple[PodCondition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    ephemeral_container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A pod as the API server stores it."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Taint(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Keeps pods off a node."""

    key: str
    effect: str
    value: str = ""


class NodeSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What an administrator wants of a node."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeInfo(msgspec.Struct, frozen=True, gc=False, rename={"boot_id": "bootID"}):
    """Facts that kubelet reports of its machine."""

    boot_id: str = ""


class NodeStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What a node has."""

    allocatable: dict[str, str] = {}
    capacity: dict[str, str] = {}
    conditions: tuple[PodCondition, ...] = ()
    node_info: NodeInfo = NodeInfo()


class Node(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A node as the API server stores it."""

    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class LeaseSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Who holds a Lease and since when."""

    holder_identity: str = ""
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A coordination.k8s.io/v1 Lease."""

    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()


decode_pod = msgspec.json.Decoder(Pod).decode
decode_node = msgspec.json.Decoder(Node).decode
decode_lease = msgspec.json.Decoder(Lease).decode
