"""The TPUs of a job: its slice, the number of hosts, and the labels of GKE's nodes.

The pods of a slice with several hosts are a gang: they start together on one slice, or wait.
"""

from dataclasses import dataclass

from atoll.jobs.errors import JobMistake
from atoll.jobs.model import WORKERS_MAX, Job
from atoll.jobs.words import JobType
from atoll.ml.attributes import PREFIX, Accelerator, MlAttributes
from atoll.ml.tables import (
    TPU_CHIPS_PER_HOST,
    TPU_HOST_CHIPS,
    TPU_TOPOLOGY_LABEL,
    TPU_TYPE_LABEL,
    TPU_TYPES,
    tpu_chips,
)


@dataclass(frozen=True, slots=True)
class TpuNeeds:
    """`hosts`: pods of the slice, each with `chips`. `labels`: values of node labels, any of which will do."""

    hosts: int
    chips: int
    labels: tuple[tuple[str, tuple[str, ...]], ...]


def tpu_needs(job: Job, attributes: MlAttributes) -> TpuNeeds | None:
    """Return the job's TPU needs; None without TPUs. Raises JobMistake."""
    if attributes.accelerator is not Accelerator.TPU:
        return None
    topology, count = attributes.tpu_topology, attributes.tpu_chip_count
    if topology is None and count is None:
        raise JobMistake(
            f"{PREFIX}tpu_topology",
            None,
            "must be there: a TPU job says how many chips it needs",
            "write a shape such as 2x2",
        )
    chips = tpu_chips(topology) if topology is not None else count or 0
    if count is not None and count != chips:
        raise JobMistake(f"{PREFIX}tpu_chip_count", count, f"a slice {topology} has {chips} chips", "give one of both")
    hosts = max(1, chips // TPU_CHIPS_PER_HOST)
    _check_hosts(job, attributes, chips, hosts)
    if job.workers is not None and job.workers != hosts:
        raise JobMistake("workers", job.workers, f"the slice lies on {hosts} hosts", "remove it")
    labels: list[tuple[str, tuple[str, ...]]] = []
    if attributes.tpu_type is not None:
        labels.append((TPU_TYPE_LABEL, TPU_TYPES[attributes.tpu_type].node_label_values))
    if topology is not None:
        labels.append((TPU_TOPOLOGY_LABEL, (topology,)))
    return TpuNeeds(hosts, chips // hosts, tuple(labels))


def _check_hosts(job: Job, attributes: MlAttributes, chips: int, hosts: int) -> None:
    """Refuse a slice that lies on no hosts, or on more than the job may have pods. Raises JobMistake."""
    topology, count = attributes.tpu_topology, attributes.tpu_chip_count
    named = ("tpu_chip_count", count) if topology is None else ("tpu_topology", topology)
    if hosts == 1 and chips not in TPU_HOST_CHIPS:
        sizes = ", ".join(map(str, TPU_HOST_CHIPS))
        raise JobMistake(f"{PREFIX}{named[0]}", named[1], f"a host has {sizes} chips for a job", "choose one of these")
    if hosts > WORKERS_MAX:
        limit = (
            f"a slice {topology} lies on {hosts} hosts, each with a pod, and a job has {WORKERS_MAX} workers at most"
        )
        raise JobMistake(f"{PREFIX}{named[0]}", named[1], limit, "choose a smaller slice")
    if hosts > 1 and (topology is None or chips % TPU_CHIPS_PER_HOST):
        limit = f"a slice of more than {TPU_CHIPS_PER_HOST} chips lies on whole hosts and is named by its shape"
        raise JobMistake(f"{PREFIX}{named[0]}", named[1], limit, f"write a {PREFIX}tpu_topology such as 4x4")
    if hosts > 1 and job.job_type is JobType.SERVICE:
        limit = f"a slice {topology} lies on {hosts} hosts, and a service runs in one pod"
        raise JobMistake(f"{PREFIX}tpu_topology", topology, limit, "choose a smaller slice")
