"""A history as data: steps at times, and faults. A seed determines it; a failing history shrinks by omitting parts."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.simulation.faults import BINDING_FAULTS, CALL_FAULTS, REQUEST_FAULTS, WATCH_FAULTS

SECONDS = 20.0
STEPS = (4, 13)
SHORT_SECONDS = 9.0
SHORT_STEPS = (2, 6)
"""As dense as the long ones. Most failures need few steps, and more short histories fit into the same time."""
PODS = 6
RESERVING = ("p0", "p1", "p2")
RESERVED_ONE_IN = 4
"""Of the histories this share has a reservation."""
GANGS = 2
NODES = ("n1", "n2")
EXTENDERS = ("extender-0", "extender-1")
CONTROLLERS = ("controllers-0", "controllers-1")
WATCHED = ("pods", "leases", "reports", "nodes", "heartbeats")

KINDS: dict[str, float] = {
    "create": 10.0,
    "delete": 4.0,
    "force delete": 3.0,
    "replace": 2.0,
    "finish": 3.0,
    "fail by hand": 1.0,
    "touch": 2.0,
    "kill extender": 1.2,
    "switch scheduler": 2.0,
    "kill controllers": 1.2,
    "hold process": 1.5,
    "cut watch": 1.0,
    "silence watch": 0.7,
    "slow watch": 2.5,
    "compact": 0.5,
    "pause kubelet": 1.5,
    "cut off node": 1.2,
    "reboot": 1.2,
    "delete node": 0.8,
    "replace machine": 0.5,
    "replace card": 0.5,
    "sick card": 0.6,
    "silence agent": 0.8,
    "lose Lease": 0.7,
}
"""What may happen, and how often beside each other."""


GANG_KINDS: dict[str, float] = {
    "create gang": 4.0,
    "create unready gang": 1.0,
    "finish member": 5.0,
    "fail member": 2.0,
    "collect member": 5.0,
    "preempt member": 1.5,
    "make gang anew": 2.0,
    "lose status of gang": 1.0,
    "replace by smaller gang": 1.0,
}
"""What may happen to gangs, in histories of their own."""
LATER_GANG_KINDS: dict[str, float] = {**GANG_KINDS, "finish member": 8.0, "run Job again": 3.0, "delete gang": 0.7}
LATER_GANGS_FROM = 2000
"""Seeds beyond it draw from LATER_GANG_KINDS and LATER_STORM_KINDS, so that the others keep their histories."""
STRICT_GANGS = 4
HOLD_SECONDS = 3.0
"""So short that all come to rest in between."""
STORM_KINDS: dict[str, float] = {
    "create gang": 4.0,
    "delete waiting member": 4.0,
    "finish member": 2.0,
    "fail member": 4.0,
    "make gang anew": 1.0,
    "lose status of gang": 1.0,
    "replace by smaller gang": 2.0,
    "create": 1.0,
    "kill controllers": 3.0,
    "hold process": 2.0,
    "slow watch": 3.0,
    "cut watch": 1.0,
    "reboot": 0.5,
}
"""What may happen to gangs while writes and watches are late."""
LATER_STORM_KINDS: dict[str, float] = {**STORM_KINDS, "delete gang": 1.0}
CALM_KINDS = frozenset({*LATER_GANG_KINDS, "create", "finish", "delete", "hear verdict"})
"""What disturbs nobody's view."""
RESERVATION_KINDS: dict[str, float] = {"make reservation anew": 2.0, "end reservation": 1.0, "delete reservation": 1.0}
"""What may happen to a reservation, where there is one."""
RESERVATION_STEPS_MAX = 3
RESERVING_GANGS = ("g0",)
SAMPLED_SEEDS = (1, 3)
"""Last digits of the seeds in whose histories kube-scheduler looks at one of the two nodes at a time."""


GANG_STEPS = frozenset({*LATER_GANG_KINDS, "delete waiting member", "hear verdict"})


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happens at a time. `target` names a pod, node, process or collection; `number` is its size."""

    at_seconds: float
    kind: str
    target: str = ""
    other: str = ""
    number: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_seconds:7.3f} s  {self.kind} {self.target} {self.other} {self.number:g}".rstrip()


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole history."""

    seed: int
    steps: tuple[Step, ...]
    rates: tuple[tuple[str, float], ...]
    controllers_count: int = 1
    reserved_count: int = 0
    """GPUs of a GpuReservation, which the pods of RESERVING and the gangs of RESERVING_GANGS use and no others."""
    skew_seconds: float = 2.0
    """How far off the clocks of machines are at most."""
    is_calm: bool = False
    """Whether nothing is killed, cut or slow, so that what should happen at once does."""
    hold_seconds: float = 0.0
    """For how long GPUs are kept for the gang that is first in order."""
    is_strict: bool = False
    """Whether a gang that waits for room keeps those behind it waiting."""

    @property
    def has_gangs(self) -> bool:
        """Tell whether any step is about gangs."""
        return any(step.kind in GANG_STEPS for step in self.steps)

    @property
    def is_sampled(self) -> bool:
        """Tell whether kube-scheduler offers a sample of the nodes, so that pods are sent beyond it."""
        return self.seed % 10 in SAMPLED_SEEDS

    @property
    def settings(self) -> dict[str, object]:
        """Return the controllers' settings."""
        if not self.has_gangs:
            return {}
        soon = {"gang_hold_after_seconds": 1.0} if self.hold_seconds else {}
        order = {"gang_order": "strict"} if self.is_strict else {}
        return {"gang_hold_seconds": self.hold_seconds, "preemption": False, **soon, **order}

    def __str__(self) -> str:
        weather = ", ".join(f"{kind} {rate:.2f}" for kind, rate in self.rates) or "calm"
        processes = f"{self.controllers_count} controllers, {self.reserved_count} GPUs reserved"
        processes += ", nodes sampled" if self.is_sampled else ""
        lines = [f"seed {self.seed}, {processes}, weather: {weather}", *map(str, self.steps)]
        return "\n  ".join(lines)


RARE = {*CALL_FAULTS, *BINDING_FAULTS}
"""Faults that few requests can meet, and that strike the more often."""


def plan_of(seed: int, *, is_short: bool = False) -> Plan:
    """Draw a history. Every seed stresses some kinds of steps and faults and leaves others out."""
    rng = random.Random(seed)
    kinds = {kind: weight * rng.choice((0.0, 1.0, 1.0, 3.0)) for kind, weight in KINDS.items()}
    kinds["create"] = KINDS["create"]
    count = rng.randint(*(SHORT_STEPS if is_short else STEPS))
    length = SHORT_SECONDS if is_short else SECONDS
    times = sorted(rng.uniform(0.3, length) if rng.random() < 0.7 else rng.uniform(0.3, 6.0) for _ in range(count))
    drawn = rng.choices(tuple(kinds), weights=tuple(kinds.values()), k=count)
    drawn_steps = [_step(rng, at, kind) for at, kind in zip(times, drawn, strict=True)]
    created = [step for step in drawn_steps if step.kind in {"create", "replace"}]
    ambushes = [_ambush(rng, step) for step in created if rng.random() < 0.4]
    steps = tuple(sorted((*drawn_steps, *ambushes), key=lambda step: step.at_seconds))
    faults = (*REQUEST_FAULTS, *CALL_FAULTS, *BINDING_FAULTS, *WATCH_FAULTS)
    chosen = [kind for kind in faults if rng.random() < 0.35] if rng.random() < 0.8 else []
    rates = tuple((kind, rng.choice((0.02, 0.05, 0.12)) * (3.0 if kind in RARE else 1.0)) for kind in chosen)
    controllers_count = 2 if rng.random() < 0.2 else 1
    reserved_count = rng.choice((1, 2, 4, 6)) if seed % RESERVED_ONE_IN == RESERVED_ONE_IN - 1 else 0
    return _with_changes(rng, Plan(seed, steps, rates, controllers_count, reserved_count), length)


def gang_plan_of(seed: int) -> Plan:
    """Draw a history of gangs: half of them in calm weather, and all with machines whose clocks are off by minutes."""
    rng = random.Random(seed)
    is_calm = rng.random() < 0.5
    of_gangs = LATER_GANG_KINDS if seed >= LATER_GANGS_FROM else GANG_KINDS
    kinds = {kind: weight * rng.choice((0.0, 1.0, 1.0, 3.0)) for kind, weight in of_gangs.items()}
    others = ("create", "finish") if is_calm else ("create", "finish", "kill controllers", "silence agent", "reboot")
    kinds |= {kind: KINDS[kind] * (0.2 if kind == "create" else 1.0) for kind in others}
    count = rng.randint(6, 16)
    drawn = rng.choices(tuple(kinds), weights=tuple(kinds.values()), k=count)
    begun = [_step(rng, 0.5 + 0.5 * number, "create gang") for number in range(rng.randint(1, 2))]
    later = [
        _step(rng, at, kind) for at, kind in zip(sorted(rng.uniform(3.0, 40.0) for _ in drawn), drawn, strict=True)
    ]
    faults = (*REQUEST_FAULTS, *CALL_FAULTS, *BINDING_FAULTS)
    chosen = [] if is_calm else [kind for kind in faults if rng.random() < 0.3]
    rates = tuple((kind, rng.choice((0.02, 0.05))) for kind in chosen)
    reserved_count = rng.choice((2, 4, 6)) if not is_calm and rng.random() < 0.5 else 0
    plan = Plan(seed, (*begun, *later), rates, reserved_count=reserved_count, skew_seconds=600.0, is_calm=is_calm)
    keeps_gpus = seed >= LATER_GANGS_FROM and not is_calm and seed % 4 == 0
    return replace(_with_changes(rng, plan, 40.0), hold_seconds=HOLD_SECONDS if keeps_gpus else 0.0)


def _with_changes(rng: random.Random, plan: Plan, length: float) -> Plan:
    """Return the plan with changes of its reservation, if it has one."""
    if not plan.reserved_count:
        return plan
    kinds, weights = tuple(RESERVATION_KINDS), tuple(RESERVATION_KINDS.values())
    drawn = rng.choices(kinds, weights=weights, k=rng.randint(0, RESERVATION_STEPS_MAX))
    changes = (Step(rng.uniform(0.3, length), kind) for kind in drawn)
    return replace(plan, steps=tuple(sorted((*plan.steps, *changes), key=lambda step: step.at_seconds)))


def gang_storm_of(seed: int) -> Plan:
    """Draw a history of gangs whose controllers are slow, killed, succeeded by others, and often without an answer."""
    rng = random.Random(seed)
    of_storms = LATER_STORM_KINDS if seed >= LATER_GANGS_FROM else STORM_KINDS
    kinds = {kind: weight * rng.choice((0.0, 1.0, 1.0, 3.0)) for kind, weight in of_storms.items()}
    kinds["create gang"] = STORM_KINDS["create gang"]
    drawn = rng.choices(tuple(kinds), weights=tuple(kinds.values()), k=rng.randint(6, 16))
    begun = [_step(rng, 0.5 + 0.5 * number, "create gang") for number in range(rng.randint(1, 2))]
    times = sorted(rng.uniform(0.6, 5.0) if rng.random() < 0.3 else rng.uniform(0.6, 40.0) for _ in drawn)
    later = [_step(rng, at, kind) for at, kind in zip(times, drawn, strict=True)]
    chosen = [kind for kind in (*REQUEST_FAULTS, *CALL_FAULTS, *BINDING_FAULTS) if rng.random() < 0.3]
    rates = tuple((kind, rng.choice((0.05, 0.12))) for kind in chosen)
    steps = tuple(sorted((*begun, *later), key=lambda step: step.at_seconds))
    count, hold_seconds = rng.choice((1, 2)), HOLD_SECONDS if seed >= LATER_GANGS_FROM and seed % 24 == 8 else 0.0
    return Plan(seed, steps, rates, controllers_count=count, skew_seconds=600.0, hold_seconds=hold_seconds)


def strict_plan_of(seed: int) -> Plan:
    """Draw a history of four gangs under strict order, which together ask for more than there is."""
    rng = random.Random(seed)
    plan = gang_storm_of(seed) if seed % 4 == 3 else gang_plan_of(seed)
    sizes = rng.choices((21, 22, 23, 31, 41), k=STRICT_GANGS)
    begun = [Step(0.5 + 0.5 * n, "create gang", f"g{n}", number=size) for n, size in enumerate(sizes)]
    later = [
        replace(step, target=f"g{rng.randrange(STRICT_GANGS)}") if step.kind in GANG_STEPS else step
        for step in plan.steps
    ]
    return replace(plan, steps=tuple(sorted((*begun, *later), key=lambda step: step.at_seconds)), is_strict=True)


def _ambush(rng: random.Random, step: Step) -> Step:
    """Return what happens to a pod just while it is being bound, or to those who bind it."""
    at = step.at_seconds + rng.choice((rng.uniform(0.02, 0.3), rng.uniform(0.3, 5.0)))
    kind = rng.choice(
        ("force delete", "force delete", "replace", "delete", "touch", "switch scheduler", "kill extender")
    )
    return replace(_step(rng, at, kind), target=rng.choice(EXTENDERS) if kind == "kill extender" else step.target)


def _step(rng: random.Random, at: float, kind: str) -> Step:
    pod = f"p{rng.randrange(PODS)}"
    node = rng.choice(NODES)
    process = rng.choice((*EXTENDERS, *CONTROLLERS[:1]))
    collection = rng.choice(WATCHED)
    seconds = rng.choice((0.5, 2.0, 6.0, 15.0))
    targets = {
        "create": Step(at, kind, pod, number=rng.choice((1, 1, 2, 2, 3, 4))),
        "replace": Step(at, kind, pod, number=rng.choice((1, 2, 4))),
        "kill extender": Step(at, kind, rng.choice(EXTENDERS), number=seconds),
        "kill controllers": Step(at, kind, CONTROLLERS[0], number=seconds),
        "switch scheduler": Step(at, kind),
        "hold process": Step(at, kind, process, number=seconds),
        "cut watch": Step(at, kind, process, collection),
        "silence watch": Step(at, kind, process, collection),
        "slow watch": Step(at, kind, process, collection, number=seconds),
        "compact": Step(at, kind),
    }
    if kind in GANG_STEPS:
        return Step(at, kind, f"g{rng.randrange(GANGS)}", number=rng.choice((21, 22, 31, 41, 23, 34)))
    on_nodes = {
        "pause kubelet", "cut off node", "reboot", "delete node", "replace machine", "replace card", "sick card",
        "silence agent",
    }  # fmt: skip
    default = Step(at, kind, node, number=seconds) if kind in on_nodes else Step(at, kind, pod)
    return targets.get(kind, default)


def shrink(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Leave out whatever is not needed for the failure: halves first, then single steps, then kinds of faults."""
    size = max(1, len(plan.steps) // 2)
    while size:
        smaller = next((p for p in _without_chunk(plan, size) if fails(p)), None)
        if smaller is None:
            size //= 2
        else:
            plan, size = smaller, min(size, max(1, len(smaller.steps) // 2))
    for kind, _ in plan.rates:
        candidate = replace(plan, rates=tuple(row for row in plan.rates if row[0] != kind))
        plan = candidate if fails(candidate) else plan
    return plan


def _without_chunk(plan: Plan, size: int) -> Iterator[Plan]:
    for start in range(0, len(plan.steps), size):
        yield replace(plan, steps=plan.steps[:start] + plan.steps[start + size :])
