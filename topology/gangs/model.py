"""Input and results of gang search, as frozen values.

Given hosts with their free resources and a gang of pod sets, the search gives a Placement for every member, or a
PlacementRefusal with counted reasons.

Levels are names, highest first, such as ("block", "rack", "clique"). A host's path has one name per level; equal names
under different parents are different domains. The host itself is always below the lowest level, and may be asked for by
the name HOST, or by that of the lowest level where the paths end in the host's own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from topology.device_requests import DeviceRequest
from topology.gangs.errors import GangError
from topology.model import Machine

LEVELS_MAX: Final = 8
MEMBERS_MAX: Final = 1 << 16
POD_SETS_MAX: Final = 64
HOST: Final = "host"
"""The level below every named one: single hosts."""

NOTHING: Final[Mapping[str, int]] = MappingProxyType({})
NO_REASONS: Final[Mapping[str, str]] = MappingProxyType({})
NO_MASKS: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """One host and what is still free on it.

    path: domain names per level, highest first. free: counted resources in whole units, such as cpu in thousandths,
    memory in bytes, pods; a missing resource counts as zero. machine, free_mask: the GPUs; None without GPUs.
    kind: names the cards, see PodSet.admitted. spare: used only if nothing else serves as well.
    """

    name: str
    path: tuple[str, ...]
    free: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    machine: Machine | None = None
    free_mask: int = 0
    kind: str = ""
    spare: bool = False


class Mode(StrEnum):
    """How strictly a level applies."""

    REQUIRED = "required"
    """One domain of the level or nothing."""
    PREFERRED = "preferred"
    """One domain of the level; else one of the next higher level, and so on; else as few domains as possible."""
    UNCONSTRAINED = "unconstrained"
    """Anywhere: few hosts, the most used first."""
    AUTO = "auto"
    """One domain of the lowest level that holds everything."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Members come in groups of `size` consecutive ranks, each inside one domain of `level`."""

    level: str
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise GangError("a slice needs a size of one or more", value=self.size)


@dataclass(frozen=True, slots=True)
class TopologyRequest:
    """Placement of members relative to each other. level: needed by REQUIRED and PREFERRED, ignored otherwise.

    slices: outermost first, each at a lower level and of a size that divides the one before. balanced: with PREFERRED,
    spread evenly over the domains instead of filling them one after the other.
    """

    mode: Mode = Mode.UNCONSTRAINED
    level: str = ""
    slices: tuple[Slice, ...] = ()
    balanced: bool = False


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `count` members of a pod set in one domain of `level` (anti-affinity to itself, a host port, a spread).
    present: others that count as well, per host."""

    level: str
    count: int
    present: Mapping[str, int] = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True, slots=True, eq=False)
class PodSet:
    """Members that are alike.

    needs: counted resources of one member, in the units of Host.free; callers add {"pods": 1}. ask: its GPUs.
    admitted: per Host.kind, masks of positions that the ask may use, in order of preference, one mask per model; a kind
    not listed admits every position. excluded: hosts that kube-scheduler would refuse, with a short constant
    reason. preferences: per host, higher is better (preferred affinity, PreferNoSchedule as a negative one).
    apart: names of pod sets whose members may not share a host with these. group: pod sets of one group are placed as
    one: the smallest is the leader, and the largest one's request holds for all.
    min_count: the number that is enough; None means all.
    """

    name: str
    count: int
    needs: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    ask: DeviceRequest | None = None
    request: TopologyRequest = TopologyRequest()
    min_count: int | None = None
    admitted: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: NO_MASKS)
    excluded: Mapping[str, str] = field(default_factory=lambda: NO_REASONS)
    preferences: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    limits: tuple[Limit, ...] = ()
    apart: frozenset[str] = frozenset()
    group: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.count <= MEMBERS_MAX:
            raise GangError(f"a pod set has 0 to {MEMBERS_MAX} members", value=self.count)
        if self.min_count is not None and not 0 <= self.min_count <= self.count:
            raise GangError("the least count lies between 0 and the count", value=self.min_count)


@dataclass(frozen=True, slots=True, eq=False)
class Gang:
    """Pod sets that start together. whole: a request for all of them together, beside their own."""

    pod_sets: tuple[PodSet, ...]
    whole: TopologyRequest = TopologyRequest()

    def __post_init__(self) -> None:
        names = [pod_set.name for pod_set in self.pod_sets]
        if not 1 <= len(names) <= POD_SETS_MAX or len(set(names)) != len(names):
            raise GangError(f"needs 1 to {POD_SETS_MAX} pod sets with names of their own", value=names)


@dataclass(frozen=True, slots=True)
class PlacedMember:
    """One member's place. positions: its GPUs on that host; empty without an ask."""

    rank: int
    host: str
    positions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DomainCount:
    """Number of members in one domain. path: names from the highest level down; the last is the host's name if the
    domain is a host."""

    path: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class PodSetPlacement:
    """Places of one pod set's members, by rank. level: the lowest level at which one domain holds all; empty if no
    domain of the highest does. domains: per host, in the order of ranks."""

    pod_set: str
    level: str
    domains: tuple[DomainCount, ...]
    members: tuple[PlacedMember, ...]

    @property
    def count(self) -> int:
        """Number of members with a place."""
        return len(self.members)


@dataclass(frozen=True, slots=True)
class Placement:
    """Places for all, in the order of the gang's pod sets. levels: names, highest first. steps: cost of the search;
    bounded: a limit was hit, so a better placement may exist."""

    levels: tuple[str, ...]
    assignments: tuple[PodSetPlacement, ...]
    steps: int
    bounded: bool


class Order(StrEnum):
    """Order of valid placements."""

    NEAREST = "nearest"
    """Atoll's own: fewest domains, then least damage to what remains. Never more domains of the requested level than
    KUEUE."""
    KUEUE = "kueue"
    """As Kueue's topology-aware scheduling would choose."""


class Cause(StrEnum):
    """Kind of refusal."""

    NO_LEVEL = "no such level"
    """The topology lacks a level that the request names."""
    BAD_SLICES = "impossible slices"
    NO_DOMAIN = "no domain"
    """No host has a place in the topology."""
    NO_FIT = "does not fit"
    """Not now; on an empty cluster: never."""


@dataclass(frozen=True, slots=True)
class PlacementRefusal:
    """Why there is no placement. fits, of: in units, for the best domain of the level; excluded: hosts by reason;
    bounded: every unit has places by itself, but not every arrangement was tried."""

    cause: Cause
    pod_set: str
    level: str = ""
    fits: int = 0
    of: int = 0
    unit: str = "pod"
    hosts: int = 0
    excluded: tuple[tuple[str, int], ...] = ()
    problem: str = ""
    bounded: bool = False

    @property
    def text(self) -> str:
        """One line for people, such as: pod set workers: topology rack fits 3 of 8 pods; excluded: cordoned: 2."""
        subject = f"pod set {self.pod_set}: " if self.pod_set else ""
        if self.cause is not Cause.NO_FIT:
            return f"{subject}{self.problem}"
        where = f"topology {self.level}" if self.level else "the topology"
        line = f"{subject}{where} fits {self.fits} of {self.of} {self.unit}s"
        if self.excluded:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self.excluded)
            line += f"; {self.hosts} hosts; excluded: {reasons}"
        return line + ("; not every arrangement was tried" if self.bounded else "")
