"""Turns an envelope of a workflow (chain, group, batch) into a pipeline of jobs.

Steps inherit nothing from each other: each job has the attributes of its own envelope. The workflow's `meta` goes to
all, as a variable. An envelope says what a job needs and not what it runs; that comes from a job document per type.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from atoll.ml.envelope import JobEnvelope, WorkflowEnvelope, WorkflowType
from atoll.ml.problems import AttributeProblem, one_of
from atoll.pipelines.expressions import ESCAPED, OPEN

META_VARIABLE: Final = "ATOLL_META"
ARGS_VARIABLE: Final = "ATOLL_ARGS"
ALL_SUCCEEDED: Final = "all_succeeded"

Runners = Mapping[str, Mapping[str, Any]]
"""What runs a type of envelope: a job document without name, such as {"job_type": ..., "container": ...}."""


class WorkflowMistake(Exception):
    """The workflow cannot become a pipeline; `problem` names the step."""

    def __init__(self, problem: AttributeProblem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def pipeline_of_workflow(workflow: WorkflowEnvelope, runners: Runners) -> dict[str, Any]:
    """Return the document of a pipeline. Raises WorkflowMistake.

    A chain is one step after the other; a group runs together. A batch with callbacks does not fail with one of its
    jobs: on_success or on_failure follows, and on_complete always.
    """
    names = [_step_name(job, number) for number, job in enumerate(workflow.jobs, 1)]
    steps = [_step(name, job, runners) for name, job in zip(names, workflow.jobs, strict=True)]
    if workflow.workflow_type is WorkflowType.CHAIN:
        for earlier, step in zip(names, steps[1:], strict=False):
            step["depends_on"] = [earlier]
    if workflow.callbacks:
        for step in steps:
            step["on_failure"] = "continue"
        steps += _callbacks(workflow, names, runners)
    name = re.sub(r"[^a-z0-9]+", "-", (workflow.name or workflow.id or "workflow").lower()).strip("-")[:40]
    return {"name": name if name[:1].isalpha() else f"w-{name}"[:40].rstrip("-"), "steps": steps}


def _callbacks(workflow: WorkflowEnvelope, names: list[str], runners: Runners) -> list[dict[str, Any]]:
    with_meta = {key: replace(job, meta={**workflow.meta, **job.meta}) for key, job in workflow.callbacks.items()}
    jobs = {key: _step(key, job, runners) for key, job in with_meta.items()}
    if "on_complete" in jobs:
        jobs["on_complete"]["depends_on"] = names
    states = " && ".join(f"steps.{name}.state == 'succeeded'" for name in names)
    sides = {side: key for side, key in (("if_true", "on_success"), ("if_false", "on_failure")) if key in jobs}
    condition = {
        "name": ALL_SUCCEEDED,
        "step_type": "condition",
        "depends_on": names,
        "config": {"expression": states, **sides},
    }
    return [condition, *jobs.values()]


def _step(name: str, job: JobEnvelope, runners: Runners) -> dict[str, Any]:
    runner = runners.get(job.type)
    if runner is None:
        known = one_of(sorted(runners)) if runners else "nothing runs any type"
        hint = "say in the file of runners what runs it, or correct the type"
        raise WorkflowMistake(AttributeProblem("type", job.type, known, hint, step=f"steps.{name}"))
    if job.priority:
        hint = "remove it, or give ext_ml_priority_class; jobs of one class run in the order of submission"
        raise WorkflowMistake(
            AttributeProblem("priority", str(job.priority), "a number orders no jobs", hint, step=f"steps.{name}")
        )
    document = json.loads(json.dumps(runner))
    container = document.setdefault("container", {})
    told = {META_VARIABLE: dict(job.meta), ARGS_VARIABLE: list(job.args)}
    variables = [{"name": key, "value": _literal(json.dumps(value))} for key, value in told.items() if value]
    if variables:
        container["env"] = [*container.get("env", []), *variables]
    if job.queue:
        document.setdefault("policy", {}).setdefault("queue_name", job.queue)
    if job.execution_timeout_seconds is not None:
        document.setdefault("policy", {})["max_runtime"] = job.execution_timeout_seconds
    return {"name": name, "step_type": "job", "config": document | job.attributes.to_json()}


def _literal(text: str) -> str:
    """Return a text in which no expression is replaced."""
    return text.replace(OPEN, ESCAPED)


def _step_name(job: JobEnvelope, number: int) -> str:
    name = re.sub(r"[^a-z0-9]+", "_", (job.id or job.type).lower()).strip("_")[:32].rstrip("_")
    return f"{name}_{number}" if name[:1].isalpha() else f"step_{number}"
