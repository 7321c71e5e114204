"""Known traps: short histories that depend on a single guard. Some of all histories are traps.

Each comes from a real cluster or a review: late Bindings, ambiguous answers, nodes that are deleted and return,
containers that outlive their pod object. The seed varies the times a little.
"""

import random
from dataclasses import replace

from tests.simulation.plan import (
    CALM_KINDS,
    LATER_GANGS_FROM,
    Plan,
    Step,
    gang_plan_of,
    gang_storm_of,
    plan_of,
    strict_plan_of,
)

Rates = tuple[tuple[str, float], ...]
BOTH = ("n1", "n2")
JITTER_SECONDS = 0.25


def crowd(at: float, *counts: int) -> tuple[Step, ...]:
    """Return pods p1, p2, ... that want everything that is free."""
    return tuple(Step(at, "create", f"p{index}", number=count) for index, count in enumerate(counts, start=1))


TRAPS: dict[str, tuple[tuple[Step, ...], Rates]] = {
    "a late Binding meets a reservation that was taken back": (
        (Step(2.0, "create", "p0", number=4), Step(2.1, "touch", "p0"), Step(2.6, "stop scheduler"),
         Step(17.0, "switch scheduler"), *crowd(17.5, 4, 4)),
        (("late Binding", 0.9),),
    ),
    "a pod moves on under every Binding": (
        (Step(2.0, "create", "p0", number=3), *(Step(2.05 + 0.1 * i, "touch", "p0") for i in range(6)),
         Step(4.0, "stop scheduler"), Step(18.0, "switch scheduler"), *crowd(18.5, 3, 3, 2)),
        (("late Binding", 0.5), ("lost Binding", 0.2), ("slow", 0.1)),
    ),
    "nobody knows whether the Binding landed, and the pod is gone": (
        (Step(2.0, "create", "p0", number=4), *(Step(2.8, "pause kubelet", node, number=12.0) for node in BOTH),
         Step(3.05, "force delete", "p0"), *crowd(6.0, 4, 4)),
        (("lost Binding", 0.8),),
    ),
    "the cache has not seen the pod whose Lease it knows": (
        (Step(1.0, "slow watch", "controllers-0", "pods", 15.0), Step(2.0, "create", "p0", number=2),
         Step(6.0, "create", "p3", number=1), Step(9.0, "finish", "p3"), *crowd(12.0, 4, 4)),
        (),
    ),
    "a successor of the same name lives": (
        (Step(2.0, "create", "p0", number=2), Step(6.0, "kill controllers", "controllers-0", number=4.0),
         Step(7.0, "replace", "p0", number=1), *crowd(12.0, 3, 3)),
        (),
    ),
    "kubelet is late": (
        (Step(2.0, "create", "p0", number=2), Step(2.4, "force delete", "p0"), Step(5.0, "create", "p0", number=4),
         Step(5.3, "force delete", "p0"), Step(8.0, "replace", "p0", number=3), Step(8.4, "force delete", "p0"),
         Step(11.0, "replace", "p0", number=3), Step(11.5, "force delete", "p0"), *crowd(12.0, 4, 4)),
        (),
    ),
    "a pod was bound and deleted while nobody looked": (
        (Step(2.0, "silence watch", "controllers-0", "pods"), Step(2.5, "create", "p0", number=2),
         Step(5.0, "force delete", "p0"), Step(5.1, "compact"), *crowd(6.0, 4, 4)),
        (),
    ),
    "the machine booted before the pod was deleted": (
        (Step(2.0, "create", "p0", number=2), *(Step(6.0, "silence agent", node, number=5.4) for node in BOTH),
         *(Step(6.1, "reboot", node, number=0.5) for node in BOTH),
         *(Step(10.0, "pause kubelet", node, number=15.0) for node in BOTH), Step(10.3, "force delete", "p0"),
         *crowd(12.0, 4, 4)),
        (),
    ),
    "another machine has the name": (
        (Step(2.0, "create", "p0", number=4), *crowd(2.0, 4), *(Step(6.0, "replace machine", node, number=0.5)
                                                                for node in BOTH), *crowd(12.0, 4, 4)),
        (),
    ),
    "somebody else set the phase": (
        (Step(2.0, "create", "p0", number=4), Step(5.5, "pause kubelet", "n1", number=9.0),
         Step(5.5, "pause kubelet", "n2", number=9.0), Step(6.0, "fail by hand", "p0"), *crowd(8.0, 4, 4)),
        (),
    ),
    "two leaders bind one pod": (
        (Step(2.0, "create", "p0", number=2), Step(2.1, "switch scheduler"), Step(4.0, "create", "p3", number=2),
         Step(4.1, "switch scheduler"), Step(6.0, "create", "p4", number=1), Step(6.1, "switch scheduler"),
         *crowd(7.0, 4, 4)),
        (("error 500", 0.15), ("error 504", 0.15), ("slow", 0.1), ("answer lost", 0.1)),
    ),
    "a request comes twice, much later": (
        (Step(2.0, "create", "p0", number=4), Step(4.0, "force delete", "p0"), *crowd(4.0, 4, 4),
         Step(8.0, "replace", "p1", number=2), Step(9.0, "replace", "p2", number=2), Step(10.0, "finish", "p1")),
        (("twice", 0.35),),
    ),
    "many binds at once": (
        tuple(Step(2.0, "create", f"p{index}", number=count) for index, count in enumerate((1, 2, 1, 2, 1, 1))),
        (("slow", 0.2), ("call twice", 0.3)),
    ),
    "a Lease is lost while its pod runs": (
        (Step(2.0, "create", "p0", number=4), *crowd(2.0, 2), Step(7.0, "lose Lease", "p0"), *crowd(7.01, 0, 2, 4),
         Step(9.0, "lose Lease", "p0"), Step(9.01, "create", "p4", number=1),
         *(Step(12.0, "pause kubelet", node, number=6.0) for node in BOTH), Step(12.6, "lose both", "p0")),
        (("slow", 0.1),),
    ),
}  # fmt: skip

LATER_TRAPS: dict[str, tuple[tuple[Step, ...], Rates]] = {
    "a pod is known, then bound and deleted while nobody looks": (
        (Step(1.5, "stop scheduler"), Step(2.0, "create", "p0", number=4),
         Step(2.6, "silence watch", "controllers-0", "pods"), Step(3.0, "switch scheduler"),
         *(Step(6.0, "pause kubelet", node, number=12.0) for node in BOTH), Step(6.4, "force delete", "p0"),
         Step(6.8, "compact"), *crowd(7.0, 4, 4)),
        (),
    ),
    "pods come and go before kubelet hears of them": (
        (*(Step(3.0 + 0.6 * number, kind, f"p{number % 3 + 3}", number=1)
           for number in range(12) for kind in ("create", "force delete soon")), *crowd(10.5, 4, 4)),
        (("slow", 0.05),),
    ),
    "a sandbox dies before kubelet hears of the deletion": (
        (Step(2.0, "create", "p0", number=4), Step(2.0, "create", "p3", number=4), *crowd(4.0, 4, 4),
         *(Step(13.2, kind, name) for kind in ("crash sandbox", "force delete soon") for name in ("p0", "p3")),
         *(Step(13.4 + 0.02 * number, "touch", "p1") for number in range(6))),
        (),
    ),
    "a bind that died is taken back while its Binding is on the way": (
        (Step(2.0, "create", "p0", number=4), Step(2.3, "kill extender", "extender-0", number=3.0),
         Step(2.4, "kill extender", "extender-1", number=3.0), *crowd(2.5, 4, 4),
         Step(9.0, "kill controllers", "controllers-0", number=1.0), Step(14.0, "touch", "p0")),
        (("late Binding", 0.8), ("slow", 0.1)),
    ),
    "a successor is bound while its predecessor is in doubt": (
        (Step(2.0, "create", "p0", number=4), *(Step(4.6, "pause kubelet", node, number=9.0) for node in BOTH),
         Step(5.0, "replace", "p0", number=4), Step(5.6, "replace", "p0", number=4), Step(7.0, "lose both", "p0"),
         Step(8.0, "kill controllers", "controllers-0", number=2.0), Step(8.1, "switch scheduler"), *crowd(9.0, 4, 2)),
        (("twice", 0.15), ("answer lost", 0.1)),
    ),
    "the machine is replaced while a release is under way": (
        (Step(2.0, "create", "p0", number=4), Step(2.0, "create", "p3", number=4), Step(6.0, "delete", "p0"),
         Step(6.3, "replace machine", "n1", number=1.0), Step(6.3, "replace machine", "n2", number=3.0),
         Step(6.5, "hold process", "controllers-0", number=3.0), Step(7.0, "force delete", "p3"), *crowd(8.0, 4, 4)),
        (("late", 0.1), ("twice", 0.1)),
    ),
}  # fmt: skip
"""Those that were added later have seeds of their own, so that a seed keeps its history."""

NEWEST_TRAPS: dict[str, tuple[tuple[Step, ...], Rates]] = {
    "a bind is frozen between its Leases and its Binding": (
        (Step(1.8, "create", "p0", number=4), Step(3.0, "hold process", "extender-0", number=15.0),
         Step(6.0, "switch scheduler"), *crowd(14.0, 4, 4)),
        (("slow", 0.7),),
    ),
    "the leader of the controllers wakes in its successor's term": (
        (Step(2.0, "create", "p0", number=4), Step(2.0, "create", "p3", number=4),
         *(Step(4.6, "pause kubelet", node, number=9.0) for node in BOTH), Step(5.0, "force delete", "p0"),
         Step(5.2, "hold process", "controllers-0", number=15.0), Step(5.6, "force delete", "p3"), *crowd(8.0, 4, 4),
         Step(20.3, "replace", "p1", number=2)),
        (("late", 0.1), ("twice", 0.1)),
    ),
    "Nodes go and come back while pods are bound to them": (
        (Step(2.0, "create", "p0", number=4), Step(2.0, "create", "p3", number=2),
         *(Step(2.05, "delete node", node, number=3.0) for node in BOTH), Step(2.3, "create", "p4", number=4),
         *(Step(6.0, "pause kubelet", node, number=7.0) for node in BOTH), *crowd(8.0, 4, 4)),
        (("late Binding", 0.3), ("slow", 0.2)),
    ),
    "a late Binding is on its way to the predecessor of a name": (
        (Step(2.0, "create", "p0", number=4), Step(2.35, "replace", "p0", number=4),
         Step(2.7, "replace", "p0", number=2), Step(3.1, "switch scheduler"), Step(3.4, "replace", "p0", number=4),
         *crowd(5.0, 4, 4)),
        (("late Binding", 0.8), ("call twice", 0.3)),
    ),
    "everybody forgets everything at once": (
        (Step(2.0, "create", "p0", number=4), Step(2.0, "create", "p3", number=3), Step(5.0, "lose Lease", "p0"),
         *(Step(5.1, "pause kubelet", node, number=8.0) for node in BOTH), Step(5.2, "force delete", "p3"),
         Step(5.3, "compact"), *(Step(5.4, "kill extender", f"extender-{one}", number=1.0) for one in range(2)),
         Step(5.4, "kill controllers", "controllers-0", number=1.0), *crowd(5.5, 4, 4)),
        (),
    ),
    "nobody reports while everything is deleted by force": (
        (Step(2.0, "create", "p0", number=4), Step(2.0, "create", "p3", number=4),
         *(Step(4.5, "silence agent", node, number=13.0) for node in BOTH),
         *(Step(5.0, "pause kubelet", node, number=10.0) for node in BOTH), Step(5.2, "force delete", "p0"),
         Step(5.3, "fail by hand", "p3"), *crowd(6.0, 4, 4), Step(16.0, "replace", "p1", number=1)),
        (("answer lost", 0.1),),
    ),
    "a card is changed under a pod that is in doubt": (
        (Step(2.0, "create", "p0", number=4), Step(2.0, "create", "p3", number=4),
         *(Step(5.0, "cut off node", node, number=4.0) for node in BOTH), Step(5.2, "force delete", "p0"),
         *(Step(6.0, "replace card", node, number=1.0) for node in BOTH), *crowd(7.0, 4, 4),
         *(Step(12.0, "reboot", node, number=1.0) for node in BOTH)),
        (("slow", 0.1),),
    ),
}  # fmt: skip
"""Beyond THOROUGH alone, with two controllers that contend for leadership."""
GANG_TRAPS: dict[str, tuple[Step, ...]] = {
    "a member is done and collected while the others run": (
        Step(2.0, "create gang", "g0", number=41), Step(10.0, "finish member", "g0"),
        Step(12.0, "collect member", "g0"), Step(14.0, "kill controllers", "controllers-0", number=2.0),
        Step(35.0, "finish member", "g0"), Step(36.0, "finish member", "g0"), Step(37.0, "finish member", "g0"),
        *(Step(38.0 + number, "collect member", "g0") for number in range(3)),
    ),
    "a gang that is not ready is made anew": (
        Step(2.0, "create unready gang", "g0"), Step(8.0, "make gang anew", "g0"), Step(9.0, "create", "p0", number=1),
    ),
    "a gang that is not ready loses its status": (
        Step(2.0, "create unready gang", "g0"), Step(8.0, "lose status of gang", "g0"),
    ),
    "one of the admission before still terminates": (
        Step(2.0, "create gang", "g0", number=22), Step(9.0, "pause kubelet", "n1", number=25.0),
        Step(9.1, "preempt member", "g0"), Step(22.0, "fail member", "g0"),
    ),
    "one of the admission before still terminates elsewhere": (
        Step(2.0, "create gang", "g0", number=22), Step(9.0, "pause kubelet", "n2", number=25.0),
        Step(9.1, "preempt member", "g0"), Step(22.0, "fail member", "g0"),
    ),
    "a gang that never fits gives way to one that does": (
        Step(2.0, "create gang", "g0", number=34), Step(30.0, "replace by smaller gang", "g0"),
    ),
    "an agent is dead, its clock was ahead, and everybody starts anew": (
        Step(2.0, "create gang", "g0", number=21), *(Step(3.0, "silence agent", node, number=400.0) for node in BOTH),
        *(Step(115.0, "kill extender", f"extender-{one}", number=1.0) for one in range(2)),
        Step(115.0, "kill controllers", "controllers-0", number=1.0), Step(130.0, "create", "p1", number=1),
        Step(131.0, "create", "p2", number=2), Step(140.0, "create gang", "g1", number=21),
    ),
}  # fmt: skip
"""Histories of gangs, whose machines' clocks are off by minutes."""
NEWEST_GANG_TRAPS: dict[str, tuple[tuple[Step, ...], Rates]] = {
    "a gang waits for room, and another never fits": (
        (Step(2.0, "create gang", "g0", number=24), Step(6.0, "create gang", "g1", number=24),
         Step(12.0, "hear verdict", "g1", "WaitForRoom"), Step(13.0, "create gang", "g2", number=34),
         Step(19.0, "hear verdict", "g2", "NeverFits")),
        (),
    ),
    "a gang waits for agents that are silent": (
        (*(Step(3.0, "silence agent", node, number=400.0) for node in BOTH),
         Step(110.0, "create gang", "g0", number=24), Step(118.0, "hear verdict", "g0", "WaitForNodes")),
        (),
    ),
    "an admission gets no answer": (
        (Step(2.0, "create gang", "g0", number=41), Step(3.0, "create gang", "g1", number=22),
         Step(8.0, "fail member", "g0"), Step(9.0, "fail member", "g1"), Step(16.0, "create", "p0", number=2)),
        (("late", 0.12), ("answer lost", 0.12), ("error 504", 0.05)),
    ),
    "a leader dies while its writes are late": (
        (Step(2.0, "create gang", "g0", number=41), Step(2.3, "kill controllers", "controllers-0", number=1.0),
         Step(3.0, "create gang", "g1", number=22), Step(20.0, "fail member", "g0"),
         Step(20.4, "kill controllers", "controllers-0", number=1.0), Step(21.0, "create", "p0", number=2)),
        (("late", 0.2), ("twice", 0.1)),
    ),
    "a waiting member is deleted while its gang is being admitted": (
        (Step(2.0, "create gang", "g0", number=31),
         *(Step(3.0 + 2.5 * number, "delete waiting member", "g0") for number in range(4))),
        (("slow", 0.5),),
    ),
    "Leases of a successor are made and deleted before anybody sees them": (
        (Step(2.0, "create gang", "g0", number=22), Step(2.0, "create gang", "g1", number=22),
         *(Step(8.0 + number, "slow watch", "controllers-0", "leases", 1.0) for number in range(3)),
         *(Step(10.0 + 2 * number, "fail member", f"g{number % 2}") for number in range(6))),
        (("error 503", 0.2), ("cut before", 0.12)),
    ),
    "a Lease of an admission is made when its pod runs elsewhere": (
        (Step(2.0, "create gang", "g0", number=41), Step(5.0, "create", "p0", number=1), Step(14.0, "finish", "p0")),
        (("late", 0.2),),
    ),
    "members fail while their Job is being suspended": (
        (Step(2.0, "create unready gang", "g0"),
         *(Step(11.0 + number, "fail member", "g0") for number in range(4))),
        (("late", 0.2),),
    ),
    "successors are put where somebody else was quicker": (
        (Step(2.0, "create gang", "g0", number=22), Step(2.0, "create gang", "g1", number=22),
         *(Step(10.0 + number, "fail member", f"g{number % 2}") for number in range(4)),
         *(Step(10.3 + number, "create", f"p{number}", number=1) for number in range(4))),
        (("cut before", 0.12), ("late", 0.12)),
    ),
}  # fmt: skip
LATER_GANG_TRAPS: dict[str, tuple[tuple[Step, ...], Rates]] = {
    "a gang is deleted for which GPUs are kept, while nobody leads": (
        (Step(1.0, "create", "p0", number=4), Step(2.0, "create gang", "g0", number=24),
         Step(9.0, "kill controllers", "controllers-0", number=4.0), Step(10.0, "delete gang", "g0"),
         Step(14.0, "create", "p1", number=4)),
        (),
    ),
}  # fmt: skip
"""Beyond LATER_GANGS_FROM; GPUs are kept for long in them."""
LONG_HOLD_SECONDS = 60.0
LATER_FROM = 1200
STRICT_FROM = 20_000
"""Seeds beyond it draw gangs under strict order."""
THOROUGH = 1500
"""Below this seed every third history is a trap and the others are long; beyond it there are many short ones."""


def history_of(seed: int) -> Plan:
    """Return the history of a seed: every third is a trap, beyond THOROUGH every twelfth; the others are drawn. Beyond
    THOROUGH another third is of gangs, half of it traps, and a sixth of gangs whose writes are late."""
    if seed >= STRICT_FROM:
        return strict_plan_of(seed)
    if seed >= THOROUGH and seed % 6 == 2:
        return newest_gang_trap_of(seed) if seed % 12 == 2 else gang_storm_of(seed)
    if seed >= THOROUGH and seed % 3 == 1:
        return gang_trap_of(seed) if seed % 2 else gang_plan_of(seed)
    if seed < THOROUGH:
        return trap_of(seed, seed // 3) if seed % 3 == 0 else plan_of(seed)
    return trap_of(seed, seed // 12) if seed % 12 == 0 else plan_of(seed, is_short=True)


def gang_trap_of(seed: int) -> Plan:
    """Return a trap of gangs, its times moved a little."""
    rng = random.Random(seed)
    steps = list(GANG_TRAPS.values())[seed // 6 % len(GANG_TRAPS)]
    moved = (replace(step, at_seconds=step.at_seconds + rng.uniform(0.0, JITTER_SECONDS)) for step in steps)
    ordered = tuple(sorted(moved, key=lambda step: step.at_seconds))
    is_calm = all(step.kind in CALM_KINDS for step in steps)
    return Plan(seed, ordered, (), skew_seconds=600.0, is_calm=is_calm)


def newest_gang_trap_of(seed: int) -> Plan:
    """Return a trap of gangs with faults of its own, its times moved a little."""
    rng = random.Random(seed)
    traps = NEWEST_GANG_TRAPS | LATER_GANG_TRAPS if seed >= LATER_GANGS_FROM else NEWEST_GANG_TRAPS
    name = list(traps)[seed // 12 % len(traps)]
    steps, rates = traps[name]
    moved = (replace(step, at_seconds=step.at_seconds + rng.uniform(0.0, JITTER_SECONDS)) for step in steps)
    ordered = tuple(sorted(moved, key=lambda step: step.at_seconds))
    hold_seconds = LONG_HOLD_SECONDS if name in LATER_GANG_TRAPS else 0.0
    is_calm = not rates and not hold_seconds
    return Plan(seed, ordered, rates, skew_seconds=600.0, is_calm=is_calm, hold_seconds=hold_seconds)


def trap_of(seed: int, number: int) -> Plan:
    """Return a trap, its times moved a little; `number` says which."""
    rng = random.Random(seed)
    traps = TRAPS if seed < LATER_FROM else LATER_TRAPS if seed < THOROUGH else TRAPS | LATER_TRAPS | NEWEST_TRAPS
    name = list(traps)[number % len(traps)]
    steps, rates = traps[name]
    kept = [step for step in steps if step.kind != "create" or step.number > 0]
    moved = (replace(step, at_seconds=step.at_seconds + rng.uniform(0.0, JITTER_SECONDS)) for step in kept)
    ordered = tuple(sorted(moved, key=lambda step: step.at_seconds))
    return Plan(seed, ordered, rates, controllers_count=2 if name in NEWEST_TRAPS else 1)
