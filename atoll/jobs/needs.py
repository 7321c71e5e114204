"""Needs of a job: attributes, policy, intent and defaults of its type combined.

Objects are created from the frozen Needs only. Contradictory fields raise a JobMistake; overridden ones are noted.

Phases: (1) one set of attributes, with what follows from them; (2) pods: how many, with how many GPUs each; (3) order
and grace; (4) time; (5) checkpoints.
"""

from dataclasses import dataclass
from typing import Final

from atoll.api.gangs import GangTopologyRequest
from atoll.jobs.aliases import PRIORITIES
from atoll.jobs.base import SECONDS_MAX
from atoll.jobs.checkpoints import Checkpoint, checkpoint_of
from atoll.jobs.contracts import CONTRACTS
from atoll.jobs.errors import JobMistake
from atoll.jobs.gangs import together_of
from atoll.jobs.gpus import GpuNeeds, gpu_needs
from atoll.jobs.model import Job
from atoll.jobs.notes import HINT, NO_EFFECT, ONLY_SERVICE, NoteBook
from atoll.jobs.settings import RenderSettings
from atoll.jobs.tenant_places import check_places
from atoll.jobs.tpus import TpuNeeds, tpu_needs
from atoll.jobs.words import JobType, Priority
from atoll.jobs.working_out import attributes_of
from atoll.ml.attributes import Accelerator, MlAttributes, MlPriorityClass

GRACE_SECONDS: Final = 30


@dataclass(frozen=True, slots=True)
class Needs:
    """All values for the objects. `workers`: pods that work together; `together`: how near, None for anywhere."""

    attributes: MlAttributes
    gpus: GpuNeeds | None
    tpus: TpuNeeds | None
    workers: int
    together: GangTopologyRequest | None
    priority: Priority
    is_preemptible: bool
    is_spot: bool
    grace_seconds: int
    deadline_seconds: int | None
    checkpoint: Checkpoint | None

    @property
    def is_gang(self) -> bool:
        """True if a GpuGang makes the pods start together or not at all."""
        return self.workers > 1


def needs_of(job: Job, settings: RenderSettings, *, now_seconds: float | None, book: NoteBook) -> Needs:
    """Return the job's needs. `now_seconds`: since 1970, for deadlines. Raises JobMistake."""
    check_places(job, settings)
    attributes = attributes_of(job, book)
    gpus = gpu_needs(job, attributes, settings, book)
    tpus = tpu_needs(job, attributes)
    if attributes.accelerator is Accelerator.FPGA:
        raise JobMistake(
            "ext_ml_accelerator",
            "fpga",
            "Atoll gives out no FPGAs",
            "write a pod template that asks for the vendor's resource",
        )
    if attributes.reservation_id is not None and gpus is None:
        raise JobMistake(
            "ext_ml_reservation_id", attributes.reservation_id, "a reservation holds GPUs, and the job asks for none",
            "ask for GPUs, or remove it",
        )  # fmt: skip
    workers = gpus.workers if gpus is not None else tpus.hosts if tpus is not None else job.workers or 1
    together = None
    if workers > 1:
        together = together_of(job, on_tpus=tpus is not None, settings=settings, book=book)
    priority = _priority(job, book)
    checkpoint = checkpoint_of(job, book)
    return Needs(
        attributes=attributes,
        gpus=gpus,
        tpus=tpus,
        workers=workers,
        together=together,
        priority=priority,
        is_preemptible=_is_preemptible(job, priority, book),
        is_spot=_is_spot(job, book),
        grace_seconds=_grace_seconds(job, settings, checkpoint, book),
        deadline_seconds=_deadline_seconds(job, now_seconds, book),
        checkpoint=checkpoint,
    )


def _priority(job: Job, book: NoteBook) -> Priority:
    """Return the priority: as given, else from the ML job's class, else the type's."""
    given, ml_class = job.policy.priority_class, job.attributes.priority_class
    by_type = CONTRACTS[job.job_type].priority
    if ml_class is None:
        book.tell("policy.priority_class", given, f"priority {given or by_type}" + _by_type(given, job))
        return given or by_type
    agreeing = PRIORITIES[ml_class]
    if given is not None and given not in agreeing:
        limit = f"ext_ml_priority_class {ml_class} means {' or '.join(agreeing)}"
        raise JobMistake("policy.priority_class", given.value, limit, "give one of both, or two that agree")
    chosen = given or (by_type if by_type in agreeing else agreeing[0])
    book.tell("ext_ml_priority_class", ml_class.value, f"priority {chosen}")
    return chosen


def _by_type(given: object, job: Job) -> str:
    return "" if given is not None else f", as every {job.job_type} has that says nothing"


def _is_preemptible(job: Job, priority: Priority, book: NoteBook) -> bool:
    if job.attributes.preemptible is not None and job.policy.preemptible is not None:
        book.tell("policy.preemptible", job.policy.preemptible, f"{NO_EFFECT}ext_ml_preemptible wins")
    for source, given in (
        ("ext_ml_preemptible", job.attributes.preemptible),
        ("policy.preemptible", job.policy.preemptible),
    ):
        if given is not None:
            book.tell(source, given, "label job.gpu.scheduling/preemptible" if given else "kept from being preempted")
            return given
    if job.attributes.priority_class is not None:
        return job.attributes.priority_class is MlPriorityClass.SPOT
    return priority is not Priority.CRITICAL


def _is_spot(job: Job, book: NoteBook) -> bool:
    if job.intent.spot_eligible:
        book.tell("intent.spot_eligible", value=True, text="tolerations of spot machines")
        return True
    return job.attributes.priority_class is MlPriorityClass.SPOT


def _grace_seconds(job: Job, settings: RenderSettings, checkpoint: Checkpoint | None, book: NoteBook) -> int:
    """Return the grace period: as requested, at least the time to save a checkpoint; at most the cluster's limit.

    A job with checkpoints saves one when it ends, unless it disables that or sets its own grace period.
    """
    asked, source = job.attributes.preemption_grace_period_s, "ext_ml_preemption_grace_period_s"
    if asked is not None and job.policy.preemption_grace_period is not None:
        text = f"{NO_EFFECT}{source} wins"
        book.tell("policy.preemption_grace_period", job.policy.preemption_grace_period, text)
    if asked is None:
        asked, source = job.policy.preemption_grace_period, "policy.preemption_grace_period"
    wanted = GRACE_SECONDS if asked is None else asked
    is_open = asked is None and job.attributes.checkpoint_on_preempt is None
    saves = checkpoint is not None and (checkpoint.on_preemption or is_open)
    least = settings.checkpoint_wait_seconds if saves else 0
    grace = min(max(wanted, least), settings.grace_seconds_max)
    why = ""
    if grace < wanted:
        why = f", the longest that this cluster gives; {wanted} were asked"
    elif grace > wanted:
        why = ", so that a checkpoint can be saved; the pod ends earlier when it is done"
        why += "" if asked is None else f" ({asked} were asked)"
    hint = HINT if asked not in (None, grace) else ""
    book.tell(source, asked, f"{hint}terminationGracePeriodSeconds {'is ' if hint else ''}{grace}{why}")
    return grace


def _deadline_seconds(job: Job, now_seconds: float | None, book: NoteBook) -> int | None:
    """Return the job's time limit, from its timeout and its deadline; None without a limit. Raises JobMistake."""
    timeout, source = job.attributes.timeout_seconds, "ext_ml_timeout_seconds"
    if timeout is not None and job.policy.max_runtime is not None:
        book.tell("policy.max_runtime", job.policy.max_runtime, f"{NO_EFFECT}ext_ml_timeout_seconds replaces it")
    if timeout is None:
        timeout, source = job.policy.max_runtime, "policy.max_runtime"
    until = job.policy.seconds_to_deadline(now_seconds)
    if until is not None and until > SECONDS_MAX:
        limit, hint = f"may be at most {SECONDS_MAX} seconds ahead", "choose an earlier one, or remove it"
        raise JobMistake(
            "policy.deadline", job.policy.deadline.isoformat() if job.policy.deadline else None, limit, hint
        )
    has_passed = until is not None and until < 0
    seconds = min((max(1, one) for one in (timeout, until) if one is not None), default=None)
    kind = f"{ONLY_SERVICE}stops it; Kubernetes ends no Deployment by itself"
    if timeout is not None:
        book.tell(source, timeout, kind if job.job_type is JobType.SERVICE else f"activeDeadlineSeconds {seconds}")
    if job.policy.deadline is not None:
        start = "scheduled_start" if job.policy.scheduled_start is not None else "now"
        counted = f"activeDeadlineSeconds {seconds}, from {start}" if until is not None else ""
        note = "annotation job.gpu.scheduling/deadline"
        note = f"{HINT}it has passed, so the job ends as soon as it begins; {note}" if has_passed else note
        told = f"{kind}; {note}" if job.job_type is JobType.SERVICE else f"{note}; {counted}" if counted else note
        book.tell("policy.deadline", job.policy.deadline.isoformat(), told)
    return None if job.job_type is JobType.SERVICE else seconds
