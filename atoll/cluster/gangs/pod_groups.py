"""Kubernetes' own PodGroups (`scheduling.k8s.io/v1beta1`, gate GenericWorkload) read as gangs. Pure.

A PodGroup of policy gang becomes a GpuGang of its name: the same quorum, the required domain, and with
`disruptionMode: all` no member to spare. kube-scheduler schedules the pods together too, but only once Atoll has let
them go with their GPUs. What a GpuGang cannot keep is refused in words.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from atoll.api import names
from atoll.api.gangs import MEMBERS_MAX, GpuGang, TopologyMode
from atoll.api.topologies import HOSTNAME
from atoll.cluster.gangs.membership import GangMember
from atoll.cluster.objects import Metadata, Pod

POD_GROUP: Final = "PodGroup/"
"""What the mark on a gang begins with that was made for a PodGroup; its uid follows."""


class GangPolicy(msgspec.Struct, frozen=True, rename="camel"):
    """Policy gang: all or none of at least this many pods."""

    min_count: int = 1


class SchedulingPolicy(msgspec.Struct, frozen=True, rename="camel"):
    """Policy of a PodGroup; basic has no field that counts here."""

    gang: GangPolicy | None = None


class GroupTopology(msgspec.Struct, frozen=True, rename="camel"):
    """Label of the nodes whose value all pods of the group share."""

    key: str


class GroupConstraints(msgspec.Struct, frozen=True, rename="camel"):
    """Constraints of the group as a whole."""

    topology: tuple[GroupTopology, ...] = ()


class DisruptionMode(msgspec.Struct, frozen=True, rename="camel"):
    """How pods of the group may be disrupted: each by itself, or all together."""

    all: dict[str, Any] | None = None


class PodGroupSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of a PodGroup's spec that Atoll keeps or refuses."""

    scheduling_policy: SchedulingPolicy
    scheduling_constraints: GroupConstraints | None = None
    disruption_mode: DisruptionMode | None = None
    priority: int = 0
    parent_composite_pod_group_name: str | None = None
    resource_claims: tuple[dict[str, Any], ...] = ()


class PodGroup(msgspec.Struct, frozen=True, rename="camel"):
    """A PodGroup as the API server stores it."""

    metadata: Metadata
    spec: PodGroupSpec

    @property
    def min_count(self) -> int:
        """Pods that start together; 0 for a group that is no gang."""
        gang = self.spec.scheduling_policy.gang
        return gang.min_count if gang is not None else 0

    @property
    def domain_key(self) -> str:
        """Label of the nodes whose value all pods share; empty for none."""
        constraints = self.spec.scheduling_constraints
        return next((one.key for one in constraints.topology), "") if constraints is not None else ""


def refusal(group: PodGroup, *, priority: int) -> str:
    """Return why pods of this priority cannot start as this group, and what to change; empty if they can."""
    named, spec = f"PodGroup {group.metadata.name!r}", group.spec
    if spec.parent_composite_pod_group_name:
        return (
            f"{named} is part of CompositePodGroup {spec.parent_composite_pod_group_name[:120]!r}, which Atoll does "
            "not read; use a GpuGang with several pod sets"
        )
    if spec.resource_claims:
        return f"{named} shares resourceClaims, whose devices Atoll does not weigh; remove them from the PodGroup"
    if group.min_count > MEMBERS_MAX:
        return f"{named} has minCount {group.min_count}, a gang has at most {MEMBERS_MAX} members"
    if priority != spec.priority:
        return (
            f"the pod has priority {priority} and {named} has {spec.priority}, and kube-scheduler schedules no pod of "
            "such a group; set the same priorityClassName on both"
        )
    return ""


def group_of(pod: Pod) -> str:
    """Return the PodGroup that the pod belongs to; empty for none."""
    return pod.spec.scheduling_group.get("podGroupName", "")


def outsider(members: Iterable[Pod], group: str) -> str:
    """Return why a member that is not of the PodGroup keeps the gang from starting; empty for none: kube-scheduler does
    not count it, and would leave members waiting that hold GPUs."""
    pod = min((one for one in members if group_of(one) != group), key=lambda one: one.metadata.name, default=None)
    if pod is None:
        return ""
    return (
        f"pod {pod.metadata.name} names the gang, and is not of PodGroup {group!r}; set spec.schedulingGroup on it, or "
        "remove the annotation"
    )


def strangers(gang: GpuGang, members: Iterable[GangMember]) -> tuple[GangMember, ...]:
    """Return the members that wait, hold nothing, and are not of the gang's PodGroup; none if it has no PodGroup. They
    count for nothing in a gang that runs."""
    found, group = tuple(members), gang.metadata.name
    is_of_group = gang.metadata.annotations.get(names.GANG_MADE_FOR, "").startswith(POD_GROUP) or any(
        group_of(member.pod) == group for member in found
    )
    waiting = (member for member in found if member.is_gated and not member.holds)
    return tuple(member for member in waiting if group_of(member.pod) != group) if is_of_group else ()


def gang_spec(group: PodGroup, counts: Mapping[str, int]) -> dict[str, Any]:
    """Return minMember, podSets and topology of the GpuGang for a group that has so many pods of each pod set.

    Groups have no upper bound, so the gang grows with its pods. If all may only be disrupted together, all are needed.
    """
    lacking = max(0, group.min_count - sum(counts.values()))
    first, *others = sorted(counts.items())
    pod_sets = [{"name": name, "count": count} for name, count in ((first[0], first[1] + lacking), *others)]
    mode = group.spec.disruption_mode
    is_one = mode is not None and mode.all is not None
    topology = {"topology": {"mode": "required", "level": group.domain_key}} if group.domain_key else {}
    return {
        "minMember": max(group.min_count, sum(counts.values())) if is_one else group.min_count,
        "podSets": pod_sets,
        **topology,
    }


def conflict(group: PodGroup, gang: GpuGang, levels: Sequence[str]) -> str:
    """Return why a GpuGang that a user wrote contradicts the group; empty if it does not. `levels`: of the gang's
    Topology, widest first."""
    named = f"PodGroup {group.metadata.name!r}"
    if group.min_count > gang.spec.quorum:
        return (
            f"the GpuGang starts {gang.spec.quorum} members, and kube-scheduler none before {named} has minCount "
            f"{group.min_count}; set minMember to {group.min_count} or more"
        )
    if group.min_count and group.domain_key and not _keeps_domain(gang, group.domain_key, levels):
        return (
            f"kube-scheduler keeps all pods of {named} in one domain of {group.domain_key}, and the GpuGang does not; "
            f"set spec.topology to mode required and level {group.domain_key}"
        )
    return ""


def _keeps_domain(gang: GpuGang, key: str, levels: Sequence[str]) -> bool:
    """Tell whether all members stay in one domain of a node label, or in a narrower one."""
    wanted = gang.spec.topology
    if wanted is None or wanted.mode is not TopologyMode.REQUIRED:
        return False
    narrower = levels[levels.index(key) :] if key in levels else ()
    return wanted.level in (key, HOSTNAME, *narrower)
