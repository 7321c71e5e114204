"""The GPUs of a job: each pod's claim, and the number of pods that share them."""

from dataclasses import dataclass
from difflib import get_close_matches
from math import ceil

from atoll.api.claims import COUNT_MAX, DeviceClaim, InterconnectKind, Vendor
from atoll.jobs.errors import JobMistake
from atoll.jobs.model import WORKERS_MAX, Job
from atoll.jobs.notes import HINT, NO_EFFECT, NoteBook
from atoll.jobs.settings import RenderSettings
from atoll.jobs.words import JobType, TopologyConstraint
from atoll.ml.attributes import PREFIX, Accelerator, DistributedStrategy, MlAttributes
from atoll.ml.mapping import device_claim
from atoll.ml.tables import GPU_TYPES, WITHOUT_NVLINK

COUNT_FIELD = f"{PREFIX}gpu_count"


@dataclass(frozen=True, slots=True)
class GpuNeeds:
    """`claim`: of each pod. `workers`: pods that share the GPUs."""

    claim: DeviceClaim
    workers: int


def gpu_needs(job: Job, attributes: MlAttributes, settings: RenderSettings, book: NoteBook) -> GpuNeeds | None:
    """Return the job's GPU needs; None without GPUs. Raises JobMistake."""
    if attributes.accelerator is not Accelerator.GPU or not attributes.gpu_count:
        return None
    workers = _workers(job, attributes, attributes.gpu_count, settings, book)
    count = attributes.gpu_count // workers
    return GpuNeeds(_claim(job, attributes, count, book), workers)


def _workers(job: Job, attributes: MlAttributes, total: int, settings: RenderSettings, book: NoteBook) -> int:
    """Return the number of pods that share the GPUs."""
    most = settings.gpus_per_pod_max
    limit = f"a machine has {most} GPUs at most"
    if job.policy.topology is TopologyConstraint.SAME_NODE and total > most:
        raise JobMistake(COUNT_FIELD, total, limit, "ask for fewer, or give policy.topology another value")
    if job.workers is not None:
        if total % job.workers:
            raise JobMistake(
                "workers", job.workers, f"{total} GPUs cannot be shared evenly by so many", "choose a divisor"
            )
        if total // job.workers > most:
            each = f"each would have {total // job.workers} GPUs, and a machine has {most} at most"
            raise JobMistake("workers", job.workers, each, f"give {ceil(total / most)} or more")
        book.tell("workers", job.workers, f"{job.workers} pods with {total // job.workers} GPUs each")
        return job.workers
    if total <= most:
        return 1
    if total > COUNT_MAX * WORKERS_MAX:
        raise JobMistake(COUNT_FIELD, total, limit, "ask for fewer")
    if job.job_type is JobType.SERVICE or not _is_distributed(attributes):
        hint = f"say {PREFIX}distributed_strategy and workers, so that several pods share them"
        raise JobMistake(
            COUNT_FIELD, total, limit, "a service runs in one pod" if job.job_type is JobType.SERVICE else hint
        )
    workers = next(number for number in range(ceil(total / most), total + 1) if total % number == 0)
    if workers > WORKERS_MAX:
        raise JobMistake(
            COUNT_FIELD, total, f"{workers} pods would share them, {WORKERS_MAX} may", "choose a round number"
        )
    book.tell(
        f"{PREFIX}distributed_strategy",
        attributes.distributed_strategy,
        f"{workers} pods with {total // workers} GPUs each: a machine has {most} at most",
    )
    return workers


def _is_distributed(attributes: MlAttributes) -> bool:
    return attributes.distributed_strategy not in (None, DistributedStrategy.NONE)


def _claim(job: Job, attributes: MlAttributes, count: int, book: NoteBook) -> DeviceClaim:
    of, total, said = f"GpuClaim/{job.name}", attributes.gpu_count, job.attributes
    book.tell(COUNT_FIELD, total, f"spec.devices.count {count}" + (" in each pod" if count != total else ""), of)
    if attributes.gpu_type is not None:
        _check_vendor(attributes.gpu_type)
        _tell_unknown(attributes.gpu_type, book, of)
    interconnect = _interconnect(job, attributes, count, book, of)
    claim = device_claim(attributes.model_copy(update={"gpu_count": count, "gpu_interconnect": interconnect}))
    assert claim is not None
    capability = claim.compute_capability
    for name, given, text in (
        ("gpu_type", attributes.gpu_type, f"spec.devices.models {', '.join(claim.models)}"),
        ("gpu_memory_gb", said.gpu_memory_gb, f"spec.devices.memory {claim.memory}"),
        (
            "gpu_compute_capability",
            said.gpu_compute_capability,
            f"spec.devices.computeCapability {capability}",
        ),
    ):
        if given is not None:
            book.tell(f"{PREFIX}{name}", given, text, of)
    return claim


def _check_vendor(gpu_type: str) -> None:
    if gpu_type.partition("-")[0] not in tuple(Vendor):
        limit = f"Atoll gives out GPUs of {' and '.join(Vendor)}"
        raise JobMistake(f"{PREFIX}gpu_type", gpu_type, limit, "choose one of theirs")


def _tell_unknown(gpu_type: str, book: NoteBook, of: str) -> None:
    """Note a type that no card's name begins with in the reference; a part of a card is none of its own."""
    models = [model for row in GPU_TYPES.values() for model in row.models]
    is_known = any(f"{gpu_type}-".startswith(f"{model}-") for model in (*models, *GPU_TYPES))
    if is_known and "-mig-" not in gpu_type:
        return
    near = get_close_matches(gpu_type, GPU_TYPES, 1)
    text = f"{HINT}it is not a known type, and only cards of that name match"
    book.tell(f"{PREFIX}gpu_type", gpu_type, text + (f"; did you mean {near[0]}?" if near else ""), of)


def _interconnect(job: Job, attributes: MlAttributes, count: int, book: NoteBook, of: str) -> InterconnectKind:
    asked = attributes.gpu_interconnect or InterconnectKind.ANY
    if job.policy.topology is TopologyConstraint.NVLINK:
        if asked is InterconnectKind.PCIE:
            limit = f"{PREFIX}gpu_interconnect is pcie"
            raise JobMistake("policy.topology", "nvlink", limit, "give one of both")
        asked = InterconnectKind.NVLINK
        if count > 1:
            book.tell("policy.topology", "nvlink", "spec.devices.interconnect nvlink", of)
    if count == 1:
        said = job.attributes.gpu_interconnect
        is_of_gang = said is InterconnectKind.NVLINK and (attributes.gpu_count or 0) > 1
        if said is not None and not is_of_gang:
            text = "any" if said is InterconnectKind.ANY else f"{NO_EFFECT}there is one GPU in a pod"
            book.tell(f"{PREFIX}gpu_interconnect", said.value, text, of)
        if job.policy.topology is TopologyConstraint.NVLINK:
            book.tell("policy.topology", "nvlink", f"{NO_EFFECT}there is one GPU in a pod", of)
        return InterconnectKind.ANY
    if asked is InterconnectKind.NVLINK and attributes.gpu_type in WITHOUT_NVLINK:
        is_said = job.policy.topology is TopologyConstraint.NVLINK
        source = "policy.topology" if is_said else f"{PREFIX}gpu_interconnect"
        text = f"{HINT}no {attributes.gpu_type} has NVLink, so the job would wait for ever"
        book.tell(source, "nvlink", f"{text}; ask for one GPU in a pod, or another type", of)
    if attributes.gpu_interconnect not in (None, InterconnectKind.ANY) or job.attributes.gpu_interconnect is not None:
        book.tell(
            f"{PREFIX}gpu_interconnect", job.attributes.gpu_interconnect, f"spec.devices.interconnect {asked}", of
        )
    return asked
