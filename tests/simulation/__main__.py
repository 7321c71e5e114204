"""Run histories: `python -m tests.simulation --histories 1000 --seed 0`; see `make simulate`."""

import argparse
import gc
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.simulation.history import run_history
from tests.simulation.plan import Plan, shrink
from tests.simulation.shells import prepare_process
from tests.simulation.traps import history_of

CHUNK = 25


@dataclass
class RunTotals:
    """Sums over histories."""

    histories: int = 0
    binds: int = 0
    releases: int = 0
    checks: int = 0
    virtual_seconds: float = 0.0
    steps: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: "RunTotals") -> None:
        """Add another tally to this one."""
        self.histories += other.histories
        self.binds += other.binds
        self.releases += other.releases
        self.checks += other.checks
        self.virtual_seconds += other.virtual_seconds
        self.steps += other.steps
        self.faults += other.faults
        self.failures += other.failures


def run_seeds(first: int, count: int, guard: str = "") -> RunTotals:
    """Run histories one after another in this process; with `guard` removed, until the first failure."""
    from tests.simulation.guards import without

    prepare_process()
    sys.unraisablehook = lambda _: None
    warnings.simplefilter("ignore")
    gc.disable()
    tally = RunTotals()
    with without(guard):
        for seed in range(first, first + count):
            plan = history_of(seed)
            outcome, weather = run_history(plan)
            tally.histories += 1
            tally.binds += outcome.binds_count
            tally.releases += outcome.releases_count
            tally.checks += outcome.checks_count
            tally.virtual_seconds += outcome.virtual_seconds
            tally.steps += Counter(step.kind for step in plan.steps)
            tally.faults += weather.counts
            if outcome.broken is not None:
                tally.failures.append((seed, str(outcome.broken)))
                if guard:
                    break
    return tally


def fails(plan: Plan) -> bool:
    """Tell whether a plan breaks a promise."""
    return run_history(plan)[0].broken is not None


def _chunks(first: int, count: int) -> Iterator[tuple[int, int]]:
    for start in range(first, first + count, CHUNK):
        yield start, min(CHUNK, first + count - start)


def _run_chunk(chunk: tuple[int, int, str]) -> RunTotals:
    return run_seeds(*chunk)


def _run_all(first: int, count: int, workers: int, guard: str) -> RunTotals:
    """Run chunk by chunk, each in a process that ends with it: that is cheaper than to collect the garbage."""
    total = RunTotals()
    chunks = ((start, size, guard) for start, size in _chunks(first, count))
    with get_context("fork").Pool(workers, maxtasksperchild=1) as pool:
        for tally in pool.imap(_run_chunk, chunks):
            total.add(tally)
            for seed, text in tally.failures:
                print(f"seed {seed}: {text}", flush=True)
            if guard and total.failures:
                break
    return total


def _print(tally: RunTotals, seconds: float) -> None:
    print(
        f"{tally.histories} histories in {seconds:.1f} s: {tally.binds} binds, {tally.releases} Leases ended, "
        f"{tally.checks} checks, {tally.virtual_seconds / 3600:.1f} simulated hours, {len(tally.failures)} failures"
    )
    for title, counts in (("steps", tally.steps), ("faults", tally.faults)):
        print(f"{title}: " + ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))


def main() -> int:
    """Return 0 when every history kept every promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--without", default="", metavar="GUARD", help="remove one guard, and expect a failure")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--tell", action="store_true", help="print every write of the one history")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    if options.tell:
        prepare_process()
        run_history(history_of(options.seed), is_told=True)
    began = time.monotonic()
    tally = _run_all(options.seed, options.histories, options.workers, options.without)
    _print(tally, time.monotonic() - began)
    if tally.failures and not options.no_shrink:
        _print_smallest(min(tally.failures)[0], options.without)
    return 1 if tally.failures else 0


def _print_smallest(seed: int, guard: str) -> None:
    from tests.simulation.guards import without

    prepare_process()
    sys.unraisablehook = lambda _: None
    warnings.simplefilter("ignore")
    with without(guard):
        plan = history_of(seed)
        if not fails(plan):
            print(f"seed {seed} does not fail alone")
            return
        smallest = shrink(plan, fails)
        print(f"smallest history that still fails, of {len(plan.steps)} steps:\n  {smallest}")
        print(run_history(smallest, is_told=True)[0].broken)
    print(f"replay: make simulate SEED={seed} HISTORIES=1")


if __name__ == "__main__":
    sys.exit(main())
