"""A pipeline that cannot run is refused when it is created, with the name of the step."""

from typing import Any

import pytest

from atoll.pipelines.documents import parse_pipeline
from tests.pipelines.made import JOB, parsed, pipeline, step


def echo(value: Any) -> dict[str, Any]:
    """Return the config of a call with one parameter."""
    return {"function_name": "echo", "parameters": {"x": value}}


CASES: dict[str, tuple[list[Any], str]] = {
    "a cycle of two": (
        [step("a", "b"), step("b", "a")],
        "steps.a.depends_on the steps wait for each other: a -> b -> a",
    ),
    "a branch waits for what waits for its parallel": (
        [step("p", kind="parallel", config={"branches": ["b"]}), step("c", "p"), step("b", "c")],
        "the steps wait for each other",
    ),
    "a condition chooses what it waits for": (
        [step("a"), step("c", "a", kind="condition", config={"expression": "true", "if_true": "a"})],
        "the steps wait for each other",
    ),
    "an unknown dependency": ([step("a", "zz")], "steps.a.depends_on is 'zz': there is no such step"),
    "an unknown branch": (
        [step("p", kind="parallel", config={"branches": ["zz"]})],
        "steps.p.config.branches is 'zz': there is no such step",
    ),
    "two steps of one name": ([step("a"), step("a")], "steps.a.name is 'a': another step has it"),
    "a name that the language keeps": ([step("in")], "steps.in.name is 'in': is a word of the expression language"),
    "an unknown function": (
        [step("a", config={"function_name": "rm"})],
        "steps.a.config.function_name is 'rm': there is no such function; use one of echo, note",
    ),
    "an unknown field of a config": (
        [step("a", config={"function_name": "echo", "params": {}})],
        "steps.a.config.params is not known",
    ),
    "a wait for nothing": ([step("w", kind="wait", config={})], "steps.w.config is {}: give duration or condition"),
    "a duration without a unit": (
        [step("w", kind="wait", config={"duration": "5"})],
        "steps.w.config.duration is '5': must be a duration such as 30s",
    ),
    "a reference to a step that it does not wait for": (
        [step("a", kind="job"), step("b", config=echo("${steps.a.job_id}"))],
        "undeclared reference to 'steps.a.job_id'; expressions here may use inputs, run and no steps, because",
    ),
    "a field that the step does not give": (
        [
            step("a", kind="job"),
            step("b", "a", config=echo("${steps.a.body}")),
        ],
        "undeclared reference to 'steps.a.body'; expressions here may use inputs, run and steps a",
    ),
    "types that do not fit": (
        [
            step("a", kind="api_call", config={"url": "https://example.com"}),
            step("b", "a", config=echo("${steps.a.status_code + 'x'}")),
        ],
        "found no matching overload for '_+_' applied to '(int, string)'",
    ),
    "a condition that is a number": (
        [step("c", kind="condition", config={"expression": "1 + 1"})],
        "steps.c.config.expression is '1 + 1': must give a boolean, and gives a int",
    ),
    "items that are no list": (
        [step("l", kind="loop", config={"items": "${inputs.n}", "body_step": "b"}), step("b")],
        "steps.l.config.items is '${inputs.n}': must give a list, and gives a int",
    ),
    "a brace that is never closed": (
        [step("a", config=echo("${inputs.n"))],
        "without its closing brace",
    ),
    "a step in two parallels": (
        [
            step("p", kind="parallel", config={"branches": ["b"]}),
            step("q", kind="parallel", config={"branches": ["b"]}),
            step("b"),
        ],
        "steps.b.name p and q name it",
    ),
    "a loop around a loop": (
        [
            step("l", kind="loop", config={"items": [1], "body_step": "m"}),
            step("m", kind="loop", config={"items": [1], "body_step": "b"}),
            step("b"),
        ],
        "steps.m.step_type is 'loop': the body of loop l must be one of",
    ),
    "a dependency on the body of a loop": (
        [step("l", kind="loop", config={"items": [1], "body_step": "b"}), step("b"), step("c", "b")],
        "steps.c.depends_on is 'b': is the body of a loop; depend on l",
    ),
    "a job without an image": (
        [step("j", kind="job", config={"job_type": "batch"})],
        "steps.j.config.container.image must be given: a job without it has nothing to run",
    ),
    "a job whose input has the wrong type": (
        [step("j", kind="job", config=JOB | {"ext_ml_gpu_count": "${inputs.name}"})],
        "steps.j.config.ext_ml_gpu_count is 'x': must be a whole number",
    ),
    "a job that names itself": (
        [step("j", kind="job", config=JOB | {"name": "mine"})],
        "steps.j.config.name is 'mine': the pipeline sets it",
    ),
    "too many retries": ([step("a", retry={"max_retries": 21})], "steps.a.retry.max_retries is 21: may be at most 20"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_run_is_refused(name: str) -> None:
    """The message names step, field and value."""
    steps, wanted = CASES[name]

    found = parsed(*steps, inputs={"n": 3, "name": "x"})

    assert found.pipeline is None
    assert wanted in " | ".join(str(one) for one in found.problems)


def test_a_job_may_use_inputs_and_outputs() -> None:
    """Expressions over inputs are checked with the defaults; those over earlier steps when the job is submitted."""
    made = pipeline(
        step("prepare", kind="job"),
        step(
            "train",
            "prepare",
            kind="job",
            config=JOB
            | {"ext_ml_gpu_count": "${inputs.gpus}", "policy": {"max_runtime": "${size(steps.prepare.job_id)}"}},
        ),
        inputs={"gpus": 8},
    )

    assert [one.name for one in made.steps] == ["prepare", "train"]


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"name: x\nsteps: 3", b"\xff", b'{"name": "x", "steps": [3]}', b"null"]
)
def test_nonsense_is_refused_without_an_exception(data: bytes) -> None:
    """Every input gives a pipeline or problems."""
    assert parse_pipeline(data, functions=frozenset()).problems
