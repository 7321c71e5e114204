"""Parses a pipeline from JSON or YAML: a Pipeline, or all its problems. No input raises an exception."""

from dataclasses import dataclass, replace

from pydantic import ValidationError

from atoll.ml.document import read
from atoll.ml.policy import MlPolicy
from atoll.ml.problems import AttributeProblem, Problems, shown
from atoll.pipelines.checking import check
from atoll.pipelines.model import Pipeline
from atoll.pipelines.wording import faults_of


@dataclass(frozen=True, slots=True)
class ParsedPipeline:
    """A pipeline, or why there is none. `is_readable`: whether the bytes are JSON or YAML at all."""

    pipeline: Pipeline | None
    problems: Problems = ()
    is_readable: bool = True


def parse_pipeline(data: bytes, *, functions: frozenset[str], policy: MlPolicy | None = None) -> ParsedPipeline:
    """Parse a pipeline. `functions`: the names of the registered ones; `policy`: limits on attributes of jobs."""
    document = read(data)
    if isinstance(document, AttributeProblem):
        return ParsedPipeline(None, (document,), is_readable=False)
    value = document.value
    if not isinstance(value, dict):
        problem = AttributeProblem("", shown(value), "must be a mapping", "write name and steps", 1)
        return ParsedPipeline(None, (problem,))
    try:
        pipeline = Pipeline.model_validate(value)
    except ValidationError as error:
        told = faults_of(error, Pipeline, line_of=document.line_of)
        return ParsedPipeline(None, tuple(_named(one, value) for one in told))
    problems = check(pipeline, functions, policy)
    return ParsedPipeline(None if problems else pipeline, problems)


def _named(problem: AttributeProblem, value: dict[str, object]) -> AttributeProblem:
    """Return a problem with the name of its step beside the number, as steps[2] tells little."""
    head, _, rest = problem.attribute.partition("]")
    number, steps = head.removeprefix("steps["), value.get("steps")
    if not head.startswith("steps[") or not number.isdigit() or not isinstance(steps, list):
        return problem
    step = steps[int(number)] if int(number) < len(steps) else None
    name = step.get("name") if isinstance(step, dict) else None
    return replace(problem, attribute=f"steps.{name}{rest}") if isinstance(name, str) and len(name) <= 40 else problem
