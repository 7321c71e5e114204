"""Use cases: templates of services that work together, with typed parameters.

A template becomes a pipeline with one service per component; its parameters become the inputs of the run. Reads no
clock and no network.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import ConfigDict, Field, model_validator

from atoll.jobs.base import JobPart
from atoll.jobs.states import ENDED, JobState
from atoll.ml.problems import AttributeProblem, Problems, shown
from atoll.pipelines.model import ENTRIES_MAX, Name, StepName
from atoll.pipelines.words import ENDED_RUNS, RunState

PREFIX: Final = "uc-"
GIVEN: Final = ("usecase", "tenant_namespace")
"""Inputs that the service gives: the name of the deployment, and the namespace of its jobs."""
TEXT_LENGTH_MAX: Final = 1024
TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


class ParameterSchema(JobPart):
    """JSON Schema of one parameter; without a default it must be given."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    type: Annotated[str, Field(pattern=f"^({'|'.join(TYPES)})$")]
    description: Annotated[str, Field(max_length=TEXT_LENGTH_MAX)] = ""
    default: Any = None
    enum: Annotated[tuple[Any, ...], Field(max_length=ENTRIES_MAX)] | None = None
    minimum: float | None = None
    maximum: float | None = None
    pattern: Annotated[str, Field(max_length=256)] | None = None
    max_length: Annotated[int, Field(ge=1, le=TEXT_LENGTH_MAX, alias="maxLength")] = TEXT_LENGTH_MAX

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse a default that the schema itself refuses."""
        if self.pattern is not None:
            re.compile(self.pattern)
        told = None if self.default is None else self.refusal(self.default)
        if told is not None:
            raise ValueError(f"default {told}; correct it")
        return self

    def refusal(self, value: Any) -> str | None:  # noqa: ANN401 - a value of JSON's types
        """Return why a value is refused, or None."""
        if type(value) not in TYPES[self.type]:
            return f"must be of type {self.type}"
        if self.enum is not None and value not in self.enum:
            return f"must be one of {', '.join(map(str, self.enum))}"
        if isinstance(value, str):
            if len(value) > self.max_length:
                return f"must have at most {self.max_length} characters"
            return None if self.pattern is None or re.search(self.pattern, value) else f"must match {self.pattern}"
        return self._beyond(value)

    def _beyond(self, value: float) -> str | None:
        if self.minimum is not None and value < self.minimum:
            return f"must be at least {self.minimum:g}"
        return f"must be at most {self.maximum:g}" if self.maximum is not None and value > self.maximum else None


class UseCaseComponent(JobPart):
    """One service: the fields of a job beside its name, with `${inputs.PARAMETER}`, and the port that it answers at."""

    name: StepName
    port: Annotated[int, Field(strict=True, ge=1, le=65_535)]
    depends_on: Annotated[tuple[StepName, ...], Field(max_length=ENTRIES_MAX)] = ()
    job: dict[str, Any]


class UseCaseTemplate(JobPart):
    """A template. `entrypoint`: the component that users talk to."""

    id: Name
    description: Annotated[str, Field(max_length=TEXT_LENGTH_MAX)] = ""
    parameters: Annotated[dict[StepName, ParameterSchema], Field(max_length=ENTRIES_MAX)] = Field(default_factory=dict)
    components: Annotated[tuple[UseCaseComponent, ...], Field(min_length=1, max_length=ENTRIES_MAX)]
    entrypoint: StepName

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse an entry point that is no component, and parameters with a name that the service gives."""
        if self.entrypoint not in {one.name for one in self.components}:
            raise ValueError(f"entrypoint {self.entrypoint} is no component; name one")
        taken = sorted(self.parameters.keys() & set(GIVEN))
        if taken:
            raise ValueError(f"parameters has {taken[0]}, which the service gives; rename it")
        return self

    def parameter_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the parameters."""
        properties = {
            name: one.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
            for name, one in self.parameters.items()
        }
        required = [name for name, one in self.parameters.items() if one.default is None]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def mistakes(self, given: Mapping[str, Any]) -> Problems:
        """Return what is wrong with parameters."""
        found = []
        known = ", ".join(sorted(self.parameters)) or "none"
        for name, value in given.items():
            schema = self.parameters.get(name)
            told = "the template has no such parameter" if schema is None else schema.refusal(value)
            if told is not None:
                hint = f"its parameters: {known}" if schema is None else "correct it"
                found.append(AttributeProblem(f"parameters.{name}", shown(value), told, hint))
        for name, schema in self.parameters.items():
            if schema.default is None and name not in given:
                found.append(
                    AttributeProblem(f"parameters.{name}", "", "must be given", schema.description or "add it")
                )
        return tuple(found)

    def inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of the run for parameters without mistakes."""
        floats = {name for name, schema in self.parameters.items() if schema.type == "number"}
        return {name: float(value) if name in floats else value for name, value in given.items()}

    def pipeline(self, name: str, *, tenant: str, project: str | None, namespace: str) -> dict[str, Any]:
        """Return the document of the pipeline of a deployment."""
        steps = [
            {
                "name": one.name,
                "step_type": "job",
                "depends_on": list(one.depends_on),
                "config": {"job_type": "service", **one.job},
            }
            for one in self.components
        ]
        defaults = {key: schema.default for key, schema in self.parameters.items()}
        inputs = self.inputs({key: value for key, value in defaults.items() if value is not None})
        return {
            "name": f"{PREFIX}{name}",
            "description": self.description,
            "tenant_id": tenant,
            **({"project_id": project} if project is not None else {}),
            "inputs": defaults | inputs | {"usecase": name, "tenant_namespace": namespace},
            "steps": steps,
        }


class DeploymentState(StrEnum):
    """State of a deployment of a use case."""

    DEPLOYING = "deploying"
    HEALTHY = "healthy"
    """All its components run."""
    DEGRADED = "degraded"
    """It was deployed, and a component does not run now."""
    FAILED = "failed"
    """It could not be deployed, or none of its components is left."""
    DELETING = "deleting"


def deployment_state(run: RunState, jobs: Collection[JobState], *, is_deleting: bool) -> DeploymentState:
    """Return the state of a deployment. `jobs`: the state of each job that its run created."""
    if is_deleting:
        return DeploymentState.DELETING
    if run not in ENDED_RUNS:
        return DeploymentState.DEPLOYING
    if run is not RunState.SUCCEEDED or all(one in ENDED for one in jobs):
        return DeploymentState.FAILED
    return DeploymentState.HEALTHY if all(one is JobState.RUNNING for one in jobs) else DeploymentState.DEGRADED


def endpoint(job: str, namespace: str, port: int) -> str:
    """Return where a component answers, within its cluster."""
    return f"http://{job}.{namespace}:{port}"


def template_of(templates: Sequence[UseCaseTemplate], wanted: str) -> UseCaseTemplate | None:
    """Return a template by its id."""
    return next((one for one in templates if one.id == wanted), None)
