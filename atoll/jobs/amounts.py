"""Host resources of each pod: cpu, memory, scratch space, shared memory.

Gives frozen Amounts in Kubernetes' format. Sizes of attributes are decimal GB. Shared memory is memory: /dev/shm counts
against the limit, so the request includes both.
"""

from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Final

from atoll.cluster.quantities import parse_amount
from atoll.jobs.errors import JobMistake
from atoll.jobs.labels import plain, workload
from atoll.jobs.model import Job
from atoll.jobs.notes import HINT, NoteBook
from atoll.ml.attributes import PREFIX, MlAttributes

CPU_REQUEST: Final = "1"
CPU_LIMIT: Final = "2"
MEMORY_REQUEST: Final = "4Gi"
MEMORY_LIMIT: Final = "8Gi"
"""Defaults of a job without its own values."""
SCRATCH_PATH: Final = "/scratch"
SHM_PATH: Final = "/dev/shm"  # noqa: S108 - shared memory is there
_SUFFIXES: Final = (("T", 10**12), ("Ti", 2**40), ("G", 10**9), ("Gi", 2**30), ("M", 10**6), ("Mi", 2**20))


@dataclass(frozen=True, slots=True)
class Amounts:
    """Quantities; empty if not requested."""

    cpu_request: str
    cpu_limit: str
    memory_request: str
    memory_limit: str
    scratch: str
    shm: str


def amounts_of(job: Job, attributes: MlAttributes, book: NoteBook) -> Amounts:
    """Return each pod's amounts. Raises JobMistake."""
    said = attributes
    for name, path in (
        ("cpu_cores", "resources.requests.cpu"),
        ("memory_gb", "resources.requests.memory and limits.memory"),
        ("storage_gb", f"resources.requests.ephemeral-storage and a volume at {SCRATCH_PATH}"),
        ("shm_size_gb", f"a volume of memory at {SHM_PATH}, counted in the memory"),
    ):
        value = getattr(said, name)
        if value is not None:
            book.tell(f"{PREFIX}{name}", plain(value), path, workload(job))
    _tell_resources(job, book)
    cpu_request, cpu_limit = _cpu(job, said)
    least, most = _memory(job, said)
    shared = gigabytes(said.shm_size_gb) if said.shm_size_gb is not None else 0
    _tell_silence(job, said, cpu_limit or cpu_request, most, book)
    return Amounts(
        cpu_request=cpu_request,
        cpu_limit=cpu_limit,
        memory_request=_with_shared(least, shared),
        memory_limit=_with_shared(most, shared),
        scratch=quantity(gigabytes(said.storage_gb)) if said.storage_gb is not None else "",
        shm=quantity(shared) if shared else "",
    )


def _tell_silence(job: Job, said: MlAttributes, cores: str, memory: str, book: NoteBook) -> None:
    """Note the default memory and cores of pods with GPUs if the job sets none: those of any small job."""
    resources = job.resources
    if not said.gpu_count:
        return
    if said.memory_gb is None and resources.memory_request is None and resources.memory_limit is None:
        text = f"{HINT}the job does not set the memory of each pod, so it is {memory}; that is little for a model"
        book.tell(f"{PREFIX}memory_gb", None, text, workload(job))
    is_little = said.gpu_count > parse_amount("cpu", cores) // 1000
    if is_little and said.cpu_cores is None and resources.cpu_request is None and resources.cpu_limit is None:
        text = f"{HINT}the job does not set the cores of each pod, so it has {cores} for its GPUs"
        book.tell(f"{PREFIX}cpu_cores", None, text, workload(job))


def _tell_resources(job: Job, book: NoteBook) -> None:
    for name in ("cpu_request", "cpu_limit", "memory_request", "memory_limit"):
        value = getattr(job.resources, name)
        if value is not None:
            what, _, kind = name.partition("_")
            book.tell(f"resources.{name}", value, f"resources.{kind}s.{what}", workload(job))


def _cpu(job: Job, said: MlAttributes) -> tuple[str, str]:
    """Return request and limit; no limit if the request exceeds the default one."""
    request = str(said.cpu_cores) if said.cpu_cores is not None else job.resources.cpu_request or CPU_REQUEST
    limit = job.resources.cpu_limit
    if limit is not None and parse_amount("cpu", limit) < parse_amount("cpu", request):
        raise JobMistake("resources.cpu_limit", limit, f"the request is {request}", "raise it, or remove it")
    if limit is None and parse_amount("cpu", request) <= parse_amount("cpu", CPU_LIMIT) and said.cpu_cores is None:
        limit = CPU_LIMIT
    return request, limit or ""


def _memory(job: Job, said: MlAttributes) -> tuple[str, str]:
    if said.memory_gb is not None:
        both = quantity(gigabytes(said.memory_gb))
        return both, both
    request, limit = job.resources.memory_request, job.resources.memory_limit
    if request is None:
        request = min((MEMORY_REQUEST, limit or MEMORY_REQUEST), key=lambda one: parse_amount("memory", one))
    if limit is None:
        limit = max((MEMORY_LIMIT, request), key=lambda one: parse_amount("memory", one))
    return request, limit


def gigabytes(number: float) -> int:
    """Return the bytes of decimal gigabytes, rounded up to whole bytes."""
    return int((Decimal(str(number)) * 10**9).to_integral_value(ROUND_CEILING))


def quantity(size_bytes: int) -> str:
    """Return bytes in the largest unit that divides them."""
    for suffix, factor in _SUFFIXES:
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{suffix}"
    return str(size_bytes)


def _with_shared(amount: str, shared_bytes: int) -> str:
    return quantity(parse_amount("memory", amount) + shared_bytes) if shared_bytes else amount
