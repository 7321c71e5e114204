"""What to do about each event and each condition: the third column of the tables in docs/reference.md.

These texts are for people, by the names in `atoll.api.names`; `python -m atoll.api.reasons` writes both into the page.
"""

from typing import Final

from atoll.api import names

NOTHING: Final = "nothing"

EVENT_STEPS: Final = {
    names.REASON_GPUS_RELEASED: NOTHING,
    names.REASON_GPUS_IN_DOUBT: "restart kubelet and agent of the node, or see GPUs in doubt in operations.md",
    names.REASON_LEASE_RECREATED: "nothing; if it recurs, find out what deletes Leases in atoll-system",
    names.REASON_DOUBLE_USE: "end one of the two pods, then run `atoll audit`",
    names.REASON_POD_WOKEN: "nothing; kube-scheduler tries the pod within seconds",
    names.REASON_ORPHAN_LEASE: NOTHING,
    names.REASON_UNREADABLE_LEASE: "compare the Lease with the reference; Atoll rewrites that of a bound pod",
    names.REASON_GPUS_RENUMBERED: "nothing; its owner creates a new pod. Mode `uuid` avoids it",
    names.REASON_GPUS_FREEING: "nothing; the pod starts when the victims have ended",
    names.REASON_PREEMPTED: "nothing; its owner creates a new pod, which waits for GPUs",
    names.REASON_PREEMPTION_ENDED: "read the message; `atoll explain pod/NAME` tells what would help",
    names.REASON_FOREIGN_USE: "end the process or pod in the message; keep device plugins off the node",
    names.REASON_GANG_ADMITTED: NOTHING,
    names.REASON_GANG_WAITING: "read the message; `atoll explain gang/NAME` tells what would help",
    names.REASON_GANG_EVICTED: "read the message; nothing if the gang comes back",
    names.REASON_GANG_DEACTIVATED: "remove the cause, then set spec.active to true",
    names.REASON_GANG_RESUMED: NOTHING,
    names.REASON_WRITE_REFUSED: "read the message: it names what refuses the write; change that, or delete the pod",
    names.REASON_GANG_UNDONE: "nothing; it is tried again. If it recurs, read the message",
    names.REASON_GPU_ILL: "read the message; drain the pod, repair or replace the card",
    names.REASON_GPU_WELL: NOTHING,
    names.REASON_NODE_NEEDS_DRAIN: "`kubectl drain` the node, reboot it, uncordon it",
    names.REASON_GPUS_GONE: "nothing if the message says that the pod is evicted; otherwise recreate the pod",
    names.REASON_RESERVATION_ACTIVE: NOTHING,
    names.REASON_RESERVATION_FILLING: "nothing; if it cannot wait, end pods that have such GPUs",
    names.REASON_RESERVATION_OVER: "nothing; pods that name it wait forever: recreate them with another one",
    names.REASON_MACHINE_GONE: "nothing; if the machine still runs, start its agent at once",
    names.REASON_MACHINE_FORGOTTEN: NOTHING,
    names.REASON_WAITING: "read the message; `atoll explain pod/NAME` tells what would help",
}

_NODE, _GANG = "GpuNodeStatus", "GpuGang"
CONDITION_STEPS: Final[dict[tuple[str, str, str], tuple[str, str]]] = {
    (_NODE, names.CONDITION_DEVICES_READABLE, names.REASON_ALL_READ): ("every GPU answers", NOTHING),
    (_NODE, names.CONDITION_DEVICES_READABLE, names.REASON_DEVICES_MISSING): (
        "a GPU is missing, unhealthy or does not answer",
        "read the message, then `nvidia-smi` and the kernel's log on the node",
    ),
    (_NODE, names.CONDITION_LINKS_CONSISTENT, names.REASON_ALL_READ): ("both ends of every link agree", NOTHING),
    (_NODE, names.CONDITION_LINKS_CONSISTENT, names.REASON_LINKS_UNREAD): (
        "links could not be read; the last known ones count",
        "`nvidia-smi topo -m` on the node; restart the agent when it works",
    ),
    (_NODE, names.CONDITION_LINKS_CONSISTENT, names.REASON_LINKS_ASYMMETRIC): (
        "the two ends of a pair disagree; the weaker counts",
        "`nvidia-smi nvlink -s` on the node: a link may be down",
    ),
    (_NODE, names.CONDITION_FABRIC_READY, names.REASON_FABRIC_READY): ("the NVLink fabric is set up", NOTHING),
    (_NODE, names.CONDITION_FABRIC_READY, names.REASON_FABRIC_NOT_READY): (
        "the NVLink fabric is not set up; nothing new is placed there",
        "start the fabric manager on the node, read its log",
    ),
    (_NODE, names.CONDITION_EVIDENCE_READABLE, names.REASON_ALL_READ): (
        "cgroups and the kubelet's list of pods are read",
        NOTHING,
    ),
    (_NODE, names.CONDITION_EVIDENCE_READABLE, names.REASON_EVIDENCE_UNREAD): (
        "running pods cannot be seen; GPUs of deleted pods stay in doubt",
        "check the agent's mount of /sys/fs/cgroup, and its right to the kubelet's API",
    ),
    (_NODE, names.CONDITION_FACTS_READABLE, names.REASON_ALL_READ): ("all facts about the devices are known", NOTHING),
    (_NODE, names.CONDITION_FACTS_READABLE, names.REASON_FACTS_UNREAD): (
        "the users or the memory size of a GPU are unknown; foreign use would not be noticed",
        "check the agent's permissions: NVIDIA_MIG_MONITOR_DEVICES=all for MIG, and the host's processes",
    ),
    ("Pod", names.POD_AS_PROMISED, "ForeignGpuUse"): (
        "the pod uses a GPU that it does not hold, or another process uses one of its GPUs",
        "end the process or pod in the message",
    ),
    ("Pod", names.POD_AS_PROMISED, "AsPromised"): ("it did, but no longer does", NOTHING),
    ("Pod", names.POD_TAKES_WRITES, names.REASON_WRITE_REFUSED): (
        "GPUs that were reserved for the pod were given back, and it took no annotation of Atoll's",
        "shorten its annotations, or change what refuses them; the message says which",
    ),
    ("Topology", names.CONDITION_LEVELS, "LevelsFound"): ("every level has a value on some node", NOTHING),
    ("Topology", names.CONDITION_LEVELS, "LevelMissing"): (
        "no node has the label of a level",
        "label the nodes, or correct spec.levels",
    ),
    ("Topology", names.CONDITION_LEVELS, "HostnamesShared"): (
        "two nodes have one host name",
        "give every node a `kubernetes.io/hostname` of its own",
    ),
    (_GANG, names.CONDITION_ACTIVE, "Active"): ("the gang may be admitted", NOTHING),
    (_GANG, names.CONDITION_ACTIVE, "Deactivated"): ("spec.active is false", "set it to true to try again"),
    (_GANG, names.CONDITION_ACTIVE, "RequeuingLimitExceeded"): (
        "it reached the limit of evictions",
        "find out why its pods do not get ready, then set spec.active to true",
    ),
    (_GANG, names.CONDITION_ACTIVE, "TopologyMissing"): (
        "its Topology does not exist",
        "create it, or correct spec.topologyName",
    ),
    (_GANG, names.CONDITION_ACTIVE, "TopologyAmbiguous"): (
        "several Topologies have the levels that it names",
        "name one in spec.topologyName",
    ),
    (_GANG, names.CONDITION_ACTIVE, "LevelMissing"): (
        "no Topology, or not the one that it names, has such a level",
        "ask for a level that a Topology lists",
    ),
    (_GANG, names.CONDITION_ACTIVE, "HostnamesShared"): (
        "two nodes of its Topology have one host name",
        "give every node a `kubernetes.io/hostname` of its own",
    ),
    (_GANG, names.CONDITION_ACTIVE, "OutOfBounds"): (
        "its waitForPodsReady is outside the administrator's bounds",
        "choose values within them",
    ),
    (_GANG, names.CONDITION_ACTIVE, "Invalid"): ("its spec contradicts itself or its pods", "read the message"),
    (_GANG, names.CONDITION_QUORUM, "QuorumReached"): ("enough members exist", NOTHING),
    (_GANG, names.CONDITION_QUORUM, "WaitForMembers"): (
        "too few members exist",
        "create the missing pods; look at their owner and at quotas",
    ),
    (_GANG, names.CONDITION_QUORUM, "ForeignGates"): (
        "members have foreign gates",
        "the programs that set them must remove them",
    ),
    (_GANG, names.CONDITION_ADMITTED, "Admitted"): ("every member has its GPUs", NOTHING),
    (_GANG, names.CONDITION_ADMITTED, "Inactive"): ("see the condition Active", "as told there"),
    (_GANG, names.CONDITION_ADMITTED, "WaitForQuorum"): ("see the condition QuorumReached", "as told there"),
    (_GANG, names.CONDITION_ADMITTED, "WaitForRoom"): (
        "it would fit if others left",
        "wait, or `atoll explain gang/NAME`",
    ),
    (_GANG, names.CONDITION_ADMITTED, "WaitForNodes"): (
        "machines that could hold it are closed, have withheld GPUs, or have not reported yet",
        "read the message: uncordon, repair, or look at the agents of these nodes",
    ),
    (_GANG, names.CONDITION_ADMITTED, "NeverFits"): (
        "it would not fit even on the empty machines",
        "lower its request, or add machines",
    ),
    (_GANG, names.CONDITION_ADMITTED, "WaitForRequeue"): (
        "it was evicted and pauses",
        "wait for the time in the message",
    ),
    (_GANG, names.CONDITION_ADMITTED, "WaitForOtherGangs"): (
        "it is the turn of gangs before it",
        "wait, or raise its priority",
    ),
    (_GANG, names.CONDITION_ADMITTED, "WaitForRelease"): (
        "GPUs of its former pods are not free yet",
        "wait; if it lasts, see GPUs in doubt in operations.md",
    ),
    (_GANG, names.CONDITION_ADMITTED, "AdmissionUndone"): (
        "an admission could not be finished and was taken back",
        "nothing; it is tried again",
    ),
    (_GANG, names.CONDITION_PODS_READY, "WaitForStart"): (
        "not every member is ready yet",
        "look at those that are not",
    ),
    (_GANG, names.CONDITION_PODS_READY, "Started"): ("every member is ready", NOTHING),
    (_GANG, names.CONDITION_PODS_READY, "WaitForRecovery"): (
        "a member is no longer ready",
        "look at that member; after recoveryTimeout the gang is evicted",
    ),
    (_GANG, names.CONDITION_PODS_READY, "Recovered"): ("every member is ready again", NOTHING),
    (_GANG, names.CONDITION_EVICTED, "NotEvicted"): ("it runs or waits", NOTHING),
    (_GANG, names.CONDITION_EVICTED, "PodsReadyTimeout"): (
        "its pods did not get ready in time",
        "look at their logs and events",
    ),
    (_GANG, names.CONDITION_EVICTED, "RecoveryLimitExceeded"): (
        "it lost ready members more often than recoveryLimitCount allows",
        "check why its members end; it is admitted again after a pause",
    ),
    (_GANG, names.CONDITION_EVICTED, "SchedulerRefused"): (
        "kube-scheduler refused a member on its node",
        "nothing; it is admitted again. If it recurs, read the message",
    ),
    (_GANG, names.CONDITION_EVICTED, "MemberRefused"): (
        "the API server refuses a write for a member",
        "read the message; an admission policy or a quota may be in the way",
    ),
    (_GANG, names.CONDITION_EVICTED, "Preempted"): (
        "a pod or gang of higher priority took its GPUs",
        "wait, or raise its priority",
    ),
    (_GANG, names.CONDITION_EVICTED, "Deactivated"): ("spec.active was set to false", "set it to true to try again"),
}
"""By kind, condition and reason: what it means, what to do."""
