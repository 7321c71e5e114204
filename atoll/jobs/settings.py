"""What an administrator says about the cluster that jobs are rendered for.

In: nothing, or values of a file. Out: frozen settings. Separate from jobs: users do not set them.
"""

from typing import Annotated, Final

from pydantic import Field

from atoll.api.claims import COUNT_MAX
from atoll.jobs.base import ObjectName, Part, Seconds
from atoll.jobs.policy import Toleration
from atoll.jobs.words import Priority
from atoll.ml.attributes import Runtime

SPOT_TAINTS: Final = (
    Toleration(key="kubernetes.azure.com/scalesetpriority", value="spot", effect="NoSchedule"),
    Toleration(key="cloud.google.com/gke-spot", value="true", effect="NoSchedule"),
    Toleration(key="eks.amazonaws.com/capacityType", value="SPOT", effect="NoSchedule"),
    Toleration(key="karpenter.sh/capacity-type", value="spot", effect="NoSchedule"),
)
"""One per provider: what marks machines that may go away at any time."""
IMAGES: Final = (
    (Runtime.VLLM, "vllm/vllm-openai:v0.11.0"),
    (Runtime.TGI, "ghcr.io/huggingface/text-generation-inference:3.3.6"),
)


class RenderSettings(Part):
    """How jobs become objects on this cluster."""

    gpus_per_pod_max: Annotated[
        int, Field(ge=1, le=COUNT_MAX, description="GPUs of the largest machine; more are shared out over several pods")
    ] = 8
    grace_seconds_max: Annotated[Seconds, Field(description="longest time between the notice and the end of a pod")] = (
        600
    )
    checkpoint_wait_seconds: Annotated[
        Seconds, Field(description="what a pod that saves a checkpoint on preemption has at least")
    ] = 300
    finished_ttl_seconds: Annotated[Seconds, Field(description="how long a finished Job stays to be looked at")] = (
        86_400
    )
    gpu_tolerations: Annotated[tuple[Toleration, ...], Field(description="of pods with GPUs")] = (
        Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule"),
        Toleration(key="amd.com/gpu", operator="Exists", effect="NoSchedule"),
    )
    spot_tolerations: Annotated[tuple[Toleration, ...], Field(description="of pods that may run on spot machines")] = (
        SPOT_TAINTS
    )
    priority_classes: Annotated[
        dict[Priority, ObjectName],
        Field(description="PriorityClass of the pods, and WorkloadPriorityClass of Kueue, for each priority"),
    ] = Field(default_factory=lambda: {priority: priority.value for priority in Priority})
    runtime_images: Annotated[
        dict[Runtime, str], Field(description="image of the server for deployment_type model, by ext_ml_runtime")
    ] = Field(default_factory=lambda: dict(IMAGES))
    checkpoint_prefixes: Annotated[
        tuple[Annotated[str, Field(max_length=1024, pattern=r"^[^\s\x00]+/$")], ...],
        Field(max_length=32, description="URIs below which checkpoints may be; the job's own alone when none is given"),
    ] = ()
    host_level: Annotated[str, Field(description="label that names a machine, for topology same_node")] = (
        "kubernetes.io/hostname"
    )
