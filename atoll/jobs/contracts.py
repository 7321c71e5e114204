"""What each type of job promises.

In: a type. Out: its contract: which object, how it restarts, scales, gives way and is billed, and the default of what a
job does not say. A table; the objects that follow from it are made in atoll.jobs.rendering.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from atoll.jobs.words import JobType, Priority


@dataclass(frozen=True, slots=True)
class Contract:
    """What a type of job promises. `service_level`: share of time up for services, of jobs that complete for others."""

    kind: str
    life: str
    restart_policy: str
    scaling: str
    priority: Priority
    preemptible: str
    on_preemption: str
    billing: str
    service_level: float
    has_volume: bool


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
        has_volume=False,
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
        has_volume=False,
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
        has_volume=True,
    ),
}
