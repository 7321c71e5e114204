"""Contract of each type of job: its object, restarts, scaling, preemption, billing and defaults.

A table; atoll.jobs.rendering creates the objects.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from atoll.jobs.words import JobType, Priority


@dataclass(frozen=True, slots=True)
class Contract:
    """Contract of a type of job. `restart_policy`: OnFailure only if the job is kept from preemption, else Never.
    `service_level`: share of uptime for services, of completed jobs for others."""

    kind: str
    life: str
    restart_policy: str
    scaling: str
    priority: Priority
    preemptible: str
    on_preemption: str
    billing: str
    service_level: float


CONTRACTS: Final[Mapping[JobType, Contract]] = {
    JobType.SERVICE: Contract(
        kind="Deployment",
        life="until stopped or failed",
        restart_policy="Always",
        scaling="replicas",
        priority=Priority.HIGH,
        preemptible="rarely",
        on_preemption="rescheduled at once, after open connections were drained",
        billing="per second while it runs",
        service_level=0.999,
    ),
    JobType.BATCH: Contract(
        kind="Job",
        life="once to the end",
        restart_policy="Never",
        scaling="parallel pods",
        priority=Priority.NORMAL,
        preemptible="yes",
        on_preemption="tried again from the start",
        billing="per second of execution",
        service_level=0.95,
    ),
    JobType.TRAINING: Contract(
        kind="Job",
        life="once to the end, resumable",
        restart_policy="OnFailure",
        scaling="workers",
        priority=Priority.NORMAL,
        preemptible="yes, after a checkpoint",
        on_preemption="saves a checkpoint, then tried again from there",
        billing="per second of execution, and storage",
        service_level=0.90,
    ),
}
