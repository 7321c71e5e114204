"""The churn benchmark: every rule gets the same arrivals and gives free sets, and Atoll is ahead if links matter."""

from __future__ import annotations

import numpy as np
import pytest

from bench import placement
from bench.churn import Load, run
from bench.rules import NAMES, rules_for
from topology.demand import PRIOR, Demand
from topology.model import positions_of
from topology.profiles import profile


@pytest.mark.parametrize("shape", ["dgx1-v100", "dgx-h100", "gb200-tray"])
def test_every_rule_gives_free_sets_of_the_right_size(shape: str) -> None:
    """For random states of nodes and every size, a place is inside what is free; no rule refuses what fits."""
    machine = profile(shape).machine
    random = np.random.default_rng(11)
    rules = rules_for(machine, PRIOR)
    assert tuple(rules) == NAMES
    for rule in rules.values():
        for count in range(1, machine.count + 1):
            free = random.integers(0, machine.full + 1, 7)
            place = rule(free, count, np.ones(7, dtype=np.int64))
            if place is None:
                assert max(int(mask).bit_count() for mask in free) < count
                continue
            assert place[1] & ~int(free[place[0]]) == 0
            assert len(positions_of(place[1])) == count


def test_runs_repeat_and_links_are_worth_it() -> None:
    """The same seed gives the same result; on the Volta mesh Atoll's sets are better than those of every other rule."""
    machine, load = profile("dgx1-v100").machine, Load(arrivals=2500, seed=5)
    first = run(machine, nodes=16, load=load, rules=rules_for(machine, PRIOR), moments=10)
    again = run(machine, nodes=16, load=load, rules=rules_for(machine, PRIOR), moments=10)

    assert first == again
    quality = {result.rule: result.mean_quality for result in first}
    assert max(quality, key=lambda rule: quality[rule]) == "atoll"
    assert all(0 < result.in_use < 1 and len(result.moments) == 10 for result in first)


def test_mix_is_read_from_the_command_line() -> None:
    """Sizes with weights become shares."""
    assert placement._mix("8:1,1:3") == Demand(shares=((1, 0.75), (8, 0.25)))


def test_churn_rows_tell_whether_the_targets_are_met() -> None:
    """Atoll's row compares with best fit on the same arrivals; the other rows are plain."""
    rows = placement.churn("gb200-tray", [Load(arrivals=600, seed=3)], nodes=8, names=["best-fit", "atoll"])

    assert [row["rule"] for row in rows] == ["best-fit", "atoll"]
    assert "within_targets" not in rows[0]
    more = rows[1]["rejected_largest"] - rows[0]["rejected_largest"]
    assert rows[1]["more_rejected_than_best_fit"] == pytest.approx(more)
