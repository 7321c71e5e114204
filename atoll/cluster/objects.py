"""Thin, frozen views of the core Kubernetes objects that Atoll watches.

The msgspec structs have the few fields that Atoll reads; everything else is skipped while decoding. The garbage
collector does not track them, which keeps thousands of pods small and cheap. They are never written back: a write is
always a patch of named fields. The models of the custom resources are in atoll.api.
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate, chain, islice
from typing import Any

import msgspec

from atoll.api import names
from atoll.api.kept import ENTRIES_MAX, OWNERS_MAX, cutting_decoder, kept_annotations, kept_labels
from atoll.cluster.bounded import LARGE_BYTES, TEXT_MAX, first
from atoll.cluster.quantities import is_zero, parse_amount

FIELD_ENTRIES_MAX = 256
"""Entries kept of each field of a large pod's spec but its containers and its affinity."""
CONDITIONS_MAX = 64
MORE_CONTAINERS = "more containers"
"""Stands for containers of a large pod, or for statuses of them, that are not kept."""


class Present(msgspec.Struct, frozen=True, gc=False):
    """An object of which only its presence is read."""


class OwnerReference(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Who made the object."""

    kind: str
    name: str
    uid: str
    controller: bool = False
    api_version: str = ""


class Metadata(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Identity of an object, and what Atoll reads of its labels and annotations.

    other_annotations_bytes: size of the annotations that were left out; they count against the API server's limit.
    """

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
    other_annotations_bytes: int = 0

    def __post_init__(self) -> None:
        """Leave out what nobody reads: anybody who may label an object could fill every watcher's memory."""
        set_field = msgspec.structs.force_setattr
        set_field(self, "labels", kept_labels(self.labels))
        kept, left_out_bytes = kept_annotations(self.annotations)
        set_field(self, "annotations", kept)
        set_field(self, "other_annotations_bytes", self.other_annotations_bytes + left_out_bytes)


class Resources(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Requests and limits of a container; quantities stay text (or a number, as hand-written manifests have it)."""

    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}


class ContainerPort(msgspec.Struct, frozen=True, gc=False, rename={"host_port": "hostPort", "host_ip": "hostIP"}):
    """A port that a container opens; only those on the host concern other pods."""

    host_port: int = 0
    host_ip: str = ""
    protocol: str = "TCP"


class Container(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """One container of a pod."""

    name: str
    resources: Resources = Resources()
    restart_policy: str | None = None
    ports: tuple[ContainerPort, ...] = ()


class Toleration(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Which taints a pod endures."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class Requirement(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """One condition on a label or a field."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class NodeSelectorTerm(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Conditions that all hold; without any it matches nothing."""

    match_expressions: tuple[Requirement, ...] = ()
    match_fields: tuple[Requirement, ...] = ()


class NodeSelector(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Terms of which one must match."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class PreferredNodeTerm(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A term that adds its weight, 1 to 100, to the nodes that it matches."""

    weight: int
    preference: NodeSelectorTerm


class NodeAffinity(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Which nodes a pod must and would like to run on."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNodeTerm, ...] = ()


class LabelSelector(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Conditions on labels that all hold; without any it matches everything."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()


class PodAffinityTerm(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Pods to be near to or apart from, and the node label that says what near is."""

    topology_key: str
    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] = ()
    namespace_selector: LabelSelector | None = None
    match_label_keys: tuple[str, ...] = ()
    mismatch_label_keys: tuple[str, ...] = ()


APART_FROM_ALL = PodAffinityTerm("kubernetes.io/hostname", LabelSelector(), namespace_selector=LabelSelector())
"""Stands for terms of anti-affinity that are not read."""


class PodAffinity(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Terms that must all hold; the preferred ones are left to kube-scheduler.

    terms_digest: the same for the same terms, so that many pods of one kind are told apart from others in little time.
    """

    required_during_scheduling_ignored_during_execution: tuple[PodAffinityTerm, ...] = ()
    terms_digest: bytes = b""

    def __post_init__(self) -> None:
        """Compute the digest once, while the pod is read."""
        terms = self.required_during_scheduling_ignored_during_execution
        digest = blake2b(msgspec.json.encode(terms), digest_size=16).digest() if terms else b""
        msgspec.structs.force_setattr(self, "terms_digest", digest)


class Affinity(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Where a pod runs, by nodes and by other pods."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class SpreadConstraint(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """How evenly pods of a kind lie in the domains of a node label."""

    max_skew: int
    topology_key: str
    when_unsatisfiable: str = "DoNotSchedule"
    label_selector: LabelSelector | None = None
    min_domains: int | None = None
    match_label_keys: tuple[str, ...] = ()
    node_affinity_policy: str = "Honor"
    node_taints_policy: str = "Ignore"


class ResourceClaimUse(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A ResourceClaim that a pod uses, by the pod's own name for it."""

    name: str


class ClaimVolume(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A volume's PersistentVolumeClaim."""

    claim_name: str


class Volume(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A volume of a pod. ephemeral: a claim named after pod and volume."""

    name: str
    persistent_volume_claim: ClaimVolume | None = None
    ephemeral: Present | None = None


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
    service_account_name: str = ""
    restart_policy: str = "Always"
    hostname: str = ""
    subdomain: str = ""
    termination_grace_period_seconds: int | None = None
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    scheduling_group: dict[str, str] = {}
    affinity: Affinity | None = None
    topology_spread_constraints: tuple[SpreadConstraint, ...] = ()
    volumes: tuple[Volume, ...] = ()
    resource_claims: tuple[ResourceClaimUse, ...] = ()
    overhead: dict[str, str | int | float] = {}
    resources: Resources | None = None


class Terminated(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The end of a container."""

    exit_code: int | None = None
    finished_at: str | None = None


class ContainerState(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """State of one container; exactly one is set, none before kubelet looked at it."""

    running: Present | None = None
    waiting: Present | None = None
    terminated: Terminated | None = None


class ContainerStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Kubelet's status of one container. resources: actual ones; allocated_resources: allocated by the kubelet."""

    name: str
    state: ContainerState = ContainerState()
    resources: Resources | None = None
    allocated_resources: dict[str, str | int | float] = {}


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
    start_time: str | None = None
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


class Namespace(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A namespace; terms of pod affinity choose by its labels."""

    metadata: Metadata


class PriorityClass(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A scheduling.k8s.io/v1 PriorityClass: what its name on a pod means."""

    metadata: Metadata
    value: int = 0
    global_default: bool = False
    preemption_policy: str = "PreemptLowerPriority"


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


class WrittenFields(msgspec.Struct, frozen=True, gc=False, rename={"fields": "fieldsV1"}):
    """The fields of an object that one client wrote, and when, by the API server's clock."""

    time: str | None = None
    fields: dict[str, Any] = {}


class HeartbeatMetadata(Metadata, frozen=True, gc=False, rename="camel"):
    """Metadata with its managed fields."""

    managed_fields: tuple[WrittenFields, ...] = ()


class Heartbeat(Lease, frozen=True, gc=False, rename="camel"):
    """The Lease that a node's agent renews."""

    metadata: HeartbeatMetadata


def decode_pod(raw: bytes) -> Pod:
    """Read a pod; of a large one only so much that no number of large pods fills the memory."""
    pod = _decode_whole_pod(raw)
    return pod if len(raw) <= LARGE_BYTES else _bounded(pod)


def _bounded(pod: Pod) -> Pod:
    """Return the pod without what makes it large. Statuses that are left out stand as a container that has not ended,
    and conditions as a pod that goes on."""
    status = {
        name: first(getattr(pod.status, name), entries_max=ENTRIES_MAX, more=(ContainerStatus(MORE_CONTAINERS),))
        for name in ("container_statuses", "init_container_statuses", "ephemeral_container_statuses")
    }
    status["conditions"] = first(
        pod.status.conditions, entries_max=CONDITIONS_MAX, more=(PodCondition("Ready", "Unknown"),)
    )
    texts = {name: getattr(pod.status, name)[:TEXT_MAX] for name in ("phase", "reason", "nominated_node_name")}
    owners = first(pod.metadata.owner_references, entries_max=OWNERS_MAX)
    return Pod(
        msgspec.structs.replace(pod.metadata, owner_references=owners),
        _bounded_spec(pod.spec),
        msgspec.structs.replace(pod.status, **texts, **status),
    )


def _bounded_spec(spec: PodSpec) -> PodSpec:
    """Return the spec with what others are charged for, and the first entries of every other field by itself."""
    fields = {name: first(getattr(spec, name), entries_max=FIELD_ENTRIES_MAX) for name in spec.__struct_fields__}
    fields["affinity"] = spec.affinity and _bounded_affinity(spec.affinity)
    fields["containers"] = _bounded_containers(spec.containers)
    fields["init_containers"] = _bounded_containers(spec.init_containers)
    return PodSpec(**fields)


def _bounded_affinity(affinity: Affinity) -> Affinity:
    """Return each part with its first entries. Anti-affinity that lost any keeps every pod off its node."""
    anti = affinity.pod_anti_affinity
    terms = anti.required_during_scheduling_ignored_during_execution if anti is not None else ()
    return Affinity(
        first(affinity.node_affinity, entries_max=ENTRIES_MAX),
        first(affinity.pod_affinity, entries_max=ENTRIES_MAX),
        PodAffinity(first(terms, entries_max=ENTRIES_MAX, more=(APART_FROM_ALL,))) if terms else anti,
    )


def _bounded_containers(containers: tuple[Container, ...]) -> tuple[Container, ...]:
    """Return the first containers, and one more of each restart policy that is charged what all others are."""
    slim = [_slim(one) for one in containers]
    ends = accumulate(1 + len(one.ports) + len(one.resources.requests) + len(one.resources.limits) for one in slim)
    kept = sum(1 for end in ends if end <= ENTRIES_MAX)
    others: dict[str | None, list[Container]] = {}
    for one in slim[kept:]:
        others.setdefault(one.restart_policy, []).append(one)
    found = (*slim[:kept], *(_as_one(policy, alike) for policy, alike in others.items()))
    return first(found, entries_max=8 * ENTRIES_MAX)  # only its texts are cut


def _slim(container: Container) -> Container:
    """Return a container without ports that are not the host's and amounts of 0, unless they are a mark of Atoll's."""
    asked = container.resources
    if not (asked.requests or asked.limits or container.ports):
        return container
    taken = {name for part in (asked.limits, asked.requests) for name, one in part.items() if not is_zero(one)}
    requests, limits = (
        {name: one for name, one in part.items() if name in taken or name.startswith(names.GROUP)}
        for part in (asked.requests, asked.limits)
    )
    ports = tuple(port for port in container.ports if port.host_port > 0)
    return Container(container.name, Resources(requests, limits), container.restart_policy, ports)


def _as_one(restart_policy: str | None, containers: Sequence[Container]) -> Container:
    """Return one container that takes as much as all of these together. That is more than init containers take that run
    one after the other; no machine runs so many."""
    asked = [{**one.resources.limits, **one.resources.requests} for one in containers]
    found = dict.fromkeys(chain.from_iterable(asked))
    counted = sorted(found, key=lambda name: "/" in name)[:FIELD_ENTRIES_MAX]
    total = {name: sum(parse_amount(name, one[name]) for one in asked if name in one) for name in counted}
    amounts: dict[str, str | int | float] = {**total, **({"cpu": f"{total['cpu']}m"} if "cpu" in total else {})}
    ports = tuple(islice((port for one in containers for port in one.ports), ENTRIES_MAX))
    return Container(MORE_CONTAINERS, Resources(amounts, {}), restart_policy, ports)


_decode_whole_pod = cutting_decoder(Pod)
decode_node = cutting_decoder(Node)
decode_lease = cutting_decoder(Lease)
decode_namespace = cutting_decoder(Namespace)
decode_heartbeat = msgspec.json.Decoder(Heartbeat).decode
decode_priority_class = msgspec.json.Decoder(PriorityClass).decode
