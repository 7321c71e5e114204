"""Rules over several attributes: inference, contradictions, warnings."""

import json
from typing import Any

import pytest
from hypothesis import given, settings

from atoll.ml.attributes import PREFIX, MlAttributes
from atoll.ml.envelope import JobEnvelope, parse
from atoll.ml.infer import complete
from atoll.ml.policy import BOUNDS, MlPolicy
from tests.ml.strategies import attributes

FOLLOWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a count of GPUs means a GPU": ({"gpu_count": 1}, {"accelerator": "gpu", "gpu_count": 1}),
    "a type of GPU means one GPU": ({"gpu_type": "nvidia-l4"}, {"accelerator": "gpu", "gpu_count": 1}),
    "memory of GPUs means one GPU": ({"gpu_memory_gb": 24}, {"accelerator": "gpu", "gpu_count": 1}),
    "a capability means one GPU": ({"gpu_compute_capability": "8.0"}, {"accelerator": "gpu", "gpu_count": 1}),
    "an interconnect means one GPU": ({"gpu_interconnect": "any"}, {"accelerator": "gpu", "gpu_count": 1}),
    "the accelerator alone means one GPU": ({"accelerator": "gpu"}, {"gpu_count": 1}),
    "a type of TPU means a TPU": ({"tpu_type": "v5e"}, {"accelerator": "tpu", "gpu_count": None}),
    "a shape of TPUs means its chips": ({"tpu_topology": "2x4"}, {"accelerator": "tpu", "tpu_chip_count": 8}),
    "no accelerator means the CPU": ({"memory_gb": 4}, {"accelerator": "cpu", "gpu_count": None}),
    "no GPU means the CPU": ({"gpu_count": 0}, {"accelerator": "cpu", "gpu_count": 0}),
    "a precision does not ask for a GPU": (
        {"precision": "bf16"},
        {"accelerator": "cpu", "gpu_compute_capability": None},
    ),
    "fp32 runs on Volta": ({"gpu_count": 1, "precision": "fp32"}, {"gpu_compute_capability": "7.0"}),
    "fp16 runs on Volta": ({"gpu_count": 1, "precision": "fp16"}, {"gpu_compute_capability": "7.0"}),
    "bf16 needs Ampere": ({"gpu_count": 1, "precision": "bf16"}, {"gpu_compute_capability": "8.0"}),
    "fp8 needs Ada": ({"gpu_count": 1, "precision": "fp8"}, {"gpu_compute_capability": "8.9"}),
    "int8 needs Turing": ({"gpu_count": 1, "precision": "int8"}, {"gpu_compute_capability": "7.5"}),
    "int4 needs Turing": ({"gpu_count": 1, "precision": "int4"}, {"gpu_compute_capability": "7.5"}),
    "a capability that is said stands": (
        {"precision": "fp8", "gpu_compute_capability": "8.0"},
        {"gpu_compute_capability": "8.0"},
    ),
    "AMD has no compute capability": ({"gpu_type": "amd-mi300x", "precision": "fp8"}, {"gpu_compute_capability": None}),
    "nor has a card of AMD that is not in the table": (
        {"gpu_type": "amd-instinct-mi210", "precision": "fp8"},
        {"gpu_compute_capability": None},
    ),
    "the interconnect of one GPU is ignored": (
        {"gpu_count": 1, "gpu_interconnect": "nvlink"},
        {"gpu_interconnect": "any"},
    ),
    "tensor parallel work needs NVLink": (
        {"gpu_count": 2, "distributed_strategy": "tensor_parallel"},
        {"gpu_interconnect": "nvlink"},
    ),
    "tensor parallel work may say otherwise": (
        {"gpu_count": 2, "distributed_strategy": "tensor_parallel", "gpu_interconnect": "pcie"},
        {"gpu_interconnect": "pcie"},
    ),
    "data parallel work takes any link": (
        {"gpu_count": 2, "distributed_strategy": "data_parallel"},
        {"gpu_interconnect": "any"},
    ),
    "spot may be preempted": ({"priority_class": "spot"}, {"preemptible": True}),
    "reserved may not": ({"priority_class": "reserved"}, {"preemptible": False}),
    "what a job says of preemption wins": ({"priority_class": "spot", "preemptible": False}, {"preemptible": False}),
}

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no GPU of a type": ({"gpu_count": 0, "gpu_type": "nvidia-l4"}, "gpu_count", "at least 1 beside ext_ml_gpu_type"),
    "no GPU with memory": ({"gpu_count": 0, "gpu_memory_gb": 24}, "gpu_count", "ext_ml_gpu_memory_gb"),
    "no GPU of a capability": ({"gpu_count": 0, "gpu_compute_capability": "8.0"}, "gpu_count", "at least 1"),
    "a GPU job without GPUs": ({"accelerator": "gpu", "gpu_count": 0}, "gpu_count", "ext_ml_accelerator gpu"),
    "a CPU job with GPUs": ({"accelerator": "cpu", "gpu_count": 2}, "gpu_count", "beside ext_ml_accelerator cpu"),
    "a TPU job with a type of GPU": ({"accelerator": "tpu", "gpu_type": "nvidia-l4"}, "gpu_type", "accelerator tpu"),
    "a GPU job with a shape of TPUs": (
        {"accelerator": "gpu", "tpu_topology": "2x2"},
        "tpu_topology",
        "accelerator gpu",
    ),
    "GPUs and TPUs": ({"gpu_count": 1, "tpu_type": "v4"}, "tpu_type", "beside ext_ml_gpu_count"),
    "chips that the shape has not": ({"tpu_topology": "4x4", "tpu_chip_count": 8}, "tpu_chip_count", "must be 16"),
    "a cube of a flat generation": ({"tpu_type": "v5e", "tpu_topology": "2x2x2"}, "tpu_topology", "2 sides on v5e"),
    "a slice of a million chips": ({"tpu_topology": "1000x1000"}, "tpu_topology", "at most 16384 chips"),
    "bf16 on Turing": ({"gpu_type": "nvidia-t4", "precision": "bf16"}, "precision", "needs compute capability 8.0"),
    "Hopper's capability of an A100": (
        {"gpu_type": "nvidia-a100", "gpu_compute_capability": "9.0"},
        "gpu_compute_capability",
        "at most 8.0",
    ),
    "a version of no model": ({"model_version": "1.0"}, "model_version", "needs ext_ml_model_id"),
    "a registry that the URI is not of": (
        {"model_registry": "mlflow", "model_registry_uri": "hf://org/name"},
        "model_registry_uri",
        "of registry mlflow",
    ),
    "an ordered rule over words": (
        {"affinity": {"required": [{"key": "memory", "operator": "Gt", "values": ["big"]}]}},
        "affinity",
        "one number",
    ),
    "an ordered rule over two numbers": (
        {"affinity": {"preferred": [{"key": "memory", "operator": "Lte", "values": ["1", "2"]}]}},
        "affinity",
        "one number",
    ),
    "a capability of AMD's": (
        {"gpu_type": "amd-instinct-mi210", "gpu_compute_capability": "9.0"},
        "gpu_compute_capability",
        "AMD's cards have none",
    ),
    "a hold of no reservation": ({"reservation_timeout_s": 60}, "reservation_timeout_s", "needs ext_ml_reservation_id"),
    "an escalation that leads nowhere": (
        {"priority_class": "on-demand", "escalation_target_class": "on-demand"},
        "escalation_target_class",
        "above",
    ),
}


def read(given: dict[str, Any], policy: MlPolicy | None = None) -> Any:
    """Parse a job with these attributes, given without their prefix."""
    return parse(json.dumps({PREFIX + name: value for name, value in given.items()}).encode(), policy)


@pytest.mark.parametrize(("given_", "expected"), FOLLOWS.values(), ids=FOLLOWS)
def test_what_is_left_out_follows_from_what_is_said(given_: dict[str, Any], expected: dict[str, Any]) -> None:
    """Each inference is drawn, and told with its reason."""
    found = read(given_)
    assert isinstance(found.envelope, JobEnvelope), found.problems
    completed = complete(found.envelope.attributes)

    assert {name: getattr(completed.attributes, name) for name in expected} == expected
    told = {note.attribute.removeprefix(PREFIX) for note in completed.notes}
    changed = {name for name, value in completed.attributes.given().items() if value != given_.get(name)}
    assert told == changed


@pytest.mark.parametrize(("given_", "name", "limit"), REFUSED.values(), ids=REFUSED)
def test_contradictions_are_refused_with_both_sides_named(given_: dict[str, Any], name: str, limit: str) -> None:
    """What can never be met is refused at once and not waited for."""
    problems = read(given_).problems

    assert [problem.attribute.removeprefix(PREFIX).partition(".")[0] for problem in problems] == [name]
    assert limit in problems[0].limit


def test_bound_of_the_cluster_is_the_administrators() -> None:
    """A thousand GPUs are refused by default, and a bound may be moved either way."""
    assert read({"gpu_count": 1000}).problems
    assert not read({"gpu_count": 1000}, MlPolicy(bounds={"gpu_count": 1024})).problems
    assert read({"gpu_count": 8}, MlPolicy(bounds={"gpu_count": 4})).problems
    assert read({"memory_gb": 10**6}, MlPolicy(bounds={"gpu_count": 4})).problems
    with pytest.raises(ValueError, match="bounds names gpus; bounds exist for gpu_count"):
        MlPolicy(bounds={"gpus": 4})


def test_models_may_be_limited_to_a_list() -> None:
    """Where a list is configured, no other model is taken."""
    policy = MlPolicy(model_ids=("meta/*", "bert-large"))

    assert not read({"model_id": "meta/llama-3.1-70b"}, policy).problems
    assert not read({"model_id": "bert-large"}, policy).problems
    assert "meta/*" in read({"model_id": "bert-larger"}, policy).problems[0].limit


WARNED: dict[str, tuple[dict[str, Any], str]] = {
    "weights that do not fit": (
        {
            "gpu_type": "nvidia-a100",
            "gpu_count": 2,
            "gpu_memory_gb": 40,
            "precision": "fp16",
            "model_id": "llama-3.1-70b",
        },
        "take 140 GB in fp16, the GPUs have 80",
    ),
    "more memory than the type is known with": (
        {"gpu_type": "nvidia-a100", "gpu_memory_gb": 100},
        "known with 40 and 80 GB",
    ),
    "a vendor that Atoll does not serve": ({"gpu_type": "intel-gaudi3"}, "GPUs of nvidia and amd"),
    "saving on preemption alone": (
        {"gpu_count": 1, "checkpoint_on_preempt": True},
        "nothing is saved",
    ),
    "a CPU job without a size": ({"accelerator": "cpu", "cpu_cores": 4}, "ext_ml_memory_gb"),
}


@pytest.mark.parametrize(("given_", "text"), WARNED.values(), ids=WARNED)
def test_user_is_warned_and_not_stopped(given_: dict[str, Any], text: str) -> None:
    """What will probably disappoint is said, and the job is taken."""
    found = read(given_)

    assert found.problems == ()
    assert any(text in str(warning) for warning in complete(found.envelope.attributes).warnings)


@pytest.mark.parametrize(
    "given_",
    [
        {"gpu_count": 4, "gpu_memory_gb": 40, "precision": "fp16", "model_id": "llama-3.1-70b"},
        {"gpu_count": 1, "gpu_memory_gb": 140, "precision": "fp16", "model_id": "llama-3.1-70b"},
        {"gpu_type": "nvidia-a100", "gpu_memory_gb": 80},
        {"gpu_type": "amd-mi300x"},
        {"accelerator": "cpu", "cpu_cores": 4, "memory_gb": 8},
    ],
)
def test_what_fits_warns_of_nothing(given_: dict[str, Any]) -> None:
    """Seventy billion parameters in fp16 fit into four cards of 40 GB; a warning is worth reading."""
    assert complete(MlAttributes.model_validate(given_)).warnings == ()


@settings(deadline=None)
@given(attributes())
def test_completing_keeps_what_is_said_and_can_be_repeated(said: MlAttributes) -> None:
    """Nothing given changes but the interconnect of one GPU; a second time changes nothing; the rules still hold."""
    once = complete(said).attributes
    given_ = said.given()
    if once.gpu_count == 1:
        given_.pop("gpu_interconnect", None)

    assert {name: getattr(once, name) for name in given_} == given_
    assert complete(once).attributes == once
    assert MlAttributes.model_validate_json(once.model_dump_json()) == once


def test_bounds_are_read_only() -> None:
    """One caller's policy cannot move another's."""
    with pytest.raises(TypeError):
        BOUNDS["gpu_count"] = 1000  # type: ignore[index]
