"""Pipeline: steps that depend on each other, in one document.

Each type of step has its own `config`. atoll.pipelines.checking has the rules over several steps.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, model_validator

from atoll.jobs.base import Flag, Identifier, JobPart
from atoll.pipelines.words import FailureRule, OverlapPolicy, StepType

STEPS_MAX: Final = 200
ENTRIES_MAX: Final = 64
DURATION_SECONDS_MAX: Final = 30 * 24 * 3600
RETRIES_MAX: Final = 20
PARALLEL_MAX: Final = 64
ITEMS_MAX: Final = 1000

_UNITS: Final[Mapping[str, int]] = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_ADDRESS: Final = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
BY_NAME: Final = "secret:"
"""Begins a recipient whose URL is a secret, such as one of Slack, by which anybody may post."""
_RECIPIENT: Final = re.compile(rf"https?://[^\s\x00-\x1f\x7f]+|{BY_NAME}[A-Za-z0-9][A-Za-z0-9_.-]{{0,62}}")
_DURATION: Final = re.compile(r"([1-9][0-9]{0,7})([smhd])")


def _seconds(value: object) -> object:
    """Accept durations such as 30s, 5m, 2h and 1d."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return int(found[1]) * _UNITS[found[2]] if found else value


Duration = Annotated[int, BeforeValidator(_seconds), Field(strict=True, ge=1, le=DURATION_SECONDS_MAX)]
"""Seconds; in documents also 30s, 5m, 2h, 1d."""
StepName = Annotated[str, Field(max_length=40, pattern=r"^[a-z][a-z0-9_]*$")]
Name = Annotated[str, Field(max_length=40, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
Source = Annotated[str, Field(min_length=1, max_length=1024)]
Url = Annotated[str, Field(min_length=1, max_length=2048)]
HeaderName = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9-]+$")]
HeaderValue = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]
SecretName = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Targets = Annotated[
    tuple[StepName, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=ENTRIES_MAX),
]


class RetryRule(JobPart):
    """How often a failed step is tried again, and after which pause; the pause doubles each time, up to an hour."""

    max_retries: Annotated[int, Field(strict=True, ge=0, le=RETRIES_MAX)] = 0
    delay: Duration = 30


class JobConfig(JobPart):
    """Config of a job step: the fields of a job beside these."""

    wait_for_ready: Annotated[
        Flag, Field(description="wait until a service runs, or another job succeeds; else go on once it is recorded")
    ] = True
    job: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def gather(cls, values: object) -> object:
        """Take everything but wait_for_ready as the job."""
        if not isinstance(values, Mapping) or set(values) <= {"job", "wait_for_ready"}:
            return values
        own = {key: value for key, value in values.items() if key == "wait_for_ready"}
        return own | {"job": {key: value for key, value in values.items() if key != "wait_for_ready"}}


class ApiCallConfig(JobPart):
    """Config of an api_call step. Any status from 400 on is a failure."""

    method: Annotated[str, Field(pattern=r"^(GET|POST|PUT|PATCH|DELETE)$")] = "GET"
    url: Url
    headers: Annotated[dict[HeaderName, HeaderValue], Field(max_length=ENTRIES_MAX)] = Field(default_factory=dict)
    secret_headers: Annotated[
        dict[HeaderName, SecretName],
        Field(max_length=ENTRIES_MAX, description="headers whose values are secrets, by the secret's name"),
    ] = Field(default_factory=dict)
    body: Any = None


class FunctionConfig(JobPart):
    """Config of a function step."""

    function_name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]
    parameters: Annotated[dict[str, Any], Field(max_length=ENTRIES_MAX)] = Field(default_factory=dict)


class NotificationConfig(JobPart):
    """Config of a notification step. Recipients are URLs, names of secrets with a URL, or addresses of mail."""

    channel: Annotated[str, Field(pattern=r"^(slack|email|webhook)$")]
    template: Annotated[str, Field(min_length=1, max_length=4096)]
    recipients: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=2048)], ...], Field(max_length=16)]
    data: Annotated[dict[str, Any], Field(max_length=ENTRIES_MAX)] = Field(default_factory=dict)
    subject: Annotated[str | None, Field(min_length=1, max_length=1024, description="of a mail")] = None

    @model_validator(mode="after")
    def check(self) -> "NotificationConfig":
        """Refuse recipients of mail that are no addresses, and a subject of what is no mail."""
        if self.channel == "email":
            wrong = [one for one in self.recipients if not _ADDRESS.fullmatch(one)]
            if wrong:
                raise ValueError(f"recipients has {wrong[0]!r}, which is no address; write one such as ann@example.com")
            return self
        if self.subject is not None:
            raise ValueError("subject belongs to channel email; remove it")
        wrong = [one for one in self.recipients if not _RECIPIENT.fullmatch(one)]
        if wrong:
            raise ValueError(f"recipients has {wrong[0]!r}; write https://HOST/... or {BY_NAME}NAME of a secret")
        return self


class ConditionConfig(JobPart):
    """Config of a condition step: the steps of the branch that is not chosen are skipped."""

    expression: Source
    if_true: Targets = ()
    if_false: Targets = ()


class WaitConfig(JobPart):
    """Config of a wait step: a duration, or until a condition holds."""

    duration: Duration | None = None
    condition: Source | None = None
    timeout: Duration = 3600
    poll_interval: Duration = 10

    @model_validator(mode="after")
    def check(self) -> "WaitConfig":
        """Refuse both and neither."""
        if (self.duration is None) == (self.condition is None):
            raise ValueError("give duration or condition, one of both")
        return self


class ParallelConfig(JobPart):
    """Config of a parallel step: it starts its branches together and ends when all of them have ended."""

    branches: Annotated[tuple[StepName, ...], Field(min_length=1, max_length=PARALLEL_MAX)]
    fail_fast: Flag = False


class LoopConfig(JobPart):
    """Config of a loop step: runs `body_step` for each item, or again and again until a condition holds."""

    body_step: StepName
    items: Annotated[list[Any], Field(max_length=ITEMS_MAX)] | Source | None = None
    until: Source | None = None
    max_iterations: Annotated[int, Field(strict=True, ge=1, le=ITEMS_MAX)] = 100
    variable: Annotated[str, Field(max_length=40, pattern=r"^[a-z][a-z0-9_]*$")] = "item"
    max_parallel: Annotated[int, Field(strict=True, ge=1, le=PARALLEL_MAX)] = 3

    @model_validator(mode="after")
    def check(self) -> "LoopConfig":
        """Refuse both and neither."""
        if (self.items is None) == (self.until is None):
            raise ValueError("give items or until, one of both")
        return self


CONFIGS: Final[Mapping[StepType, type[JobPart]]] = {
    StepType.JOB: JobConfig,
    StepType.API_CALL: ApiCallConfig,
    StepType.FUNCTION: FunctionConfig,
    StepType.NOTIFICATION: NotificationConfig,
    StepType.CONDITION: ConditionConfig,
    StepType.WAIT: WaitConfig,
    StepType.PARALLEL: ParallelConfig,
    StepType.LOOP: LoopConfig,
}


class PipelineStep(JobPart):
    """One step."""

    name: StepName
    step_type: StepType
    config: dict[str, Any] = Field(default_factory=dict)
    depends_on: Annotated[tuple[StepName, ...], Field(max_length=STEPS_MAX)] = ()
    retry: RetryRule = RetryRule()
    timeout: Annotated[Duration | None, Field(description="of each try; a job that runs longer is cancelled")] = None
    on_failure: FailureRule = FailureRule.FAIL

    def settings(self) -> Any:  # noqa: ANN401 - the model of the step's type
        """Return the config in the model of the step's type. Raises ValidationError."""
        return CONFIGS[self.step_type].model_validate(self.config)


class Pipeline(JobPart):
    """Steps that depend on each other."""

    name: Name
    description: Annotated[str, Field(max_length=1024)] = ""
    project_id: Identifier | None = None
    tenant_id: Annotated[str | None, Field(max_length=49, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = None
    inputs: Annotated[
        dict[StepName, Any], Field(max_length=ENTRIES_MAX, description="inputs of a run, with their defaults")
    ] = Field(default_factory=dict)
    notes: Annotated[
        tuple[Annotated[str, Field(max_length=512)], ...],
        Field(max_length=ENTRIES_MAX, description="what was noticed about the envelopes of a workflow"),
    ] = ()
    fail_fast: Annotated[Flag, Field(description="stop running steps when one fails")] = False
    overlap: OverlapPolicy = OverlapPolicy.ALLOW
    steps: Annotated[tuple[PipelineStep, ...], Field(min_length=1, max_length=STEPS_MAX)]

    def step(self, name: str) -> PipelineStep:
        """Return a step by its name. Raises KeyError."""
        for one in self.steps:
            if one.name == name:
                return one
        raise KeyError(name)
