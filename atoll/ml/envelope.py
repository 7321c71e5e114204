"""Parses an envelope: a job with its attributes, or a workflow of jobs, from JSON or YAML.

Gives a Parsed with the envelope or its problems, each with its line. No input raises an exception. Attributes are in
the envelope itself or under `attributes`; other keys that are no field of an envelope are kept in `others` and ignored.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from atoll.ml.attributes import NAMES, PREFIX, AttributePart, MlAttributes
from atoll.ml.document import Document, Path, read
from atoll.ml.policy import MlPolicy
from atoll.ml.problems import AttributeProblem, Notes, ParseNote, Problems, one_of, shown
from atoll.ml.rules import complaints
from atoll.ml.wording import NAME_LENGTH_MAX, dotted, problem_of_complaint, problems_of_errors, unknown_attribute

STEPS_MAX: Final = 64
PROBLEMS_MAX: Final = 100
PREFIXED: Final = tuple(PREFIX + name for name in NAMES)
CALLBACKS: Final = ("on_complete", "on_success", "on_failure")


class WorkflowType(StrEnum):
    """chain: one step after the other. group: all at once. batch: all at once, then callbacks."""

    CHAIN = "chain"
    GROUP = "group"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvelope:
    """One job. `attributes`: as given, nothing inferred; `others`: unknown keys."""

    type: str = ""
    id: str = ""
    queue: str = ""
    args: tuple[Any, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    priority: int | None = None
    timeout_seconds: int | None = None
    attributes: MlAttributes = field(default_factory=MlAttributes)
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def execution_timeout_seconds(self) -> int | None:
        """The job's time limit: the attribute if given, else the job's own; None for no limit."""
        return self.attributes.timeout_seconds or self.timeout_seconds or None

    def to_json(self) -> dict[str, Any]:
        """Return the envelope's JSON form, which parses to the same value."""
        head = {"id": self.id, "type": self.type, "queue": self.queue, "args": list(self.args), "meta": dict(self.meta)}
        numbers = {"priority": self.priority, "timeout": self.timeout_seconds}
        return {
            **{key: value for key, value in head.items() if value},
            **{key: value for key, value in numbers.items() if value is not None},
            **self.attributes.to_json(),
            **self.others,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowEnvelope:
    """Jobs that belong together. Each has its own attributes and inherits none; `meta` is handed to all, see `jobs`.

    callbacks: on_complete, on_success, on_failure of a batch.
    """

    workflow_type: WorkflowType
    id: str = ""
    name: str = ""
    steps: tuple[JobEnvelope, ...] = ()
    callbacks: Mapping[str, JobEnvelope] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def jobs(self) -> tuple[JobEnvelope, ...]:
        """The steps, each with the workflow's meta under its own."""
        return tuple(replace(step, meta={**self.meta, **step.meta}) for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """Return the envelope's JSON form, which parses to the same value."""
        head = {"id": self.id, "name": self.name, "meta": dict(self.meta)}
        callbacks = {key: job.to_json() for key, job in self.callbacks.items()}
        return {
            "workflow_type": self.workflow_type.value,
            **{key: value for key, value in head.items() if value},
            steps_key(self.workflow_type): [step.to_json() for step in self.steps],
            **({"callbacks": callbacks} if callbacks else {}),
            **self.others,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What came of the bytes: an envelope, or None and why. `lines`: of each value, by its path in the document."""

    envelope: JobEnvelope | WorkflowEnvelope | None
    problems: Problems = ()
    notes: Notes = ()
    lines: Mapping[Path, int] = field(default_factory=dict)


def steps_key(workflow_type: WorkflowType) -> str:
    """Return the key of a workflow's jobs: those of a chain are steps."""
    return "steps" if workflow_type is WorkflowType.CHAIN else "jobs"


class JobHead(AttributePart):
    """What every envelope of a job may say beside its attributes."""

    id: Annotated[str, Field(strict=True, max_length=128, pattern="^[A-Za-z0-9._:-]*$")] = ""
    type: Annotated[str, Field(strict=True, max_length=255, pattern="^([A-Za-z0-9][A-Za-z0-9._/-]*)?$")] = ""
    queue: Annotated[str, Field(strict=True, max_length=128, pattern="^([a-z0-9][a-z0-9.-]*)?$")] = ""
    args: tuple[Any, ...] = ()
    meta: dict[str, Any] = Field(default_factory=dict)
    priority: Annotated[int, Field(strict=True, ge=-1_000_000, le=1_000_000)] | None = None
    timeout: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] | None = None


class WorkflowHead(AttributePart):
    """What a workflow says beside its jobs."""

    workflow_type: WorkflowType
    id: Annotated[str, Field(strict=True, max_length=128, pattern="^[A-Za-z0-9._:-]*$")] = ""
    name: Annotated[str, Field(strict=True, max_length=128)] = ""
    meta: dict[str, Any] = Field(default_factory=dict)


def parse(data: bytes, policy: MlPolicy | None = None) -> Parsed:
    """Read an envelope from JSON or YAML and judge it by a policy; without one by the policy's defaults."""
    document = read(data)
    if isinstance(document, AttributeProblem):
        return Parsed(envelope=None, problems=(document,))
    reader = _Reader(document, policy or MlPolicy())
    envelope = reader.envelope()
    problems = tuple(sorted(reader.problems, key=lambda problem: problem.line or 0)[:PROBLEMS_MAX])
    return Parsed(
        envelope=None if problems else envelope, problems=problems, notes=tuple(reader.notes), lines=document.lines
    )


@dataclass(slots=True)
class _Reader:
    """One document; collects every problem rather than the first one."""

    document: Document
    policy: MlPolicy
    problems: list[AttributeProblem] = field(default_factory=list)
    notes: list[ParseNote] = field(default_factory=list)

    def envelope(self) -> JobEnvelope | WorkflowEnvelope | None:
        value = self.document.value
        if not isinstance(value, dict):
            self._refuse((), "must be a mapping", "write attributes such as ext_ml_gpu_count: 1", value=shown(value))
            return None
        words = tuple(WorkflowType)
        if "workflow_type" in value:
            return self._workflow(value, "workflow_type")
        if value.get("type") in words and ("steps" in value or "jobs" in value):
            return self._workflow(value, "type")
        return self._job(value, ())

    def _refuse(self, path: Path, limit: str, hint: str, *, value: str = "", step: str | None = None) -> None:
        """Add a problem. step: the part of a workflow before the name; without it the whole path is the name."""
        name = dotted(path) if step is None else dotted(path[-1:])
        self.problems.append(AttributeProblem(name, value, limit, hint, self.document.line_of(path), step or ""))

    def _workflow(self, value: dict[str, Any], type_key: str) -> WorkflowEnvelope | None:
        names = [type_key, *(name for name in WorkflowHead.model_fields if name not in {"workflow_type", "type"})]
        head = self._head({name: value[name] for name in names if name in value}, WorkflowHead, (), type_key=type_key)
        for key in value:
            if key.startswith(PREFIX) or key == "attributes":
                self._refuse(
                    (key,), "must stand on a job", "steps inherit nothing; write it at each step that needs it"
                )
        if not isinstance(head, WorkflowHead):
            return None
        kind = head.workflow_type
        steps_name, other = ("steps", "jobs") if kind is WorkflowType.CHAIN else ("jobs", "steps")
        if other in value:
            self._refuse((other,), f"must be called {steps_name} in a {kind}", f"write {steps_name}:")
        steps = self._jobs(value.get(steps_name), (steps_name,))
        callbacks = dict(self._callbacks(value.get("callbacks"), kind)) if "callbacks" in value else {}
        known = {*names, "steps", "jobs", "callbacks"}
        return WorkflowEnvelope(
            workflow_type=kind,
            id=head.id,
            name=head.name,
            steps=steps,
            callbacks=callbacks,
            meta=head.meta,
            others={key: child for key, child in value.items() if key not in known},
        )

    def _jobs(self, value: object, path: Path) -> tuple[JobEnvelope, ...]:
        if not isinstance(value, list) or not 1 <= len(value) <= STEPS_MAX:
            told = f"{len(value)} entries" if isinstance(value, list) else "" if value is None else shown(value)
            self._refuse(path, f"must be a list of 1 to {STEPS_MAX} jobs", "write one entry for each job", value=told)
            return ()
        return tuple(self._child(job, (*path, index)) for index, job in enumerate(value))

    def _callbacks(self, value: object, kind: WorkflowType) -> Iterator[tuple[str, JobEnvelope]]:
        if kind is not WorkflowType.BATCH or not isinstance(value, dict):
            self._refuse(("callbacks",), "must be a mapping in a workflow of type batch", "remove it, or write a batch")
            return
        for key, job in value.items():
            if key in CALLBACKS:
                yield key, self._child(job, ("callbacks", key))
            else:
                self._refuse(("callbacks", key), one_of(CALLBACKS), "rename it")

    def _child(self, value: object, path: Path) -> JobEnvelope:
        if not isinstance(value, dict):
            self._refuse(path, "must be a job", "write a mapping with type and attributes", value=shown(value))
            return JobEnvelope()
        for key in ("steps", "jobs", "workflow_type"):
            if key in value:
                self._refuse((*path, key), "must not stand in a step", "a step is one job; write a workflow of its own")
        return self._job(value, path)

    def _job(self, value: dict[str, Any], path: Path) -> JobEnvelope:
        if value.get("depends_on"):
            hint = "put both jobs into a chain, or start the second by a trigger on the first"
            self._refuse((*path, "depends_on"), "is not known: a job depends on no other", hint, step=dotted(path))
        names = [name for name in JobHead.model_fields if name in value]
        head = self._head({name: value[name] for name in names}, JobHead, path)
        attributes, taken = self._attributes(value, path)
        others = {key: child for key, child in value.items() if key not in {*names, *taken}}
        if not isinstance(head, JobHead):
            return JobEnvelope()
        return JobEnvelope(
            id=head.id,
            type=head.type,
            queue=head.queue,
            args=head.args,
            meta=head.meta,
            priority=head.priority,
            timeout_seconds=head.timeout,
            attributes=attributes,
            others=others,
        )

    def _head(
        self, value: dict[str, Any], model: type[AttributePart], path: Path, *, type_key: str = "type"
    ) -> AttributePart | None:
        """Return the fields beside the attributes, each as its model takes it."""
        given = {"workflow_type" if model is WorkflowHead and key == type_key else key: v for key, v in value.items()}
        try:
            return model.model_validate(given)
        except ValidationError as error:
            found = problems_of_errors(
                error,
                model,
                prefix="",
                step=dotted(path),
                line_of=lambda inner: self.document.line_of((*path, *inner)),
            )
            self.problems.extend(found)
            return None

    def _attributes(self, value: dict[str, Any], path: Path) -> tuple[MlAttributes, set[str]]:
        """Return the attributes of one job, and the keys of the envelope that they take up."""
        inner = value.get("attributes")
        places = {key: (*path, key) for key in value if key.startswith(PREFIX)}
        given = {key: value[key] for key in places}
        step = dotted(path)
        if inner is not None and not isinstance(inner, dict):
            self._refuse((*path, "attributes"), "must be a mapping", "write name: value", value=shown(inner), step=step)
        for key, child in (inner or {}).items() if isinstance(inner, dict) else ():
            place = (*path, "attributes", key)
            if not key.startswith(PREFIX):
                self._forgotten(key)
            elif key in given:
                self._refuse(place, "may stand once", "it stands beside attributes too; remove one", step=step)
            else:
                given[key], places[key] = child, place
        for key in value:
            if not key.startswith(PREFIX):
                self._forgotten(key)
        return self._validated(given, places, step), {*(key for key in value if key.startswith(PREFIX)), "attributes"}

    def _forgotten(self, key: str) -> None:
        """Note a name of an attribute that stands without its prefix, or with another, and so says nothing."""
        if key in NAMES:
            self.notes.append(ParseNote(key, "", f"ignored without its prefix; did you mean {PREFIX}{key}?"))
        elif near := get_close_matches(key[:NAME_LENGTH_MAX].lower(), PREFIXED, 1, cutoff=0.85):
            self.notes.append(ParseNote(dotted((key,)), "", f"ignored; did you mean {near[0]}?"))

    def _validated(self, given: dict[str, Any], places: dict[str, Path], step: str) -> MlAttributes:
        def line_of(path: Path) -> int | None:
            return self.document.line_of((*places.get(f"{PREFIX}{path[0]}", ()), *path[1:]))

        bare, before = {}, len(self.problems)
        for key, child in given.items():
            name = key.removeprefix(PREFIX)
            if name not in NAMES:
                self.problems.append(unknown_attribute(name, NAMES, step=step, line=line_of((name,))))
            elif child is None:
                self._refuse(places[key], "must have a value", "write one, or leave the attribute out", step=step)
            else:
                bare[name] = child
        try:
            attributes = MlAttributes.model_validate(bare)
        except ValidationError as error:
            self.problems.extend(problems_of_errors(error, MlAttributes, step=step, line_of=line_of))
            return MlAttributes()
        if len(self.problems) == before:
            broken = complaints(attributes, self.policy)
            self.problems.extend(problem_of_complaint(one, attributes, step=step, line_of=line_of) for one in broken)
        return attributes
