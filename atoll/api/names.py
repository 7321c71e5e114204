"""Every label, annotation, resource, gate, finalizer and event reason that Atoll writes on an object or reads from one.

Each name is spelled only here.
"""

from typing import Final

GROUP: Final = "gpu.scheduling"
VERSION: Final = "v1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

SYSTEM_NAMESPACE: Final = "atoll-system"
"""Namespace of Atoll's other parts and of the GPU Leases."""
HEARTBEAT_NAMESPACE: Final = "atoll-nodes"
"""Namespace of the agents and of their heartbeat Leases, one per node, named like the node."""

SCHEDULER_NAME: Final = "gpu-scheduler"
DEFAULT_SCHEDULER_NAME: Final = "default-scheduler"

GPU_RESOURCE: Final = "gpu.scheduling/gpu"
MIG_RESOURCE_PREFIX: Final = "gpu.scheduling/mig-"

# Annotations that users write. Immutable after CREATE.
CLAIM: Final = "gpu.scheduling/claim"
GANG: Final = "gpu.scheduling/gang"
GANG_SIZE: Final = "gpu.scheduling/gang-size"
POD_SET: Final = "gpu.scheduling/pod-set"
RESERVATION: Final = "gpu.scheduling/reservation"
"""On a pod: the GpuReservation outside of which it never runs. On a GPU Lease: NAME/UID of its GpuReservation."""
RENDEZVOUS: Final = "gpu.scheduling/rendezvous"
"""On a member of a gang: with the value true, its containers get their rank, the number of ranks, and who they are."""
USER_ANNOTATIONS: Final = (CLAIM, GANG, GANG_SIZE, POD_SET, RESERVATION, RENDEZVOUS)

PREEMPTIBLE: Final = "job.gpu.scheduling/preemptible"
"""Label of a pod: with the value false, no pod of a higher priority takes its GPUs."""

# Annotations that only Atoll writes.
CLAIM_UID: Final = "gpu.scheduling/claim-uid"
ALLOCATED: Final = "gpu.scheduling/allocated"
UUIDS: Final = "gpu.scheduling/uuids"
WOKEN: Final = "gpu.scheduling/woken"
KEPT: Final = "gpu.scheduling/kept"
"""On a waiting pod: NODE:ID,ID of the GPUs kept for it; other pods do not get them. See soft_reservations."""
ADMISSION: Final = "gpu.scheduling/admission"
"""On an ungated member of a gang: the id of its admission, as in the gang's status.admission."""
RANK: Final = "gpu.scheduling/rank"
WORLD_SIZE: Final = "gpu.scheduling/world-size"
LEADER: Final = "gpu.scheduling/leader"
HOSTS: Final = "gpu.scheduling/hosts"
"""On an ungated member that asks for its rendezvous: its rank, the number of ranks, the address of rank 0, and all
addresses in the order of ranks."""
PREEMPTION_NOTICE: Final = "gpu.scheduling/preemption-notice"
"""On a pod that is being evicted: the latest time of its end, in RFC 3339, readable through the downward API."""
CONTAINER_DEVICES_PREFIX: Final = "devices.gpu.scheduling/"
CONTAINER_UUIDS_PREFIX: Final = "uuids.gpu.scheduling/"
RENDEZVOUS_ANNOTATIONS: Final = (RANK, WORLD_SIZE, LEADER, HOSTS)
OWN_ANNOTATIONS: Final = (
    CLAIM_UID, ALLOCATED, UUIDS, WOKEN, KEPT, ADMISSION, *RENDEZVOUS_ANNOTATIONS, PREEMPTION_NOTICE
)  # fmt: skip
OWN_ANNOTATION_PREFIXES: Final = (CONTAINER_DEVICES_PREFIX, CONTAINER_UUIDS_PREFIX)

# Annotations on a Node, or on a pod that serves models, for the placement of machine-learning jobs.
MODELS_LOADED: Final = "gpu.scheduling/models-loaded"
"""JSON: a list of mappings with model_id, model_version and model_format."""
MODELS_CACHED: Final = "gpu.scheduling/models-cached"
MODEL_ANNOTATIONS: Final = (MODELS_LOADED, MODELS_CACHED)
RUNTIMES: Final = "gpu.scheduling/runtimes"
"""Words separated by commas, such as vllm,pytorch; a node without it serves every runtime."""

DRIVER_HOLD: Final = "gpu.scheduling/driver-hold"
"""Label of a Node: with the value released, its agent releases the driver, so that it can be reloaded."""
DRIVER_RELEASED: Final = "released"

MIRROR: Final = "kubernetes.io/config.mirror"
"""Kubelet's mark on a static pod's mirror; only kubelets may set it."""
STATIC_POD_UID: Final = "kubernetes.io/config.hash"
"""On such a mirror: the uid that the kubelet and the container runtime use for the pod."""

GANG_GATE: Final = "gpu.scheduling/gang-admission"
GANG_MADE_FOR: Final = "gpu.scheduling/made-for"
"""Annotation on a GpuGang that Atoll created from the pods' annotations: the uid of their owner, or `pods`."""
GANG_FENCED: Final = "gpu.scheduling/fenced"
"""On a GpuGang: moves its version, so that a late write of its status fails."""
GANG_SUSPENDED: Final = "gpu.scheduling/suspended"
"""Label on a Job or another owner of members that Atoll suspended: the uid of the gang. Only these are resumed."""
FABRIC_LEVEL: Final = "gpu.scheduling/fabric-clique"
"""Level of a Topology whose domains are NVLink fabric cliques: clusterUUID and cliqueId, as the agents report them."""
START_TAINT_PREFIXES: Final = ("startup-taint.cluster-autoscaler.kubernetes.io/", f"{GROUP}/")
"""Prefixes of the taint keys that the controllers may remove from a new node; their policy forbids others."""
RUNTIME_CLASS: Final = "atoll-nvidia"
"""RuntimeClass whose NVIDIA handler accepts the visible-devices variable; only the webhook may set it."""

# Environment variables of containers.
CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
NVIDIA_VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
CUDA_DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"
ROCR_VISIBLE_DEVICES: Final = "ROCR_VISIBLE_DEVICES"
HIP_VISIBLE_DEVICES: Final = "HIP_VISIBLE_DEVICES"
GPU_DEVICE_ORDINAL: Final = "GPU_DEVICE_ORDINAL"
VISIBLE_DEVICES_VARIABLES: Final = (
    CUDA_VISIBLE_DEVICES,
    NVIDIA_VISIBLE_DEVICES,
    ROCR_VISIBLE_DEVICES,
    HIP_VISIBLE_DEVICES,
    GPU_DEVICE_ORDINAL,
)
"""A claimed pod may not set any of these itself."""
DRIVER_DEVICE_VARIABLES: Final = (
    "NVIDIA_NVSWITCH",
    "NVIDIA_IMEX_CHANNELS",
    "NVIDIA_GDRCOPY",
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_MIG_MONITOR_DEVICES",
)
"""By these NVIDIA's runtime gives a container devices of the whole machine: its switches, memory of other nodes' pods,
the partition of GPUs. A claim gives none of them."""
VARIABLES_OFF: Final = ("", "void", "none", "disabled")
"""Values with which a variable gives nothing."""
CDI_PREFIX: Final = "cdi.k8s.io/"
"""Annotations with this prefix name devices, which some runtimes add to the containers."""

GANG_VARIABLES: Final = {
    "ATOLL_GANG_RANK": RANK,
    "ATOLL_GANG_SIZE": WORLD_SIZE,
    "ATOLL_GANG_LEADER": LEADER,
    "ATOLL_GANG_HOSTS": HOSTS,
}
"""Variables of a member that asks for its rendezvous, with the annotations to which they refer."""

# Labels and annotations on GPU Leases. Identity is in annotations, because label values end at 63 characters.
LEASE_KIND_LABEL: Final = "gpu.scheduling/lease"
LEASE_KIND_GPU: Final = "gpu"
LEASE_NODE: Final = "gpu.scheduling/node"
LEASE_NODE_UID: Final = "gpu.scheduling/node-uid"
LEASE_DEVICE_ID: Final = "gpu.scheduling/device-id"
LEASE_DEVICE_UUID: Final = "gpu.scheduling/device-uuid"
LEASE_CLAIM: Final = "gpu.scheduling/claim"
LEASE_GANG: Final = "gpu.scheduling/gang"
LEASE_ATTEMPT: Final = "gpu.scheduling/attempt"
LEASE_DEADLINE: Final = "gpu.scheduling/reservation-deadline"
LEASE_FENCED: Final = "gpu.scheduling/fenced"
"""Set before a reservation is taken back: no bind may use the Lease from then on."""
LEASE_IN_DOUBT: Final = "gpu.scheduling/in-doubt"

CONTROLLERS_LEADER_LEASE: Final = "atoll-controllers"
SCHEDULER_LEADER_LEASE: Final = "atoll-scheduler"
"""kube-scheduler's Lease in the shipped configuration; a change of its holder makes extenders read everything again."""
WEBHOOK_SERVICE: Final = "atoll-webhook"
WEBHOOK_CONFIGURATION: Final = "zz-atoll-webhook"
"""Sorted last, so that it sees the changes of other webhooks."""
WEBHOOK_SECRET: Final = "atoll-webhook-tls"  # noqa: S105 - the name of a Secret
"""Serving certificate of the webhook; the CA's key is in a separate Secret that the webhook cannot read."""
AUTHORITY_SECRET: Final = "atoll-authority"  # noqa: S105 - the name of a Secret

# Event reasons, PascalCase. docs/reference.md carries the same table; a test compares them.
REASON_GPUS_RELEASED: Final = "GpusReleased"
REASON_GPUS_IN_DOUBT: Final = "GpusInDoubt"
REASON_LEASE_RECREATED: Final = "GpuLeaseRecreated"
REASON_DOUBLE_USE: Final = "GpuDoubleUse"
REASON_POD_WOKEN: Final = "GpusAvailable"
REASON_ORPHAN_LEASE: Final = "OrphanGpuLease"
REASON_WAITING: Final = "WaitingForGpus"
REASON_GPUS_RENUMBERED: Final = "GpusRenumbered"
REASON_UNREADABLE_LEASE: Final = "UnreadableGpuLease"
REASON_GPUS_FREEING: Final = "GpusBeingFreed"
REASON_PREEMPTED: Final = "PreemptedForIsland"
REASON_PREEMPTION_ENDED: Final = "PreemptionEnded"
REASON_FOREIGN_USE: Final = "ForeignGpuUse"
REASON_GANG_ADMITTED: Final = "GangAdmitted"
REASON_GANG_WAITING: Final = "GangWaiting"
REASON_GANG_EVICTED: Final = "GangEvicted"
REASON_GANG_DEACTIVATED: Final = "GangDeactivated"
REASON_GANG_RESUMED: Final = "GangResumed"
REASON_GANG_UNDONE: Final = "GangAdmissionUndone"
REASON_GPU_ILL: Final = "GpuUnhealthy"
REASON_GPU_WELL: Final = "GpuHealthy"
REASON_NODE_NEEDS_DRAIN: Final = "GpuNodeNeedsDrain"
REASON_GPUS_GONE: Final = "GpusGone"
REASON_RESERVATION_ACTIVE: Final = "ReservationActive"
REASON_RESERVATION_FILLING: Final = "ReservationFilling"
REASON_RESERVATION_OVER: Final = "ReservationOver"
REASON_MACHINE_GONE: Final = "GpuMachineGone"
REASON_MACHINE_FORGOTTEN: Final = "GpuMachineForgotten"
REASON_WRITE_REFUSED: Final = "WriteRefused"
EVENT_REASONS: Final = {
    REASON_GPUS_RELEASED: "proof arrived that the pod can no longer use its GPUs; they are free again",
    REASON_GPUS_IN_DOUBT: "the pod is gone, but no proof yet that its containers are; its GPUs are not given out",
    REASON_LEASE_RECREATED: "a bound pod had no Lease for one of its GPUs; the Lease was written again",
    REASON_DOUBLE_USE: "two bound pods name one GPU; nothing was released, an administrator must decide",
    REASON_POD_WOKEN: "GPUs that fit the waiting pod became free; kube-scheduler was asked to try it again",
    REASON_ORPHAN_LEASE: "a Lease named a holder that never bound this GPU; it was deleted",
    REASON_UNREADABLE_LEASE: "a GPU Lease is unreadable or contradicts its name; its GPU is not given out meanwhile",
    REASON_GPUS_RENUMBERED: "after a reboot the pod's GPU indices belong to other GPUs; the pod is evicted",
    REASON_GANG_ADMITTED: "every member of the gang got its GPUs, and all of them may start",
    REASON_GANG_WAITING: "the gang holds nothing and waits; the message says what for",
    REASON_GANG_EVICTED: "the whole gang gives its GPUs back; the message says why, and whether it comes back",
    REASON_GANG_DEACTIVATED: "the gang was deactivated; set spec.active to true to try it again",
    REASON_GANG_RESUMED: "the pause after the eviction is over; the owner of the members was resumed",
    REASON_GANG_UNDONE: "an admission could not be finished, so every reservation of it was taken back",
    REASON_GPUS_FREEING: "pods of lower priority are evicted, so that the pod gets linked GPUs for its claim",
    REASON_PREEMPTED: "the pod is evicted for one of higher priority whose claim needs linked GPUs",
    REASON_PREEMPTION_ENDED: "the pod did not get the GPUs that were freed for it; the message says why",
    REASON_RESERVATION_ACTIVE: "a GpuReservation holds all of its GPUs",
    REASON_RESERVATION_FILLING: "a GpuReservation holds too few GPUs; it takes more as they become free",
    REASON_RESERVATION_OVER: "a GpuReservation has ended or was not used; it no longer holds GPUs",
    REASON_FOREIGN_USE: "a GPU is in use by a process that does not hold it; it is not given out meanwhile",
    REASON_GPU_ILL: "a GPU is no longer given out; once on the pod that holds it and on the node",
    REASON_GPU_WELL: "a GPU that was unhealthy may be given out again",
    REASON_NODE_NEEDS_DRAIN: "a GPU needs a reboot of its node; nothing new is placed there, drain it",
    REASON_GPUS_GONE: "a GPU of a bound pod is gone from its machine; its containers cannot start again",
    REASON_MACHINE_GONE: "somebody declared a machine gone for good; GPUs of pods that left it are freed",
    REASON_MACHINE_FORGOTTEN: "report and heartbeat of a node without a Node object were deleted",
    REASON_WRITE_REFUSED: "a write for the gang or one of its pods was refused; it is tried again after a pause",
    REASON_WAITING: "no node can give the pod its GPUs now; the message says what is missing",
}

POD_AS_PROMISED: Final = "gpu.scheduling/GpusAsPromised"
"""Condition of a pod: False while it uses a GPU that it does not hold, or another process uses one of its GPUs."""
POD_TAKES_WRITES: Final = "gpu.scheduling/TakesAnnotations"
"""Condition of a pod: False once it refused an annotation with which reserved GPUs are given back; written instead."""

# Conditions of a GpuNodeStatus, and their reasons.
CONDITION_DEVICES_READABLE: Final = "DevicesReadable"
CONDITION_LINKS_CONSISTENT: Final = "LinksConsistent"
CONDITION_EVIDENCE_READABLE: Final = "EvidenceReadable"
CONDITION_FABRIC_READY: Final = "FabricReady"
CONDITION_FACTS_READABLE: Final = "FactsReadable"
REASON_FACTS_UNREAD: Final = "FactsUnread"
REASON_FABRIC_READY: Final = "FabricReady"
REASON_FABRIC_NOT_READY: Final = "FabricNotReady"
REASON_ALL_READ: Final = "AllRead"
REASON_DEVICES_MISSING: Final = "DevicesMissing"
REASON_LINKS_UNREAD: Final = "LinksUnread"
REASON_LINKS_ASYMMETRIC: Final = "LinksAsymmetric"
REASON_EVIDENCE_UNREAD: Final = "EvidenceUnread"

# Conditions of a GpuGang, and their reasons.
CONDITION_ACTIVE: Final = "Active"
CONDITION_QUORUM: Final = "QuorumReached"
CONDITION_ADMITTED: Final = "Admitted"
CONDITION_PODS_READY: Final = "PodsReady"
CONDITION_EVICTED: Final = "Evicted"
CONDITION_LEVELS: Final = "LevelsFound"
"""Condition of a Topology: every level has a value on some node, and no two nodes share a host name."""
GANG_CONDITIONS: Final = {
    CONDITION_ACTIVE: (
        "Active",
        "Deactivated",
        "RequeuingLimitExceeded",
        "TopologyMissing",
        "TopologyAmbiguous",
        "LevelMissing",
        "HostnamesShared",
        "OutOfBounds",
        "Invalid",
    ),
    CONDITION_QUORUM: ("QuorumReached", "WaitForMembers", "ForeignGates"),
    CONDITION_ADMITTED: (
        "Admitted",
        "Inactive",
        "WaitForQuorum",
        "WaitForRoom",
        "WaitForNodes",
        "NeverFits",
        "WaitForRequeue",
        "WaitForOtherGangs",
        "WaitForRelease",
        "AdmissionUndone",
    ),
    CONDITION_PODS_READY: ("WaitForStart", "Started", "WaitForRecovery", "Recovered"),
    CONDITION_EVICTED: (
        "NotEvicted",
        "PodsReadyTimeout",
        "RecoveryLimitExceeded",
        "SchedulerRefused",
        "MemberRefused",
        "Preempted",
        "Deactivated",
    ),
}

COMPLETE_JOBS: Final = "gpu.scheduling/complete-jobs"
"""Label of a namespace; "true" completes templates of Jobs that name a claim, so that quotas count their GPUs."""

EVIDENCE_WANTED: Final = "gpu.scheduling/evidence-wanted"
"""Annotation on a GpuNodeStatus. When its value changes, the agent lists its pods again, then takes and publishes two
complete readings: for a controller that missed a deletion and needs a later report."""

# Rejections per node for kube-scheduler: short constant phrases, because it counts equal texts.
REJECT_NO_REPORT: Final = "no GPU report from this node"
REJECT_STALE_REPORT: Final = "GPU report is stale"
REJECT_PAST_BOOT: Final = "GPU report is from before the node's reboot"
REJECT_PAST_NODE: Final = "GPU report is of an earlier Node of this name"
REJECT_RESTORED: Final = "GPU report is from before the API server was restored"
REJECT_UNKNOWN_POD: Final = "GPU report shows a pod that the API server does not know"
REJECT_BAD_REPORT: Final = "GPU report contradicts itself"
REJECT_NEVER_FITS: Final = "node has too few GPUs that match the claim"
REJECT_NO_MODEL: Final = "no GPU of a claimed model"
REJECT_NO_MEMORY: Final = "no GPU with the claimed memory"
REJECT_MEMORY_UNKNOWN: Final = "memory size of the GPUs is unknown"
REJECT_NO_CAPABILITY: Final = "no GPU with the claimed compute capability"
REJECT_CLAIM_MISSING: Final = "GpuClaim of the pod is missing"
REJECT_CLAIM_REPLACED: Final = "GpuClaim was deleted and created anew after the pod"
REJECT_GANG: Final = "gang of the pod is not admitted"
REJECT_COUNT_MISMATCH: Final = "GPU requests of the containers differ from the claim"
REJECT_ANNOTATIONS: Final = "annotations of the pod leave no room for those of its GPUs"
REJECT_HOLDS_ELSEWHERE: Final = "pod still holds GPUs of another node"
REJECT_ELSEWHERE: Final = "GPUs that suit the pod better are on node"
"""Followed by the node's name: kube-scheduler did not offer it, and the controllers send the pod there."""
REJECT_MIG: Final = "no MIG instance of the claimed profile"
REJECT_RESERVATION_MISSING: Final = "GpuReservation of the pod is missing"
REJECT_RESERVATION_FOREIGN: Final = "pod may not use its GpuReservation"
REJECT_RESERVATION_EARLY: Final = "GpuReservation of the pod has not begun"
REJECT_RESERVATION_OVER: Final = "GpuReservation of the pod is over"
REJECT_RESERVATION_SMALL: Final = "GpuReservation of the pod is smaller than the pod"
REJECT_RESERVATION_ELSEWHERE: Final = "GpuReservation of the pod has nothing here"
REJECT_REFUSED: Final = "kubelets refused the last pods of this owner, the next waits a while"
REJECT_FABRIC: Final = "NVLink fabric of the node is not ready"


def is_own_annotation(key: str) -> bool:
    """True if only Atoll may write the annotation `key` on a pod."""
    return key in OWN_ANNOTATIONS or key.startswith(OWN_ANNOTATION_PREFIXES)


def mig_resource(profile: str) -> str:
    """Return the resource that counts MIG instances of a profile; a resource name cannot contain the + of
    `1g.10gb+me`."""
    return MIG_RESOURCE_PREFIX + profile.replace("+", ".")
