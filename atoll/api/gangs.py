"""GpuGang: pods that start together and near each other, or wait without holding anything.

Namespaced. `spec` belongs to users, `status` to the controllers. Rules over several fields are here as CEL, for the API
server, and in `check`, for objects that were stored before the rules.
"""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from atoll.api.base import Conditions, LabelText, Model, ObjectMeta, ShortText, list_map, rules
from atoll.api.topologies import LEVELS_MAX, NodeLabel

MEMBERS_MAX = 100_000
POD_SETS_MAX = 16
SLICE_LAYERS_MAX = 3
DOMAINS_MAX = 200
"""Limit of domains listed per pod set; more are summarised at a wider level."""
OWNERS_MAX = 64
SUCCEEDED_MAX = 256
"""Most pairs of pod set and owner whose succeeded members a status counts."""
PRESENT_MAX = 1000
"""Most succeeded members whose uids a status lists because their objects still exist."""
DURATION = "^([0-9]{1,5}h)?([0-9]{1,6}m)?([0-9]{1,8}s)?$"

Duration = Annotated[str, Field(min_length=2, max_length=24, pattern=DURATION)]
"""A whole number of hours, minutes and seconds such as 5m, 1h30m or 90s."""
MemberCount = Annotated[int, Field(ge=1, le=MEMBERS_MAX)]
PodSetName = Annotated[str, Field(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class TopologyMode(StrEnum):
    """How near the members must be.

    required: one domain of the level, or wait. preferred: one domain of the level, else of wider levels, else anywhere.
    unconstrained: anywhere, packed into few domains. auto: one domain of the lowest level that fits, else wider.
    """

    REQUIRED = "required"
    PREFERRED = "preferred"
    UNCONSTRAINED = "unconstrained"
    AUTO = "auto"


class RequeueTimestamp(StrEnum):
    """An evicted gang waits behind gangs that came meanwhile (Eviction), or keeps its age (Creation)."""

    EVICTION = "Eviction"
    CREATION = "Creation"


LEVEL_RULES = (
    (
        "(self.mode == 'required' || self.mode == 'preferred') == has(self.level)",
        "level names the level for the modes required and preferred, and for these alone",
    ),
    (
        (
            "!has(self.slices) || self.slices.size() < 2 || [1, 2].all(i, i >= self.slices.size() || "
            "self.slices[i - 1].size % self.slices[i].size == 0)"
        ),
        "each slice size must be a multiple of the next smaller one, outermost slices first",
    ),
    (
        "has(self.subGroupCount) == has(self.subGroupIndexLabel)",
        "subGroupIndexLabel and subGroupCount belong together; set both or neither",
    ),
    (
        "!self.balanced || self.mode == 'preferred'",
        "balanced spreads members over the domains below a preferred level; set mode: preferred, or remove balanced",
    ),
)


class SliceRequest(Model):
    """Members form slices of `size` consecutive ranks; each slice is in one domain of `level`."""

    size: Annotated[MemberCount, Field(description="members of one slice")]
    level: Annotated[NodeLabel, Field(description="a nodeLabel of the topology")]


class GangTopologyRequest(Model):
    """Placement of the members of a pod set, or of all members together."""

    model_config = ConfigDict(json_schema_extra=rules(*LEVEL_RULES))

    mode: TopologyMode = TopologyMode.UNCONSTRAINED
    level: Annotated[NodeLabel | None, Field(description="a nodeLabel of the topology")] = None
    slices: Annotated[
        tuple[SliceRequest, ...], Field(max_length=SLICE_LAYERS_MAX, description="outermost first; inner ones nest")
    ] = ()
    balanced: Annotated[
        bool,
        Field(description="spread evenly over few domains below the preferred level, not one after the other"),
    ] = False
    pod_index_label: Annotated[
        NodeLabel | None, Field(description="label of the pods with their rank; known kinds need none")
    ] = None
    sub_group_index_label: Annotated[
        NodeLabel | None, Field(description="label of the pods with the index of their sub-group")
    ] = None
    sub_group_count: Annotated[MemberCount | None, Field(description="number of sub-groups of the members")] = None

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse contradictions; the same rules are in LEVEL_RULES as CEL."""
        if (self.mode in {TopologyMode.REQUIRED, TopologyMode.PREFERRED}) != (self.level is not None):
            raise ValueError(LEVEL_RULES[0][1])
        pairs = zip(self.slices, self.slices[1:], strict=False)
        if any(outer.size % inner.size for outer, inner in pairs):
            raise ValueError(LEVEL_RULES[1][1])
        if (self.sub_group_count is None) != (self.sub_group_index_label is None):
            raise ValueError(LEVEL_RULES[2][1])
        if self.balanced and self.mode is not TopologyMode.PREFERRED:
            raise ValueError(LEVEL_RULES[3][1])
        return self


POD_SET_RULES = (("!has(self.minCount) || self.minCount <= self.count", "minCount is at most count"),)


class GangPodSet(Model):
    """Members of one kind: leaders, workers."""

    model_config = ConfigDict(json_schema_extra=rules(*POD_SET_RULES))

    name: Annotated[PodSetName, Field(description="name in the annotation gpu.scheduling/pod-set")]
    count: Annotated[MemberCount, Field(description="members of this kind")]
    min_count: Annotated[MemberCount | None, Field(description="least useful number of members; count by default")] = (
        None
    )
    topology: GangTopologyRequest | None = None
    group: Annotated[
        PodSetName | None, Field(description="a leader and its workers with the same group are placed together")
    ] = None

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse a minimum beyond the count."""
        if self.min_count is not None and self.min_count > self.count:
            raise ValueError(POD_SET_RULES[0][1])
        return self


class RequeuingStrategy(Model):
    """When an evicted gang is tried again, and how often."""

    timestamp: RequeueTimestamp | None = None
    backoff_base_seconds: (
        Annotated[int, Field(description="pause after the first eviction", ge=1, le=86_400)] | None
    ) = None
    backoff_max_seconds: Annotated[int, Field(description="longest pause", ge=1, le=604_800)] | None = None
    backoff_limit_count: Annotated[
        int | None, Field(ge=0, le=1000, description="evictions after which the next one deactivates the gang")
    ] = None


DURATION_RULES = (
    (
        (
            "(!has(self.timeout) || duration(self.timeout) >= duration('1s')) && "
            "(!has(self.recoveryTimeout) || duration(self.recoveryTimeout) >= duration('1s'))"
        ),
        "a timeout is at least 1s",
    ),
)


class WaitForPodsReady(Model):
    """The gang's own choice within the administrator's bounds; absent values are the administrator's."""

    model_config = ConfigDict(json_schema_extra=rules(*DURATION_RULES))

    enable: Annotated[bool | None, Field(description="evict the gang when its members are not ready in time")] = None
    timeout: Annotated[Duration | None, Field(description="from admission until the members are ready")] = None
    recovery_timeout: Annotated[
        Duration | None, Field(description="how long a gang that was ready may lack members")
    ] = None
    recovery_limit_count: Annotated[
        int | None,
        Field(
            ge=0, le=1000, description="losses of ready members allowed in one admission; the next loss evicts the gang"
        ),
    ] = None
    requeuing_strategy: RequeuingStrategy | None = None

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse timeouts of zero."""
        for text in (self.timeout, self.recovery_timeout):
            if text is not None and duration_seconds(text) < 1:
                raise ValueError(DURATION_RULES[0][1])
        return self


GANG_RULES = (
    (
        "!has(self.minMember) || self.minMember <= self.podSets.map(p, p.count).sum()",
        "minMember is at most the sum of the counts",
    ),
    (
        "self.podSets.map(p, p.count).sum() <= 100000",
        "a gang has at most 100000 members",
    ),
    (
        "!has(self.topology) || (!has(self.topology.podIndexLabel) && !has(self.topology.subGroupIndexLabel))",
        "podIndexLabel and sub-groups belong to the topology of a pod set; set them there",
    ),
    (
        (
            "!has(self.topology) || !has(self.topology.slices) || self.topology.slices.size() == 0 || "
            "(self.podSets.size() == 1 && !has(self.podSets[0].topology))"
        ),
        "slices cut the members of one pod set; with several, or beside a topology of the pod set, set them there",
    ),
    (
        (
            "!has(self.topology) || !self.topology.balanced || "
            "(self.podSets.size() == 1 && !has(self.podSets[0].topology))"
        ),
        "balanced spreads the members of one pod set; with several, or beside its own topology, set it there",
    ),
    (
        (
            "self.podSets.all(p, !has(p.group) || "
            "(self.podSets.filter(q, has(q.group) && q.group == p.group).size() == 2 && "
            "self.podSets.exists(q, has(q.group) && q.group == p.group && q.count == 1)))"
        ),
        "a group is a leader and its workers: exactly two pod sets with this group, one of them with count 1",
    ),
    (
        (
            "self.podSets.all(p, !has(p.group) || !has(p.topology) || self.podSets.all(q, !has(q.group) || "
            "q.group != p.group || q.count < p.count || (has(q.topology) && q.topology == p.topology)))"
        ),
        "a leader is placed by the topology of its workers; set the same for both, or remove the leader's",
    ),
)


class GpuGangSpec(Model):
    """Members of the gang, and their placement."""

    model_config = ConfigDict(json_schema_extra=rules(*GANG_RULES))

    active: Annotated[
        bool, Field(description="false releases everything; true again resets the count of evictions")
    ] = True
    min_member: Annotated[MemberCount | None, Field(description="members needed to start; all of them by default")] = (
        None
    )
    topology_name: Annotated[
        LabelText | None, Field(description="a Topology; optional if only one has the levels that the gang names")
    ] = None
    topology: Annotated[GangTopologyRequest | None, Field(description="for all members together")] = None
    pod_sets: Annotated[
        tuple[GangPodSet, ...],
        Field(
            description="the kinds of members",
            min_length=1,
            max_length=POD_SETS_MAX,
            json_schema_extra=list_map("name"),
        ),
    ]
    wait_for_pods_ready: WaitForPodsReady | None = None

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse contradictions; the same rules are in GANG_RULES as CEL."""
        pod_set_names = [pod_set.name for pod_set in self.pod_sets]
        if len(set(pod_set_names)) < len(pod_set_names):
            msg = "podSets names one pod set twice; each may stand once"
            raise ValueError(msg)
        if self.min_member is not None and self.min_member > self.size:
            raise ValueError(GANG_RULES[0][1])
        if self.size > MEMBERS_MAX:
            raise ValueError(GANG_RULES[1][1])
        if self.topology is not None:
            if self.topology.pod_index_label is not None or self.topology.sub_group_index_label is not None:
                raise ValueError(GANG_RULES[2][1])
            if self.topology.slices and (len(self.pod_sets) > 1 or self.pod_sets[0].topology is not None):
                raise ValueError(GANG_RULES[3][1])
            if self.topology.balanced and (len(self.pod_sets) > 1 or self.pod_sets[0].topology is not None):
                raise ValueError(GANG_RULES[4][1])
        self._check_groups()
        return self

    def _check_groups(self) -> None:
        for group in {pod_set.group for pod_set in self.pod_sets if pod_set.group is not None}:
            mates = sorted((one for one in self.pod_sets if one.group == group), key=lambda one: one.count)
            if len(mates) != 2 or mates[0].count != 1:
                raise ValueError(GANG_RULES[5][1])
            leader, workers = mates
            is_alike = leader.topology == workers.topology
            if not is_alike and (leader.topology is not None or leader.count == workers.count):
                raise ValueError(GANG_RULES[6][1])

    def topology_of(self, pod_set: GangPodSet) -> GangTopologyRequest | None:
        """Return the topology of a pod set: its own, or that of the workers for the leader of a group."""
        if pod_set.topology is not None or pod_set.group is None:
            return pod_set.topology
        mates = (one.topology for one in self.pod_sets if one.group == pod_set.group)
        found = next((topology for topology in mates if topology is not None), None)
        return found.model_copy(update={"slices": ()}) if found is not None else None

    @property
    def size(self) -> int:
        """Members that the gang may have."""
        return sum(pod_set.count for pod_set in self.pod_sets)

    @property
    def quorum(self) -> int:
        """Members needed to start: minMember, and never fewer than the pod sets' minCounts."""
        least = sum(pod_set.min_count if pod_set.min_count is not None else 0 for pod_set in self.pod_sets)
        return max(self.min_member if self.min_member is not None else self.size, least)


class DomainShare(Model):
    """Number of members in one domain. `values` go from the widest of the listed levels down."""

    values: Annotated[
        tuple[LabelText, ...], Field(description="the domain, by its labels' values", max_length=LEVELS_MAX)
    ]
    count: Annotated[int, Field(description="members there", ge=0)]


class PodSetAssignment(Model):
    """Places of one pod set's members."""

    name: Annotated[PodSetName, Field(description="the pod set")]
    count: Annotated[int, Field(description="members with a place", ge=0)]
    levels: Annotated[
        tuple[NodeLabel, ...],
        Field(max_length=LEVELS_MAX, description="labels of `values`; only the hostname if it is the lowest level"),
    ] = ()
    domain_count: Annotated[int, Field(ge=0, description="domains of the lowest level, listed or not")] = 0
    domains: Annotated[
        tuple[DomainShare, ...],
        Field(max_length=DOMAINS_MAX, description="if there are too many, those of a wider level"),
    ] = ()


class GangAssignment(Model):
    """The placement of the members at their start."""

    topology: Annotated[LabelText, Field(description="the Topology of the placement")] = ""
    time: Annotated[str, Field(max_length=64, description="time at which the members' gates opened")] = ""
    pod_sets: Annotated[
        tuple[PodSetAssignment, ...],
        Field(description="places of the members", max_length=POD_SETS_MAX, json_schema_extra=list_map("name")),
    ] = ()


class RequeueState(Model):
    """Effect of past evictions on the next admission."""

    count: Annotated[int, Field(ge=0, description="evictions because pods were not ready in time")] = 0
    requeue_at: Annotated[str, Field(description="not tried again before then", max_length=64)] | None = None


class SuspendedOwner(Model):
    """A Job or another owner of members that Atoll suspended and will resume."""

    api_version: Annotated[str, Field(description="of the owner", max_length=128)]
    kind: Annotated[str, Field(description="of the owner", max_length=63)]
    name: Annotated[str, Field(description="of the owner", max_length=253)]
    uid: Annotated[str, Field(description="of the owner", max_length=64)]


class SucceededMembers(Model):
    """Succeeded members of one pod set and one owner. They still count after their objects are deleted."""

    pod_set: Annotated[PodSetName, Field(description="the pod set")]
    owner: Annotated[str, Field(description="uid of their controller; empty for bare pods", max_length=64)]
    count: Annotated[int, Field(description="members that have succeeded", ge=0)]
    present: Annotated[
        tuple[Annotated[str, Field(max_length=64)], ...],
        Field(max_length=PRESENT_MAX, description="uids of those whose objects still existed"),
    ] = ()


class GpuGangStatus(Model):
    """Status of the gang."""

    phase: Annotated[str, Field(description="one word for people", max_length=32)] = ""
    members: Annotated[int, Field(description="members that exist", ge=0)] = 0
    ready: Annotated[int, Field(ge=0, description="members that are ready or have succeeded")] = 0
    needed: Annotated[int, Field(description="members needed to start", ge=0)] = 0
    admissions: Annotated[int, Field(ge=0, description="how often the gang was admitted")] = 0
    admission: Annotated[
        str,
        Field(
            description="id of the admission, or of the one that an eviction ended; members carry it as an annotation",
            max_length=64,
        ),
    ] = ""
    was_ready: Annotated[bool, Field(description="ready at least once in this admission")] = False
    succeeded: Annotated[
        tuple[SucceededMembers, ...],
        Field(
            description="members that have succeeded, including those whose pods are deleted",
            max_length=SUCCEEDED_MAX,
            json_schema_extra=list_map("podSet", "owner"),
        ),
    ] = ()
    losses: Annotated[int, Field(ge=0, description="losses of ready members in this admission")] = 0
    assignment: GangAssignment | None = None
    requeue_state: RequeueState | None = None
    suspended_owners: Annotated[
        tuple[SuspendedOwner, ...],
        Field(
            description="owners that Atoll suspended and will resume",
            max_length=OWNERS_MAX,
            json_schema_extra=list_map("uid"),
        ),
    ] = ()
    observed_generation: (
        Annotated[int, Field(description="generation of the spec that this describes", ge=0)] | None
    ) = None
    conditions: Conditions = ()


class GpuGang(Model):
    """A GpuGang as the API server stores it."""

    api_version: ShortText = "gpu.scheduling/v1"
    kind: ShortText = "GpuGang"
    metadata: ObjectMeta
    spec: GpuGangSpec
    status: GpuGangStatus | None = None


def duration_seconds(text: str) -> int:
    """Return the seconds of a duration such as 1h30m; the text has passed `Duration`."""
    total, number = 0, ""
    for character in text:
        if character.isdigit():
            number += character
        else:
            total += int(number) * {"h": 3600, "m": 60, "s": 1}[character]
            number = ""
    return total
