"""Rules of a queue: defaults, limits and budgets.

Defaults fill gaps before limits apply. A job beyond a limit is refused; one for which a budget is spent waits, and is
never refused. Limits hold in addition to the cluster's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from atoll.ml import tables
from atoll.ml.attributes import PREFIX, AttributePart, Count, MlAttributes, MlPriorityClass, Number
from atoll.ml.infer import Completed, complete
from atoll.ml.policy import MlPolicy
from atoll.ml.problems import AttributeProblem, ParseNote, Problems, shown
from atoll.ml.rules import complaints
from atoll.ml.wording import problem_of_complaint, problems_of_errors

GpuTypeName = Annotated[str, Field(strict=True, min_length=1, max_length=63)]


class MlLimits(AttributePart):
    """The first six concern one job; the last two are budgets over the queue's running jobs."""

    max_gpu_count: Annotated[int, Field(strict=True, ge=0)] | None = None
    max_gpu_memory_gb: Number | None = None
    max_memory_gb: Number | None = None
    max_timeout_seconds: Count | None = None
    allowed_gpu_types: Annotated[tuple[GpuTypeName, ...], Field(max_length=64)] | None = None
    allowed_priority_classes: tuple[MlPriorityClass, ...] | None = None
    max_concurrent_gpu_jobs: Annotated[int, Field(strict=True, ge=0)] | None = None
    max_total_gpus: Annotated[int, Field(strict=True, ge=0)] | None = None


@dataclass(frozen=True, slots=True)
class QueueRules:
    """One queue. Its defaults are within its own limits."""

    name: str
    defaults: MlAttributes = MlAttributes()  # noqa: RUF009 - frozen
    limits: MlLimits = MlLimits()  # noqa: RUF009 - frozen

    @property
    def has_budget(self) -> bool:
        """Return whether a job may have to wait for others to end."""
        return any(getattr(self.limits, name) is not None for name in BUDGETS)


@dataclass(frozen=True, slots=True)
class QueueUsage:
    """Current use of a queue: jobs with GPUs in the cluster, and their GPUs."""

    gpu_jobs: int = 0
    gpus: int = 0


MAXIMA: Final[Mapping[str, str]] = {
    "gpu_count": "max_gpu_count",
    "gpu_memory_gb": "max_gpu_memory_gb",
    "memory_gb": "max_memory_gb",
    "timeout_seconds": "max_timeout_seconds",
}
"""Attribute to the limit that it may reach."""
BUDGETS: Final = ("max_concurrent_gpu_jobs", "max_total_gpus")


def parse_queue_rules(name: str, config: Mapping[str, Any], policy: MlPolicy | None = None) -> QueueRules | Problems:
    """Read `ml_defaults` and `ml_limits` of a queue's configuration; other keys of it are not read here.

    Defaults may be written with or without the prefix. Those that break a rule or the queue's own limits are refused,
    because they would make every job of the queue fail.
    """
    given, limits = config.get("ml_defaults") or {}, config.get("ml_limits") or {}
    for key, value in (("ml_defaults", given), ("ml_limits", limits)):
        if not isinstance(value, Mapping) or not all(isinstance(part, str) for part in value):
            return (
                AttributeProblem(key, shown(value), "must be a mapping", "write name: value", step=f"queue {name}"),
            )
    bare = {key.removeprefix(PREFIX): value for key, value in given.items()}
    try:
        found = QueueRules(name, MlAttributes.model_validate(bare), MlLimits.model_validate(limits))
    except ValidationError as error:
        is_default = error.title == MlAttributes.__name__
        model, prefix = (MlAttributes, PREFIX) if is_default else (MlLimits, "")
        return problems_of_errors(error, model, prefix=prefix, step=f"queue {name}")
    broken = complaints(found.defaults, policy or MlPolicy())
    problems = tuple(problem_of_complaint(one, found.defaults) for one in broken) + _exceeded(found.defaults, found)
    return tuple(replace(problem, step=f"queue {name} ml_defaults") for problem in problems) or found


def filled_names(given: MlAttributes, rules: QueueRules) -> tuple[str, ...]:
    """Return the attributes that the queue's defaults fill."""
    return tuple(name for name in rules.defaults.given() if getattr(given, name) is None)


def with_defaults(given: MlAttributes, rules: QueueRules) -> tuple[MlAttributes, tuple[ParseNote, ...]]:
    """Return the attributes with the queue's defaults in the gaps, and a note for each that was filled."""
    filled = {name: getattr(rules.defaults, name) for name in filled_names(given, rules)}
    notes = tuple(
        ParseNote(PREFIX + name, str(value), f"default of queue {rules.name}") for name, value in filled.items()
    )
    return given.model_copy(update=filled), notes


def submit(given: MlAttributes, rules: QueueRules, policy: MlPolicy | None = None) -> Completed | Problems:
    """Judge a job for a queue: defaults, inference, rules, then limits. Problems refuse it, and another try changes
    nothing."""
    filled, notes = with_defaults(given, rules)
    broken = complaints(filled, policy or MlPolicy())
    if broken:
        problems = (problem_of_complaint(one, filled) for one in broken)
        return tuple(_with_origin(problem, notes, rules) for problem in problems)
    completed = complete(filled)
    completed = replace(completed, notes=(*notes, *completed.notes))
    exceeded = _exceeded(completed.attributes, rules)
    if exceeded:
        return tuple(_with_origin(problem, notes, rules) for problem in exceeded)
    return completed


def _with_origin(problem: AttributeProblem, notes: tuple[ParseNote, ...], rules: QueueRules) -> AttributeProblem:
    """Add to a problem that the value is a default of the queue."""
    if not any(note.attribute == problem.attribute for note in notes):
        return problem
    return replace(problem, hint=f"it is a default of queue {rules.name}; {problem.hint}, or choose another queue")


def _exceeded(attributes: MlAttributes, rules: QueueRules) -> Problems:
    limits, found = rules.limits, []
    for name, field in MAXIMA.items():
        value, limit = getattr(attributes, name), getattr(limits, field)
        if value is not None and limit is not None and value > limit:
            hint = f"ask for less, or choose another queue than {rules.name}"
            found.append(AttributeProblem(PREFIX + name, shown(value), f"may be at most {limit:.15g} ({field})", hint))
    allowed = None if limits.allowed_gpu_types is None else tuple(map(tables.gpu_id, limits.allowed_gpu_types))
    if allowed is not None and attributes.gpu_type is not None and attributes.gpu_type not in allowed:
        found.append(_not_allowed("gpu_type", attributes.gpu_type, allowed, rules))
    classes = limits.allowed_priority_classes
    if classes is not None and attributes.priority_class is not None and attributes.priority_class not in classes:
        found.append(_not_allowed("priority_class", attributes.priority_class, classes, rules))
    return tuple(found)


def _not_allowed(name: str, value: str, allowed: tuple[str, ...], rules: QueueRules) -> AttributeProblem:
    limit = f"must be one of {', '.join(allowed)}" if allowed else "is not allowed here"
    return AttributeProblem(
        PREFIX + name, str(value), f"{limit} (allowed_{name}{'es' if name.endswith('ss') else 's'})",
        f"choose one of them, or another queue than {rules.name}",
    )  # fmt: skip


def waits_for(gpus: int, rules: QueueRules, usage: QueueUsage) -> str:
    """Return the budget that a job with so many GPUs waits for; empty for none, as for every job without GPUs."""
    jobs_max, gpus_max = rules.limits.max_concurrent_gpu_jobs, rules.limits.max_total_gpus
    if not gpus:
        return ""
    if jobs_max is not None and usage.gpu_jobs >= jobs_max:
        return f"{usage.gpu_jobs} of {jobs_max} jobs with GPUs run from queue {rules.name}; waits for one to end"
    if gpus_max is not None and usage.gpus + gpus > gpus_max:
        ever = "waits for GPUs to be freed" if gpus <= gpus_max else "waits until max_total_gpus is raised"
        return f"{usage.gpus} of {gpus_max} GPUs of queue {rules.name} are in use and the job asks for {gpus}; {ever}"
    return ""
