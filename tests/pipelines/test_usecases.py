"""Templates of use cases: their parameters, the pipelines that they become, and the states of a deployment."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from atoll.jobs.states import JobState
from atoll.pipelines.documents import parse_pipeline
from atoll.pipelines.usecases import UseCaseTemplate, deployment_state
from atoll.pipelines.words import RunState

SHIPPED = sorted((Path(__file__).parents[2] / "pipelines" / "templates").glob("*.yaml"))
PARAMETERS = {
    "size": {"type": "integer", "default": 2, "minimum": 1, "maximum": 4},
    "rate": {"type": "number", "default": 1},
    "kind": {"type": "string", "enum": ["a", "b"], "default": "a"},
    "image": {"type": "string", "pattern": "^[a-z/:.0-9]+$", "maxLength": 12},
    "debug": {"type": "boolean", "default": False},
}


def template(**changes: Any) -> UseCaseTemplate:
    """Return a template of one component."""
    job = {"container": {"image": "${inputs.image}"}}
    fields = {"id": "t", "components": [{"name": "a", "port": 80, "job": job}], "entrypoint": "a"}
    return UseCaseTemplate.model_validate(fields | {"parameters": PARAMETERS} | changes)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda one: one.stem)
def test_a_shipped_template_becomes_a_pipeline_without_mistakes(file: Path) -> None:
    """Its components are services; the entry point is one of them; GPUs are where models are served."""
    made = UseCaseTemplate.model_validate(yaml.safe_load(file.read_text()))
    document = made.pipeline("help", tenant="acme", project=None, namespace="tenant-acme")
    document["inputs"] |= dict.fromkeys(made.parameter_schema()["required"], "registry.example.com/a:1")
    parsed = parse_pipeline(json.dumps(document).encode(), functions=frozenset())

    assert parsed.problems == ()
    assert {one.name for one in made.components if "ext_ml_gpu_count" in one.job} <= {"embedder", "model_server"}
    assert made.parameter_schema()["required"]


def test_three_families_are_shipped() -> None:
    """RAG, chatbot, agent."""
    assert [one.stem for one in SHIPPED] == ["agent", "chatbot", "rag"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"image": "a:1"}, []),
        ({"image": "a:1", "size": 4, "rate": 2, "kind": "b", "debug": True}, []),
        ({}, ["parameters.image"]),
        ({"image": "A:1"}, ["must match"]),
        ({"image": "a" * 13}, ["at most 12 characters"]),
        ({"image": "a", "size": 5}, ["at most 4"]),
        ({"image": "a", "size": 0}, ["at least 1"]),
        ({"image": "a", "size": True}, ["of type integer"]),
        ({"image": "a", "size": 1.5}, ["of type integer"]),
        ({"image": "a", "kind": "c"}, ["one of a, b"]),
        ({"image": "a", "other": 1}, ["no such parameter"]),
        ({"image": 3, "debug": "yes"}, ["of type string", "of type boolean"]),
    ],
)
def test_parameters_are_checked_by_their_schema(given: dict[str, Any], told: list[str]) -> None:
    """Each mistake once."""
    found = [str(one) for one in template().mistakes(given)]

    assert len(found) == len(told)
    assert all(want in one for want, one in zip(told, found, strict=True))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"entrypoint": "b"}, "is no component"),
        ({"parameters": {"usecase": {"type": "string"}}}, "the service gives"),
        ({"parameters": {"a": {"type": "integer", "default": "x"}}}, "must be of type integer"),
        ({"parameters": {"a": {"type": "array"}}}, "pattern"),
    ],
)
def test_a_template_that_cannot_work_is_refused(changes: dict[str, Any], told: str) -> None:
    """With the reason."""
    with pytest.raises(ValidationError, match=told):
        template(**changes)


RUNNING, QUEUED, FAILED = JobState.RUNNING, JobState.QUEUED, JobState.FAILED


@pytest.mark.parametrize(
    ("run", "jobs", "wanted"),
    [
        (RunState.PENDING, [], "deploying"),
        (RunState.RUNNING, [RUNNING, QUEUED], "deploying"),
        (RunState.SUCCEEDED, [RUNNING, RUNNING], "healthy"),
        (RunState.SUCCEEDED, [RUNNING, QUEUED], "degraded"),
        (RunState.SUCCEEDED, [RUNNING, FAILED], "degraded"),
        (RunState.SUCCEEDED, [FAILED, FAILED], "failed"),
        (RunState.FAILED, [RUNNING, FAILED], "failed"),
        (RunState.CANCELLED, [], "failed"),
    ],
)
def test_states_of_a_deployment(run: RunState, jobs: Sequence[JobState], wanted: str) -> None:
    """From the run and its jobs; deleting comes before all."""
    assert deployment_state(run, jobs, is_deleting=False) == wanted
    assert deployment_state(run, jobs, is_deleting=True) == "deleting"
