"""Checks the inputs of a run against the pipeline's."""

from collections.abc import Mapping
from typing import Any

from atoll.ml.problems import shown
from atoll.pipelines.expressions import is_json, type_of
from atoll.pipelines.model import Pipeline
from jobs.problems import mistaken


def checked_inputs(pipeline: Pipeline, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a run. Raises ApiRefusal for unknown names and other types than the defaults have."""
    for name, value in given.items():
        if name not in pipeline.inputs:
            known = ", ".join(sorted(pipeline.inputs)) or "none"
            raise mistaken(f"inputs.{name}", value, "the pipeline has no such input", f"its inputs: {known}")
        default = pipeline.inputs[name]
        if not is_json(value) or (default is not None and type_of(value) is not type_of(default)):
            limit = f"must have the type {type_of(default).name.lower()}, as its default {shown(default)}"
            raise mistaken(f"inputs.{name}", value, limit, "correct it")
    return dict(given)
