"""Builders of pipelines."""

import json
from typing import Any

from atoll.pipelines.documents import ParsedPipeline, parse_pipeline
from atoll.pipelines.graph import PipelineGraph
from atoll.pipelines.model import Pipeline

FUNCTIONS = frozenset({"echo", "note"})
RUNNERS = {
    kind: {"job_type": "training" if kind == "ml.train" else "batch", "container": {"image": f"{kind}:1"}}
    for kind in ("data.prepare", "ml.train", "ml.evaluate", "report.send", "ml.infer")
}
JOB = {"job_type": "batch", "container": {"image": "busybox:1"}}


def step(name: str, *depends_on: str, kind: str = "function", config: Any = None, **fields: Any) -> dict[str, Any]:
    """Return a step as it stands in a document; a call of `echo` by default."""
    defaults = {"function": {"function_name": "echo"}, "job": JOB}
    given = defaults.get(kind, {}) if config is None else config
    return {"name": name, "step_type": kind, "config": given, "depends_on": list(depends_on), **fields}


def parsed(*steps: Any, **fields: Any) -> ParsedPipeline:
    """Parse a pipeline of steps."""
    document = {"name": "nightly", "steps": list(steps), **fields}
    return parse_pipeline(json.dumps(document).encode(), functions=FUNCTIONS)


def pipeline(*steps: Any, **fields: Any) -> Pipeline:
    """Return a pipeline that must be valid."""
    found = parsed(*steps, **fields)
    assert found.pipeline is not None, [str(one) for one in found.problems]
    return found.pipeline


def graph(*steps: Any, **fields: Any) -> PipelineGraph:
    """Return the graph of a pipeline that must be valid."""
    return PipelineGraph(pipeline(*steps, **fields))
