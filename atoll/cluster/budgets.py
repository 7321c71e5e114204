"""PodDisruptionBudgets and gangs: which pods they protect, and how many evictions they allow now.

The API server has the last word: it refuses an eviction that breaks a budget with 429.

A gang counts as a budget: it allows as many evictions as it has members beyond its minimum. A caller that knows only a
gang's name assumes that it needs every member.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from atoll.api import names
from atoll.api.kept import ENTRIES_MAX, cutting_decoder
from atoll.cluster.bounded import LARGE_BYTES, first
from atoll.cluster.labels import selects
from atoll.cluster.objects import LabelSelector, Metadata, Pod


class BudgetSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Whom a budget protects; without a selector nobody."""

    selector: LabelSelector | None = None


class BudgetStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What the disruption controller has worked out. `observed_generation` of an older spec allows nothing."""

    disruptions_allowed: int = 0
    observed_generation: int = 0


class DisruptionBudget(msgspec.Struct, frozen=True, gc=False):
    """A policy/v1 PodDisruptionBudget."""

    metadata: Metadata
    spec: BudgetSpec = BudgetSpec()
    status: BudgetStatus = BudgetStatus()

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def allowed(self) -> int:
        """How many of its pods may be evicted now."""
        is_current = self.status.observed_generation >= self.metadata.generation
        return max(0, self.status.disruptions_allowed) if is_current else 0

    def protects(self, pod: Pod) -> bool:
        """Tell whether the budget covers the pod."""
        selector = self.spec.selector
        is_near = pod.metadata.namespace == self.metadata.namespace
        return is_near and selector is not None and selects(selector, pod.metadata.labels)


@dataclass(frozen=True, slots=True)
class GangBudgets:
    """What gangs promise to their members: by uid the keys, and how many evictions each key allows."""

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    allowed: Mapping[str, int] = field(default_factory=dict)

    def of(self, pod: Pod) -> tuple[str, ...]:
        """Return the keys that protect a pod; none for one in no gang."""
        gang = pod.metadata.annotations.get(names.GANG)
        if not gang:
            return ()
        return self.keys.get(pod.metadata.uid, (gang_promise(pod.metadata.namespace, gang),))


def gang_promise(namespace: str, gang: str) -> str:
    """Return the key of a gang as a whole; no budget has it, because names have no spaces."""
    return f"gang {namespace}/{gang}"


@dataclass(frozen=True, slots=True)
class DisruptionBudgets:
    """Every budget of the cluster at one moment, and what is known of gangs."""

    all: tuple[DisruptionBudget, ...] = ()
    gangs: GangBudgets = field(default_factory=GangBudgets)

    def of(self, pod: Pod) -> tuple[str, ...]:
        """Return the keys of the budgets that protect the pod, sorted."""
        return tuple(sorted(budget.key for budget in self.all if budget.protects(pod)))

    def promises_of(self, pod: Pod) -> tuple[str, ...]:
        """Return the keys of all that protects the pod where it goes alone: its budgets and its gang."""
        return (*self.of(pod), *self.gangs.of(pod))

    def allowed(self) -> dict[str, int]:
        """Return how many evictions each budget and gang allows now, by key."""
        return {**self.gangs.allowed, **{budget.key: budget.allowed for budget in self.all}}


def violations(victims: Iterable[tuple[str, ...]], allowed: Mapping[str, int]) -> int:
    """Count the victims whose eviction breaks a budget. Each victim is given by the keys of its budgets, in order."""
    left = dict(allowed)
    broken = 0
    for keys in victims:
        broken += any(left.get(key, 0) <= 0 for key in keys)
        for key in keys:
            left[key] = left.get(key, 0) - 1
    return broken


_decode_whole_budget = cutting_decoder(DisruptionBudget)


def decode_budget(raw: bytes) -> DisruptionBudget:
    """Read a budget; of a large one only so much that no number of them fills the memory."""
    budget = _decode_whole_budget(raw)
    if len(raw) <= LARGE_BYTES:
        return budget
    return DisruptionBudget(budget.metadata, first(budget.spec, entries_max=ENTRIES_MAX), budget.status)
