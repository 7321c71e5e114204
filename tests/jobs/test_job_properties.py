"""Any valid job: its objects are valid for Kubernetes and Atoll, reproducible, and no field is lost silently."""

from contextlib import suppress
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.jobs.documents import parse_job
from atoll.jobs.errors import JobMistake
from atoll.jobs.labels import label_value
from atoll.jobs.model import Job
from atoll.jobs.rendering import render
from atoll.jobs.text import manifest_text
from atoll.ml.attributes import PREFIX
from tests.jobs.render import NOW_SECONDS
from tests.kubernetes_schemas import validate

OWN_KINDS = {"GpuClaim": GpuClaim, "GpuGang": GpuGang}
text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)
words = st.from_regex(r"\A[a-z]([a-z0-9-]{0,10}[a-z0-9])?\Z")
rules = st.fixed_dictionaries(
    {"key": words, "operator": st.sampled_from(["In", "NotIn"]), "values": st.lists(words, min_size=1, max_size=3)}
) | st.fixed_dictionaries(
    {"key": words, "operator": st.sampled_from(["Gt", "Gte", "Lt", "Lte"]), "values": st.just(["7"])}
)
ATTRIBUTES: dict[str, st.SearchStrategy[Any]] = {
    "gpu_count": st.integers(1, 64),
    "gpu_type": st.sampled_from(["nvidia-h100", "nvidia-a100", "amd-mi300x", "nvidia-b200"]),
    "gpu_memory_gb": st.integers(1, 80) | st.floats(0.5, 80),
    "gpu_interconnect": st.sampled_from(["nvlink", "any"]),
    "memory_gb": st.integers(1, 2000) | st.floats(0.1, 2000),
    "storage_gb": st.integers(1, 2000),
    "shm_size_gb": st.floats(0.1, 500),
    "model_id": st.from_regex(r"\A[A-Za-z$({][A-Za-z0-9$(){}:#-]{0,90}\Z"),
    "max_tokens": st.integers(1, 10_000),
    "timeout_seconds": st.integers(1, 10**6),
    "runtime": st.sampled_from(["pytorch", "vllm", "custom"]),
    "precision": st.sampled_from(["fp32", "bf16", "int4"]),
    "distributed_strategy": st.sampled_from(["fsdp", "tensor_parallel", "deepspeed"]),
    "priority_class": st.sampled_from(["spot", "on-demand", "reserved"]),
    "preemptible": st.booleans(),
    "preemption_grace_period_s": st.integers(0, 1000),
    "checkpoint_on_preempt": st.booleans(),
    "reservation_id": words,
    "checkpoint_max_count": st.integers(1, 10),
    "node_selector": st.dictionaries(words, words, max_size=3),
    "affinity": st.fixed_dictionaries({"required": st.lists(rules, max_size=3)}),
}
POLICY: dict[str, st.SearchStrategy[Any]] = {
    "preemptible": st.booleans(),
    "preemption_grace_period": st.integers(1, 1000),
    "deadline": st.just("2031-01-01T00:00:00Z"),
    "scheduled_start": st.just("2030-06-01T00:00:00+02:00"),
    "max_runtime": st.integers(1, 10**6),
    "queue_name": words,
    "cohort": words,
    "topology": st.sampled_from(["none", "nvlink", "spread"]),
    "tolerations": st.just([{"key": "team", "value": "a", "effect": "NoExecute", "toleration_seconds": 5}]),
    "max_retries": st.integers(0, 10),
    "retry_delay_seconds": st.integers(0, 100),
    "retry_on_preemption": st.booleans(),
    "unique_seconds": st.integers(1, 1000),
}
INTENT: dict[str, st.SearchStrategy[Any]] = {
    "optimization_goal": st.sampled_from(["cost", "latency"]),
    "spot_eligible": st.booleans(),
    "budget_cap": st.decimals(1, 1000, places=2).map(str),
    "budget_action": st.sampled_from(["warn", "pause"]),
    "cost_center": words,
    "workload_class": st.sampled_from(["production", "interactive"]),
    "sla_tier": words,
    "expected_duration_hint": st.integers(1, 1000),
    "gpu_memory_hint": st.just("40GB"),
}
variables = st.lists(
    st.fixed_dictionaries({"name": st.from_regex(r"\A[A-Z][A-Z0-9_]{0,8}\Z"), "value": text}),
    max_size=3,
    unique_by=lambda one: one["name"],
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw a valid job of any type."""
    job_type = draw(st.sampled_from(["service", "batch", "training"]))
    attributes = draw(st.fixed_dictionaries({}, optional=ATTRIBUTES))
    if "reservation_id" in attributes:
        attributes.setdefault("gpu_count", 1)
    if job_type == "service":
        attributes["gpu_count"] = min(8, attributes.get("gpu_count", 1))
    else:
        attributes.setdefault("distributed_strategy", "fsdp")
        attributes["checkpoint_enabled"] = draw(st.booleans())
    container = {
        "image": "work:1",
        "command": draw(st.lists(text, max_size=3)),
        "env": draw(variables),
        "ports": draw(st.sampled_from([[], [{"port": 80, "name": "http"}]])),
    }
    return Job.model_validate(
        {
            "name": draw(words),
            "job_type": job_type,
            "container": container,
            "attributes": {PREFIX + name: value for name, value in attributes.items()},
            "policy": draw(st.fixed_dictionaries({}, optional=POLICY)),
            "intent": draw(st.fixed_dictionaries({}, optional=INTENT)),
            "tenant_id": draw(st.none() | words),
            "annotations": draw(st.dictionaries(words, text, max_size=2)),
        }
    )


@settings(deadline=None)
@given(jobs())
def test_any_valid_job_renders_to_what_the_cluster_takes(job: Job) -> None:
    """Objects pass the schemas of Kubernetes and our own models, and come back from their YAML as they went in."""
    result = render(job, now_seconds=NOW_SECONDS)
    printed = manifest_text(result)

    assert printed == manifest_text(
        render(Job.model_validate(job.model_dump(exclude_unset=True)), now_seconds=NOW_SECONDS)
    )
    assert [one for one in yaml.safe_load_all(printed) if one is not None] == list(result.objects)
    for one in result.objects:
        if one["kind"] in OWN_KINDS:
            OWN_KINDS[one["kind"]].model_validate(one)
        else:
            validate(one, "1.37", strict=True)


@settings(deadline=None)
@given(jobs())
def test_no_wish_is_lost_in_silence(job: Job) -> None:
    """Whatever a job says is told: what it became, or that it has no effect and why."""
    told = {note.source for note in render(job, now_seconds=NOW_SECONDS).notes}
    said = {f"{PREFIX}{name}" for name, value in job.attributes.given().items() if value not in ({}, None)}
    said |= {
        f"policy.{name}" for name in job.policy.model_fields_set if name != "topology" or job.policy.topology != "none"
    }
    said |= {
        f"intent.{name}" for name in job.intent.model_fields_set if name != "spot_eligible" or job.intent.spot_eligible
    }

    assert {one for one in said if not any(note.startswith(one) for note in told)} == set()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | text,
        lambda some: (
            st.lists(some, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "name",
                        "job_type",
                        "container",
                        "image",
                        "policy",
                        "intent",
                        "attributes",
                        "env",
                        "ext_ml_gpu_count",
                    ]
                ),
                some,
                max_size=5,
            )
        ),
    )
)
def test_no_document_crashes(value: Any) -> None:
    """A document is a job, or a list of what is wrong with it; rendering a job ends in objects or in one reason."""
    parsed = parse_job(yaml.safe_dump(value).encode())

    assert (parsed.job is None) == bool(parsed.problems)
    if parsed.job is not None:
        with suppress(JobMistake):
            assert render(parsed.job).objects


@given(text, text)
def test_labels_of_different_texts_differ(one: str, other: str) -> None:
    """No selector takes one model for another."""
    assert (label_value(one) == label_value(other)) == (one == other)
