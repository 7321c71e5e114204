"""How an attempt to free GPUs continues: whom to evict now, when to look again, or why it has ended. Pure.

The attempt remembers which evictions were refused.
"""

from dataclasses import dataclass, field

from atoll.cluster.budgets import DisruptionBudgets
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod
from atoll.cluster.occupants import occupancy, pods_by_node
from atoll.cluster.soft_reservations import SoftReservation

UNUSED_SECONDS = 30.0
"""GPUs that are free for the pod and that it does not take by then, it cannot use: cpu, volumes, a quota."""
BUDGET_PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 1.0


@dataclass(slots=True)
class EvictionAttempt:
    """One attempt, as this process has seen it. A new leader begins its clock anew."""

    started_seconds: float
    free_since_seconds: float | None = None
    evicted: set[str] = field(default_factory=set)
    first_refusal_seconds: dict[str, float] = field(default_factory=dict)
    again_seconds: dict[str, float] = field(default_factory=dict)

    def refuse(self, uid: str, now_seconds: float, retry_after_seconds: float) -> None:
        """Note that a victim could not be evicted now."""
        self.first_refusal_seconds.setdefault(uid, now_seconds)
        self.again_seconds[uid] = now_seconds + retry_after_seconds


@dataclass(frozen=True, slots=True)
class EvictionStatus:
    """What of the kept GPUs is not free yet: `victims` hold some and run on, `rest` is held otherwise (ending pods,
    GPUs in doubt), `is_taken` by a pod that may not be evicted. `is_blind`: the node is not heard."""

    victims: tuple[Pod, ...] = ()
    is_free: bool = False
    is_taken: bool = False
    is_blind: bool = False

    @classmethod
    def of(cls, ledger: Ledger, pod: Pod, kept: SoftReservation, now_seconds: float) -> "EvictionStatus":
        """Look at the node of the kept GPUs."""
        holders = pods_by_node(ledger).get(kept.node, ())
        occupied = occupancy(ledger, kept.node, holders, pod, budgets=DisruptionBudgets(), now_seconds=now_seconds)
        if occupied is None:
            return cls(is_blind=True)
        wanted = occupied.devices.mask_of(kept.device_ids)
        missing = wanted & ~occupied.free
        victims = tuple(ledger.pods[each.uid] for each in occupied.evictable if each.mask & missing)
        others = {each.metadata.uid for each in holders} - {each.metadata.uid for each in victims}
        is_taken = any(
            occupied.devices.mask_of(held.device_ids) & missing
            for uid in others
            if (held := ledger.allocation_of(uid)) is not None and ledger.pods[uid].metadata.deletion_timestamp is None
        )
        return cls(victims, is_free=not missing and bool(wanted), is_taken=is_taken)


@dataclass(frozen=True, slots=True)
class EvictionStep:
    """Evict these now, and look again then."""

    evict: tuple[Pod, ...] = ()
    again_seconds: float = LOOK_SECONDS


def next_step(
    attempt: EvictionAttempt, outlook: EvictionStatus, now_seconds: float, *, timeout_seconds: float
) -> EvictionStep | str:
    """Return what to do, or why the attempt has ended."""
    if outlook.is_free:
        attempt.free_since_seconds = attempt.free_since_seconds or now_seconds
        rest = attempt.free_since_seconds + UNUSED_SECONDS - now_seconds
        return (
            EvictionStep((), rest) if rest > 0 else f"the GPUs were free for {UNUSED_SECONDS:.0f} s and were not taken"
        )
    attempt.free_since_seconds = None
    if outlook.is_taken:
        return "some of the GPUs are held by a pod that may not be evicted for it"
    if now_seconds - attempt.started_seconds > timeout_seconds:
        return f"the GPUs were not free within {timeout_seconds:.0f} s"
    if outlook.is_blind:
        return EvictionStep()
    waiting = [victim for victim in outlook.victims if victim.metadata.uid not in attempt.evicted]
    for victim in waiting:
        refused = attempt.first_refusal_seconds.get(victim.metadata.uid)
        if refused is not None and now_seconds - refused > BUDGET_PATIENCE_SECONDS:
            return f"a disruption budget keeps {victim.metadata.namespace}/{victim.metadata.name}"
    due = (victim for victim in waiting if attempt.again_seconds.get(victim.metadata.uid, 0.0) <= now_seconds)
    return EvictionStep(tuple(due))
