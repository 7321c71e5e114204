"""Every attribute: default, bounds, accepted words, refused types."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from atoll.ml.attributes import NAMES, PREFIX, MlAttributes
from atoll.ml.envelope import JobEnvelope, Parsed, parse
from atoll.ml.infer import complete
from atoll.ml.policy import BOUNDS

RULE = {"key": "zone", "operator": "In", "values": ["a"]}
AFFINITY = {"required": [RULE], "preferred": [{**RULE, "weight": 100}]}
DIGEST = "sha256:" + "0f" * 32


class Case(NamedTuple):
    """default: after completion, of a job with one GPU. good: at the edge of what is taken. bad: just beyond, a word
    that is not listed, a wrong type; `limit` is a part of what the first of them is told. beside: what must stand
    beside the good ones."""

    name: str
    default: Any
    good: tuple[Any, ...]
    bad: tuple[Any, ...]
    limit: str
    beside: Mapping[str, Any] = MappingProxyType({})


GPU: dict[str, Any] = {"gpu_count": 2}
CASES = (
    Case("accelerator", "gpu", ("gpu", "tpu", "fpga", "cpu"), ("GPU", "npu", 1, ["gpu"]), "gpu, tpu, fpga, cpu"),
    Case(
        "gpu_type",
        None,
        ("nvidia-h100", "intel-gaudi3", "amd-instinct-mi300x"),
        ("H100", "h100", "nvidia-", "a" * 64, 100),
        "vendor-model",
    ),
    Case("gpu_count", 1, (0, 1, 512), (513, 1000, -1, 1.0, "8", True), "at most 512"),
    Case("gpu_memory_gb", None, (0.5, 80, 1024), (1024.5, 0, -1, "80", True), "at most 1024"),
    Case("gpu_compute_capability", None, ("7.0", "10.0"), ("9", "9.0.1", "sm_90", 9.0), "major.minor"),
    Case("gpu_interconnect", "any", ("nvlink", "pcie", "any"), ("NVLink", "infiniband", 4), "any, nvlink, pcie", GPU),
    Case("tpu_type", None, ("v4", "v5e", "v5p", "v6e"), ("v5", "V4", 4), "v4, v5e, v5p, v6e"),
    Case("tpu_topology", None, ("1x1", "4x8", "2x2x4"), ("4", "4x", "0x4", "4x4x4x4", "4X4", 16), "4x4 or 2x2x4"),
    Case("tpu_chip_count", None, (1, 16_384), (16_385, 0, 4.0, "4"), "at most 16384"),
    Case("memory_gb", None, (0.1, 65_536), (65_537, 0, "64", None), "at most 65536"),
    Case("storage_gb", None, (1, 1_000_000), (1_000_001, -5, "1"), "at most 1000000"),
    Case("shm_size_gb", None, (0.064, 65_536), (65_537, 0, "64MB"), "at most 65536"),
    Case("cpu_cores", None, (1, 4096), (4097, 0, 0.5, "500m"), "at most 4096"),
    Case("model_id", None, ("llama-3.1-70b", "org/name"), ("a b", "", "../x", "/x", "x" * 257, 70), "without blanks"),
    Case(
        "model_version",
        None,
        ("2.1.0", "6f3ad1c", "2026-01-31"),
        ("latest build", "", 2.1),
        "letters, digits",
        {"model_id": "m"},
    ),
    Case(
        "model_provider",
        None,
        ("openai", "anthropic", "google", "huggingface", "replicate", "local", "custom"),
        ("meta", 1),
        "openai, anthropic",
    ),
    Case(
        "model_checksum",
        None,
        (DIGEST, "md5:" + "a" * 32),
        ("sha256:ab", "crc:00", DIGEST.upper(), "0f" * 32, 7),
        "must have 64 digits",
    ),
    Case(
        "model_format",
        None,
        ("safetensors", "gguf", "onnx", "torchscript", "savedmodel", "custom"),
        ("pickle", 1),
        "safetensors, gguf",
    ),
    Case(
        "model_registry",
        None,
        ("huggingface", "mlflow", "wandb", "s3", "gcs", "custom"),
        ("docker", 1),
        "huggingface, mlflow",
    ),
    Case(
        "model_registry_uri",
        None,
        ("hf://org/name@main", "s3://models/llama/"),
        ("org/name", "s3://m/../x", "file:///etc/passwd", 1),
        "scheme://place",
    ),
    Case("max_tokens", None, (1, 100_000_000), (100_000_001, 0, "4k"), "at most 100000000"),
    Case("max_batch_size", None, (1, 10_000_000), (10_000_001, 0, 1.5), "at most 10000000"),
    Case("timeout_seconds", None, (1, 366 * 86_400), (366 * 86_400 + 1, 0, "60s"), "at most 31622400"),
    Case(
        "runtime",
        None,
        ("pytorch", "tensorflow", "onnx", "triton", "vllm", "tgi", "custom"),
        ("jax", 1),
        "pytorch, tensorflow",
    ),
    Case("precision", None, ("fp32", "fp16", "bf16", "fp8", "int8", "int4"), ("fp4", "FP16", 16), "fp32, fp16, bf16"),
    Case(
        "distributed_strategy",
        None,
        ("none", "data_parallel", "tensor_parallel", "pipeline_parallel", "fsdp", "deepspeed"),
        ("ddp", 1),
        "data_parallel",
    ),
    Case(
        "node_selector",
        None,
        ({"zone": "a"}, {"topology.kubernetes.io/zone": ""}),
        ({"zone": "a b"}, {"bad key": "x"}, {"zone": 1}, ["zone"], "zone=a"),
        "must be labels",
    ),
    Case(
        "affinity",
        None,
        (AFFINITY, {}),
        (
            {"required": [{"key": "zone", "operator": "Is"}]},
            {"must": []},
            {"preferred": [{**RULE, "weight": 101}]},
            {"required": [{"operator": "In"}]},
            [],
        ),
        "In, NotIn, Exists",
    ),
    Case(
        "anti_affinity",
        None,
        (AFFINITY, {}),
        ({"required": [{**RULE, "values": []}]}, {"required": [{**RULE, "weight": 1}]}, "zone"),
        "must name a value",
    ),
    Case(
        "priority_class",
        "on-demand",
        ("spot", "on-demand", "reserved"),
        ("high", "on_demand", 1),
        "spot, on-demand, reserved",
    ),
    Case("preemptible", False, (True, False), ("yes", "true", 1), "true or false"),
    Case("preemption_grace_period_s", 30, (0, 86_400), (86_401, -1, "30s", 30.0), "at most 86400"),
    Case("checkpoint_on_preempt", False, (True, False), ("on", 0), "true or false"),
    Case(
        "reservation_id",
        None,
        ("nightly-h100", "a.b"),
        ("Nightly", "-a", "a/b", "a..b", "a-.b", "a" * 254, 1),
        "a name in lower case",
    ),
    Case(
        "reservation_timeout_s",
        None,
        (1, 366 * 86_400),
        (366 * 86_400 + 1, 0, "1h"),
        "at most",
        {"reservation_id": "r"},
    ),
    Case("priority_escalation", False, (True, False), ("no", 1), "true or false"),
    Case("escalation_after_s", 3600, (0, 366 * 86_400), (366 * 86_400 + 1, -1, "1h"), "at most"),
    Case("escalation_target_class", None, ("on-demand", "reserved"), ("spot", "high", 2), "must be above"),
    Case("checkpoint_enabled", False, (True, False), ("true", 1), "true or false"),
    Case("checkpoint_interval_s", 300, (1, 366 * 86_400), (366 * 86_400 + 1, 0, 0.5), "at most"),
    Case(
        "checkpoint_storage_uri",
        None,
        ("s3://bucket/run/", "gs://bucket/run/", "az://container/run/", "file:///checkpoints/run/"),
        ("s3://bucket/run", "hf://org/name/", "s3://bucket/../x/", "file://host/x/", 1),
        "must end in a slash",
    ),
    Case("checkpoint_max_count", 3, (1, 1000), (1001, 0, "3"), "at most 1000"),
)
"""In the order of the reference."""


def read(attributes: dict[str, Any]) -> Parsed:
    """Parse an envelope of one job with these attributes, given without their prefix."""
    return parse(json.dumps({PREFIX + name: value for name, value in attributes.items()}).encode())


def test_every_attribute_is_tried() -> None:
    """The table above leaves none of the 42 out, and names none that there is not."""
    assert tuple(case.name for case in CASES) == NAMES
    assert len(NAMES) == 42


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attribute_left_out_gets_its_default(case: Case) -> None:
    """A job that says one GPU and nothing else is complete."""
    completed = complete(MlAttributes(gpu_count=1)).attributes

    assert getattr(completed, case.name) == case.default


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attribute_takes_what_it_may_up_to_the_edge(case: Case) -> None:
    """Every listed word, the smallest and the largest value are taken as they stand."""
    for value in case.good:
        found = read({**case.beside, case.name: value})

        assert [str(problem) for problem in found.problems] == []
        assert isinstance(found.envelope, JobEnvelope)
        assert found.envelope.attributes.to_json() == MlAttributes(**{**case.beside, case.name: value}).to_json()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attribute_refuses_what_it_may_not_and_says_so(case: Case) -> None:
    """Beyond the bound, an unlisted word, a wrong type: refused with attribute, value, limit and line."""
    for number, value in enumerate(case.bad):
        found = read({**case.beside, case.name: value})

        assert found.envelope is None, value
        assert all(problem.attribute.startswith(PREFIX + case.name) for problem in found.problems), value
        assert all(problem.limit and problem.hint and problem.line == 1 for problem in found.problems), value
        assert number or any(case.limit in str(problem) for problem in found.problems), found.problems


def test_every_number_has_an_upper_bound() -> None:
    """An attribute that asks for an amount cannot ask for any amount."""
    numbers = {case.name for case in CASES if type(case.good[-1]) in {int, float}}

    assert numbers == set(BOUNDS)


def test_error_tells_what_was_probably_meant() -> None:
    """A misspelt attribute, a word in capitals and a bare model are corrected in the hint."""
    text = b"ext_ml_gpu_cout: 8\next_ml_precision: BF16\next_ml_gpu_type: H100\n"

    assert [str(problem) for problem in parse(text).problems] == [
        "line 1: ext_ml_gpu_cout is not known; did you mean ext_ml_gpu_count?",
        "line 2: ext_ml_precision is 'BF16': must be one of fp32, fp16, bf16, fp8, int8, int4; did you mean bf16?",
        "line 3: ext_ml_gpu_type is 'H100': must be vendor-model in lower case, such as nvidia-h100; write nvidia-h100",
    ]


def test_attribute_without_its_prefix_is_ignored_and_told_of() -> None:
    """What is not of this vocabulary does not matter to it, but a likely slip is told."""
    found = parse(b"gpu_count: 3\next_mlx_model_name: x\nowner: me\nattributes: {precision: fp4, x: 1}\n")

    assert isinstance(found.envelope, JobEnvelope)
    assert found.envelope.attributes == MlAttributes()
    assert sorted(str(note) for note in found.notes) == [
        "gpu_count: ignored without its prefix; did you mean ext_ml_gpu_count?",
        "precision: ignored without its prefix; did you mean ext_ml_precision?",
    ]


EXAMPLES = Path(__file__).parents[2] / "examples" / "jobs"
GOLDEN: dict[str, list[dict[str, Any]]] = {
    "inference.json": [
        {
            "accelerator": "gpu", "gpu_type": "nvidia-a100", "gpu_count": 2, "gpu_memory_gb": 80, "precision": "fp16",
            "runtime": "vllm", "max_tokens": 4096, "model_id": "llama-3.1-70b", "model_version": "2.1",
            "model_format": "safetensors", "model_registry": "huggingface", "priority_class": "on-demand",
            "timeout_seconds": 60,
        }
    ],
    "training.yaml": [
        {
            "accelerator": "gpu", "gpu_type": "nvidia-h100", "gpu_count": 8, "gpu_memory_gb": 80,
            "gpu_compute_capability": "9.0", "gpu_interconnect": "nvlink", "precision": "bf16",
            "distributed_strategy": "fsdp", "runtime": "pytorch", "memory_gb": 1024, "storage_gb": 2000,
            "shm_size_gb": 256, "model_id": "llama-3.1-70b", "model_version": "2.1-finetune",
            "priority_class": "reserved", "preemptible": False, "timeout_seconds": 172_800,
            "node_selector": {"cluster": "training", "instance_type": "p5.48xlarge"}, "checkpoint_enabled": True,
            "checkpoint_interval_s": 600, "checkpoint_max_count": 5,
            "checkpoint_storage_uri": "s3://checkpoints/llama-3.1-70b/",
        }
    ],
    "tpu.yaml": [
        {
            "accelerator": "tpu", "tpu_type": "v5e", "tpu_topology": "4x4", "tpu_chip_count": 16, "precision": "bf16",
            "runtime": "tensorflow", "memory_gb": 256, "model_id": "t5-xxl", "model_version": "1.0",
            "priority_class": "reserved", "timeout_seconds": 86_400, "checkpoint_enabled": True,
            "checkpoint_interval_s": 900, "checkpoint_storage_uri": "gs://checkpoints/t5-xxl/",
        }
    ],
    "sweep.yaml": [
        {
            "accelerator": "gpu", "gpu_type": "nvidia-a100", "gpu_count": 4, "gpu_memory_gb": 40, "precision": "fp16",
            "distributed_strategy": "data_parallel", "runtime": "pytorch", "memory_gb": 128, "model_id": "resnet50",
            "model_version": "1.0", "priority_class": "spot", "preemptible": True, "preemption_grace_period_s": 60,
            "checkpoint_on_preempt": True, "timeout_seconds": 14_400, "checkpoint_enabled": True,
            "checkpoint_interval_s": 300, "checkpoint_storage_uri": "s3://checkpoints/resnet50/",
        }
    ],
    "cpu.yaml": [
        {
            "accelerator": "cpu", "cpu_cores": 4, "memory_gb": 8, "runtime": "onnx", "max_batch_size": 32,
            "model_id": "distilbert-base", "model_version": "1.2", "model_format": "onnx",
            "priority_class": "on-demand", "timeout_seconds": 10,
        }
    ],
    "chain.yaml": [
        {"accelerator": "cpu", "cpu_cores": 16, "memory_gb": 64, "storage_gb": 500},
        {
            "accelerator": "gpu", "gpu_type": "nvidia-h100", "gpu_count": 8, "gpu_interconnect": "nvlink",
            "distributed_strategy": "fsdp", "priority_class": "reserved", "timeout_seconds": 86_400,
            "checkpoint_enabled": True, "checkpoint_interval_s": 600,
            "checkpoint_storage_uri": "s3://checkpoints/fine-tune/",
        },
        {"accelerator": "gpu", "gpu_type": "nvidia-a100", "gpu_count": 2, "runtime": "vllm", "timeout_seconds": 7200},
        {"accelerator": "cpu", "timeout_seconds": 300},
    ],
    "group.yaml": [
        {"gpu_type": "nvidia-a100", "gpu_count": 4, "precision": "fp16", "model_id": "llama-3.1-70b"},
        {
            "gpu_type": "nvidia-l4", "gpu_count": 1, "gpu_memory_gb": 24, "precision": "fp16",
            "model_id": "stable-diffusion-xl",
        },
        {
            "gpu_type": "nvidia-t4", "gpu_count": 1, "gpu_memory_gb": 16, "precision": "fp16",
            "model_id": "whisper-large-v3",
        },
    ],
}  # fmt: skip


def test_every_example_is_held_against_its_meaning() -> None:
    """A new example comes with what it means."""
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in {".json", ".yaml"}} >= set(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_example_says_field_by_field_what_it_should(name: str) -> None:
    """The seven examples parse, without a problem or a slip, to exactly these attributes."""
    found = parse((EXAMPLES / name).read_bytes())

    assert (found.problems, found.notes) == ((), ())
    assert found.envelope is not None
    jobs = (found.envelope,) if isinstance(found.envelope, JobEnvelope) else found.envelope.jobs
    assert [job.attributes.given() for job in jobs] == GOLDEN[name]
    assert [complete(job.attributes).attributes.accelerator for job in jobs] == [
        attributes.get("accelerator", "gpu") for attributes in GOLDEN[name]
    ]
