"""Words for what pydantic finds wrong in a pipeline."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pydantic import BaseModel, ValidationError

from atoll.ml.problems import Problems
from atoll.ml.wording import LineOf, nowhere, problems_of_errors

FORMS: Final[Mapping[str, str]] = {
    "name": "must be lower-case letters, digits and, in a step, underscores; a letter first",
    "method": "must be GET, POST, PUT, PATCH or DELETE",
    "channel": "must be slack, email or webhook",
    **dict.fromkeys(("duration", "timeout", "delay", "poll_interval"), "must be a duration such as 30s, 5m, 2h or 1d"),
}


def faults_of(error: ValidationError, model: type[BaseModel], *, step: str = "", line_of: LineOf = nowhere) -> Problems:
    """Return one problem for each error of a model."""
    told = problems_of_errors(error, model, prefix="", step=step, line_of=line_of)
    out = []
    for detail, problem in zip(error.errors(include_url=False), told, strict=True):
        kind, field = detail["type"], next((part for part in reversed(detail["loc"]) if isinstance(part, str)), "")
        if kind == "value_error":
            limit, _, hint = str(detail["ctx"]["error"]).partition("; ")
            problem = replace(problem, limit=limit, hint=hint or "change it")
        elif kind in ("string_pattern_mismatch", "int_type", "int_parsing") and field in FORMS:
            problem = replace(problem, limit=FORMS[field], hint="correct it")
        out.append(problem)
    return tuple(out)
