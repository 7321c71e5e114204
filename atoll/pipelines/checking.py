"""Checks a pipeline when it is created: names, cycles, expressions and jobs. Each problem names its step."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError

from atoll.jobs.documents import parse_job
from atoll.ml.attributes import PREFIX
from atoll.ml.policy import MlPolicy
from atoll.ml.problems import AttributeProblem, Problems, shown
from atoll.ml.wording import dotted
from atoll.pipelines.expressions import (
    ExpressionFailed,
    ExpressionInvalid,
    ValueType,
    compiled,
    expressions_in,
    filled,
    is_json,
    source_of,
    texts_in,
)
from atoll.pipelines.graph import PipelineGraph, targets
from atoll.pipelines.model import CONFIGS, Pipeline, PipelineStep
from atoll.pipelines.wording import faults_of
from atoll.pipelines.words import StepType

RESERVED: Final = frozenset(
    (
        *("as", "break", "const", "continue", "else", "false", "for", "function", "if", "import", "in", "let", "loop"),
        *("namespace", "null", "package", "return", "true", "var", "void", "while"),
        *("index", "inputs", "jobs", "run", "steps"),
    )
)
"""Words of the expression language, which nothing may be named."""
LEAVES: Final = frozenset(StepType) - {StepType.CONDITION, StepType.PARALLEL, StepType.LOOP}
SET_BY_PIPELINE: Final = (
    *("name", "id", "source_type", "source_id", "step_id", "idempotency_key", "namespace"),
    *("tenant_id", "project_id", "cluster_id", "created_by", "owner_type"),
)
EXPRESSIONS: Final = (
    ("expression", ValueType.BOOLEAN),
    ("condition", ValueType.BOOLEAN),
    ("items", ValueType.LIST),
)
"""Fields that hold an expression, with the type of its value."""
SAMPLE_NAME: Final = "step"
PROBLEMS_MAX: Final = 100


def check(pipeline: Pipeline, functions: frozenset[str], policy: MlPolicy | None = None) -> Problems:
    """Return the problems of a pipeline. `functions`: the names of the registered ones."""
    found = (*_inputs(pipeline), *_names(pipeline), *_configs(pipeline))
    if found:
        return tuple(found)[:PROBLEMS_MAX]
    graph = PipelineGraph(pipeline)
    found = tuple(_structure(graph))
    if found:
        return found[:PROBLEMS_MAX]
    return tuple(one for step in pipeline.steps for one in _step(graph, step, functions, policy))[:PROBLEMS_MAX]


def templates_of(step: PipelineStep, settings: Any) -> Mapping[str, Any]:  # noqa: ANN401 - the model of the type
    """Return the parts of a step's config in which `${...}` is replaced, by their field."""
    match step.step_type:
        case StepType.JOB:
            return {"": settings.job}
        case StepType.API_CALL:
            return {"url": settings.url, "headers": settings.headers, "body": settings.body}
        case StepType.FUNCTION:
            return {"parameters": settings.parameters}
        case StepType.NOTIFICATION:
            return {"template": settings.template, "data": settings.data, "subject": settings.subject}
        case StepType.LOOP if isinstance(settings.items, list):
            return {"items": settings.items}
        case _:
            return {}


def _problem(step: str, field: str, value: object, limit: str, hint: str) -> AttributeProblem:
    return AttributeProblem(field, "" if value is None else shown(value), limit, hint, step=f"steps.{step}")


def _inputs(pipeline: Pipeline) -> Iterator[AttributeProblem]:
    for name, value in pipeline.inputs.items():
        if name in RESERVED:
            yield AttributeProblem(f"inputs.{name}", "", "is a word of the expression language", "rename it")
        if not is_json(value):
            yield AttributeProblem(f"inputs.{name}", shown(value), "is no value of JSON, or too deep", "simplify it")


def _names(pipeline: Pipeline) -> Iterator[AttributeProblem]:
    seen: set[str] = set()
    known = {step.name for step in pipeline.steps}
    for step in pipeline.steps:
        if step.name in seen:
            yield _problem(step.name, "name", step.name, "another step has it", "rename one of them")
        if step.name in RESERVED:
            yield _problem(step.name, "name", step.name, "is a word of the expression language", "rename it")
        seen.add(step.name)
        for one in step.depends_on:
            if one not in known:
                yield _problem(step.name, "depends_on", one, "there is no such step", "correct the name")
            if one == step.name:
                yield _problem(step.name, "depends_on", one, "a step cannot depend on itself", "remove it")


def _configs(pipeline: Pipeline) -> Iterator[AttributeProblem]:
    for step in pipeline.steps:
        try:
            step.settings()
        except ValidationError as error:
            yield from faults_of(error, CONFIGS[step.step_type], step=f"steps.{step.name}.config")


def _structure(graph: PipelineGraph) -> Iterator[AttributeProblem]:
    for step in graph.pipeline.steps:
        for field, target in targets(step, graph.settings[step.name]):
            if target not in graph.steps:
                yield _problem(step.name, f"config.{field}", target, "there is no such step", "correct the name")
    for name, owners in graph.owners.items():
        if len(owners) > 1 and name in graph.steps:
            told = " and ".join(sorted({owner.name for owner in owners}))
            yield _problem(name, "name", None, f"{told} name it", "a step belongs to one of them: copy it")
        loop = graph.owner(name, StepType.LOOP)
        if loop is not None and name in graph.steps:
            yield from _body(graph, name, loop)
    if all(target in graph.steps for target in graph.owners):
        cycle = graph.cycle()
        if cycle:
            limit = f"the steps wait for each other: {' -> '.join(cycle)}"
            yield _problem(cycle[0], "depends_on", None, limit, "remove one of the dependencies")


def _body(graph: PipelineGraph, name: str, loop: PipelineStep) -> Iterator[AttributeProblem]:
    body = graph.steps[name]
    if body.step_type not in LEAVES:
        told = ", ".join(sorted(LEAVES))
        yield _problem(
            name, "step_type", body.step_type.value, f"the body of loop {loop.name} must be one of {told}", "change it"
        )
    if body.depends_on:
        yield _problem(name, "depends_on", None, "the body of a loop depends on nothing", f"move it to {loop.name}")
    variable = graph.settings[loop.name].variable
    if variable in RESERVED:
        yield _problem(loop.name, "config.variable", variable, "is a word of the expression language", "rename it")
    for step in graph.pipeline.steps:
        if name in step.depends_on:
            yield _problem(step.name, "depends_on", name, "is the body of a loop", f"depend on {loop.name}")


def _step(
    graph: PipelineGraph, step: PipelineStep, functions: frozenset[str], policy: MlPolicy | None
) -> Iterator[AttributeProblem]:
    settings, names = graph.settings[step.name], graph.names_of(step.name)
    for field, value in templates_of(step, settings).items():
        for path, text in texts_in(value):
            where = ".".join(str(part) for part in ("config", field, *path) if part != "")
            yield from _template(step.name, where, text, names)
    for field, wanted in EXPRESSIONS:
        source = getattr(settings, field, None)
        if isinstance(source, str):
            more = _job_names(graph, step.name) if field == "condition" else {}
            yield from _expression(step.name, f"config.{field}", source, {**names, **more}, wanted)
    until = getattr(settings, "until", None)
    if until is not None:
        inner = graph.names_of(step.name, with_body=True)
        yield from _expression(step.name, "config.until", until, inner, ValueType.BOOLEAN)
    if step.step_type is StepType.FUNCTION and settings.function_name not in functions:
        hint = f"use one of {', '.join(sorted(functions))}" if functions else "no functions are registered"
        yield _problem(step.name, "config.function_name", settings.function_name, "there is no such function", hint)
    if step.step_type is StepType.JOB:
        yield from _job(graph, step, settings.job, names, policy)


def _job_names(graph: PipelineGraph, name: str) -> Mapping[str, ValueType]:
    """Return the names that a waiting condition also sees: what the jobs of earlier steps do now."""
    earlier = graph.ended_before(name)
    return {f"jobs.{one}": ValueType.TEXT for one in earlier if graph.steps[one].step_type is StepType.JOB}


def _template(step: str, field: str, text: str, names: Mapping[str, ValueType]) -> Iterator[AttributeProblem]:
    try:
        for source in expressions_in(text):
            compiled(source, names)
    except ExpressionInvalid as error:
        yield _problem(step, field, text, str(error), _hint(names))


def _expression(
    step: str, field: str, text: str, names: Mapping[str, ValueType], wanted: ValueType
) -> Iterator[AttributeProblem]:
    try:
        found = compiled(source_of(text), names)
    except ExpressionInvalid as error:
        yield _problem(step, field, text, str(error), _hint(names))
        return
    if not found.accepts(wanted):
        yield _problem(
            step, field, text, f"must give a {wanted.name.lower()}, and gives a {found.type_name}", "correct it"
        )


def _hint(names: Mapping[str, ValueType]) -> str:
    """Return what an expression may use: only steps that end before this one begins."""
    steps = sorted({name.split(".")[1] for name in names if name.startswith("steps.")})
    told = f"steps {', '.join(steps)}" if steps else "no steps, because depends_on names none"
    return f"expressions here may use inputs, run and {told}"


def _job(
    graph: PipelineGraph,
    step: PipelineStep,
    job: dict[str, Any],
    names: Mapping[str, ValueType],
    policy: MlPolicy | None,
) -> Iterator[AttributeProblem]:
    """Yield the problems of a job, with expressions over inputs replaced by the defaults; what depends on earlier
    steps is checked when the job is submitted."""
    for field in SET_BY_PIPELINE:
        if field in job:
            yield _problem(step.name, f"config.{field}", job[field], "the pipeline sets it", "remove it")
            return
    values = {f"inputs.{key}": value for key, value in graph.pipeline.inputs.items()}
    values |= {"run.id": SAMPLE_NAME, "run.pipeline": graph.pipeline.name}
    unknown: set[str] = set()
    sample = _sampled(job, names, values, (), unknown)
    for one in parse_job(json.dumps({"name": SAMPLE_NAME, **sample}).encode(), policy).problems:
        bare = one.attribute.removeprefix(PREFIX)
        if not unknown.intersection((one.attribute, bare)):
            yield AttributeProblem(one.attribute, one.value, one.limit, one.hint, step=f"steps.{step.name}.config")


def _sampled(
    value: Any,  # noqa: ANN401 - a value of JSON's types
    names: Mapping[str, ValueType],
    values: Mapping[str, Any],
    path: tuple[str | int, ...],
    unknown: set[str],
) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {key: _sampled(one, names, values, (*path, str(key)), unknown) for key, one in value.items()}
    if isinstance(value, list):
        return [_sampled(one, names, values, (*path, number), unknown) for number, one in enumerate(value)]
    try:
        return filled(value, names, values)
    except (ExpressionFailed, ExpressionInvalid):
        unknown.add(dotted(path).removeprefix("attributes."))
        return value
