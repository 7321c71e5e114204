"""The promises under every fault that can be injected, over many seeded histories; failures can be replayed."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation.faults import BINDING_FAULTS, CALL_FAULTS, REQUEST_FAULTS, WATCH_FAULTS
from tests.simulation.guards import GUARDS
from tests.simulation.plan import (
    KINDS,
    LATER_GANG_KINDS,
    LATER_GANGS_FROM,
    RESERVATION_KINDS,
    RESERVING_GANGS,
    Plan,
    Step,
    gang_plan_of,
    plan_of,
    shrink,
)
from tests.simulation.traps import STRICT_FROM

HISTORIES = int(os.environ.get("ATOLL_HISTORIES", "1400"))
"""ATOLL_HISTORIES says another number: 10,000 in `make test-long`, some minutes of two cores."""
SIZE = HISTORIES // 2
STARTS = (0, max(SIZE, 1200))
"""Seeds of the first history of each part; every guard's loss is seen among them."""
GUARD_HISTORIES_MAX = 300
"""Counted from the seed at which a guard's loss was seen; usually the first of them fails."""
FOUND_ONCE = {
    "an admission without an answer arrives late, after its Leases were taken back": 2152,
    "an admission arrives late, and one of its Leases": 2836,
    "a member is marked late, while the marks of others are taken off": 6136,
    "marks are taken off a gang, and one request gets no answer": 7208,
    "marks are taken off a gang, and one request cannot be sent": 9280,
    "Leases are deleted while gates open": 2822,
    "a member goes while its Lease is asked for, and a reservation fills": 20356,
    "a member that is gated goes after its GpuGang was made anew": 22159,
    "a gang recovers, and the next leader's clock is minutes behind": 28860,
}
"""Seeds beyond those of the other tests, each of which broke a promise once, or does without a guard."""
ALL_FAULTS = (*REQUEST_FAULTS, *CALL_FAULTS, *BINDING_FAULTS, *WATCH_FAULTS)
REPOSITORY = Path(__file__).parents[2]


def simulate(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the simulation in a process of its own, whose hashes are the same in every run."""
    command = [sys.executable, "-m", "tests.simulation", *options]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("start", STARTS)
def test_promises_are_kept_in_every_history(start: int) -> None:
    """No GPU for two, none leaked, all or nothing, the uid alone: whatever fails, in whatever order."""
    run = simulate("--histories", str(SIZE), "--seed", str(start), "--workers", "1")

    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert f"{SIZE} histories" in run.stdout
    for fault in ALL_FAULTS:
        assert fault in run.stdout


@pytest.mark.timeout(1800)
def test_nobody_passes_a_gang_that_waits_for_room() -> None:
    """Under strict order, with every other promise; without faults the order is judged write by write."""
    size = max(GUARD_HISTORIES_MAX, HISTORIES // 5)
    run = simulate("--histories", str(size), "--seed", str(STRICT_FROM), "--workers", "1")

    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("guard", GUARDS)
def test_simulation_bites(guard: str) -> None:
    """With this guard taken out of the production code a history fails: the simulation would notice its loss."""
    options = ("--histories", str(GUARD_HISTORIES_MAX), "--seed", str(GUARDS[guard].seed), "--workers", "1")
    run = simulate("--without", guard, "--no-shrink", *options)

    starts = (start <= GUARDS[guard].seed <= start + SIZE - GUARD_HISTORIES_MAX for start in STARTS)
    assert any(starts) or GUARDS[guard].seed in (STRICT_FROM, *FOUND_ONCE.values())
    assert run.returncode == 1, run.stdout[-2000:] + run.stderr[-2000:]
    assert ": promise " in run.stdout


@pytest.mark.parametrize("seed", FOUND_ONCE.values(), ids=FOUND_ONCE.keys())
def test_what_a_history_broke_once_stays_mended(seed: int) -> None:
    """Seeds beyond those of the other tests."""
    run = simulate("--histories", "1", "--seed", str(seed), "--workers", "1")

    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.parametrize("seed", ["77", "12298"], ids=["pods", "gangs that are evicted and pause"])
def test_seed_replays_exactly(seed: str) -> None:
    """The same seed tells the same story, write by write."""
    first, second = (simulate("--histories", "1", "--seed", seed, "--workers", "1", "--tell").stdout for _ in range(2))

    stories = [[line for line in text.splitlines() if " s  " in line] for text in (first, second)]
    assert len(stories[0]) > 10
    assert stories[0] == stories[1]


def test_every_kind_of_step_occurs() -> None:
    """A few hundred seeds draw every step and every fault."""
    plans = [plan_of(seed) for seed in range(300)]

    of_gangs = [gang_plan_of(LATER_GANGS_FROM + seed) for seed in range(100)]

    assert {step.kind for plan in plans for step in plan.steps} == {*KINDS, *RESERVATION_KINDS}
    assert any(plan.reserved_count and step.target in RESERVING_GANGS for plan in of_gangs for step in plan.steps)
    assert {step.kind for plan in of_gangs for step in plan.steps} >= set(LATER_GANG_KINDS)
    assert {plan.is_calm for plan in of_gangs} == {True, False}
    assert {kind for plan in plans for kind, _ in plan.rates} == set(ALL_FAULTS)


def test_failing_history_shrinks_to_what_is_needed() -> None:
    """Steps and faults that the failure does not need are left out; those that it needs stay, in order."""
    steps = tuple(Step(float(at), "touch", f"p{at}") for at in range(20))
    plan = Plan(1, steps, (("late", 0.1), ("twice", 0.1)))

    def fails(candidate: Plan) -> bool:
        targets = [step.target for step in candidate.steps]
        return {"p3", "p11", "p12"} <= set(targets) and ("late", 0.1) in candidate.rates

    assert shrink(plan, fails) == replace(plan, steps=(steps[3], steps[11], steps[12]), rates=(("late", 0.1),))
