"""Notes for fields that create no part of an object by themselves, so that every field has a note."""

from atoll.api import job_names
from atoll.jobs.labels import workload
from atoll.jobs.model import Job
from atoll.jobs.needs import Needs
from atoll.jobs.notes import NoteBook
from atoll.jobs.words import JobType


def tell_rest(job: Job, needs: Needs, book: NoteBook) -> None:
    """Note fields that only labels and annotations have, and fields that Kubernetes ignores."""
    policy = job.policy
    if policy.scheduled_start is not None:
        text = "the job service starts it then; nothing in Kubernetes waits for it, so apply it at that time"
        book.tell("policy.scheduled_start", policy.scheduled_start.isoformat(), text)
    given = policy.model_fields_set
    if "retry_delay_seconds" in given:
        text = "the job service keeps it; Kubernetes waits 10 s, then twice as long each time"
        book.tell("policy.retry_delay_seconds", policy.retry_delay_seconds, text)
    if job.job_type is JobType.SERVICE:
        for field in ("max_retries", "retry_on_preemption"):
            if field in given:
                book.tell(f"policy.{field}", getattr(policy, field), "without effect: a service always starts again")
    if policy.cohort is not None:
        text = f"annotation {job_names.PREFIX}cohort; Kueue's ClusterQueue names it"
        book.tell("policy.cohort", policy.cohort, text, workload(job))
    _tell_intent(job, book)
    _tell_accelerator(job, needs, book)


def _tell_intent(job: Job, book: NoteBook) -> None:
    intent = job.intent
    for field, key, where in (
        ("optimization_goal", job_names.OPTIMIZATION_GOAL, "label"),
        ("workload_class", job_names.WORKLOAD_CLASS, "label"),
        ("budget_cap", "budget-cap", "annotation"),
        ("budget_action", "budget-action", "annotation"),
        ("cost_center", "cost-center", "annotation"),
        ("sla_tier", "sla-tier", "annotation"),
        ("expected_duration_hint", "expected-duration", "annotation"),
        ("gpu_memory_hint", "gpu-memory-hint", "annotation"),
    ):
        if field in intent.model_fields_set and getattr(intent, field) is not None:
            name = key if "/" in key else job_names.PREFIX + key
            book.tell(f"intent.{field}", str(getattr(intent, field)), f"{where} {name}", workload(job))


def _tell_accelerator(job: Job, needs: Needs, book: NoteBook) -> None:
    said = job.attributes.accelerator
    if said is not None:
        became = {"gpu": "a GpuClaim", "tpu": "TPUs of nodes", "cpu": "no GpuClaim: any node will do"}
        book.tell("ext_ml_accelerator", said.value, became.get(said.value, ""))
    if job.attributes.tpu_chip_count is not None and needs.tpus is not None:
        text = f"{needs.workers} pods with {needs.tpus.chips} chips each"
        book.tell("ext_ml_tpu_chip_count", job.attributes.tpu_chip_count, text)
