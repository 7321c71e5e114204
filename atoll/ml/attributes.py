"""The 42 attributes of a job, by their names without the prefix `ext_ml_`.

None means not given. Sizes are in GB of 10^9 bytes; times are in seconds. Rules for single values are here; rules over
several attributes are in atoll.ml.rules, inference in atoll.ml.infer, upper bounds in atoll.ml.policy.
"""

from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from atoll.api.claims import InterconnectKind
from atoll.api.topologies import LABEL_KEY

PREFIX: Final = "ext_ml_"
LABEL_VALUE: Final = "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
RULES_MAX: Final = 32
VALUES_MAX: Final = 64
PAIRS_MAX: Final = 32


class Accelerator(StrEnum):
    """Accelerator of a job. gpu, tpu and fpga need a worker that has one; cpu may run anywhere."""

    GPU = "gpu"
    TPU = "tpu"
    FPGA = "fpga"
    CPU = "cpu"


class TpuType(StrEnum):
    """Generations of TPUs."""

    V4 = "v4"
    V5E = "v5e"
    V5P = "v5p"
    V6E = "v6e"


class ModelProvider(StrEnum):
    """Provider of a model."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    GOOGLE = "google"
    HUGGINGFACE = "huggingface"
    REPLICATE = "replicate"
    LOCAL = "local"
    CUSTOM = "custom"


class ModelFormat(StrEnum):
    """Storage format of the weights; decides which runtimes can load them."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"
    SAVEDMODEL = "savedmodel"
    CUSTOM = "custom"


class ModelRegistry(StrEnum):
    """Registry of models."""

    HUGGINGFACE = "huggingface"
    MLFLOW = "mlflow"
    WANDB = "wandb"
    S3 = "s3"
    GCS = "gcs"
    CUSTOM = "custom"


class Runtime(StrEnum):
    """Runtime of the model in the container."""

    PYTORCH = "pytorch"
    TENSORFLOW = "tensorflow"
    ONNX = "onnx"
    TRITON = "triton"
    VLLM = "vllm"
    TGI = "tgi"
    CUSTOM = "custom"


class Precision(StrEnum):
    """Number format of the model's computation."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class DistributedStrategy(StrEnum):
    """Distribution of the work over the accelerators."""

    NONE = "none"
    DATA_PARALLEL = "data_parallel"
    TENSOR_PARALLEL = "tensor_parallel"
    PIPELINE_PARALLEL = "pipeline_parallel"
    FSDP = "fsdp"
    DEEPSPEED = "deepspeed"


class MlPriorityClass(StrEnum):
    """From the lowest to the highest."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"
    RESERVED = "reserved"


class Operator(StrEnum):
    """How a rule compares a label; the ordered ones compare dotted numbers, see atoll.ml.selection."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    GTE = "Gte"
    LT = "Lt"
    LTE = "Lte"


class AttributePart(BaseModel):
    """Base of the parts of an envelope: frozen, and a misspelt field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


LabelKey = Annotated[str, Field(strict=True, min_length=1, max_length=316, pattern=LABEL_KEY)]
LabelValue = Annotated[str, Field(strict=True, max_length=63, pattern=LABEL_VALUE)]


class AffinityRule(AttributePart):
    """One condition on the labels of a worker."""

    key: Annotated[LabelKey, Field(description="label, or a worker's property such as gpu_type")]
    operator: Operator
    values: Annotated[
        tuple[LabelValue, ...],
        Field(max_length=VALUES_MAX, description="In and NotIn take several, ordered operators one, the others none"),
    ] = ()


class PreferredRule(AffinityRule):
    """A condition that adds its weight to workers that meet it, and refuses none."""

    weight: Annotated[int, Field(strict=True, ge=0, le=100)] = 1


class LabelAffinity(AttributePart):
    """Conditions that must hold, and conditions that should."""

    required: Annotated[tuple[AffinityRule, ...], Field(max_length=RULES_MAX)] = ()
    preferred: Annotated[tuple[PreferredRule, ...], Field(max_length=RULES_MAX)] = ()


Number = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, gt=0)]
Seconds = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1, max_length=1024, pattern=r"^[^\x00-\x20\x7f]+$")]


class MlAttributes(AttributePart):
    """The attributes of a job. Every field is optional; a job with only `gpu_count` is valid."""

    accelerator: Annotated[Accelerator | None, Field(description="inferred from the other attributes")] = None
    gpu_type: Annotated[
        Annotated[str, Field(strict=True, max_length=63, pattern="^[a-z0-9]+(-[a-z0-9.]*[a-z0-9])+$")] | None,
        Field(description="vendor and model, such as nvidia-h100; any GPU by default"),
    ] = None
    gpu_count: Annotated[
        Annotated[int, Field(strict=True, ge=0)] | None,
        Field(description="1 if any attribute of GPUs is given"),
    ] = None
    gpu_memory_gb: Annotated[Number | None, Field(description="least nominal memory of each GPU")] = None
    gpu_compute_capability: Annotated[
        Annotated[str, Field(strict=True, pattern=r"^[0-9]{1,3}\.[0-9]{1,3}$")] | None,
        Field(description="least of each GPU; major.minor, inferred from the precision"),
    ] = None
    gpu_interconnect: Annotated[
        InterconnectKind | None,
        Field(description="nvlink: between every two of the job's GPUs; ignored for one GPU"),
    ] = None
    tpu_type: Annotated[TpuType | None, Field(description="generation of the chips")] = None
    tpu_topology: Annotated[
        Annotated[str, Field(strict=True, pattern="^[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}$")] | None,
        Field(description="a contiguous slice of that shape, such as 4x4 or 2x2x4"),
    ] = None
    tpu_chip_count: Annotated[Count | None, Field(description="the product of the sides of the topology")] = None
    memory_gb: Annotated[Number | None, Field(description="memory of the host")] = None
    storage_gb: Annotated[Number | None, Field(description="scratch space")] = None
    shm_size_gb: Annotated[Number | None, Field(description="size of /dev/shm; runtimes give 64 MB")] = None
    cpu_cores: Annotated[Count | None, Field(description="cores of the host")] = None
    model_id: Annotated[
        Annotated[Text, Field(max_length=256)] | None, Field(description="used for routing and locality")
    ] = None
    model_version: Annotated[
        Annotated[str, Field(strict=True, max_length=128, pattern="^[A-Za-z0-9][A-Za-z0-9._:+-]*$")] | None,
        Field(description="with model_id: the version told to the container; `atoll job explain` shows who has it"),
    ] = None
    model_provider: Annotated[ModelProvider | None, Field(description="passed on to the container")] = None
    model_checksum: Annotated[
        Annotated[str, Field(strict=True, max_length=256, pattern="^[a-z0-9_]{2,16}:[0-9a-f]+$")] | None,
        Field(description="algorithm:hexadecimal, such as sha256:...; verified before the model is loaded"),
    ] = None
    model_format: Annotated[ModelFormat | None, Field(description="storage format of the weights")] = None
    model_registry: Annotated[ModelRegistry | None, Field(description="registry of the model")] = None
    model_registry_uri: Annotated[Text | None, Field(description="such as hf://org/name@revision")] = None
    max_tokens: Annotated[Count | None, Field(description="passed on to the container")] = None
    max_batch_size: Annotated[Count | None, Field(description="passed on to the container")] = None
    timeout_seconds: Annotated[Count | None, Field(description="replaces the job's own timeout")] = None
    runtime: Annotated[
        Runtime | None,
        Field(
            description="told to the container; `atoll job explain` shows which workers list it, and it binds no pod"
        ),
    ] = None
    precision: Annotated[Precision | None, Field(description="number format of the computation")] = None
    distributed_strategy: Annotated[
        DistributedStrategy | None, Field(description="distribution of the work over the GPUs")
    ] = None
    node_selector: Annotated[
        Annotated[dict[LabelKey, LabelValue], Field(max_length=PAIRS_MAX)] | None,
        Field(description="labels that the worker must have"),
    ] = None
    affinity: Annotated[LabelAffinity | None, Field(description="conditions on the worker")] = None
    anti_affinity: Annotated[LabelAffinity | None, Field(description="conditions on other jobs of the worker")] = None
    priority_class: Annotated[
        MlPriorityClass | None, Field(description="place in the queue, and which jobs may preempt this one")
    ] = None
    preemptible: Annotated[Flag | None, Field(description="true for spot, false for the others")] = None
    preemption_grace_period_s: Annotated[
        Seconds | None, Field(description="seconds between the warning and the end")
    ] = None
    checkpoint_on_preempt: Annotated[Flag | None, Field(description="save within the grace period")] = None
    reservation_id: Annotated[
        Annotated[str, Field(strict=True, max_length=253, pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] | None,
        Field(description="a reservation; the job never runs outside of it"),
    ] = None
    reservation_timeout_s: Annotated[
        Count | None, Field(description="releases the reservation after so long without use, if it has one user")
    ] = None
    priority_escalation: Annotated[
        Flag | None, Field(description="a spot job that waits too long moves up; only in the job service")
    ] = None
    escalation_after_s: Annotated[Seconds | None, Field(description="seconds in the queue before it moves up")] = None
    escalation_target_class: Annotated[MlPriorityClass | None, Field(description="class to move up to")] = None
    checkpoint_enabled: Annotated[
        Flag | None, Field(description="save at intervals and resume from the last checkpoint")
    ] = None
    checkpoint_interval_s: Annotated[Count | None, Field(description="seconds between checkpoints")] = None
    checkpoint_storage_uri: Annotated[
        Text | None, Field(description="s3://, gs://, az:// or file://, ends in a slash")
    ] = None
    checkpoint_max_count: Annotated[
        Count | None, Field(description="checkpoints kept; the oldest is deleted first")
    ] = None

    def given(self) -> dict[str, Any]:
        """Return the attributes that are set, by their names without the prefix."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the envelope's form: prefixed names, without absent attributes."""
        return {PREFIX + name: value for name, value in self.model_dump(mode="json", exclude_none=True).items()}


NAMES: Final = tuple(MlAttributes.model_fields)
"""The names of the attributes without the prefix, in the order of the reference."""
GPU_NAMES: Final = ("gpu_type", "gpu_count", "gpu_memory_gb", "gpu_compute_capability", "gpu_interconnect")
TPU_NAMES: Final = ("tpu_type", "tpu_topology", "tpu_chip_count")
