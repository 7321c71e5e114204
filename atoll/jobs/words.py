"""The words of a job: every choice that its fields offer, and which whole number a priority stands for.

In: nothing. Out: enums, spelled as users write them. Separate, so that a reader finds all choices on one page.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class JobType(StrEnum):
    """How a job lives: a service until it is stopped, a batch once to its end, a training once and resumable."""

    SERVICE = "service"
    BATCH = "batch"
    TRAINING = "training"


class DeploymentType(StrEnum):
    """What a job is made from: a chart, a container image, or a model with the server that serves it."""

    HELM = "helm"
    DOCKER = "docker"
    MODEL = "model"


class SourceType(StrEnum):
    """Who asked for the job."""

    DIRECT = "direct"
    PIPELINE = "pipeline"
    USECASE = "usecase"


class OwnerType(StrEnum):
    """Whose job it is: a person's, or the platform's own."""

    USER = "user"
    PLATFORM = "platform"


class Priority(StrEnum):
    """How important a job is; see PRIORITY_VALUES."""

    CRITICAL = "critical"
    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


PRIORITY_VALUES: Final[Mapping[Priority, int]] = {
    Priority.CRITICAL: 1000,
    Priority.HIGH: 100,
    Priority.NORMAL: 10,
    Priority.LOW: 1,
}
PRIORITY_MEANINGS: Final[Mapping[Priority, str]] = {
    Priority.CRITICAL: "nobody is above it, so that it is never preempted; for reserved capacity",
    Priority.HIGH: "preempted by critical jobs alone; what services have by default",
    Priority.NORMAL: "may be preempted; what batch and training jobs have by default",
    Priority.LOW: "gives way to everybody: spot and background work",
}


class TopologyConstraint(StrEnum):
    """How the GPUs of a job lie: all on one node, joined by NVLink, or its pods on different nodes."""

    NONE = "none"
    SAME_NODE = "same_node"
    NVLINK = "nvlink"
    SPREAD = "spread"


class OptimizationGoal(StrEnum):
    """What a choice between clusters weighs most."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    COST = "cost"
    BALANCED = "balanced"


class WorkloadClass(StrEnum):
    """What the work is for."""

    PRODUCTION = "production"
    STAGING = "staging"
    DEVELOPMENT = "development"
    RESEARCH = "research"
    SYSTEM = "system"
    INTERACTIVE = "interactive"


class BudgetAction(StrEnum):
    """What happens when the budget is spent."""

    WARN = "warn"
    PAUSE = "pause"
    CANCEL = "cancel"
