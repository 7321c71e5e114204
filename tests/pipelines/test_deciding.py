"""What happens next in a run: against a brute-force oracle, and told as stories."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.pipelines.deciding import (
    EndRun,
    RunSnapshot,
    StartTry,
    StopTry,
    TryOutcome,
    after_try,
    new_run,
    settled,
)
from atoll.pipelines.graph import PipelineGraph, step_of
from atoll.pipelines.model import PipelineStep
from atoll.pipelines.rerunning import rerun
from atoll.pipelines.words import FailureRule, RunState, SkipCause, StepState, StepType
from tests.pipelines.made import graph, step

ROUNDS_MAX = 2000
LEAVES = ("function", "job", "wait")


@dataclass
class PlayedRun:
    """What happened in a run that was played to its end."""

    run: RunSnapshot
    end: EndRun
    tries: Counter[str]
    most_running: Counter[str]
    begun_after_halt: list[str]

    def states(self) -> dict[str, str]:
        """Return the state of each step."""
        return {key: one.state.value for key, one in self.run.steps.items()}


def play(
    made: PipelineGraph,
    fails: Mapping[str, int],
    *,
    order: Any = None,
    cancel_after: int = -1,
    begun: RunSnapshot | None = None,
) -> PlayedRun:
    """Play a run. fails: how many tries of a step fail, by its name; order: draws which running try ends next;
    cancel_after: ends of tries after which the run is cancelled; begun: the run if it is not a new one."""
    run, running, tries = begun or new_run(made, "r1", {}), [], Counter[str]()
    most, late = Counter[str](), list[str]()
    for ended in range(ROUNDS_MAX):
        if ended == cancel_after:
            run = replace(run, cancel_requested=True)
        is_halted = run.cancel_requested or _is_fail_fast(run)
        run, decisions = settled(run)
        for one in decisions:
            if isinstance(one, StartTry):
                running.append(one.key)
                tries[one.key] += 1
                late += [one.key] if is_halted else []
                name = step_of(made, one.key)[0].name
                most[name] = max(most[name], sum(step_of(made, key)[0].name == name for key in running))
            if isinstance(one, EndRun):
                assert not running
                return PlayedRun(run, one, tries, most, late)
        assert running, "nothing runs, and the run has not ended"
        key = running.pop(order(len(running)) if order else 0)
        is_stopped = run.of(key).is_stopping
        fail = is_stopped or tries[key] <= fails.get(step_of(made, key)[0].name, 0)
        run = after_try(run, key, TryOutcome(error="boom") if fail else TryOutcome({"result": key}))
    raise AssertionError("the run does not end")


def _is_fail_fast(run: RunSnapshot) -> bool:
    made = run.graph
    failed = [
        name
        for name, one in made.steps.items()
        if not made.is_contained(name) and run.of(name).state is StepState.FAILED and one.on_failure is FailureRule.FAIL
    ]
    return made.pipeline.fail_fast and bool(failed)


# The oracle: the final state of each step, from the final states of what it waits for


class StepOracle:
    """How each step ends when nothing is cancelled or stopped. `broken` is skipped because of a failure."""

    def __init__(self, made: PipelineGraph, fails: Mapping[str, int]) -> None:
        self.made, self.fails = made, fails

    def final(self, name: str) -> str:
        """Return how a step ends."""
        begun = self.begins(name)
        return self.outcome(self.made.steps[name]) if begun == "yes" else begun

    def is_broken(self, name: str) -> bool:
        """Return whether what depends on a step cannot run."""
        found = self.final(name)
        return found == "broken" or (found == "failed" and self.made.steps[name].on_failure is FailureRule.FAIL)

    def begins(self, name: str) -> str:
        """Return yes, or why a step is skipped."""
        for owner in self.made.owners.get(name, ()):
            found = self.begins(owner.name) if owner.step_type is StepType.PARALLEL else self.chooses(owner, name)
            if found != "yes":
                return found
        waits = self.made.steps[name].depends_on
        if any(self.is_broken(one) for one in waits):
            return "broken"
        return "skipped" if waits and all(self.final(one) == "skipped" for one in waits) else "yes"

    def chooses(self, owner: PipelineStep, name: str) -> str:
        """Return whether a condition chooses a step."""
        if self.final(owner.name) != "succeeded":
            return "broken" if self.is_broken(owner.name) else "skipped"
        settings = self.made.settings[owner.name]
        return (
            "yes" if name in (settings.if_true if settings.expression == "true" else settings.if_false) else "skipped"
        )

    def outcome(self, one: PipelineStep) -> str:
        """Return how a step that begins ends."""
        settings = self.made.settings[one.name]
        match one.step_type:
            case StepType.CONDITION:
                has_failed = False
            case StepType.PARALLEL:
                has_failed = any(self.is_broken(name) for name in settings.branches)
            case StepType.LOOP:
                body = self.made.steps[settings.body_step]
                has_failed = bool(settings.items) and self.fails[body.name] > body.retry.max_retries
            case _:
                has_failed = self.fails[one.name] > one.retry.max_retries
        return "failed" if has_failed else "succeeded"


@st.composite
def pipelines(draw: Any, *, fail_fast: bool = False) -> tuple[PipelineGraph, dict[str, int]]:
    """Draw a pipeline in which every step waits only for earlier ones, and how many tries of each step fail."""
    steps: list[dict[str, Any]] = []
    outer: list[str] = []  # may be depended on
    for number in range(draw(st.integers(1, 7))):
        name = f"s{number}"
        waits = draw(st.lists(st.sampled_from(outer), unique=True, max_size=3)) if outer else []
        kind = draw(st.sampled_from([*LEAVES, "condition", "parallel", "loop"]))
        fields = {
            "retry": {"max_retries": draw(st.integers(0, 2))},
            "on_failure": draw(st.sampled_from(["fail", "fail", "continue"])),
        }
        config = {"wait": {"duration": "1s"}}.get(kind)
        if kind in ("condition", "parallel"):
            roots = [f"{name}{letter}" for letter in "ab"[: draw(st.integers(1, 2))]]
            steps += [step(root, on_failure=draw(st.sampled_from(["fail", "continue"]))) for root in roots]
            inner = roots
            outer += roots
            told = draw(st.sampled_from(["true", "false"]))
            sides = {"if_true": inner[:1], "if_false": inner[1:]}
            config = (
                {"expression": told, **sides} if kind == "condition" else {"branches": inner, "fail_fast": fail_fast}
            )
        if kind == "loop":
            steps.append(step(f"{name}body", retry={"max_retries": draw(st.integers(0, 1))}))
            count = draw(st.integers(0, 4))
            config = {"items": list(range(count)), "body_step": f"{name}body", "max_parallel": draw(st.integers(1, 3))}
        steps.append(step(name, *waits, kind=kind, config=config, **fields))
        outer.append(name)
    made = graph(*draw(st.permutations(steps)), fail_fast=fail_fast)
    return made, {name: draw(st.integers(0, 3)) for name in made.steps}


@given(pipelines(), st.data())
def test_any_order_of_ends_gives_what_the_oracle_says(drawn: Any, data: Any) -> None:
    """Each step ends as it must, whatever ends first; no step is tried more often than it may be."""
    made, fails = drawn
    oracle = StepOracle(made, fails)
    wanted = {name: oracle.final(name) for name in made.steps if made.owner(name, StepType.LOOP) is None}

    life = play(made, fails, order=lambda count: data.draw(st.integers(0, count - 1)))

    states = {name: found for name, found in life.states().items() if name in wanted}
    assert states == {name: "skipped" if found == "broken" else found for name, found in wanted.items()}
    has_failed = any(
        found == "failed" and made.steps[name].on_failure is FailureRule.FAIL and not made.is_contained(name)
        for name, found in wanted.items()
    )
    assert life.end.state is (RunState.FAILED if has_failed else RunState.SUCCEEDED)
    for key, count in life.tries.items():
        assert count <= step_of(made, key)[0].retry.max_retries + 1
    for loop in (one for one in made.pipeline.steps if one.step_type is StepType.LOOP):
        settings = made.settings[loop.name]
        assert life.most_running[settings.body_step] <= settings.max_parallel


@given(pipelines(fail_fast=True), st.data(), st.integers(-1, 6))
def test_after_a_failure_or_a_cancel_nothing_begins(drawn: Any, data: Any, cancel_after: int) -> None:
    """Whatever the order, the run ends, and no try begins once it must stop."""
    made, fails = drawn

    life = play(made, fails, order=lambda count: data.draw(st.integers(0, count - 1)), cancel_after=cancel_after)

    assert life.begun_after_halt == []
    assert all(one.has_ended for one in life.run.steps.values())
    assert not life.run.cancel_requested or life.end.state is RunState.CANCELLED


@given(pipelines(), st.data(), st.integers(-1, 6))
def test_a_rerun_ends_and_repeats_nothing_that_it_kept(drawn: Any, data: Any, cancel_after: int) -> None:
    """Whatever failed, was cancelled, or was lost since; now every try succeeds, and so does the run."""
    made, fails = drawn
    first = play(made, fails, order=lambda count: data.draw(st.integers(0, count - 1)), cancel_after=cancel_after)
    done = sorted(key for key, one in first.run.steps.items() if one.state is StepState.SUCCEEDED)
    lost = data.draw(st.sets(st.sampled_from(done))) if done else set()

    again = rerun(first.run, "r2", lost=lost)
    kept = {key for key, one in again.steps.items() if one.state is StepState.SUCCEEDED}
    second = play(made, {}, begun=again)

    assert second.end.state is RunState.SUCCEEDED
    assert not kept & (lost | second.tries.keys())


# Stories


def test_a_rerun_opens_every_step_that_contains_what_runs_again() -> None:
    """A branch within a branch was lost: both of its parallel steps begin again, and the branch beside it does not."""
    made = graph(
        step("outer", kind="parallel", config={"branches": ["inner", "beside"]}),
        step("inner", kind="parallel", config={"branches": ["left"]}),
        *(step(name) for name in ("beside", "left")),
        step("last", "outer"),
    )

    second = play(made, {}, begun=rerun(play(made, {"last": 9}).run, "r2", lost={"left"}))

    assert (second.end.state, second.tries) == (RunState.SUCCEEDED, {"left": 1, "last": 1})


def test_a_diamond_runs_both_sides_and_joins() -> None:
    """The last step waits for both."""
    life = play(graph(step("a"), step("b", "a"), step("c", "a"), step("d", "b", "c")), {})

    assert (life.end.state, set(life.states().values())) == (RunState.SUCCEEDED, {"succeeded"})


def test_a_failed_step_skips_what_depends_on_it_and_no_sibling() -> None:
    """The run fails and says which step, and why."""
    life = play(graph(step("a"), step("b"), step("c", "a"), step("d", "c"), step("e", "b")), {"a": 1})

    assert life.states() == {"a": "failed", "b": "succeeded", "c": "skipped", "d": "skipped", "e": "succeeded"}
    assert (life.end.state, life.end.message) == (RunState.FAILED, "step a failed: boom")
    assert life.run.of("c").skip_cause is SkipCause.UPSTREAM_FAILED


def test_the_pause_before_a_retry_doubles() -> None:
    """Two retries: after 10 s and after 20 s."""
    made = graph(step("a", retry={"max_retries": 2, "delay": "10s"}))
    run, first = settled(new_run(made, "r1", {}))
    run, second = settled(after_try(run, "a", TryOutcome(error="boom")))
    run, third = settled(after_try(run, "a", TryOutcome(error="boom")))

    assert first + second + third == (StartTry("a", 1, 0), StartTry("a", 2, 10), StartTry("a", 3, 20))


def test_an_error_that_no_retry_helps_ends_the_step() -> None:
    """Such as a job that the service refuses."""
    run, _ = settled(new_run(graph(step("a", retry={"max_retries": 9})), "r1", {}))
    run = after_try(run, "a", TryOutcome(error="refused", may_retry=False))

    assert run.of("a").state is StepState.FAILED


def test_a_condition_skips_the_other_branch_and_joins_ignore_it() -> None:
    """What follows the branch alone is skipped too; the join runs."""
    made = graph(
        step("c", kind="condition", config={"expression": "inputs.n > 2", "if_true": "t", "if_false": "f"}),
        step("t"),
        step("f"),
        step("g", "f"),
        step("join", "t", "g"),
        inputs={"n": 3},
    )
    life = play(made, {})

    assert life.states() == {
        "c": "succeeded", "t": "succeeded", "f": "skipped", "g": "skipped", "join": "succeeded",
    }  # fmt: skip
    assert life.run.of("c").output == {"condition_result": True, "branch": "if_true"}


def test_a_condition_without_a_value_fails_with_the_reason() -> None:
    """Its branches are skipped."""
    config = {"expression": "steps.a.result.ok", "if_true": "t"}
    life = play(graph(step("a"), step("c", "a", kind="condition", config=config), step("t")), {})

    assert life.states()["t"] == "skipped"
    assert "steps.a.result.ok" in life.end.message


def test_a_parallel_with_fail_fast_stops_its_other_branches_alone() -> None:
    """The running branch is stopped; a step outside goes on. The parallel tells which branch failed by itself."""
    made = graph(
        step("p", kind="parallel", config={"branches": ["y", "x"], "fail_fast": True}), step("x"), step("y"), step("z")
    )
    run, _ = settled(new_run(made, "r1", {}))
    run, decisions = settled(after_try(run, "x", TryOutcome(error="boom")))

    assert decisions == (StopTry("y", SkipCause.FAIL_FAST),)
    run, _ = settled(after_try(run, "y", TryOutcome(error="interrupted")))
    assert run.of("y").error == "stopped: another step failed"
    assert (run.of("p").state, run.of("p").error) == (StepState.FAILED, "branch x: boom")


def test_a_loop_runs_three_items_two_at_a_time() -> None:
    """Its results are in the order of the items."""
    made = graph(
        step("l", kind="loop", config={"items": "inputs.files", "body_step": "b", "max_parallel": 2}),
        step("b", config={"function_name": "echo", "parameters": {"x": "${item}"}}),
        inputs={"files": ["u", "v", "w"]},
    )
    life = play(made, {}, order=lambda count: count - 1)

    assert life.most_running["b"] == 2
    assert life.run.of("l").output == {
        "results": [{"result": "b[0]"}, {"result": "b[1]"}, {"result": "b[2]"}],
        "count": 3,
    }


@pytest.mark.parametrize(("until", "count", "state"), [("index == 2", 3, "succeeded"), ("false", 4, "failed")])
def test_a_loop_runs_until_a_condition_holds(until: str, count: int, state: str) -> None:
    """One iteration after the other, a bounded number of them."""
    config = {"until": until, "body_step": "b", "max_iterations": 4}
    life = play(graph(step("l", kind="loop", config=config), step("b")), {})

    assert (life.tries.total(), life.states()["l"]) == (count, state)


def test_cancel_stops_what_runs_and_skips_the_rest() -> None:
    """The run is cancelled once the running try has ended."""
    run, _ = settled(new_run(graph(step("a"), step("b", "a")), "r1", {}))
    run, decisions = settled(replace(run, cancel_requested=True))

    assert StopTry("a", SkipCause.CANCELLED) in decisions
    assert not any(isinstance(one, EndRun) for one in decisions)
    run, decisions = settled(after_try(run, "a", TryOutcome(error="interrupted")))
    assert decisions == (EndRun(RunState.CANCELLED, "cancelled"),)
    assert run.of("b").skip_cause is SkipCause.CANCELLED
