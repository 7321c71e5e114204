"""Resource profiles and patterns: the kind of work of a job, in common words.

A profile has suitable flavors. Neither changes the objects; both appear in labels and in `atoll job explain`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from atoll.cluster.quantities import parse_amount
from atoll.jobs.model import Job
from atoll.jobs.words import JobType, OptimizationGoal, OwnerType, Priority, WorkloadClass
from atoll.ml.attributes import MlAttributes, MlPriorityClass

MUCH_MEMORY_BYTES: Final = 128 * 10**9
MUCH_STORAGE_GB: Final = 1000
MANY_CORES: Final = 16


class Pattern(StrEnum):
    """Common name of a type, or of a type with a policy."""

    SERVERLESS = "serverless"
    SPOT = "spot"
    SCHEDULED = "scheduled"
    INTERACTIVE = "interactive"
    SYSTEM = "system"
    BACKGROUND = "background"
    TIME_BOUNDED = "time-bounded"
    COST_OPTIMISED = "cost-optimised"


def patterns_of(job: Job) -> tuple[Pattern, ...]:
    """Return the patterns that the job follows."""
    policy, intent, of = job.policy, job.intent, job.job_type
    is_spot = intent.spot_eligible or job.attributes.priority_class is MlPriorityClass.SPOT
    is_interactive = of is JobType.SERVICE and intent.workload_class is WorkloadClass.INTERACTIVE
    rows = (
        (Pattern.SERVERLESS, of is JobType.SERVICE and policy.scale_to_zero),
        (Pattern.SPOT, is_spot),
        (Pattern.SCHEDULED, of is JobType.BATCH and policy.scheduled_start is not None),
        (Pattern.INTERACTIVE, is_interactive),
        (Pattern.SYSTEM, job.owner_type is OwnerType.PLATFORM),
        (Pattern.BACKGROUND, policy.priority_class is Priority.LOW),
        (Pattern.TIME_BOUNDED, policy.deadline is not None),
        (Pattern.COST_OPTIMISED, intent.optimization_goal is OptimizationGoal.COST),
    )
    return tuple(pattern for pattern, holds in rows if holds)


@dataclass(frozen=True, slots=True)
class ResourceProfile:
    """A kind of work, and suitable flavors of machines, the best first."""

    name: str
    flavors: tuple[str, ...]


def profile_of(job: Job, attributes: MlAttributes) -> ResourceProfile:
    """Return the profile of the job: by memory if it needs much, by GPUs, by storage, else by CPU."""
    gpus = attributes.gpu_count or 0
    memory_bytes = int((attributes.memory_gb or 0) * 10**9) or parse_amount(
        "memory", job.resources.memory_request or "4Gi"
    )
    if gpus <= 1 and memory_bytes >= MUCH_MEMORY_BYTES:
        return ResourceProfile("memory-intensive", ("memory-optimized",))
    if gpus:
        return ResourceProfile("gpu-intensive", (f"gpu-{(attributes.gpu_type or 'any').partition('-')[2] or 'any'}",))
    if (attributes.storage_gb or 0) >= MUCH_STORAGE_GB:
        return ResourceProfile("storage-intensive", ("storage-optimized",))
    cores = attributes.cpu_cores or parse_amount("cpu", job.resources.cpu_request or "1") // 1000
    return ResourceProfile(
        "cpu-only", ("cpu-compute", "cpu-standard") if cores >= MANY_CORES else ("cpu-standard", "cpu-compute")
    )
