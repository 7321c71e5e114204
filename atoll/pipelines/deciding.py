"""Decides what happens next in a run: from the states of its steps follow the decisions, and nothing else.

Reads no clock: pauses and timeouts are durations that whoever carries out a decision observes. `settled` decides until
nothing is left to decide; the caller then starts tries, and reports how each ended with `after_try`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from atoll.pipelines.expressions import ExpressionFailed, ExpressionInvalid, ValueType, compiled, filled, source_of
from atoll.pipelines.graph import INDEX, PipelineGraph, step_of
from atoll.pipelines.model import ITEMS_MAX, PipelineStep
from atoll.pipelines.sequencing import ORDER, BranchNeed, GpuRoom, need_of, order_of
from atoll.pipelines.words import ENDED_STEPS, FailureRule, RunState, SkipCause, StepState, StepType

PAUSE_SECONDS_MAX: Final = 3600
ITEMS: Final = "items"
STOPPED: Final = "stopped: "


@dataclass(frozen=True, slots=True)
class StepRun:
    """One step of a run. `attempt`: tries begun. A pending step with tries behind it waits for its next one."""

    state: StepState = StepState.PENDING
    attempt: int = 0
    output: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    skip_cause: SkipCause | None = None
    is_stopping: bool = False

    @property
    def has_ended(self) -> bool:
        """Return whether nothing can change it any more."""
        return self.state in ENDED_STEPS


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run. `steps`: by name; the bodies of a loop as body[0], body[1]. `inputs`: as given for this run."""

    graph: PipelineGraph
    run_id: str
    inputs: Mapping[str, Any]
    steps: Mapping[str, StepRun]
    cancel_requested: bool = False
    room: GpuRoom | None = None
    """Free quota while this is decided; None if it is not known, or there is none."""

    def of(self, key: str) -> StepRun:
        """Return a step."""
        return self.steps.get(key, StepRun())


@dataclass(frozen=True, slots=True)
class StartTry:
    """Begin a try of a step, after a pause in seconds."""

    key: str
    attempt: int
    pause_seconds: int


@dataclass(frozen=True, slots=True)
class OpenStep:
    """Begin a parallel or loop step, which runs no work of its own."""

    key: str
    output: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SkipStep:
    """A step will not run."""

    key: str
    cause: SkipCause


@dataclass(frozen=True, slots=True)
class EndStep:
    """A step ends without work: a condition, a parallel, a loop."""

    key: str
    state: StepState
    output: Mapping[str, Any]
    error: str = ""


@dataclass(frozen=True, slots=True)
class StopTry:
    """Stop a running try; it still reports how it ended."""

    key: str
    cause: SkipCause


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run is over."""

    state: RunState
    message: str


@dataclass(frozen=True, slots=True)
class TryOutcome:
    """How a try ended: with an output, or an error. `may_retry`: whether another try could help."""

    output: Mapping[str, Any] | None = None
    error: str = ""
    may_retry: bool = True


StepDecision = StartTry | OpenStep | SkipStep | EndStep | StopTry
Decision = StepDecision | EndRun


def new_run(graph: PipelineGraph, run_id: str, inputs: Mapping[str, Any]) -> RunSnapshot:
    """Return a run that has not begun; inputs that are not given have their defaults."""
    steps = {name: StepRun() for name in graph.steps if graph.owner(name, StepType.LOOP) is None}
    return RunSnapshot(graph, run_id, {**graph.pipeline.inputs, **inputs}, steps)


def settled(run: RunSnapshot) -> tuple[RunSnapshot, tuple[Decision, ...]]:
    """Decide until nothing is left to decide; return the run afterwards and all decisions."""
    taken: list[Decision] = []
    while True:
        decisions = next_steps(run)
        taken.extend(decisions)
        if not decisions or isinstance(decisions[-1], EndRun):
            return run, tuple(taken)
        run = applied(run, decisions)


def applied(run: RunSnapshot, decisions: tuple[Decision, ...]) -> RunSnapshot:
    """Return the run after decisions."""
    steps = dict(run.steps)
    for one in decisions:
        if not isinstance(one, EndRun):
            steps[one.key] = _changed(run.of(one.key), one)
    return replace(run, steps=steps)


def _changed(step: StepRun, decision: StepDecision) -> StepRun:
    match decision:
        case StartTry(attempt=attempt):
            return replace(step, state=StepState.RUNNING, attempt=attempt, error="")
        case OpenStep(output=output):
            return replace(step, state=StepState.RUNNING, output=output)
        case SkipStep(cause=cause):
            return replace(step, state=StepState.SKIPPED, skip_cause=cause)
        case EndStep(state=state, output=output, error=error):
            return replace(step, state=state, output=output, error=error)
        case StopTry(cause=cause):
            return replace(step, is_stopping=True, skip_cause=cause)


def after_try(run: RunSnapshot, key: str, outcome: TryOutcome) -> RunSnapshot:
    """Return the run after a try ended: the step succeeded, failed, or waits for its next try."""
    step, before = step_of(run.graph, key)[0], run.of(key)
    if before.state is not StepState.RUNNING:
        return run
    if outcome.output is not None:
        after = replace(before, state=StepState.SUCCEEDED, output=outcome.output, error="", skip_cause=None)
    elif before.is_stopping:
        after = replace(before, state=StepState.FAILED, error=f"{STOPPED}{before.skip_cause}", skip_cause=None)
    elif outcome.may_retry and before.attempt <= step.retry.max_retries:
        after = replace(before, state=StepState.PENDING, error=outcome.error)
    else:
        after = replace(before, state=StepState.FAILED, error=outcome.error)
    return replace(run, steps={**run.steps, key: after})


def next_steps(run: RunSnapshot) -> tuple[Decision, ...]:
    """Return what to do next; EndRun alone when every step has ended."""
    found: list[Decision] = []
    for name, step in run.graph.steps.items():
        if run.graph.owner(name, StepType.LOOP) is None:
            found.extend(_decide(run, step))
    return tuple(found) if found else tuple(_end_of(run))


def _end_of(run: RunSnapshot) -> Iterator[Decision]:
    if not all(one.has_ended for one in run.steps.values()):
        return
    if run.cancel_requested:
        yield EndRun(RunState.CANCELLED, "cancelled")
        return
    failed = [name for name in run.graph.steps if not run.graph.is_contained(name) and _has_failed(run, name)]
    if not failed:
        yield EndRun(RunState.SUCCEEDED, "")
        return
    cause = _cause(run, failed)
    yield EndRun(RunState.FAILED, f"step {cause} failed: {run.of(cause).error}")


def _cause(run: RunSnapshot, keys: list[str]) -> str:
    """Return the first of some steps that failed; one that was stopped because of another only if all were."""
    steps = {key: run.of(key) for key in keys}
    return min(keys, key=lambda key: (steps[key].state is not StepState.FAILED, steps[key].error.startswith(STOPPED)))


def _has_failed(run: RunSnapshot, key: str) -> bool:
    """Return whether a step failed, and its rule does not say to continue."""
    step, _ = step_of(run.graph, key)
    return run.of(key).state is StepState.FAILED and step.on_failure is FailureRule.FAIL


def _halt(run: RunSnapshot, name: str) -> SkipCause | None:
    """Return why a step may not begin or go on; None if it may."""
    if run.cancel_requested:
        return SkipCause.CANCELLED
    graph = run.graph
    if graph.pipeline.fail_fast and any(_has_failed(run, one) for one in graph.steps if not graph.is_contained(one)):
        return SkipCause.FAIL_FAST
    owner = graph.owner(name, StepType.PARALLEL)
    while owner is not None:
        settings = graph.settings[owner.name]
        if settings.fail_fast and any(_has_failed(run, one) for one in settings.branches):
            return SkipCause.FAIL_FAST
        owner = graph.owner(owner.name, StepType.PARALLEL)
    return None


def _decide(run: RunSnapshot, step: PipelineStep) -> Iterator[Decision]:
    now = run.of(step.name)
    if now.has_ended:
        return
    halt = _halt(run, step.name)
    if now.state is StepState.PENDING:
        yield from _pending(run, step, halt)
    elif step.step_type is StepType.PARALLEL:
        yield from _parallel(run, step)
    elif step.step_type is StepType.LOOP:
        yield from _Loop(run, step, halt).decide()
    elif halt is not None and not now.is_stopping:
        yield StopTry(step.name, halt)


def _pending(run: RunSnapshot, step: PipelineStep, halt: SkipCause | None) -> Iterator[Decision]:
    now = run.of(step.name)
    if now.attempt:
        yield _again(step, step.name, now) if halt is None else _stopped(step.name, halt)
    elif halt is not None:
        yield SkipStep(step.name, halt)
    else:
        gate = _gate(run, step)
        if isinstance(gate, SkipCause):
            yield SkipStep(step.name, gate)
        elif gate:
            yield _begin(run, step)


def _again(step: PipelineStep, key: str, now: StepRun) -> StartTry:
    pause = min(step.retry.delay * 2 ** (now.attempt - 1), PAUSE_SECONDS_MAX)
    return StartTry(key, now.attempt + 1, pause)


def _stopped(key: str, halt: SkipCause) -> EndStep:
    return EndStep(key, StepState.FAILED, {}, f"{STOPPED}{halt}")


def _gate(run: RunSnapshot, step: PipelineStep) -> bool | SkipCause:
    """Return whether a step may begin, or why it is skipped."""
    chosen = _owner_gate(run, step.name)
    if chosen is not True:
        return chosen
    waits = [run.of(one) for one in step.depends_on]
    if not all(one.has_ended for one in waits):
        return False
    if any(_is_broken(run, one) for one in step.depends_on):
        return SkipCause.UPSTREAM_FAILED
    if waits and all(one.state is StepState.SKIPPED for one in waits):
        return SkipCause.NOT_SELECTED
    return True


def _owner_gate(run: RunSnapshot, name: str) -> bool | SkipCause:
    for owner in run.graph.owners.get(name, ()):
        now = run.of(owner.name)
        if now.state is StepState.SKIPPED:
            return now.skip_cause or SkipCause.NOT_SELECTED
        if owner.step_type is StepType.PARALLEL:
            return now.state is StepState.RUNNING and _is_its_turn(run, now, name)
        if now.state is StepState.FAILED:
            return SkipCause.UPSTREAM_FAILED if _has_failed(run, owner.name) else SkipCause.NOT_SELECTED
        if now.state is not StepState.SUCCEEDED:
            return False
        if name not in getattr(run.graph.settings[owner.name], str(now.output["branch"])):
            return SkipCause.NOT_SELECTED
    return True


def _is_its_turn(run: RunSnapshot, parallel: StepRun, name: str) -> bool:
    """Return whether the branches before this one have ended, if the quota is too small for all of them together."""
    order = parallel.output.get(ORDER, [])
    return name not in order or all(run.of(one).has_ended for one in order[: order.index(name)])


def _is_broken(run: RunSnapshot, name: str) -> bool:
    """Return whether steps that depend on this one cannot run."""
    now = run.of(name)
    is_skipped = now.state is StepState.SKIPPED and now.skip_cause is not SkipCause.NOT_SELECTED
    return is_skipped or _has_failed(run, name)


def _begin(run: RunSnapshot, step: PipelineStep) -> Decision:
    settings = run.graph.settings[step.name]
    try:
        match step.step_type:
            case StepType.CONDITION:
                is_so = bool(evaluated(run, step.name, settings.expression))
                told = {"condition_result": is_so, "branch": "if_true" if is_so else "if_false"}
                return EndStep(step.name, StepState.SUCCEEDED, told)
            case StepType.PARALLEL:
                return OpenStep(step.name, _order(run, step))
            case StepType.LOOP:
                return OpenStep(step.name, {ITEMS: _items(run, step)})
            case _:
                return StartTry(step.name, 1, 0)
    except (ExpressionFailed, ExpressionInvalid) as error:
        return EndStep(step.name, StepState.FAILED, {}, str(error))


def _items(run: RunSnapshot, step: PipelineStep) -> list[Any] | None:
    """Return the items of a loop, None if it runs until a condition holds. Raises ExpressionFailed."""
    items = run.graph.settings[step.name].items
    if items is None:
        return None
    found = evaluated(run, step.name, items) if isinstance(items, str) else resolved(run, step.name, items)
    if not isinstance(found, list) or len(found) > ITEMS_MAX:
        raise ExpressionFailed(f"items must be a list of at most {ITEMS_MAX}")
    return found


def _order(run: RunSnapshot, step: PipelineStep) -> dict[str, Any]:
    """Return the order of the branches if their jobs do not fit the free quota together.

    Jobs whose needs depend on what is not known yet, and parallel steps within this one, count nothing.
    """
    if run.room is None:
        return {}
    found: list[BranchNeed | None] = []
    for name in run.graph.settings[step.name].branches:
        settings, kind, copies = run.graph.settings[name], run.graph.steps[name].step_type, 1
        if kind is StepType.LOOP:
            copies = min(settings.max_parallel, len(settings.items) if isinstance(settings.items, list) else ITEMS_MAX)
            settings, kind = run.graph.settings[settings.body_step], run.graph.steps[settings.body_step].step_type
        if kind is not StepType.JOB:
            continue
        try:
            job = resolved(run, name, settings.job)
        except (ExpressionFailed, ExpressionInvalid):
            continue
        found.append(need_of(name, job, run.room, copies=copies, after=run.graph.ended_before(name)))
    return order_of(tuple(one for one in found if one is not None), run.room)


def _parallel(run: RunSnapshot, step: PipelineStep) -> Iterator[Decision]:
    branches = run.graph.settings[step.name].branches
    if not all(run.of(one).has_ended for one in branches):
        return
    broken = [one for one in branches if _is_broken(run, one)]
    if not broken:
        yield EndStep(step.name, StepState.SUCCEEDED, run.of(step.name).output)
        return
    told = run.of(first := _cause(run, broken)).error or str(run.of(first).skip_cause)
    yield EndStep(step.name, StepState.FAILED, run.of(step.name).output, f"branch {first}: {told}")


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop that has begun."""

    run: RunSnapshot
    step: PipelineStep
    halt: SkipCause | None

    def decide(self) -> Iterator[Decision]:
        settings = self.run.graph.settings[self.step.name]
        items = self.run.of(self.step.name).output[ITEMS]
        bodies = self._bodies(settings.body_step)
        failed = next((key for key in bodies if _has_failed(self.run, key)), None)
        active = [key for key in bodies if not self.run.of(key).has_ended]
        if self.halt is not None or failed is not None:
            yield from self._close(active, failed)
        else:
            yield from self._retries(active)
            yield from self._fixed(items, bodies, active) if items is not None else self._until(bodies, active)

    def _bodies(self, name: str) -> list[str]:
        keys: list[str] = []
        while (key := f"{name}[{len(keys)}]") in self.run.steps:
            keys.append(key)
        return keys

    def _retries(self, active: list[str]) -> Iterator[Decision]:
        body = self.run.graph.steps[self.run.graph.settings[self.step.name].body_step]
        for key in active:
            if self.run.of(key).state is StepState.PENDING:
                yield _again(body, key, self.run.of(key))

    def _close(self, active: list[str], failed: str | None) -> Iterator[Decision]:
        """Start nothing more; end when nothing runs any more."""
        for key in active:
            now = self.run.of(key)
            if now.state is StepState.PENDING:
                yield _stopped(key, self.halt or SkipCause.FAIL_FAST)
            elif self.halt is not None and not now.is_stopping:
                yield StopTry(key, self.halt)
        if not active:
            told = f"{failed}: {self.run.of(failed).error}" if failed else f"{STOPPED}{self.halt}"
            yield EndStep(self.step.name, StepState.FAILED, {}, told)

    def _fixed(self, items: list[Any], bodies: list[str], active: list[str]) -> Iterator[Decision]:
        settings = self.run.graph.settings[self.step.name]
        if len(bodies) == len(items) and not active:
            yield self._done(bodies)
        room = settings.max_parallel - len(active)
        for number in range(len(bodies), min(len(items), len(bodies) + room)):
            yield StartTry(f"{settings.body_step}[{number}]", 1, 0)

    def _until(self, bodies: list[str], active: list[str]) -> Iterator[Decision]:
        settings = self.run.graph.settings[self.step.name]
        if active:
            return
        try:
            if bodies and evaluated(self.run, self.step.name, settings.until, body=bodies[-1]):
                yield self._done(bodies)
                return
        except (ExpressionFailed, ExpressionInvalid) as error:
            yield EndStep(self.step.name, StepState.FAILED, {}, str(error))
            return
        if len(bodies) < settings.max_iterations:
            yield StartTry(f"{settings.body_step}[{len(bodies)}]", 1, 0)
            return
        told = f"the condition did not hold after {len(bodies)} iterations"
        yield EndStep(self.step.name, StepState.FAILED, {}, told)

    def _done(self, bodies: list[str]) -> EndStep:
        results = [dict(self.run.of(key).output) for key in bodies]
        return EndStep(self.step.name, StepState.SUCCEEDED, {"results": results, "count": len(bodies)})


# Expressions of a run


def evaluated(run: RunSnapshot, key: str, text: str, *, body: str = "", more: Mapping[str, str] | None = None) -> Any:  # noqa: ANN401 - a value of JSON's types
    """Return the value of an expression of a step. `body`: the iteration that `until` looks at; `more`: states of jobs.

    Raises ExpressionFailed, ExpressionInvalid.
    """
    step, number = step_of(run.graph, key)
    names, values = dict(run.graph.names_of(step.name, with_body=bool(body))), values_of(run, step.name, number)
    if body:
        of_body, last = step_of(run.graph, body)
        values |= _step_values(of_body.name, run.of(body)) | {INDEX: last}
    from_jobs = {f"jobs.{name}": state for name, state in (more or {}).items()}
    names |= dict.fromkeys(from_jobs, ValueType.TEXT)
    return compiled(source_of(text), names).value(values | from_jobs)


def resolved(run: RunSnapshot, key: str, value: Any) -> Any:  # noqa: ANN401 - a value of JSON's types
    """Return a part of a step's config with its expressions replaced. Raises ExpressionFailed, ExpressionInvalid."""
    step, number = step_of(run.graph, key)
    return filled(value, run.graph.names_of(step.name), values_of(run, step.name, number))


def values_of(run: RunSnapshot, name: str, number: int | None) -> dict[str, Any]:
    """Return the values of the names that a step may use."""
    values = {f"inputs.{key}": value for key, value in run.inputs.items()}
    values |= {"run.id": run.run_id, "run.pipeline": run.graph.pipeline.name}
    for earlier in run.graph.ended_before(name):
        values |= _step_values(earlier, run.of(earlier))
    loop = run.graph.owner(name, StepType.LOOP)
    if loop is not None and number is not None:
        items = run.of(loop.name).output.get(ITEMS)
        values |= {INDEX: number, run.graph.settings[loop.name].variable: items[number] if items else number}
    return values


def _step_values(name: str, step: StepRun) -> dict[str, Any]:
    own = {"state": step.state.value, "error": step.error}
    return {f"steps.{name}.{field}": value for field, value in {**step.output, **own}.items()}
