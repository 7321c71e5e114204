"""Valid attributes and envelopes, as hypothesis draws them: every attribute by itself, without contradictions."""

from enum import StrEnum
from typing import Any

from hypothesis import strategies as st

from atoll.ml.attributes import (
    GPU_NAMES,
    PREFIX,
    TPU_NAMES,
    Accelerator,
    DistributedStrategy,
    MlAttributes,
    ModelFormat,
    ModelProvider,
    Operator,
    Precision,
    Runtime,
    TpuType,
)
from atoll.ml.policy import BOUNDS

KEYS = ("zone", "region", "gpu_type", "topology.kubernetes.io/zone", "tier")
VALUES = ("", "a", "b", "8.0", "9", "10.0.1", "x-1")
NUMBERS = ("0", "7.5", "8.0", "8", "10.0", "9.0.1")


def words(kind: type[StrEnum]) -> st.SearchStrategy[str]:
    """Return the words of an enumeration."""
    return st.sampled_from([word.value for word in kind])


def amounts(name: str, *, least: int = 1) -> st.SearchStrategy[int]:
    """Return whole amounts up to the bound of an attribute."""
    return st.integers(least, int(BOUNDS[name]))


def rules() -> st.SearchStrategy[dict[str, Any]]:
    """Return valid rules on labels."""

    def of(operator: str) -> st.SearchStrategy[dict[str, Any]]:
        match operator:
            case "In" | "NotIn":
                values = st.lists(st.sampled_from(VALUES), min_size=1, max_size=3)
            case "Exists" | "DoesNotExist":
                values = st.just([])
            case _:
                values = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=1)
        return st.fixed_dictionaries({"key": st.sampled_from(KEYS), "operator": st.just(operator), "values": values})

    return words(Operator).flatmap(of)


def affinities() -> st.SearchStrategy[dict[str, Any]]:
    """Return valid affinities."""
    preferred = st.tuples(rules(), st.integers(0, 100)).map(lambda pair: {**pair[0], "weight": pair[1]})
    return st.fixed_dictionaries(
        {}, optional={"required": st.lists(rules(), max_size=3), "preferred": st.lists(preferred, max_size=3)}
    )


GPU = {
    "gpu_type": st.sampled_from(("nvidia-h100", "nvidia-b200", "amd-mi300x", "intel-gaudi3")),
    "gpu_count": amounts("gpu_count"),
    "gpu_memory_gb": st.floats(0.1, 1024, allow_nan=False).map(lambda gb: round(gb, 3)),
    "gpu_compute_capability": st.sampled_from(("7.0", "8.9", "9.0")),
    "gpu_interconnect": st.sampled_from(("nvlink", "pcie", "any")),
}
TPU = {"tpu_type": words(TpuType), "tpu_topology": st.sampled_from(("1x1", "2x2", "4x8"))}
OTHERS = {
    "memory_gb": amounts("memory_gb"),
    "storage_gb": amounts("storage_gb"),
    "shm_size_gb": amounts("shm_size_gb"),
    "cpu_cores": amounts("cpu_cores"),
    "model_id": st.from_regex(r"[a-z0-9][a-z0-9-]{0,10}(/[a-z0-9-]{1,10})?", fullmatch=True),
    "model_provider": words(ModelProvider),
    "model_checksum": st.from_regex("sha256:[0-9a-f]{64}", fullmatch=True),
    "model_format": words(ModelFormat),
    "model_registry_uri": st.sampled_from(("hf://org/name@main", "s3://models/x/", "https://models.example.com/x")),
    "max_tokens": amounts("max_tokens"),
    "max_batch_size": amounts("max_batch_size"),
    "timeout_seconds": amounts("timeout_seconds"),
    "runtime": words(Runtime),
    "precision": words(Precision),
    "distributed_strategy": words(DistributedStrategy),
    "node_selector": st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES), max_size=4),
    "affinity": affinities(),
    "anti_affinity": affinities(),
    "priority_class": st.sampled_from(("spot", "on-demand", "reserved")),
    "preemptible": st.booleans(),
    "preemption_grace_period_s": amounts("preemption_grace_period_s", least=0),
    "checkpoint_on_preempt": st.booleans(),
    "reservation_id": st.from_regex("[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True),
    "priority_escalation": st.booleans(),
    "escalation_after_s": amounts("escalation_after_s", least=0),
    "checkpoint_enabled": st.booleans(),
    "checkpoint_interval_s": amounts("checkpoint_interval_s"),
    "checkpoint_storage_uri": st.sampled_from(("s3://bucket/run/", "gs://bucket/a/b/", "file:///checkpoints/")),
    "checkpoint_max_count": amounts("checkpoint_max_count"),
}


def raw_attributes() -> st.SearchStrategy[dict[str, Any]]:
    """Return valid attributes as JSON says them, with their prefix."""
    accelerators = (
        {"accelerator": st.just(Accelerator.GPU.value), **GPU},
        {"accelerator": st.just(Accelerator.TPU.value), **TPU},
        {"accelerator": st.sampled_from((Accelerator.CPU.value, Accelerator.FPGA.value))},
    )
    assert {*GPU} == {*GPU_NAMES}
    assert {*TPU} < {*TPU_NAMES}
    drawn = st.sampled_from(accelerators).flatmap(lambda own: st.fixed_dictionaries({}, optional={**own, **OTHERS}))
    return drawn.map(
        lambda found: {
            PREFIX + name: value
            for name, value in found.items()
            if name != "gpu_compute_capability" or found.get("gpu_type") != "amd-mi300x"
        }
    )


def attributes() -> st.SearchStrategy[MlAttributes]:
    """Return valid attributes."""
    return raw_attributes().map(
        lambda raw: MlAttributes.model_validate({name.removeprefix(PREFIX): value for name, value in raw.items()})
    )


def jobs() -> st.SearchStrategy[dict[str, Any]]:
    """Return valid envelopes of a job, the attributes in one of the two places."""
    heads = st.fixed_dictionaries(
        {},
        optional={
            "id": st.from_regex("[a-z0-9-]{1,20}", fullmatch=True),
            "type": st.sampled_from(("ml.train", "data.prepare")),
            "queue": st.sampled_from(("gpu", "gpu-training")),
            "args": st.lists(st.integers() | st.text("abc"), max_size=3),
            "meta": st.dictionaries(st.text("abc", min_size=1), st.integers() | st.text("abc"), max_size=2),
            "priority": st.integers(-10, 10),
            "timeout": st.integers(0, 3600),
            "owner": st.text("abc"),
        },
    )
    return st.tuples(heads, raw_attributes(), st.booleans()).map(
        lambda drawn: {**drawn[0], **(drawn[1] if drawn[2] else {"attributes": drawn[1]})}
    )


def workflows() -> st.SearchStrategy[dict[str, Any]]:
    """Return valid envelopes of a workflow."""
    lists = st.lists(jobs(), min_size=1, max_size=3)
    meta = {"meta": st.dictionaries(st.text("abc", min_size=1), st.integers(), max_size=2), "name": st.just("flow")}
    return st.one_of(
        st.fixed_dictionaries({"workflow_type": st.just("chain"), "steps": lists}, optional=meta),
        st.fixed_dictionaries({"workflow_type": st.just("group"), "jobs": lists}, optional=meta),
        st.fixed_dictionaries(
            {"workflow_type": st.just("batch"), "jobs": lists},
            optional={**meta, "callbacks": st.dictionaries(st.sampled_from(("on_complete", "on_failure")), jobs())},
        ),
    )
