"""Enums of a job's fields, spelled as users write them, and the numbers of priorities."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class JobType(StrEnum):
    """Life cycle of a job: a service runs until it is stopped, a batch once to its end, a training once and
    resumable."""

    SERVICE = "service"
    BATCH = "batch"
    TRAINING = "training"


class DeploymentType(StrEnum):
    """Source of a job's pods: a chart, a container image, or a model with its server."""

    HELM = "helm"
    DOCKER = "docker"
    MODEL = "model"


class SourceType(StrEnum):
    """Origin of the job."""

    DIRECT = "direct"
    PIPELINE = "pipeline"
    USECASE = "usecase"


class OwnerType(StrEnum):
    """Owner of the job: a person, or the platform itself."""

    USER = "user"
    PLATFORM = "platform"


class Priority(StrEnum):
    """Priority of a job; see PRIORITY_VALUES."""

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
    Priority.CRITICAL: "the highest, so never preempted; for reserved capacity",
    Priority.HIGH: "preempted only by critical jobs; the default of services",
    Priority.NORMAL: "may be preempted; the default of batch and training jobs",
    Priority.LOW: "preempted by all others: spot and background work",
}


class TopologyConstraint(StrEnum):
    """Placement of a job's GPUs: all on one node, joined by NVLink, or its pods on different nodes."""

    NONE = "none"
    SAME_NODE = "same_node"
    NVLINK = "nvlink"
    SPREAD = "spread"


class OptimizationGoal(StrEnum):
    """Main criterion for the choice of a cluster."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    COST = "cost"
    BALANCED = "balanced"


class WorkloadClass(StrEnum):
    """Purpose of the work."""

    PRODUCTION = "production"
    STAGING = "staging"
    DEVELOPMENT = "development"
    RESEARCH = "research"
    SYSTEM = "system"
    INTERACTIVE = "interactive"


class BudgetAction(StrEnum):
    """Action when the budget is spent."""

    WARN = "warn"
    PAUSE = "pause"
    CANCEL = "cancel"
