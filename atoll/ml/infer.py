"""Completes a job's attributes: inference from its other attributes, then the defaults.

The input already has the queue's defaults. The Completed has a note for each inferred attribute, in the words of
`atoll job render`. Given attributes do not change, except that the interconnect of a single GPU is ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from atoll.api.claims import InterconnectKind
from atoll.ml import tables
from atoll.ml.attributes import (
    GPU_NAMES,
    PREFIX,
    TPU_NAMES,
    Accelerator,
    DistributedStrategy,
    MlAttributes,
    MlPriorityClass,
)
from atoll.ml.problems import Notes, ParseNote

DEFAULTS: Final[Mapping[str, Any]] = {
    "priority_class": MlPriorityClass.ON_DEMAND,
    "preemption_grace_period_s": 30,
    "checkpoint_on_preempt": False,
    "priority_escalation": False,
    "escalation_after_s": 3600,
    "checkpoint_enabled": False,
    "checkpoint_interval_s": 300,
    "checkpoint_max_count": 3,
}
"""Defaults if neither the job nor its queue sets a value."""


@dataclass(frozen=True, slots=True)
class Completed:
    """Completed attributes, notes of the inferred ones, and warnings."""

    attributes: MlAttributes
    notes: Notes = ()
    warnings: Notes = ()


Step = Callable[[MlAttributes], tuple[str, Any, str] | None]


def complete(given: MlAttributes) -> Completed:
    """Return the attributes with all that follows from them. Idempotent."""
    attributes, notes = given, []
    for step in STEPS:
        found = step(attributes)
        if found is not None:
            name, value, reason = found
            attributes = attributes.model_copy(update={name: value})
            notes.append(ParseNote(PREFIX + name, str(value), reason))
    missing = {name: value for name, value in DEFAULTS.items() if getattr(attributes, name) is None}
    notes.extend(ParseNote(PREFIX + name, _word(value), "default") for name, value in missing.items())
    attributes = attributes.model_copy(update=missing)
    if attributes.preemptible is None:
        preemptible = attributes.priority_class is MlPriorityClass.SPOT
        attributes = attributes.model_copy(update={"preemptible": preemptible})
        notes.append(
            ParseNote(PREFIX + "preemptible", _word(preemptible), f"priority class {attributes.priority_class}")
        )
    return Completed(attributes, tuple(notes), _warnings(attributes))


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _accelerator(given: MlAttributes) -> tuple[str, Any, str] | None:
    if given.accelerator is not None:
        return None
    for kind, names in ((Accelerator.TPU, TPU_NAMES), (Accelerator.GPU, GPU_NAMES)):
        for name in names if kind is Accelerator.TPU or given.gpu_count != 0 else ():
            if getattr(given, name) is not None:
                return "accelerator", kind, f"{PREFIX}{name} is given"
    return "accelerator", Accelerator.CPU, "no attribute asks for a GPU or a TPU"


def _count(given: MlAttributes) -> tuple[str, Any, str] | None:
    if given.accelerator is not Accelerator.GPU or given.gpu_count is not None:
        return None
    return "gpu_count", 1, "the job asks for a GPU and names no count"


def _interconnect(given: MlAttributes) -> tuple[str, Any, str] | None:
    if given.accelerator is not Accelerator.GPU:
        return None
    if given.gpu_count == 1:
        if given.gpu_interconnect is InterconnectKind.ANY:
            return None
        return "gpu_interconnect", InterconnectKind.ANY, "a single GPU is joined with none"
    if given.gpu_interconnect is not None:
        return None
    if given.distributed_strategy is DistributedStrategy.TENSOR_PARALLEL:
        return "gpu_interconnect", InterconnectKind.NVLINK, "tensor_parallel exchanges data at each layer"
    return "gpu_interconnect", InterconnectKind.ANY, "default"


def _capability(given: MlAttributes) -> tuple[str, Any, str] | None:
    if given.accelerator is not Accelerator.GPU or given.precision is None or given.gpu_compute_capability is not None:
        return None
    if tables.has_no_capability(given.gpu_type or ""):
        return None
    needs = tables.PRECISIONS[given.precision].compute_capability
    return (
        "gpu_compute_capability",
        tables.capability_text(needs),
        f"{given.precision} needs {tables.GENERATIONS[needs]}",
    )


def _chips(given: MlAttributes) -> tuple[str, Any, str] | None:
    if given.tpu_topology is None or given.tpu_chip_count is not None:
        return None
    return "tpu_chip_count", tables.tpu_chips(given.tpu_topology), f"the chips of {given.tpu_topology}"


STEPS: Final[tuple[Step, ...]] = (_accelerator, _count, _interconnect, _capability, _chips)


def _warnings(attributes: MlAttributes) -> Notes:
    """Return warnings about what works worse or later than the job may expect."""
    found = []
    weights = tables.weights_gb(attributes)
    row = tables.GPU_TYPES.get(attributes.gpu_type or "")
    per_gpu = attributes.gpu_memory_gb or (row.memory_gb[-1] if row is not None else None)
    has = per_gpu * (attributes.gpu_count or 1) if per_gpu is not None else None
    if attributes.accelerator is Accelerator.GPU and weights is not None and has is not None and weights > has:
        reason = (
            f"the weights of {attributes.model_id} take {weights:g} GB in {attributes.precision}, the GPUs have {has:g}"
        )
        found.append(ParseNote(PREFIX + "gpu_memory_gb", f"{per_gpu:g}", reason))
    if row is not None and (attributes.gpu_memory_gb or 0) > row.memory_gb[-1]:
        reason = f"{row.id} is known with {' and '.join(map(str, row.memory_gb))} GB; the job waits for a larger one"
        found.append(ParseNote(PREFIX + "gpu_memory_gb", f"{attributes.gpu_memory_gb:g}", reason))
    vendor = (attributes.gpu_type or "nvidia-").partition("-")[0]
    if vendor not in tables.VENDORS:
        reason = f"Atoll gives out GPUs of {' and '.join(tables.VENDORS)}; the job waits for ever"
        found.append(ParseNote(PREFIX + "gpu_type", attributes.gpu_type or "", reason))
    if attributes.checkpoint_on_preempt and not attributes.checkpoint_enabled:
        reason = "without ext_ml_checkpoint_enabled nothing is saved"
        found.append(ParseNote(PREFIX + "checkpoint_on_preempt", "true", reason))
    if attributes.accelerator is Accelerator.CPU and (attributes.cpu_cores is None or attributes.memory_gb is None):
        reason = f"a job without GPUs does well to name {PREFIX}cpu_cores and {PREFIX}memory_gb"
        found.append(ParseNote(PREFIX + "accelerator", "cpu", reason))
    return tuple(found)
