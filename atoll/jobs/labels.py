"""Labels and annotations of all objects that a job becomes."""

import re
from hashlib import sha256
from typing import Final

from atoll.api import job_names, names
from atoll.jobs.model import Job
from atoll.jobs.needs import Needs
from atoll.jobs.notes import NO_EFFECT, ONLY_SERVICE, NoteBook
from atoll.jobs.profiles import profile_of
from atoll.jobs.words import DeploymentType, JobType
from atoll.ml.attributes import PREFIX, MlAttributes
from atoll.ml.escalation import escalation_of
from atoll.ml.infer import DEFAULTS

_LABEL: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?\Z", re.ASCII)
_OTHER: Final = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)
DIGEST_LENGTH: Final = 8


def label_value(text: str) -> str:
    """Return a text as a label value: itself if valid, else its valid characters with a digest, so that two texts never
    share one value."""
    if _LABEL.match(text):
        return text
    digest = sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
    kept = _OTHER.sub("-", text).strip("-_.")[: 62 - DIGEST_LENGTH].strip("-_.")
    return f"{kept}-{digest}" if kept else digest


def labels_of(job: Job, needs: Needs) -> dict[str, str]:
    """Return the labels of every object and pod; those of the user first."""
    attributes, intent = needs.attributes, job.intent
    model, version = attributes.model_id, attributes.model_version
    own = {
        job_names.APP: job.name,
        job_names.JOB_NAME: job.name,
        job_names.JOB_ID: str(job.id) if job.id is not None else None,
        job_names.JOB_TYPE: job.job_type.value,
        job_names.DEPLOYMENT_TYPE: job.deployment_type.value,
        job_names.SOURCE_TYPE: job.source_type.value,
        job_names.TENANT_ID: job.tenant_id,
        job_names.PROJECT_ID: job.project_id,
        job_names.OPTIMIZATION_GOAL: intent.optimization_goal.value,
        job_names.WORKLOAD_CLASS: intent.workload_class.value,
        job_names.SPOT_ELIGIBLE: "true" if needs.is_spot else "false",
        names.PREEMPTIBLE: "true" if needs.is_preemptible else "false",
        job_names.PRIORITY: needs.priority.value,
        job_names.RESOURCE_PROFILE: profile_of(job, attributes).name,
        job_names.MODEL_ID: label_value(model) if model is not None else None,
        job_names.MODEL_VERSION: label_value(version) if version is not None else None,
    }
    return job.labels | {key: value for key, value in own.items() if value is not None}


IDENTITY: Final = (
    job_names.APP,
    job_names.JOB_NAME,
    job_names.JOB_ID,
    job_names.JOB_TYPE,
    job_names.TENANT_ID,
    job_names.PROJECT_ID,
)


def identity_of(job: Job, needs: Needs) -> dict[str, str]:
    """Return the labels of objects without pods, which identify their job."""
    return job.labels | {key: value for key, value in labels_of(job, needs).items() if key in IDENTITY}


def queue_labels(job: Job, priority_class: str, book: NoteBook) -> dict[str, str]:
    """Return the labels for Kueue on the object that runs the pods; none if the job is in no queue.

    Kueue's webhook copies a Deployment's labels to its pods.
    """
    queue = job.policy.queue_name
    if queue is None and job.tenant_id is not None:
        queue = f"tenant-{job.tenant_id}-queue"
        book.tell("tenant_id", job.tenant_id, f"label {job_names.QUEUE_NAME} {queue}", workload(job))
    if queue is None:
        return {}
    if job.policy.queue_name is not None:
        book.tell("policy.queue_name", queue, f"label {job_names.QUEUE_NAME}", workload(job))
    return {job_names.QUEUE_NAME: queue, job_names.QUEUE_PRIORITY: priority_class}


def workload(job: Job) -> str:
    """Return kind/name of the object that runs the pods."""
    if job.deployment_type is DeploymentType.HELM:
        return ""
    return f"{'Deployment' if job.job_type is JobType.SERVICE else 'Job'}/{job.name}"


def workload_annotations(job: Job) -> dict[str, str]:
    """Return the annotations of the object that runs the pods, for other programs: times, money, and the user's own."""
    policy, intent = job.policy, job.intent
    delays = "retry_delay_seconds" in policy.model_fields_set
    told = {
        job_names.DEADLINE: policy.deadline.isoformat() if policy.deadline is not None else None,
        job_names.SCHEDULED_START: policy.scheduled_start.isoformat() if policy.scheduled_start is not None else None,
        **{
            job_names.PREFIX + key: str(value) if value is not None else None
            for key, value in (
                ("cohort", policy.cohort),
                ("budget-cap", intent.budget_cap),
                ("budget-action", intent.budget_action.value if intent.budget_cap is not None else None),
                ("cost-center", intent.cost_center),
                ("sla-tier", intent.sla_tier),
                ("expected-duration", intent.expected_duration_hint),
                ("gpu-memory-hint", intent.gpu_memory_hint),
                (
                    "retry-delay-seconds",
                    policy.retry_delay_seconds if delays else None,
                ),
                ("source-id", job.source_id),
                ("step-id", job.step_id),
                ("cluster-id", job.cluster_id),
                ("created-by", job.created_by),
                ("owner-type", job.owner_type.value if "owner_type" in job.model_fields_set else None),
                ("idempotency-key", job.idempotency_key),
            )
        },
    }
    return job.annotations | {key: value for key, value in told.items() if value is not None}


ON_PODS: Final = (
    "accelerator",
    "tpu_type",
    "tpu_topology",
    "model_id",
    "model_version",
    "model_provider",
    "model_checksum",
    "model_format",
    "model_registry",
    "model_registry_uri",
    "max_tokens",
    "max_batch_size",
    "timeout_seconds",
    "runtime",
    "precision",
    "distributed_strategy",
    "priority_class",
    "reservation_timeout_s",
    "priority_escalation",
    "escalation_after_s",
    "escalation_target_class",
)
"""Attributes copied to pods: for the container, for model locality, for records."""


def pod_annotations(job: Job, needs: Needs) -> dict[str, str]:
    """Return the annotations of the pods: their claim, the reservation, and the job's model."""
    told: dict[str, str] = {}
    if needs.gpus is not None:
        told[names.CLAIM] = job.name
    if needs.is_gang:
        told[names.GANG] = job.name
        told[names.POD_SET] = POD_SET
    if job.attributes.reservation_id is not None:
        told[names.RESERVATION] = job.attributes.reservation_id
    for name in ON_PODS:
        value = getattr(job.attributes, name)
        if name == "model_id":
            value = needs.attributes.model_id
        if value is not None:
            told[job_names.ML_ANNOTATION_PREFIX + name.replace("_", "-")] = plain(value)
    return told


POD_SET: Final = "main"
ESCALATION: Final = ("priority_escalation", "escalation_after_s", "escalation_target_class")
NOT_FOR_CONTAINERS: Final = frozenset({"priority_class", "reservation_timeout_s", *ESCALATION})
"""Those of them that no container needs."""


def plain(value: object) -> str:
    """Return a value of an attribute as text: true and false in lower case, whole numbers without a point."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _escalation(attributes: MlAttributes, name: str) -> str:
    """Return what an attribute of escalation does; empty for an escalation that is not wanted."""
    if not attributes.priority_escalation:
        return "" if name == "priority_escalation" else f"{NO_EFFECT}{PREFIX}priority_escalation is not true"
    if escalation_of(attributes) is None:
        own = f"{PREFIX}priority_class is {attributes.priority_class or DEFAULTS['priority_class']}"
        return f"{NO_EFFECT}{own}, and only a spot job moves up"
    return f"{ONLY_SERVICE}moves the job up; kubectl's objects keep their class"


def tell_pods(job: Job, book: NoteBook) -> None:
    """Note the attributes on the pods."""
    for name in ON_PODS:
        value = getattr(job.attributes, name)
        if value is not None:
            key = job_names.ML_ANNOTATION_PREFIX + name.replace("_", "-")
            variable = (
                "" if name in NOT_FOR_CONTAINERS else f"variable {job_names.ML_VARIABLE_PREFIX}{name.upper()} and "
            )
            text = f"{variable}annotation {key} of the pods"
            if name == "reservation_timeout_s":
                text += "; it releases a reservation of one user after so long without use"
            if name in ESCALATION:
                text = _escalation(job.attributes, name) or text
            book.tell(f"{PREFIX}{name}", plain(value), text, workload(job))
    if job.attributes.reservation_id is not None:
        text = f"annotation {names.RESERVATION} of the pods"
        book.tell(f"{PREFIX}reservation_id", job.attributes.reservation_id, text, workload(job))
