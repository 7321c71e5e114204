"""Who belongs to a gang, in which pod set, with which rank, and at which stage each member is.

A pod belongs to the gang that its annotation names (the webhook copies the claim's gangRef there); its pod set is the
annotated one, else the one that its owner's labels name, else the only one. Ranks come from index labels; where those
are missing, no numbers or not unique within a pod set, all ranks of the set follow the pods' names, worker-2 before
worker-10. The order is fixed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from atoll.api import names
from atoll.api.gangs import GangPodSet, GpuGang, GpuGangSpec
from atoll.cluster import pods
from atoll.cluster.objects import Pod
from topology.gangs.ranks import ranks

JOBSET_SET = "jobset.sigs.k8s.io/replicatedjob-name"
JOBSET_INDEX = "jobset.sigs.k8s.io/job-index"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
KUBEFLOW_SET = "training.kubeflow.org/replica-type"
KUBEFLOW_ROLE = "training.kubeflow.org/job-role"
"""What the MPI operator writes instead; others write it on the master alone, beside the type."""
RAY_SET = "ray.io/group"
RAY_INDEX = "ray.io/worker-group-replica-index"
KUBEFLOW_INDEX = "training.kubeflow.org/replica-index"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
GROUP_SIZE = "leaderworkerset.sigs.k8s.io/size"
"""An annotation: the leader and its workers together."""
STATEFUL_INDEX = "apps.kubernetes.io/pod-index"
JOBSET_REPLICAS = "jobset.sigs.k8s.io/replicatedjob-replicas"
SET_LABELS = (JOBSET_SET, KUBEFLOW_SET, KUBEFLOW_ROLE, RAY_SET)
INDEX_LABELS = (
    COMPLETION_INDEX,
    "kubernetes.io/job-completion-index",
    KUBEFLOW_INDEX,
    WORKER_INDEX,
    STATEFUL_INDEX,
    RAY_INDEX,
)
SUB_GROUP_LABELS = (JOBSET_INDEX, GROUP_INDEX)
RANKING_ANNOTATIONS = (*INDEX_LABELS, *SUB_GROUP_LABELS, GROUP_SIZE, JOBSET_REPLICAS)
"""Keys that others write on pods, as labels or as annotations, and that rank the members of a gang."""
LEADER, WORKER = "leader", "worker"
ONLY_SET = "pods"
"""The pod set of a gang that is created for pods which name none."""

GangKey = tuple[str, str]
"""Namespace and name."""


class MemberStage(StrEnum):
    """How far a member has come."""

    GATED = "waits behind Atoll's gate alone"
    HELD_BACK = "waits behind gates of others too"
    STARTING = "may start, and is not ready yet"
    READY = "is ready"
    SUCCEEDED = "has succeeded"
    FAILED = "has failed"
    ENDING = "is being deleted"


STARTED = frozenset({MemberStage.STARTING, MemberStage.READY})
DONE = frozenset({MemberStage.SUCCEEDED, MemberStage.FAILED})
OVER = DONE | {MemberStage.ENDING}
COUNTING = STARTED | {MemberStage.SUCCEEDED}
"""Members that have a place and have not failed, ready or not, or have done their work."""


@dataclass(frozen=True, slots=True)
class GangMember:
    """One pod of a gang. `pod_set` is empty for a pod of no known set; `holds`: GPUs are reserved for it, as far as
    that is known since `held_since` (seconds since 1970)."""

    pod: Pod
    pod_set: str
    rank: int
    stage: MemberStage
    holds: bool
    held_since: float | None = None

    @property
    def uid(self) -> str:
        """The pod's uid."""
        return self.pod.metadata.uid

    @property
    def is_gated(self) -> bool:
        """Whether Atoll's gate is still on the pod: then it cannot be bound."""
        return has_gate(self.pod)


def controller_uid(pod: Pod) -> str:
    """Return the uid of the pod's controller; empty for a bare pod."""
    return next((owner.uid for owner in pod.metadata.owner_references if owner.controller), "")


def owner_uid(member: GangMember) -> str:
    """Return the uid of the member's controller; empty for a bare pod."""
    return controller_uid(member.pod)


def is_of_stateful_set(member: GangMember) -> bool:
    """Return whether the member's controller is a StatefulSet, which by default creates a pod only once the one before
    it is Ready."""
    return any(owner.controller and owner.kind == "StatefulSet" for owner in member.pod.metadata.owner_references)


def admission_of(member: GangMember) -> str:
    """Return the id of the admission in which the member was ungated; empty if none, or from before ids existed."""
    return member.pod.metadata.annotations.get(names.ADMISSION, "")


def of_admission(members: Iterable[GangMember], admission: str, known: Collection[str]) -> tuple[GangMember, ...]:
    """Return the members without those that ended, or are ending, in an earlier admission.

    Without an id, admissions cannot be told apart. Members in `known`, and succeeded members whose owner has members
    that have not ended, also count for this admission.
    """
    found = tuple(members)
    if not admission:
        return found
    owners = {owner for member in found if member.stage not in OVER and (owner := owner_uid(member))}

    def belongs(member: GangMember) -> bool:
        if member.stage not in OVER or admission_of(member) == admission or member.uid in known:
            return True
        return member.stage is MemberStage.SUCCEEDED and owner_uid(member) in owners

    return tuple(member for member in found if belongs(member))


def key_of(gang: GpuGang) -> GangKey:
    """Return namespace and name."""
    return (gang.metadata.namespace, gang.metadata.name)


def gang_key(pod: Pod) -> GangKey | None:
    """Return the gang that the pod belongs to."""
    name = pod.metadata.annotations.get(names.GANG)
    return (pod.metadata.namespace, name) if name else None


def has_gate(pod: Pod) -> bool:
    """Tell whether Atoll's gate is on the pod."""
    return any(gate.name == names.GANG_GATE for gate in pod.spec.scheduling_gates)


def stage_of(pod: Pod) -> MemberStage:
    """Tell how far a pod has come. One whose containers all ended well counts as succeeded before its phase says so.

    What is being deleted has not succeeded, whatever its phase: a program that is told to end, by an eviction or a
    suspended owner, often ends with status 0. It is gone in a moment, and its successor has all of the work to do.
    """
    if pod.status.phase == "Failed":
        return MemberStage.FAILED
    if pod.metadata.deletion_timestamp is not None:
        return MemberStage.ENDING
    if pods.is_terminal(pod):
        return MemberStage.SUCCEEDED
    if has_gate(pod):
        return MemberStage.GATED if len(pod.spec.scheduling_gates) == 1 else MemberStage.HELD_BACK
    if _has_just_succeeded(pod):
        return MemberStage.SUCCEEDED
    is_ready = any(condition.type == "Ready" and condition.status == "True" for condition in pod.status.conditions)
    return MemberStage.READY if is_ready else MemberStage.STARTING


def _has_just_succeeded(pod: Pod) -> bool:
    """Tell whether every regular container ended with status 0; such a pod is not started again by Never, OnFailure."""
    statuses = pod.status.container_statuses
    if not statuses or len(statuses) < len(pod.spec.containers) or pod.spec.restart_policy == "Always":
        return False
    return all(status.state.terminated is not None and status.state.terminated.exit_code == 0 for status in statuses)


def pod_set_of(pod: Pod, spec: GpuGangSpec) -> str:
    """Return the pod set of a pod, an empty text when the gang has none that fits."""
    known = {pod_set.name for pod_set in spec.pod_sets}
    annotated = pod.metadata.annotations.get(names.POD_SET)
    if annotated is not None:
        return annotated if annotated in known else ""
    for label in SET_LABELS:
        named = pod.metadata.labels.get(label, "").lower()
        if named in known:
            return named
    role = role_of(pod)
    if role and {LEADER, WORKER} <= known:
        return role
    return spec.pod_sets[0].name if len(known) == 1 else ""


def role_of(pod: Pod) -> str:
    """Return LEADER or WORKER for a pod of a LeaderWorkerSet; empty for others."""
    index = pod.metadata.labels.get(WORKER_INDEX)
    return "" if index is None else LEADER if index == "0" else WORKER


def set_names(members: Sequence[Pod]) -> list[str]:
    """Return the pod set that each member names; empty for none. A LeaderWorkerSet has two if its leaders ask for other
    GPUs than its workers."""
    named = [_named_set(pod) for pod in members]
    roles = [role_of(pod) for pod in members]
    asks = {(pods.claim_name(pod), pods.device_count(pod)) for pod in members}
    return roles if all(roles) and not any(named) and len(asks) > 1 else named


def _named_set(pod: Pod) -> str:
    labels = pod.metadata.labels
    owners = (labels[key] for key in SET_LABELS if labels.get(key))
    return pod.metadata.annotations.get(names.POD_SET) or next(owners, "").lower()


def members_of(
    found: Iterable[Pod],
    spec: GpuGangSpec,
    holders: Mapping[str, bool],
    since: Mapping[str, float | None] | None = None,
) -> tuple[GangMember, ...]:
    """Return the members among pods of one gang, by pod set, rank and name. `holders` tells who has GPUs reserved, and
    `since` from when on."""
    by_set: dict[str, list[Pod]] = {}
    for pod in found:
        by_set.setdefault(pod_set_of(pod, spec), []).append(pod)
    sets = {pod_set.name: pod_set for pod_set in spec.pod_sets}
    members = [
        GangMember(
            pod, name, rank, stage_of(pod), holders.get(pod.metadata.uid, False), (since or {}).get(pod.metadata.uid)
        )
        for name, group in by_set.items()
        for pod, rank in _ranked(group, sets.get(name))
    ]
    return tuple(sorted(members, key=lambda member: (member.pod_set, member.rank, member.pod.metadata.name)))


def _ranked(group: Sequence[Pod], pod_set: GangPodSet | None) -> list[tuple[Pod, int]]:
    by_name = sorted(group, key=lambda pod: (pod.metadata.name, pod.metadata.uid))
    live = [pod for pod in by_name if stage_of(pod) not in {*DONE, MemberStage.ENDING}]
    rank_of = {
        pod.metadata.uid: rank
        for pod, rank in zip(live, ranks([(pod.metadata.name, _index(pod, pod_set)) for pod in live]), strict=True)
    }
    return [(pod, rank_of.get(pod.metadata.uid, 0)) for pod in group]


def _index(pod: Pod, pod_set: GangPodSet | None) -> int | None:
    """Return the rank that the labels give: sub-group times its size, plus the index within it."""
    request = pod_set.topology if pod_set is not None else None
    labels = {**pod.metadata.annotations, **pod.metadata.labels}
    wanted = (request.pod_index_label,) if request is not None and request.pod_index_label else INDEX_LABELS
    index = next((number for label in wanted if (number := _number(labels.get(label))) is not None), None)
    if pod_set is None:
        return index
    if GROUP_SIZE in labels and not (
        request is not None and (request.pod_index_label or request.sub_group_index_label)
    ):
        return _group_rank(labels, pod_set)
    count = request.sub_group_count if request is not None and request.sub_group_count else None
    groups = (request.sub_group_index_label,) if request is not None and request.sub_group_index_label else ()
    group = next((n for label in (*groups, *SUB_GROUP_LABELS) if (n := _number(labels.get(label))) is not None), None)
    if group is None:
        return index
    replicas = count or _number(labels.get(JOBSET_REPLICAS))
    if not replicas or pod_set.count % replicas:
        return index
    return group * (pod_set.count // replicas) + (index or 0)


def _group_rank(labels: Mapping[str, str], pod_set: GangPodSet) -> int | None:
    """Return the rank in a LeaderWorkerSet: groups in turn, in each the leader (worker 0) first; or within the set of
    the leaders, or that of the workers, where the gang has those."""
    size, worker = _number(labels.get(GROUP_SIZE)), _number(labels.get(WORKER_INDEX))
    group = _number(labels.get(GROUP_INDEX)) or 0
    if not size or worker is None:
        return worker
    if pod_set.name == LEADER:
        return group
    if pod_set.name == WORKER:
        return group * (size - 1) + worker - 1
    return group * size + worker


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= 6 else None


def without_pod_set(members: Iterable[GangMember]) -> tuple[GangMember, ...]:
    """Return the members that belong to none of the gang's pod sets."""
    return tuple(member for member in members if not member.pod_set)


def holding(member: GangMember, *, holds: bool) -> GangMember:
    """Return the member as one that holds GPUs, or holds none any more."""
    return replace(member, holds=holds)


def node_of(member: GangMember) -> str:
    """Return the node of a member that runs or is about to; empty for none."""
    return member.pod.spec.node_name or ("" if member.is_gated else member.pod.status.nominated_node_name)
