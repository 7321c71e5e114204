"""JobPolicy: when and with which other jobs a job runs. JobIntent: its purpose and cost.

A missing value stays None if the default depends on the type of the job; atoll.jobs.contracts fills it in.
"""

from decimal import Decimal
from math import floor
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, BeforeValidator, Field, ValidationInfo, model_validator

from atoll.jobs.base import (
    MAP_ENTRIES_MAX,
    SECONDS_MAX,
    Flag,
    Identifier,
    JobPart,
    LabelKey,
    LabelValue,
    ObjectName,
    Seconds,
    is_new,
)
from atoll.jobs.words import BudgetAction, OptimizationGoal, Priority, TopologyConstraint, WorkloadClass

REPLICAS_MAX = 1000
TOLERATIONS_MAX = 16
RETRIES_MAX = 1000

Replicas = Annotated[int, Field(strict=True, ge=0, le=REPLICAS_MAX)]


def _written(value: object, info: ValidationInfo) -> object:
    """Refuse numbers, which would be seconds since 1970: nobody writes a time so. Raises ValueError."""
    is_number = isinstance(value, int | float) or (isinstance(value, str) and value.strip("+-.0123456789 ") == "")
    if is_new(info) and is_number:
        raise ValueError("must be a time with its zone; write it as 2030-01-31T22:00:00Z")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_written)]


class JobToleration(JobPart):
    """A taint that the job's pods tolerate."""

    key: Annotated[LabelKey | None, Field(description="key of the taint; every taint by default")] = None
    operator: Annotated[Literal["Exists", "Equal"], Field(description="Equal compares the value")] = "Equal"
    value: Annotated[LabelValue, Field(description="value of the taint, for Equal")] = ""
    effect: Annotated[
        Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None,
        Field(description="effect of the taint; every effect by default"),
    ] = None
    toleration_seconds: Annotated[
        int | None,
        Field(strict=True, ge=0, description="how long a NoExecute taint is tolerated; for ever by default"),
    ] = None

    @model_validator(mode="after")
    def check(self, info: ValidationInfo) -> Self:
        """Refuse tolerations that the API server would refuse."""
        if is_new(info) and (self.toleration_seconds or 0) > SECONDS_MAX:
            raise ValueError(
                f"toleration_seconds may be at most {SECONDS_MAX}; remove it to tolerate the taint for ever"
            )
        if self.operator == "Exists" and self.value:
            raise ValueError("operator Exists takes no value; remove it, or write operator Equal")
        if self.operator == "Equal" and self.key is None:
            raise ValueError("operator Equal needs a key; write operator Exists to tolerate every taint")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError("toleration_seconds is for effect NoExecute alone")
        return self


class JobPolicy(JobPart):
    """When and with which other jobs a job runs."""

    priority_class: Annotated[
        Priority | None, Field(description="order of admission and preemption; services are high, others normal")
    ] = None
    preemptible: Annotated[Flag | None, Field(description="may be preempted by other jobs; yes unless critical")] = None
    preemption_grace_period: Annotated[
        Seconds | None, Field(description="seconds between the notice and the end; 30 by default")
    ] = None
    scale_to_zero: Annotated[Flag, Field(description="a service without requests has no pods")] = False
    min_replicas: Annotated[
        Replicas | None, Field(description="least replicas of a service; 1 by default, 0 with scale_to_zero")
    ] = None
    max_replicas: Annotated[
        Replicas | None,
        Field(description="most replicas of a service: a value above the least creates an autoscaler"),
    ] = None
    scheduled_start: Annotated[Moment | None, Field(description="the job does not start before")] = None
    deadline: Annotated[Moment | None, Field(description="the job must have ended by then")] = None
    max_runtime: Annotated[Seconds | None, Field(description="seconds that the job may run")] = None
    queue_name: Annotated[
        ObjectName | None, Field(max_length=63, description="LocalQueue; the tenant's by default")
    ] = None
    cohort: Annotated[
        ObjectName | None, Field(max_length=63, description="group of queues that lend to each other; for reports")
    ] = None
    topology: Annotated[
        TopologyConstraint, Field(description="all GPUs on one node, joined by NVLink, or pods on different nodes")
    ] = TopologyConstraint.NONE
    node_selector: Annotated[
        dict[LabelKey, LabelValue] | None, Field(max_length=MAP_ENTRIES_MAX, description="labels of the nodes")
    ] = None
    tolerations: Annotated[
        tuple[JobToleration, ...] | None, Field(max_length=TOLERATIONS_MAX, description="taints that the pods tolerate")
    ] = None
    max_retries: Annotated[
        int, Field(strict=True, ge=0, le=RETRIES_MAX, description="failures after which the job has failed")
    ] = 3
    retry_delay_seconds: Annotated[
        int, Field(strict=True, ge=0, le=86_400, description="pause before a retry, by the job service")
    ] = 30
    retry_on_preemption: Annotated[Flag, Field(description="no: preemption is a failure")] = True
    unique_seconds: Annotated[
        Seconds | None,
        Field(description="an identical job that the tenant submits within so many seconds is the first one"),
    ] = None

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse contradictions."""
        least = self.least_replicas
        if self.max_replicas is not None and self.max_replicas < max(1, least):
            raise ValueError(f"max_replicas {self.max_replicas} is less than {max(1, least)}, the least that it may be")
        if least == 0 and not self.scale_to_zero:
            raise ValueError("min_replicas 0 is for services with scale_to_zero: true")
        if self.scheduled_start is not None and self.deadline is not None and self.deadline <= self.scheduled_start:
            raise ValueError("deadline is not after scheduled_start")
        return self

    @property
    def least_replicas(self) -> int:
        """Replicas of a service without load."""
        if self.min_replicas is not None:
            return self.min_replicas
        return 0 if self.scale_to_zero else 1

    def seconds_to_deadline(self, now_seconds: float | None) -> int | None:
        """Return the seconds from the start, or from now if the job may start at once, to the deadline.

        Negative if it has passed. `now_seconds`: since 1970. None without a deadline, and if neither is known.
        """
        start = self.scheduled_start.timestamp() if self.scheduled_start is not None else now_seconds
        return floor(self.deadline.timestamp() - start) if self.deadline is not None and start is not None else None


class CheckpointConfig(JobPart):
    """Place and interval of a training's checkpoints; `ext_ml_checkpoint_*` attributes override it."""

    enabled: Flag = True
    storage_class: Annotated[ObjectName, Field(description="of the volume")] = "standard"
    storage_size: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,7}(Mi|Gi|Ti|M|G|T)$", description="of the volume")] = (
        "100Gi"
    )
    checkpoint_interval: Annotated[Seconds, Field(description="seconds between checkpoints")] = 3600
    max_checkpoints: Annotated[
        int, Field(strict=True, ge=1, le=1000, description="checkpoints kept; the oldest beyond is removed")
    ] = 3
    checkpoint_path: Annotated[
        str,
        Field(max_length=512, pattern=r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$", description="mount path of the volume"),
    ] = "/checkpoints"


class JobIntent(JobPart):
    """Purpose and cost of a job."""

    optimization_goal: Annotated[OptimizationGoal, Field(description="main criterion for the choice of a cluster")] = (
        OptimizationGoal.BALANCED
    )
    spot_eligible: Annotated[Flag, Field(description="may run on machines that can disappear at any time")] = False
    budget_cap: Annotated[
        Decimal | None, Field(gt=0, max_digits=15, decimal_places=4, description="greatest cost in US dollars")
    ] = None
    budget_action: Annotated[BudgetAction, Field(description="action beyond budget_cap")] = BudgetAction.WARN
    cost_center: Annotated[Identifier | None, Field(description="who pays")] = None
    workload_class: WorkloadClass = WorkloadClass.DEVELOPMENT
    sla_tier: Annotated[Identifier | None, Field(description="such as gold, silver, bronze")] = None
    expected_duration_hint: Annotated[Seconds | None, Field(description="seconds, for estimates")] = None
    gpu_memory_hint: Annotated[
        str | None, Field(max_length=12, pattern=r"^[1-9][0-9]{0,4}GB$", description="such as 40GB, for estimates")
    ] = None
    checkpoint_config: Annotated[CheckpointConfig | None, Field(description="for trainings")] = None
