"""Envelopes of workflows become pipelines: the golden chain and group, and a batch with callbacks."""

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.ml.envelope import WorkflowEnvelope, parse
from atoll.pipelines.graph import PipelineGraph
from atoll.pipelines.workflows import WorkflowMistake, pipeline_of_workflow
from tests.pipelines.made import RUNNERS, pipeline
from tests.pipelines.test_deciding import play

EXAMPLES = Path(__file__).parents[2] / "examples" / "jobs"


def workflow_of(data: bytes) -> WorkflowEnvelope:
    """Return an envelope that must be a workflow."""
    found = parse(data).envelope
    assert isinstance(found, WorkflowEnvelope)
    return found


def made_of(workflow: WorkflowEnvelope) -> tuple[dict[str, Any], PipelineGraph]:
    """Return the document of its pipeline, and its graph."""
    document = pipeline_of_workflow(workflow, RUNNERS)
    return document, PipelineGraph(pipeline(*document["steps"], name=document["name"]))


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("chain", {"prepare_1": (), "train_2": ("prepare_1",), "evaluate_3": ("train_2",), "tell_4": ("evaluate_3",)}),
        ("group", {"text_1": (), "picture_2": (), "speech_3": ()}),
    ],
)
def test_the_golden_workflows_become_pipelines(name: str, waits: dict[str, tuple[str, ...]]) -> None:
    """A chain is one after the other, a group together; each job has the attributes of its own envelope alone."""
    workflow = workflow_of((EXAMPLES / f"{name}.yaml").read_bytes())
    document, graph = made_of(workflow)

    assert {step.name: step.depends_on for step in graph.pipeline.steps} == waits
    for step, job in zip(document["steps"], workflow.steps, strict=True):
        given = {key: value for key, value in step["config"].items() if key.startswith("ext_ml_")}
        assert given == job.attributes.to_json()
        meta = [one["value"] for one in step["config"]["container"].get("env", ()) if one["name"] == "ATOLL_META"]
        assert meta == ([json.dumps(dict(workflow.meta))] if workflow.meta else [])
    assert play(graph, {}).end.state == "succeeded"


BATCH = {
    "workflow_type": "batch",
    "name": "many",
    "meta": {"note": "${inputs.secret}"},
    "jobs": [{"id": "a", "type": "ml.infer"}, {"id": "b", "type": "ml.infer"}],
    "callbacks": {key: {"type": "report.send"} for key in ("on_success", "on_failure", "on_complete")},
}


@pytest.mark.parametrize(("fails", "skipped"), [({}, "on_failure"), ({"a_1": 9}, "on_success")])
def test_the_callbacks_of_a_batch_follow_its_jobs(fails: dict[str, int], skipped: str) -> None:
    """One of two, and on_complete always."""
    _, graph = made_of(workflow_of(json.dumps(BATCH).encode()))
    states = play(graph, fails).states()

    assert {key for key, state in states.items() if state == "skipped"} == {skipped}
    assert states["on_complete"] == "succeeded"


def test_text_of_an_envelope_is_no_expression() -> None:
    """Meta and arguments reach the container as they stand."""
    document, _ = made_of(workflow_of(json.dumps(BATCH).encode()))

    assert document["steps"][0]["config"]["container"]["env"][0]["value"] == '{"note": "$${inputs.secret}"}'


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ({"timeout": 60}, 60),
        ({"timeout": 60, "ext_ml_timeout_seconds": 7200}, 7200),
        ({"timeout": 0}, None),
        ({}, None),
    ],
)
def test_the_timeout_of_an_envelope_limits_its_job(said: dict[str, Any], seconds: int | None) -> None:
    """That of the attributes replaces the envelope's own."""
    workflow = {"workflow_type": "chain", "steps": [{"id": "a", "type": "data.prepare", **said}]}
    document, _ = made_of(workflow_of(json.dumps(workflow).encode()))

    assert document["steps"][0]["config"].get("policy", {}).get("max_runtime") == seconds


@pytest.mark.parametrize("said", [{}, {"priority": 0}])
def test_an_envelope_without_a_number_has_the_priority_of_its_class(said: dict[str, int]) -> None:
    """0 is what producers send that set none."""
    step = {"id": "a", "type": "data.prepare", "ext_ml_priority_class": "spot", **said}
    document, _ = made_of(workflow_of(json.dumps({"workflow_type": "chain", "steps": [step]}).encode()))

    assert document["steps"][0]["config"]["ext_ml_priority_class"] == "spot"


@pytest.mark.parametrize("number", [-1, 7])
def test_a_number_that_would_order_nothing_is_refused(number: int) -> None:
    """Kueue orders by classes and then by time; whoever sends a number expects more."""
    step = {"id": "a", "type": "data.prepare", "priority": number}
    workflow = workflow_of(json.dumps({"workflow_type": "chain", "steps": [step]}).encode())

    with pytest.raises(WorkflowMistake, match=rf"steps\.a_1\.priority is {number}: a number orders no jobs"):
        pipeline_of_workflow(workflow, RUNNERS)


def test_a_type_that_nothing_runs_is_refused() -> None:
    """With the step and the known types."""
    workflow = workflow_of(b"workflow_type: chain\nsteps: [{id: a, type: ml.unknown}]")

    with pytest.raises(WorkflowMistake, match=r"steps\.a_1\.type is ml\.unknown: must be one of data\.prepare"):
        pipeline_of_workflow(workflow, RUNNERS)
