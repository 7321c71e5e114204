"""The administrator's settings for rendering jobs on a cluster. Users do not set them."""

from typing import Annotated, Final, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from atoll.api.claims import COUNT_MAX
from atoll.jobs.base import JobPart, ObjectName, Seconds
from atoll.jobs.policy import JobToleration
from atoll.jobs.words import Priority
from atoll.ml.attributes import Runtime
from atoll.ml.policy import ADMINISTRATIVE_KEYS, MlPolicy

SPOT_TAINTS: Final = (
    JobToleration(key="kubernetes.azure.com/scalesetpriority", value="spot", effect="NoSchedule"),
    JobToleration(key="cloud.google.com/gke-spot", value="true", effect="NoSchedule"),
    JobToleration(key="eks.amazonaws.com/capacityType", value="SPOT", effect="NoSchedule"),
    JobToleration(key="karpenter.sh/capacity-type", value="spot", effect="NoSchedule"),
)
"""Taints of spot machines, one per provider."""
IMAGES: Final = (
    (Runtime.VLLM, "vllm/vllm-openai:v0.11.0"),
    (Runtime.TGI, "ghcr.io/huggingface/text-generation-inference:3.3.6"),
)

TENANT: Final = "{tenant}"
"""Stands for the name of a tenant in a prefix."""

Patterns = tuple[Annotated[str, Field(min_length=1, max_length=317)], ...]


class RenderSettings(JobPart):
    """Rendering of jobs on this cluster."""

    gpus_per_pod_max: Annotated[
        int,
        Field(ge=1, le=COUNT_MAX, description="GPUs of the largest machine; more are distributed over several pods"),
    ] = 8
    grace_seconds_max: Annotated[Seconds, Field(description="longest time between the notice and the end of a pod")] = (
        600
    )
    checkpoint_wait_seconds: Annotated[
        Seconds, Field(description="least grace of a pod that saves a checkpoint on preemption")
    ] = 300
    finished_ttl_seconds: Annotated[Seconds, Field(description="time for which a finished Job is kept")] = 86_400
    gpu_tolerations: Annotated[tuple[JobToleration, ...], Field(description="tolerations of pods with GPUs")] = (
        JobToleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule"),
        JobToleration(key="amd.com/gpu", operator="Exists", effect="NoSchedule"),
    )
    spot_tolerations: Annotated[
        tuple[JobToleration, ...], Field(description="tolerations of pods that may run on spot")
    ] = SPOT_TAINTS
    priority_classes: Annotated[
        dict[Priority, ObjectName],
        Field(description="PriorityClass of the pods, and WorkloadPriorityClass of Kueue, for each priority"),
    ] = Field(default_factory=lambda: {priority: priority.value for priority in Priority})
    runtime_images: Annotated[
        dict[Runtime, str], Field(description="image of the server for deployment_type model, by ext_ml_runtime")
    ] = Field(default_factory=lambda: dict(IMAGES))
    checkpoint_prefixes: Annotated[
        tuple[Annotated[str, Field(max_length=1024, pattern=r"^[^\s\x00]+/$")], ...],
        Field(
            max_length=32, description="allowed URI prefixes of checkpoints; only the job's own URI if none is given"
        ),
    ] = ()
    tenant_prefixes: Annotated[
        tuple[Annotated[str, Field(max_length=1024, pattern=r"^[a-z0-9]+://[^\s\x00]*/$")], ...],
        Field(
            max_length=32,
            description="URI prefixes with {tenant} in them, such as s3://checkpoints/{tenant}/: checkpoints in object "
            "stores are below those of the job's tenant or below checkpoint_prefixes, and models below no other's",
        ),
    ] = ()
    attribute_bounds: Annotated[
        dict[str, Annotated[float, Field(ge=0)]],
        Field(max_length=64, description="upper bounds of attributes, such as gpu_count: 64; the others keep theirs"),
    ] = Field(default_factory=dict)
    model_ids: Annotated[
        Patterns, Field(max_length=1000, description="models that jobs may name, with *; every model if none is given")
    ] = ()
    registry_hosts: Annotated[
        Patterns,
        Field(max_length=64, description="hosts in the cluster's own networks that models may come from"),
    ] = ()
    selector_keys: Annotated[
        Patterns,
        Field(max_length=64, description="node labels that jobs may select by, with *; every other if none is given"),
    ] = ()
    forbidden_selector_keys: Annotated[
        Patterns, Field(max_length=64, description="node labels that no job may select by, with *")
    ] = ADMINISTRATIVE_KEYS
    host_level: Annotated[str, Field(description="label with the machine's name, for topology same_node")] = (
        "kubernetes.io/hostname"
    )
    slice_level: Annotated[str, Field(description="label that all hosts of one TPU slice share, and no other host")] = (
        "cloud.google.com/gke-nodepool"
    )

    @field_validator("priority_classes", "runtime_images")
    @classmethod
    def fill(cls, given: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        """Return the default of every entry that is left out."""
        default: dict[str, str] = cls.model_fields[info.field_name or ""].get_default(call_default_factory=True)
        return default | given

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse bounds of unknown attributes, and prefixes that do not keep tenants apart."""
        self.policy()
        for template in self.tenant_prefixes:
            before, found, after = template.partition(TENANT)
            if not found or "{" in before + after:
                raise ValueError(f"tenant_prefixes {template} must have {TENANT} in it once, and no other braces")
            wide = next((one for one in self.checkpoint_prefixes if before.startswith(one)), None)
            if wide is not None:
                raise ValueError(
                    f"checkpoint_prefixes {wide} would open {template} to every tenant; remove one of both"
                )
        return self

    def policy(self) -> MlPolicy:
        """Return the limits on the attributes of jobs. Raises ValueError for the bound of an unknown attribute.

        With tenant_prefixes the place of checkpoints is judged once the tenant is known (atoll.jobs.tenant_places).
        """
        return MlPolicy(
            bounds=self.attribute_bounds,
            model_ids=self.model_ids,
            checkpoint_prefixes=() if self.tenant_prefixes else self.checkpoint_prefixes,
            hosts=self.registry_hosts,
            selector_keys=self.selector_keys,
            forbidden_selector_keys=self.forbidden_selector_keys,
        )
