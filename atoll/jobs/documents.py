"""Parses a job from JSON or YAML: a Job, or all its problems, each with its line.

No input raises an exception. atoll.ml parses and bounds the bytes and checks the attributes; this module words problems
of a job's fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from atoll.api.forms import form_of
from atoll.jobs.base import NEW
from atoll.jobs.container import is_of_kernel
from atoll.jobs.errors import JobMistake
from atoll.jobs.model import Job, gathered
from atoll.jobs.working_out import given_attributes
from atoll.ml.attributes import NAMES, PREFIX, MlAttributes
from atoll.ml.document import Document, Path, read
from atoll.ml.infer import complete
from atoll.ml.policy import MlPolicy
from atoll.ml.problems import AttributeProblem, Problems, shown
from atoll.ml.rules import KEY_REFUSED, complaints
from atoll.ml.wording import LineOf, dotted, problem_of_complaint, problems_of_errors

ATTRIBUTES: Final = "attributes"
ELSEWHERE: Final[Mapping[str, str]] = {
    "depends_on": "a job waits for no other: a pipeline of two steps does, or a trigger of type dependency",
    "time_window": "windows belong to the triggers of pipelines; policy.scheduled_start is one moment",
    "time_windows": "windows belong to the triggers of pipelines; policy.scheduled_start is one moment",
    "schedule": "a trigger of type cron starts a job again and again; policy.scheduled_start does once",
    "cron": "a trigger of type cron starts a job again and again; policy.scheduled_start does once",
    "image": "write it as container.image",
    "command": "write it as container.command",
    "args": "write them as container.args",
    "env": "write it as container.env",
    "gpus": "write ext_ml_gpu_count, or resources.gpu_count",
    "replicas": "write policy.min_replicas for a service, parallelism for a batch, workers for a training",
    "priority": "a number orders no jobs: write policy.priority_class",
    "checkpoint_config": "write it as intent.checkpoint_config",
}
"""Fields that people look for in a job, and their right places."""
FORMS: Final[Mapping[str, str]] = {
    "name": "must be lower-case letters, digits and dashes, and begin with a letter",
    "image": "must be the name of a container image",
    "tenant_id": "must be lower-case letters, digits and dashes",
    "queue_name": "must be the name of a LocalQueue: lower-case letters, digits and dashes",
    "mount_path": "must be a whole path such as /data, without dots that lead elsewhere",
    "checkpoint_path": "must be a whole path such as /checkpoints, without dots that lead elsewhere",
    "working_dir": "must be a whole path such as /work, without dots that lead elsewhere",
    "cpu_request": 'must be cores such as 4, "0.5" or 500m',
    "cpu_limit": 'must be cores such as 4, "0.5" or 500m',
    "memory_request": "must be a size such as 64Gi or 64G",
    "memory_limit": "must be a size such as 64Gi or 64G",
    "storage_size": "must be a size such as 100Gi",
    "empty_size": "must be a size such as 10Gi",
    "gpu_memory_hint": "must be a size such as 40GB",
    "id": "must be a uuid",
}
_TIMES: Final = ("datetime", "timezone")
_MESSAGES: Final[Mapping[str, str]] = {
    "string_too_long": "may have {max_length} characters",
    "string_too_short": "must not be empty",
    "too_long": "may have {max_length} entries",
}


@dataclass(frozen=True, slots=True)
class ParsedJob:
    """A job, or why there is none."""

    job: Job | None
    problems: Problems
    document: Document

    def located(self, problem: AttributeProblem) -> AttributeProblem:
        """Add the line of its field to a problem that was found later."""
        path = tuple(part for part in problem.attribute.split(".") if part)
        return replace(problem, line=problem.line if problem.line is not None else _line(self.document, path))


def parse_job(data: bytes | Document, policy: MlPolicy | None = None) -> ParsedJob:
    """Parse a job, or one that was read already. `policy`: the administrators' limits on attributes."""
    document = read(data) if isinstance(data, bytes) else data
    if isinstance(document, AttributeProblem):
        return ParsedJob(None, (document,), Document(None))
    value = document.value
    if not isinstance(value, dict):
        has = "nothing" if value is None else shown(value)
        problem = AttributeProblem("", has, "must be a mapping", "write name, job_type and the like", 1)
        return ParsedJob(None, (problem,), document)
    other = _envelope(value) or _manifest(value)
    if other is not None:
        return ParsedJob(None, (replace(other, line=_line(document, (other.attribute,))),), document)
    try:
        fields = gathered(value)
    except JobMistake as mistake:
        found = mistake.problem
        return ParsedJob(None, (replace(found, line=_line(document, (found.attribute,))),), document)
    attributes, problems = _attributes(fields, document)
    try:
        job = Job.model_validate(fields | {ATTRIBUTES: attributes}, context=NEW)
    except ValidationError as error:
        told = problems or _rules(attributes, policy or MlPolicy(), document)
        return ParsedJob(None, (*told, *problems_of_fields(error, document, Job)), document)
    if not problems:
        rules = policy or MlPolicy()
        problems = (
            *_rules(given_attributes(job), rules, document),
            *_selector_keys(job, rules, document),
            *_kernel_folders(job, document),
        )
    return ParsedJob(None if problems else job, problems, document)


def _envelope(value: Mapping[str, Any]) -> AttributeProblem | None:
    """Return the problem if the document is an envelope of attributes: it describes needs, but nothing to run."""
    key = next((key for key in ("workflow_type", "type") if key in value), None)
    if key is None or "job_type" in value or "container" in value:
        return None
    each = "each of its steps as a job" if key == "workflow_type" else "a job"
    hint = f"write {each} with name, job_type and container beside the attributes, as in examples/jobs/complete"
    return AttributeProblem(
        key, shown(value[key]), "makes this an envelope of attributes, which has nothing to run", hint
    )


def _manifest(value: Mapping[str, Any]) -> AttributeProblem | None:
    """Return the problem if the document is an object of Kubernetes."""
    if not {"apiVersion", "kind"} <= value.keys():
        return None
    hint = "give it to kubectl, or write a job with name, job_type and container"
    return AttributeProblem("kind", shown(value["kind"]), "makes this an object of Kubernetes, which is no job", hint)


def _attributes(fields: Mapping[str, Any], document: Document) -> tuple[MlAttributes, Problems]:
    given = fields.get(ATTRIBUTES, {})
    if not isinstance(given, dict):
        hint = f"write {PREFIX}gpu_count: 1 and the like below it"
        has = "" if given is None else shown(given)
        problem = AttributeProblem(ATTRIBUTES, has, "must be a mapping", hint, document.line_of((ATTRIBUTES,)))
        return MlAttributes(), (problem,)
    empty = [name for name in NAMES if name in given and given[name] is None]
    if empty:
        limit, hint = "must have a value", "write one, or remove the line"
        return MlAttributes(), tuple(
            AttributeProblem(PREFIX + name, "", limit, hint, _line(document, (PREFIX + name,))) for name in empty
        )
    try:
        return MlAttributes.model_validate(given), ()
    except ValidationError as error:
        told = problems_of_errors(error, MlAttributes, line_of=_line_of(document))
        return MlAttributes(), tuple(_unprefixed(one) for one in told)


def _unprefixed(problem: AttributeProblem) -> AttributeProblem:
    """Return the problem of an attribute written without its prefix."""
    name, found, _ = problem.attribute.removeprefix(PREFIX).partition(" (without")
    if not found:
        return problem
    return replace(problem, attribute=name, limit=f"attributes begin with {PREFIX}", hint=f"write {PREFIX}{name}")


def _rules(given: MlAttributes, policy: MlPolicy, document: Document) -> Problems:
    """Return the broken rules over the attributes, as given and after inference."""
    for attributes in (given, complete(given).attributes):
        found = complaints(attributes, policy)
        if found:
            return tuple(problem_of_complaint(one, attributes, line_of=_line_of(document)) for one in found)
    return ()


def _selector_keys(job: Job, policy: MlPolicy, document: Document) -> Problems:
    """Return the node labels that a job's policy selects by, and may not: those of its attributes are checked there."""
    limit, hint = KEY_REFUSED
    paths = [("policy", "node_selector", key) for key in job.policy.node_selector or {} if not policy.allows_key(key)]
    return tuple(AttributeProblem(dotted(path), "", limit, hint, _line(document, path)) for path in paths)


def _kernel_folders(job: Job, document: Document) -> Problems:
    """Return the volumes over the kernel's folders. No rule of the model: records of older jobs must stay readable."""
    return tuple(
        AttributeProblem(
            dotted(path), one.mount_path, "is the kernel's", "choose another folder", _line(document, path)
        )
        for index, one in enumerate(job.container.volumes if job.container is not None else ())
        if is_of_kernel(one.mount_path)
        for path in [("container", "volumes", index, "mount_path")]
    )


def _line_of(document: Document) -> LineOf:
    """Return a function from an attribute's path, without prefix, to its line."""
    return lambda path: _line(document, (PREFIX + str(path[0]), *path[1:]))


def _line(document: Document, path: Path) -> int | None:
    """Return the line of a field; attributes are beside the other fields or under `attributes`."""
    if path and str(path[0]).startswith(PREFIX) and (path[0],) not in document.lines:
        path = (ATTRIBUTES, *path)
    return document.line_of(path)


def problems_of_fields(error: ValidationError, document: Document, model: type[BaseModel]) -> Problems:
    """Return one problem for each error of a model that was read from a document, with its line."""
    more = [PREFIX + name for name in NAMES] if model is Job else []
    worded = problems_of_errors(error, model, more=more, prefix="")
    return tuple(
        _field(detail, problem, document)
        for detail, problem in zip(error.errors(include_url=False), worded, strict=True)
    )


def _field(detail: ErrorDetails, problem: AttributeProblem, document: Document) -> AttributeProblem:
    path = tuple(part for part in detail["loc"] if part != "[key]")
    name = next((part for part in reversed(path) if isinstance(part, str)), "")
    kind, context = detail["type"], detail.get("ctx", {})
    mistake = context.get("error")
    if isinstance(mistake, JobMistake):
        found = mistake.problem
        return replace(found, line=_line(document, tuple(found.attribute.split("."))))
    problem = replace(problem, attribute=dotted(path), line=_line(document, path))
    if kind == "value_error":
        limit, _, hint = str(mistake).partition("; ")
        return replace(problem, limit=limit, hint=hint or "change it")
    if kind == "extra_forbidden":
        attribute = name.lower().removeprefix(PREFIX)
        hint = f"write {PREFIX}{attribute}" if len(path) == 1 and attribute in NAMES else problem.hint
        return replace(problem, limit="is not known", hint=ELSEWHERE.get(name, hint))
    if kind == "model_type":
        return replace(problem, hint="write its fields below it")
    if kind.startswith(_TIMES):
        return replace(problem, limit="must be a time with its zone", hint="write it as 2030-01-31T22:00:00Z")
    if kind == "string_pattern_mismatch" or kind.startswith("uuid"):
        return replace(
            problem,
            limit=FORMS.get(name if len(path) < 3 or name != "name" else "", form_of(str(context.get("pattern")))),
            hint="correct it",
        )
    return replace(problem, limit=_MESSAGES[kind].format(**context)) if kind in _MESSAGES else problem
