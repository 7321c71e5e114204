"""The graph of a pipeline: what each step waits for, who contains it, and which names its expressions may use.

A step begins and ends; edges connect these moments. A parallel step ends after its branches, which begin after it does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from atoll.pipelines.expressions import ValueType, type_of
from atoll.pipelines.model import Pipeline, PipelineStep
from atoll.pipelines.words import StepType

OUTPUTS: Final[Mapping[StepType, Mapping[str, ValueType]]] = {
    StepType.JOB: {"job_id": ValueType.TEXT, "status": ValueType.TEXT, "name": ValueType.TEXT},
    StepType.API_CALL: {"status_code": ValueType.INTEGER, "body": ValueType.ANY},
    StepType.FUNCTION: {"result": ValueType.ANY},
    StepType.NOTIFICATION: {"sent": ValueType.BOOLEAN},
    StepType.CONDITION: {"branch": ValueType.TEXT, "condition_result": ValueType.BOOLEAN},
    StepType.WAIT: {"waited": ValueType.INTEGER},
    StepType.PARALLEL: {},
    StepType.LOOP: {"results": ValueType.LIST, "count": ValueType.INTEGER},
}
"""What `${steps.NAME.FIELD}` may name, beside state and error, which every step has."""
ALWAYS: Final = {"state": ValueType.TEXT, "error": ValueType.TEXT}
RUN_NAMES: Final = {"run.id": ValueType.TEXT, "run.pipeline": ValueType.TEXT}
INDEX: Final = "index"

Moment = tuple[str, str]
BEGIN, END = "begin", "end"


@dataclass(frozen=True)
class PipelineGraph:
    """A pipeline whose names are known to exist, as a graph."""

    pipeline: Pipeline

    @cached_property
    def steps(self) -> Mapping[str, PipelineStep]:
        """The steps by name."""
        return {step.name: step for step in self.pipeline.steps}

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The config of each step, in the model of its type."""
        return {step.name: step.settings() for step in self.pipeline.steps}

    @cached_property
    def owners(self) -> Mapping[str, tuple[PipelineStep, ...]]:
        """The condition, parallel or loop steps that name a step."""
        found: dict[str, tuple[PipelineStep, ...]] = {}
        for step in self.pipeline.steps:
            for _, target in targets(step, self.settings[step.name]):
                found[target] = (*found.get(target, ()), step)
        return found

    def owner(self, name: str, kind: StepType) -> PipelineStep | None:
        """Return the step of a type that names a step."""
        return next((one for one in self.owners.get(name, ()) if one.step_type is kind), None)

    def is_contained(self, name: str) -> bool:
        """Return whether a parallel or loop step answers for the failure of a step."""
        kinds = (StepType.PARALLEL, StepType.LOOP)
        return any(owner.step_type in kinds for owner in self.owners.get(name, ()))

    @cached_property
    def edges(self) -> Mapping[Moment, frozenset[Moment]]:
        """What comes before each moment."""
        before: dict[Moment, set[Moment]] = {}
        for earlier, later in self._pairs():
            before.setdefault(later, set()).add(earlier)
            before.setdefault(earlier, set())
        return {moment: frozenset(found) for moment, found in before.items()}

    def _pairs(self) -> Iterator[tuple[Moment, Moment]]:
        for step in self.pipeline.steps:
            yield (step.name, BEGIN), (step.name, END)
            for one in step.depends_on:
                yield (one, END), (step.name, BEGIN)
            for _, target in targets(step, self.settings[step.name]):
                if step.step_type is StepType.CONDITION:
                    yield (step.name, END), (target, BEGIN)
                else:
                    yield (step.name, BEGIN), (target, BEGIN)
                    yield (target, END), (step.name, END)

    def cycle(self) -> tuple[str, ...]:
        """Return the steps of a cycle, the first one again at the end; empty if there is none."""
        try:
            TopologicalSorter(self.edges).prepare()
        except CycleError as error:
            found = [moment[0] for moment in error.args[1]]
            return tuple(name for number, name in enumerate(found) if number == 0 or name != found[number - 1])
        return ()

    def ended_before(self, name: str) -> frozenset[str]:
        """Return the steps that have ended when a step begins; bodies of loops excepted, which run many times."""
        seen: set[Moment] = set()
        waiting = list(self.edges[name, BEGIN])
        while waiting:
            moment = waiting.pop()
            if moment not in seen:
                seen.add(moment)
                waiting.extend(self.edges[moment])
        ended = {step for step, which in seen if which == END}
        return frozenset(one for one in ended if self.owner(one, StepType.LOOP) is None)

    def names_of(self, name: str, *, with_body: bool = False) -> Mapping[str, ValueType]:
        """Return the names that expressions of a step may use. `with_body`: for `until` of a loop, after its body."""
        found = dict(RUN_NAMES)
        found |= {f"inputs.{key}": type_of(value) for key, value in self.pipeline.inputs.items()}
        for earlier in sorted(self.ended_before(name)):
            found |= self._fields(earlier)
        loop = self.owner(name, StepType.LOOP)
        if loop is not None:
            found |= {self.settings[loop.name].variable: ValueType.ANY, INDEX: ValueType.INTEGER}
        if with_body:
            found |= self._fields(self.settings[name].body_step) | {INDEX: ValueType.INTEGER}
        return found

    def _fields(self, name: str) -> dict[str, ValueType]:
        fields = {**OUTPUTS[self.steps[name].step_type], **ALWAYS}
        return {f"steps.{name}.{field}": kind for field, kind in fields.items()}


def targets(step: PipelineStep, settings: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - the model of the type
    """Yield the steps that a step names in its config, with the field."""
    match step.step_type:
        case StepType.CONDITION:
            yield from (("if_true", one) for one in settings.if_true)
            yield from (("if_false", one) for one in settings.if_false)
        case StepType.PARALLEL:
            yield from (("branches", one) for one in settings.branches)
        case StepType.LOOP:
            yield "body_step", settings.body_step
        case _:
            return


def step_of(graph: PipelineGraph, key: str) -> tuple[PipelineStep, int | None]:
    """Return the step of a key, and the number of the iteration if it is the body of a loop."""
    name, _, rest = key.partition("[")
    return graph.steps[name], int(rest.removesuffix("]")) if rest else None
