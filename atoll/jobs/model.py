"""Job: the description of one job, in one document.

`check` has the rules over several fields; atoll.ml checks the `ext_ml_*` attributes. A Job has no status: the job
service records that.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self
from uuid import UUID

from pydantic import Field, ValidationInfo, field_serializer, field_validator, model_validator

from atoll.cluster.quantities import parse_amount
from atoll.jobs.aliases import gpu_model
from atoll.jobs.base import (
    MAP_ENTRIES_MAX,
    ByteQuantity,
    CpuQuantity,
    Identifier,
    JobPart,
    LabelKey,
    LabelValue,
    ShortName,
    Text,
    is_new,
)
from atoll.jobs.container import JobContainer
from atoll.jobs.errors import JobMistake
from atoll.jobs.policy import JobIntent, JobPolicy
from atoll.jobs.words import DeploymentType, JobType, OwnerType, SourceType
from atoll.ml.attributes import PREFIX, MlAttributes
from atoll.ml.selection import NODE_LABELS

WORKERS_MAX: Final = 1000
PODS_MAX: Final = 10_000
RESERVED_DOMAINS: Final = ("kubernetes.io", "k8s.io", "gpu.scheduling", "x-k8s.io")
"""Domains of labels and annotations that users may not write."""
HELM_VALUES_MAX: Final = 256

Workers = Annotated[int, Field(strict=True, ge=1, le=WORKERS_MAX)]
PodCount = Annotated[int, Field(strict=True, ge=1, le=PODS_MAX)]


class JobResources(JobPart):
    """Requests of each pod of a job; `ext_ml_*` attributes of the same meaning override defaults."""

    gpu_type: Annotated[
        str | None, Field(max_length=63, description="such as A100, H100, T4 or nvidia-h100; any GPU by default")
    ] = None
    gpu_count: Annotated[
        int | None, Field(strict=True, ge=0, le=100_000, description="GPUs: all of a training, else of each pod")
    ] = None
    cpu_request: CpuQuantity | None = None
    cpu_limit: CpuQuantity | None = None
    memory_request: ByteQuantity | None = None
    memory_limit: ByteQuantity | None = None

    @field_validator("gpu_type")
    @classmethod
    def know_model(cls, value: str | None) -> str | None:
        """Accept short names of models."""
        if value is None:
            return None
        model = gpu_model(value)
        if model is None:
            raise ValueError("must be a known GPU such as A100, H100 or T4, or of the form vendor-model")
        return model

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse limits below requests."""
        for what, resource in (("cpu", "cpu"), ("memory", "memory")):
            least, most = getattr(self, f"{what}_request"), getattr(self, f"{what}_limit")
            if least is not None and most is not None and parse_amount(resource, most) < parse_amount(resource, least):
                raise ValueError(f"{what}_limit {most} is less than {what}_request {least}")
        return self


class Helm(JobPart):
    """A chart and its values."""

    chart: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")]
    version: Annotated[str | None, Field(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$")] = None
    values: Annotated[dict[Annotated[str, Field(max_length=253)], Any], Field(max_length=HELM_VALUES_MAX)] = Field(
        default_factory=dict
    )


class Job(JobPart):
    """A job to run."""

    name: Annotated[
        str,
        Field(
            max_length=52,
            pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$",
            description="name of the job's objects; begins with a letter",
        ),
    ]
    namespace: Annotated[ShortName | None, Field(description="namespace of the objects; kubectl's by default")] = None
    id: Annotated[UUID | None, Field(description="set by the job service")] = None
    job_type: JobType
    deployment_type: DeploymentType = DeploymentType.DOCKER
    container: Annotated[JobContainer | None, Field(description="container of the pods")] = None
    helm: Annotated[Helm | None, Field(description="for deployment_type helm")] = None
    model_id: Annotated[
        str | None,
        Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$", description="as ext_ml_model_id"),
    ] = None
    resources: JobResources = JobResources()
    workers: Annotated[
        Workers | None, Field(description="pods that work together and start together; they share the GPUs evenly")
    ] = None
    parallelism: Annotated[PodCount | None, Field(description="of a batch: independent pods at a time")] = None
    completions: Annotated[PodCount | None, Field(description="of a batch: pods that must succeed")] = None
    policy: JobPolicy = JobPolicy()
    intent: JobIntent = JobIntent()
    attributes: Annotated[
        MlAttributes, Field(description="the ext_ml_* attributes; they may also be beside the other fields")
    ] = MlAttributes()
    source_type: SourceType = SourceType.DIRECT
    source_id: Identifier | None = None
    step_id: Identifier | None = None
    cluster_id: Identifier | None = None
    project_id: Identifier | None = None
    tenant_id: Annotated[
        str | None,
        Field(
            max_length=49, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", description="selects the queue tenant-ID-queue"
        ),
    ] = None
    created_by: Identifier | None = None
    owner_type: OwnerType = OwnerType.USER
    idempotency_key: Annotated[str | None, Field(min_length=1, max_length=512, pattern=r"^[!-~]+$")] = None
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=MAP_ENTRIES_MAX)] = Field(default_factory=dict)
    annotations: Annotated[dict[LabelKey, Text], Field(max_length=MAP_ENTRIES_MAX)] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def gather_attributes(cls, values: object) -> object:
        """Gather names that begin with ext_ml_ as `attributes`."""
        return gathered(values) if isinstance(values, Mapping) else values

    @field_serializer("attributes")
    def write_attributes(self, attributes: MlAttributes) -> dict[str, Any]:
        """Write attributes in the envelope's form, so that a written job parses to the same value."""
        return attributes.to_json()

    @field_validator("labels", "annotations")
    @classmethod
    def check_keys(cls, values: dict[str, str]) -> dict[str, str]:
        """Refuse reserved keys."""
        if "app" in values:
            raise ValueError("app is the label by which the job's own pods are found; choose another")
        for key in values:
            domain = key.partition("/")[0] if "/" in key else ""
            if any(domain == one or domain.endswith("." + one) for one in RESERVED_DOMAINS):
                raise ValueError(f"{key} belongs to {domain}, whose keys users do not set; choose another")
        return values

    @model_validator(mode="after")
    def check(self, info: ValidationInfo) -> Self:
        """Refuse fields that the job's type does not have, and a job without content."""
        for rule in (_check_type, _check_source, _check_twice):
            rule(self)
        if is_new(info):
            _check_selectors(self)
        return self


def gathered(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the values with those that begin with ext_ml_ under `attributes`, without the prefix. Raises ValueError
    for an attribute in both places."""
    beside = {key: value for key, value in values.items() if isinstance(key, str) and key.startswith(PREFIX)}
    given = values.get("attributes")
    if not isinstance(given, Mapping):
        inner: dict[Any, Any] = {}
        if given is not None:
            return dict(values)
    else:
        inner = dict(given)
    twice = sorted(set(beside) & set(inner))
    if twice:
        raise JobMistake(twice[0], beside[twice[0]], "it stands under attributes as well", "remove one of both")
    merged = {_bare(key): value for key, value in (inner | beside).items()}
    rest = {key: value for key, value in values.items() if key not in beside}
    return rest | {"attributes": merged} if merged or given is not None else rest


def _bare(key: object) -> object:
    """Return the name of an attribute without its prefix; a key without the prefix stays and is reported as unknown."""
    if isinstance(key, str):
        return key.removeprefix(PREFIX) if key.startswith(PREFIX) else f"{key} (without {PREFIX})"
    return key


def _check_type(job: Job) -> None:
    policy, of = job.policy, job.job_type
    for field, given, types in (
        ("policy.scale_to_zero", policy.scale_to_zero or None, (JobType.SERVICE,)),
        ("policy.min_replicas", policy.min_replicas, (JobType.SERVICE,)),
        ("policy.max_replicas", policy.max_replicas, (JobType.SERVICE,)),
        ("intent.checkpoint_config", job.intent.checkpoint_config, (JobType.TRAINING,)),
        ("parallelism", job.parallelism, (JobType.BATCH,)),
        ("completions", job.completions, (JobType.BATCH,)),
        ("workers", job.workers, (JobType.BATCH, JobType.TRAINING)),
    ):
        if given is not None and of not in types:
            value = "set" if isinstance(given, JobPart) else given
            raise JobMistake(field, value, f"only a {' or '.join(types)} has it", f"remove it; this job is a {of}")
    if job.workers is not None and (job.parallelism is not None or job.completions is not None):
        raise JobMistake(
            "workers", job.workers, "workers work as one and parallelism counts pods on their own", "give one of both"
        )


def _check_source(job: Job) -> None:
    if (job.helm is not None) != (job.deployment_type is DeploymentType.HELM):
        raise JobMistake(
            "deployment_type", job.deployment_type, "helm and deployment_type helm belong together", "give both or none"
        )
    if job.deployment_type is DeploymentType.DOCKER and (job.container is None or job.container.image is None):
        raise JobMistake(
            "container.image",
            None,
            "must be given: a job without it has nothing to run",
            "give it, or deployment_type model with ext_ml_model_id and ext_ml_runtime, or helm with helm.chart",
        )
    if job.deployment_type is DeploymentType.MODEL and (job.model_id or job.attributes.model_id) is None:
        raise JobMistake("ext_ml_model_id", None, "must be given for deployment_type model", "name the model")


def _check_twice(job: Job) -> None:
    """Refuse two fields of one meaning with different values."""
    attributes, resources = job.attributes, job.resources
    for one, first, other, second in (
        ("model_id", job.model_id, "model_id", attributes.model_id),
        ("resources.gpu_type", resources.gpu_type, "gpu_type", attributes.gpu_type),
        ("resources.gpu_count", resources.gpu_count, "gpu_count", attributes.gpu_count),
        ("resources.memory_request", resources.memory_request, "memory_gb", attributes.memory_gb),
        ("resources.memory_limit", resources.memory_limit, "memory_gb", attributes.memory_gb),
        ("resources.cpu_request", resources.cpu_request, "cpu_cores", attributes.cpu_cores),
    ):
        if first is not None and second is not None and first != second:
            raise JobMistake(one, first, f"{PREFIX}{other} means the same and is {second}", "give one of both")


def _check_selectors(job: Job) -> None:
    """Refuse two values of one node label, which no node has: under one name, or under a short one and the node's."""
    selected: dict[str, tuple[str, str]] = {}
    for field, pairs in (
        (f"{PREFIX}node_selector", job.attributes.node_selector),
        ("policy.node_selector", job.policy.node_selector),
    ):
        for key, value in sorted((pairs or {}).items()):
            other, first = selected.setdefault(NODE_LABELS.get(key, key), (f"{field}.{key}", value))
            if first != value:
                limit = f"{other} says {first!r} of the same label"
                raise JobMistake(f"{field}.{key}", value, limit, "give one of both")
