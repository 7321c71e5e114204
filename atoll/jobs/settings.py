"""The administrator's settings for rendering jobs on a cluster. Users do not set them."""

from typing import Annotated, Final

from pydantic import Field

from atoll.api.claims import COUNT_MAX
from atoll.jobs.base import JobPart, ObjectName, Seconds
from atoll.jobs.policy import JobToleration
from atoll.jobs.words import Priority
from atoll.ml.attributes import Runtime

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
    host_level: Annotated[str, Field(description="label with the machine's name, for topology same_node")] = (
        "kubernetes.io/hostname"
    )
    slice_level: Annotated[str, Field(description="label that all hosts of one TPU slice share, and no other host")] = (
        "cloud.google.com/gke-nodepool"
    )
