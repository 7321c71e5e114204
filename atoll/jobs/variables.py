"""Environment variables of a job's container: its attributes, the rendezvous of its pods, the place of checkpoints.

The user's variables come last, so that they override others; each has a note.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from atoll.api import job_names
from atoll.jobs.labels import NOT_FOR_CONTAINERS, ON_PODS, plain, workload
from atoll.jobs.model import Job
from atoll.jobs.needs import Needs
from atoll.jobs.notes import HINT, NoteBook
from atoll.jobs.settings import RenderSettings
from atoll.jobs.tenant_places import prefixes_of
from atoll.jobs.words import JobType
from atoll.ml.attributes import PREFIX, Runtime

RANK_ANNOTATION: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def variables_of(job: Job, needs: Needs, settings: RenderSettings, book: NoteBook) -> list[dict[str, Any]]:
    """Return the env of the container."""
    own = dict(_own(job, needs, settings, book))
    given = job.container.env if job.container is not None else ()
    for variable in given:
        if own.pop(variable.name, None) is not None:
            book.tell(f"container.env.{variable.name}", "given", f"{HINT}it replaces the value that Atoll would set")
    entries = [{"name": name, **value} for name, value in own.items()]
    return entries + [variable.manifest() for variable in given]


def _own(job: Job, needs: Needs, settings: RenderSettings, book: NoteBook) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield job_names.JOB_NAME_VARIABLE, literal(job.name)
    yield job_names.JOB_ID_VARIABLE, literal(str(job.id) if job.id is not None else job.name)
    for name in ON_PODS:
        value = needs.attributes.model_id if name == "model_id" else getattr(job.attributes, name)
        if value is not None and name not in NOT_FOR_CONTAINERS:
            yield job_names.ML_VARIABLE_PREFIX + name.upper(), literal(plain(value))
    if job.attributes.model_registry_uri is not None and settings.registry_hosts:
        yield job_names.MODEL_HOSTS, literal(" ".join(settings.registry_hosts))
    yield job_names.GRACE_VARIABLE, literal(str(needs.grace_seconds))
    yield from _checkpoints(job, needs, settings, book)
    if needs.workers > 1:
        yield from _meeting(job, needs)
    elif job.job_type is JobType.TRAINING and needs.attributes.runtime is Runtime.PYTORCH and needs.gpus is not None:
        sizes = literal("1"), literal(str(needs.gpus.claim.count))
        yield from zip(job_names.TORCHRUN_VARIABLES, sizes, strict=False)


def _checkpoints(
    job: Job, needs: Needs, settings: RenderSettings, book: NoteBook
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    checkpoint = needs.checkpoint
    if checkpoint is None:
        return
    config = job.intent.checkpoint_config
    allowed = prefixes_of(settings, job.tenant_id)
    prefixes = allowed if checkpoint.uri.startswith(allowed) else (*allowed, checkpoint.uri)
    yield job_names.CHECKPOINT_PREFIXES, literal(" ".join(prefixes))
    for name, field, variable, value in (
        ("checkpoint_enabled", "enabled", job_names.CHECKPOINT_URI, checkpoint.uri),
        ("checkpoint_storage_uri", "checkpoint_path", job_names.CHECKPOINT_URI, checkpoint.uri),
        (
            "checkpoint_interval_s",
            "checkpoint_interval",
            job_names.CHECKPOINT_INTERVAL,
            str(checkpoint.interval_seconds),
        ),
        ("checkpoint_max_count", "max_checkpoints", job_names.CHECKPOINT_COUNT, str(checkpoint.kept)),
        ("checkpoint_on_preempt", "", job_names.CHECKPOINT_ON_PREEMPTION, plain(checkpoint.on_preemption)),
    ):
        said = getattr(job.attributes, name)
        if said is not None:
            book.tell(f"{PREFIX}{name}", plain(said), f"variable {variable}", workload(job))
        elif config is not None and field:
            told = config.enabled if field == "enabled" else value
            book.tell(f"intent.checkpoint_config.{field}", told, f"variable {variable}", workload(job))
        yield variable, literal(value)


def _meeting(job: Job, needs: Needs) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rendezvous of pods that work together, also in torchrun's variables."""
    first = f"{job.name}-0.{job.name}"
    port = str(job_names.MASTER_PORT_NUMBER)
    per_worker = needs.gpus.claim.count if needs.gpus is not None else 0
    rank = {"valueFrom": {"fieldRef": {"fieldPath": RANK_ANNOTATION}}}
    yield job_names.WORKERS_VARIABLE, literal(str(needs.workers))
    yield job_names.GPUS_VARIABLE, literal(str(per_worker))
    yield job_names.MASTER_ADDRESS, literal(first)
    yield job_names.MASTER_PORT, literal(port)
    if needs.attributes.runtime is Runtime.PYTORCH:
        values = (literal(str(needs.workers)), literal(str(per_worker or 1)), rank, literal(first), literal(port))
        yield from zip(job_names.TORCHRUN_VARIABLES, values, strict=True)


def literal(text: str) -> dict[str, str]:
    """Return a value that Kubernetes does not expand: it would replace $(NAME) by a variable."""
    return {"value": text.replace("$(", "$$(")}
