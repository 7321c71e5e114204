"""Envelopes: jobs and workflows, the two places of attributes, round trips, and refusals that name the cause."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.ml.attributes import NAMES, PREFIX, MlAttributes
from atoll.ml.envelope import JobEnvelope, WorkflowEnvelope, WorkflowType, parse
from atoll.ml.reference import page
from atoll.ml.schema import envelope_schema, main
from tests.ml.strategies import jobs, raw_attributes, workflows

SCHEMA = jsonschema.Draft202012Validator(envelope_schema())
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "jobs").glob("*.[jy]*"))


def read(value: Any) -> Any:
    """Parse a value as JSON says it."""
    return parse(json.dumps(value).encode())


@given(jobs() | workflows())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_valid_envelope_comes_back_as_it_went_in(value: dict[str, Any]) -> None:
    """From JSON and from YAML the same is read, what it says reads to the same again, and the schema takes it."""
    found = read(value)

    assert found.problems == ()
    assert parse(yaml.safe_dump(value).encode()).envelope == found.envelope
    assert read(found.envelope.to_json()).envelope == found.envelope
    assert list(SCHEMA.iter_errors(value)) == []


WRONG = {
    "gpu_count": (-1, 513, "8", 1.5), "gpu_type": ("H100", 1), "gpu_memory_gb": (0, 2000, "x"), "precision": ("fp4", 1),
    "accelerator": ("npu",), "tpu_topology": ("4",), "memory_gb": (-1, 10**9), "runtime": ("jax",), "max_tokens": (0,),
    "model_version": (1.0, ""), "model_checksum": ("x",), "timeout_seconds": (0, 10**10), "preemptible": (1, "yes"),
    "node_selector": ({"a b": "c"}, {"a": 1}, []), "affinity": ({"required": [{}]}, {"x": 1}),
    "priority_class": ("top",),
    "checkpoint_storage_uri": (1, ""), "checkpoint_max_count": (0, 2000), "escalation_target_class": (1, "x"),
    "cpu_cores": (0.5, 0), "reservation_id": ("A", ""), "model_registry": ("x",), "distributed_strategy": ("ddp",),
}  # fmt: skip


@given(raw_attributes(), st.sampled_from(sorted(WRONG)), st.data())
@settings(deadline=None)
def test_invalid_envelope_is_refused_with_the_attribute_named(
    value: dict[str, Any], name: str, data: st.DataObject
) -> None:
    """One wrong value among right ones is found, by us and by the schema, and no other is blamed."""
    key = PREFIX + name
    spoilt = {**value, key: data.draw(st.sampled_from(WRONG[name]))}
    found = read(spoilt)

    assert found.envelope is None
    assert {problem.attribute.partition(".")[0].partition("[")[0] for problem in found.problems} == {key}
    assert list(SCHEMA.iter_errors(spoilt))


def test_job_with_one_attribute_is_enough() -> None:
    """A count of GPUs is a job."""
    assert read({"ext_ml_gpu_count": 1}).envelope == JobEnvelope(attributes=MlAttributes(gpu_count=1))


def test_envelope_without_attributes_is_none_of_our_business() -> None:
    """Everything but ext_ml_ is kept as it stands."""
    found = read(
        {"type": "email.send", "args": ["x"], "container": {"image": "a"}, "ext_other": 1, "retry": {"max": 3}}
    )

    assert found.envelope == JobEnvelope(
        type="email.send", args=("x",), others={"container": {"image": "a"}, "ext_other": 1, "retry": {"max": 3}}
    )


def test_attributes_may_stand_in_their_own_mapping() -> None:
    """In the envelope or under `attributes`, each once."""
    flat, nested = read({"ext_ml_gpu_count": 2}), read({"attributes": {"ext_ml_gpu_count": 2}})
    both = read({"ext_ml_gpu_count": 2, "attributes": {"ext_ml_gpu_count": 2, "ext_ml_gpu_type": "nvidia-l4"}})

    assert flat.envelope == nested.envelope
    assert [problem.attribute for problem in both.problems] == ["ext_ml_gpu_count"]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ({"timeout": 60, "ext_ml_timeout_seconds": 7200}, 7200),
        ({"timeout": 7200, "ext_ml_timeout_seconds": 60}, 60),
        ({"timeout": 60}, 60),
        ({"ext_ml_timeout_seconds": 60}, 60),
        ({"timeout": 0}, None),
        ({}, None),
    ],
)
def test_timeout_of_the_attributes_is_the_only_one(value: dict[str, Any], seconds: int | None) -> None:
    """The job's own timeout counts where the attribute is left out, and 0 is none."""
    assert read(value).envelope.execution_timeout_seconds == seconds


CHAIN = {
    "workflow_type": "chain",
    "meta": {"experiment": "exp-42", "run": 1},
    "steps": [
        {"type": "data.prepare", "ext_ml_cpu_cores": 16},
        {"type": "ml.train", "ext_ml_gpu_count": 8, "meta": {"run": 2}},
        {"type": "report.send"},
    ],
}


def test_steps_share_meta_and_inherit_no_attribute() -> None:
    """A step without attributes has none, whatever stands beside it."""
    envelope = read(CHAIN).envelope

    assert isinstance(envelope, WorkflowEnvelope)
    assert [job.attributes.given() for job in envelope.jobs] == [{"cpu_cores": 16}, {"gpu_count": 8}, {}]
    assert [job.meta["run"] for job in envelope.jobs] == [1, 2, 1]
    assert {job.meta["experiment"] for job in envelope.jobs} == {"exp-42"}


def test_workflow_may_be_told_by_its_type() -> None:
    """`type: chain` with steps is a workflow; a job of any other type keeps what it calls steps."""
    told = {**{key: value for key, value in CHAIN.items() if key != "workflow_type"}, "type": "chain"}

    assert read(told).envelope == read(CHAIN).envelope
    assert read({"type": "chain"}).envelope == JobEnvelope(type="chain")
    assert read({"type": "ml.train", "steps": 5}).envelope == JobEnvelope(type="ml.train", others={"steps": 5})


def test_batch_has_callbacks() -> None:
    """Callbacks are jobs with attributes of their own."""
    found = read({
        "workflow_type": "batch",
        "jobs": [{"ext_ml_gpu_count": 1}],
        "callbacks": {"on_success": {"type": "report.send", "ext_ml_cpu_cores": 1}},
    })  # fmt: skip

    assert found.envelope.workflow_type is WorkflowType.BATCH
    assert found.envelope.callbacks["on_success"].attributes == MlAttributes(cpu_cores=1)


def changed(**fields: Any) -> dict[str, Any]:
    """Return the chain with other fields."""
    return {**copy.deepcopy(CHAIN), **fields}


REFUSED: dict[str, tuple[Any, str]] = {
    "a list": ([], "the document must be a mapping"),
    "a number": (8, "the document must be a mapping"),
    "an attribute on the workflow": (changed(ext_ml_gpu_count=1), "ext_ml_gpu_count must stand on a job"),
    "attributes on the workflow": (changed(attributes={}), "attributes must stand on a job"),
    "a workflow of another type": (changed(workflow_type="graph"), "must be one of chain, group, batch"),
    "a chain of jobs": (
        {"workflow_type": "chain", "jobs": [{}]}, "jobs must be called steps in a chain",
    ),
    "a group of steps": ({"workflow_type": "group", "steps": [{}]}, "steps must be called jobs in a group"),
    "a chain without steps": (changed(steps=[]), "steps is 0 entries: must be a list of 1 to 64 jobs"),
    "a chain that forgot its steps": ({"workflow_type": "chain"}, "steps must be a list of 1 to 64 jobs"),
    "steps that are a number": (changed(steps=5), "steps is 5: must be a list of 1 to 64 jobs"),
    "a chain of too many": (changed(steps=[{}] * 65), "steps is 65 entries"),
    "a step that is text": (changed(steps=["train"]), "steps[0] is 'train': must be a job"),
    "a workflow in a step": (changed(steps=[{"steps": []}]), "steps[0].steps must not stand in a step"),
    "a step that depends on another": (changed(steps=[{"depends_on": ["a"]}]), "steps[0].depends_on is not known"),
    "a job that depends on another": ({"depends_on": ["a"]}, "depends_on is not known"),
    "callbacks of a chain": (changed(callbacks={}), "callbacks must be a mapping in a workflow of type batch"),
    "a callback that there is not": (
        {"workflow_type": "batch", "jobs": [{}], "callbacks": {"on_start": {}}}, "must be one of on_complete",
    ),
    "a wrong attribute in a step": (
        changed(steps=[{}, {"ext_ml_precision": "fp4"}]), "steps[1].ext_ml_precision is 'fp4': must be one of fp32",
    ),
    "a wrong attribute in a callback": (
        {"workflow_type": "batch", "jobs": [{}], "callbacks": {"on_success": {"ext_ml_gpu_count": "1"}}},
        "callbacks.on_success.ext_ml_gpu_count is '1': must be a whole number",
    ),
    "attributes that are a list": ({"attributes": ["ext_ml_gpu_count"]}, "attributes is ['ext_ml_gpu_count']: must be"),
    "an attribute without a value": ({"ext_ml_gpu_type": None}, "ext_ml_gpu_type must have a value"),
    "a queue in capitals": ({"queue": "GPU"}, "queue is 'GPU'"),
    "an id with blanks": ({"id": "a b"}, "id is 'a b'"),
    "args that are a mapping": ({"args": {}}, "args is {}: must be a list"),
    "meta that is a list": ({"meta": []}, "meta is []: must be a mapping"),
    "a timeout in words": ({"timeout": "60s"}, "timeout is '60s': must be a whole number"),
}  # fmt: skip


@pytest.mark.parametrize(("value", "text"), REFUSED.values(), ids=REFUSED)
def test_envelope_of_another_shape_is_refused_in_words(value: Any, text: str) -> None:
    """Each refusal names the part, the value and what may stand there."""
    problems = read(value).problems

    assert any(text in str(problem) for problem in problems), [str(problem) for problem in problems]


def test_problems_come_in_the_order_of_their_lines() -> None:
    """Who reads the list edits from top to bottom."""
    text = b"ext_ml_priority_class: top\nattributes:\n  ext_ml_gpu_count: 0.5\n  ext_ml_gpu_types: x\nqueue: GPU\n"

    assert [(problem.line, problem.attribute) for problem in parse(text).problems] == [
        (1, "ext_ml_priority_class"),
        (3, "ext_ml_gpu_count"),
        (4, "ext_ml_gpu_types"),
        (5, "queue"),
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_schema_takes_the_examples(path: Path) -> None:
    """An editor that checks by the schema has nothing to say of them."""
    assert list(SCHEMA.iter_errors(yaml.safe_load(path.read_text()))) == []


@pytest.mark.parametrize(
    "value",
    [
        {"ext_ml_gpus": 1},
        {"attributes": {"ext_ml_gpus": 1}},
        {"ext_ml_gpu_count": 513},
        {"workflow_type": "chain", "jobs": [{}]},
        {"workflow_type": "group", "jobs": [{"ext_ml_precision": "fp4"}]},
        {"workflow_type": "group", "jobs": [{}], "ext_ml_gpu_count": 1},
    ],
)
def test_what_the_schema_refuses_is_refused(value: dict[str, Any]) -> None:
    """Unknown attributes, bounds and shapes stand in the schema too."""
    assert list(SCHEMA.iter_errors(value))
    assert read(value).envelope is None


def test_schema_is_valid_and_describes_every_attribute() -> None:
    """It is a schema of its dialect, with all 42 attributes."""
    schema = envelope_schema()

    jsonschema.Draft202012Validator.check_schema(schema)
    assert list(schema["$defs"]["Attributes"]["properties"]) == [PREFIX + name for name in NAMES]


def test_published_files_are_the_generated_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stale file is told of, with the command that writes it."""
    assert main(["--check"]) == 0
    assert main(["--check", "--directory", str(tmp_path)]) == 1
    assert "run python -m atoll.ml.schema" in capsys.readouterr().err
    assert main(["--directory", str(tmp_path)]) == 0
    assert main(["--check", "--directory", str(tmp_path)]) == 0


def test_page_tells_of_every_attribute_and_default() -> None:
    """What the page says is what happens."""
    text = page()

    assert [name for name in NAMES if f"| `{PREFIX}{name}` |" not in text] == []
    assert "| `ext_ml_escalation_after_s` | whole number, at least 0, at most 31622400 | `3600` |" in text
