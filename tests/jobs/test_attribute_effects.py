"""Every accepted attribute changes the objects of its job, or the job is told that it has no effect."""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api import job_names
from atoll.jobs.documents import parse_job
from atoll.jobs.errors import JobMistake
from atoll.jobs.rendering import Rendered, render
from atoll.jobs.working_out import given_attributes
from atoll.ml.attributes import NAMES, PREFIX, MlAttributes
from atoll.ml.infer import complete
from tests.jobs.render import IMAGE, NOW_SECONDS
from tests.ml.strategies import raw_attributes

Attributes = Mapping[str, Any]
KINDS: Mapping[str, Attributes] = {
    **{kind: {"job_type": kind, "container": IMAGE} for kind in ("service", "batch", "training")},
    "chart": {"job_type": "service", "deployment_type": "helm", "helm": {"chart": "oci://charts.example.com/app"}},
}
GPUS = {"gpu_count": 2}
SLICE = {"tpu_topology": "2x2"}
MODEL = {"model_id": "llama"}
SAVES = {"checkpoint_enabled": True}
RULES = {"required": [{"key": "zone", "operator": "In", "values": ["a"]}]}
ACTS: Mapping[str, tuple[Attributes, Any]] = {
    "accelerator": ({}, "gpu"),
    "gpu_type": (GPUS, "nvidia-h100"),
    "gpu_count": ({}, 1),
    "gpu_memory_gb": (GPUS, 40),
    "gpu_compute_capability": (GPUS, "9.0"),
    "gpu_interconnect": (GPUS, "nvlink"),
    "tpu_type": (SLICE, "v5e"),
    "tpu_topology": ({"tpu_chip_count": 4}, "2x2"),
    "tpu_chip_count": ({}, 4),
    "memory_gb": ({}, 8),
    "storage_gb": ({}, 8),
    "shm_size_gb": ({}, 8),
    "cpu_cores": ({}, 8),
    "model_id": ({}, "llama"),
    "model_version": (MODEL, "1.0"),
    "model_provider": ({}, "local"),
    "model_checksum": ({}, "sha256:" + "0" * 64),
    "model_format": ({}, "onnx"),
    "model_registry": ({}, "s3"),
    "model_registry_uri": ({}, "s3://models/llama/"),
    "max_tokens": ({}, 1),
    "max_batch_size": ({}, 1),
    "timeout_seconds": ({}, 60),
    "runtime": ({}, "pytorch"),
    "precision": (GPUS, "fp8"),
    "distributed_strategy": (GPUS, "tensor_parallel"),
    "node_selector": ({}, {"zone": "a"}),
    "affinity": ({}, RULES),
    "anti_affinity": ({}, RULES),
    "priority_class": ({}, "spot"),
    "preemptible": ({}, False),
    "preemption_grace_period_s": ({}, 60),
    "checkpoint_on_preempt": (SAVES, True),
    "reservation_id": (GPUS, "nightly"),
    "reservation_timeout_s": ({**GPUS, "reservation_id": "nightly"}, 60),
    "checkpoint_enabled": ({}, True),
    "checkpoint_interval_s": (SAVES, 60),
    "checkpoint_storage_uri": (SAVES, "s3://runs/one/"),
    "checkpoint_max_count": (SAVES, 5),
}
"""An attribute, and what must stand beside it for an effect in the objects."""
OF_THE_SERVICE = ("priority_escalation", "escalation_after_s", "escalation_target_class")
OTHERS: Mapping[str, Any] = {"priority_class": "spot", "checkpoint_storage_uri": "s3://runs/one/"}
"""Values that act where the default is given by name."""


def result(attributes: Attributes, kind: str) -> tuple[MlAttributes, Rendered] | None:
    """Return what follows from a job's attributes, and its objects; None if it is refused."""
    said = {PREFIX + name.removeprefix(PREFIX): value for name, value in attributes.items()}
    parsed = parse_job(json.dumps({"name": "work", **KINDS[kind], **said}).encode())
    if parsed.job is None:
        return None
    try:
        return complete(given_attributes(parsed.job)).attributes, render(parsed.job, now_seconds=NOW_SECONDS)
    except JobMistake:
        return None


def acting(found: Rendered) -> str:
    """Return all that a cluster or a container reads: not the annotations that only record attributes."""
    helm = dict(found.helm.values) if found.helm is not None else {}
    parts = deepcopy([*found.objects, helm])
    metadata = [part["spec"]["template"]["metadata"] for part in parts if "template" in part.get("spec", {})]
    for annotations in (*(one.get("annotations", {}) for one in metadata), helm.get("podAnnotations", {})):
        for key in [one for one in annotations if one.startswith(job_names.ML_ANNOTATION_PREFIX)]:
            if key != job_names.RESERVATION_TIMEOUT:
                del annotations[key]
    return json.dumps(parts, sort_keys=True, default=str)


def is_told(found: Rendered, name: str) -> bool:
    """Return whether `atoll job validate` says something about an attribute."""
    return any(note.is_hint and note.source.startswith(PREFIX + name) for note in found.notes)


def test_every_attribute_is_in_the_table() -> None:
    """None is left out."""
    assert {*ACTS, *OF_THE_SERVICE} == {*NAMES}


@pytest.mark.parametrize("name", ACTS)
def test_attribute_has_an_effect(name: str) -> None:
    """It changes the objects of a training; nothing is told about it that the user has to mend."""
    beside, value = ACTS[name]
    before, after = result(beside, "training"), result({**beside, name: value}, "training")
    assert before is not None or name == "tpu_topology"
    assert after is not None
    assert before is None or acting(before[1]) != acting(after[1])
    assert not is_told(after[1], name)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        pytest.param({"priority_class": "spot"}, "only the job service moves the job up", id="spot"),
        pytest.param({"priority_class": "on-demand"}, "only a spot job moves up", id="on-demand"),
        pytest.param({"priority_class": "reserved"}, "only a spot job moves up", id="reserved"),
        pytest.param({}, "only a spot job moves up", id="no-class"),
        pytest.param({"priority_class": "spot", "priority_escalation": False}, "is not true", id="not-wanted"),
    ],
)
def test_escalation_without_the_service_is_told(attributes: Attributes, words: str) -> None:
    """A pod's priority never changes; a job of another class never moves up."""
    asked = {"priority_escalation": True, "escalation_after_s": 60, "escalation_target_class": "reserved"}
    if attributes.get("priority_class") == "reserved":
        del asked["escalation_target_class"]
    found = result({**asked, **attributes}, "batch")
    assert found is not None
    told = {note.source.removeprefix(PREFIX): note.text for note in found[1].notes if note.is_hint}
    wanted = [name for name in asked if not (name == "priority_escalation" and words == "is not true")]
    assert [name for name in wanted if words in told.get(name, "")] == wanted


def says_something(value: Any) -> bool:
    """Return whether a value of an attribute asks for anything: an empty selector and a weight of 0 do not."""
    if isinstance(value, dict) and value.keys() <= {"required", "preferred"}:
        return bool(value.get("required")) or any(rule.get("weight", 1) for rule in value.get("preferred", ()))
    return value not in ({}, False)


@settings(deadline=None)
@given(raw_attributes(), st.sampled_from(sorted(KINDS)))
def test_no_attribute_is_accepted_and_then_without_effect_in_silence(raw: dict[str, Any], kind: str) -> None:
    """Whatever stands beside it, and whatever kind of job it is."""
    if PREFIX + "gpu_count" in raw:
        raw[PREFIX + "gpu_count"] = raw[PREFIX + "gpu_count"] % 8 + 1
    found = result(raw, kind)
    if found is None:
        return
    for prefixed, value in raw.items():
        name, rest = prefixed.removeprefix(PREFIX), {key: one for key, one in raw.items() if key != prefixed}
        without = result(rest, kind)
        if without is None or without[0] == found[0] or not says_something(value) or is_told(found[1], name):
            continue
        other = OTHERS.get(name, False if name == "preemptible" else None)
        changed = result({**rest, name: other}, kind) if other is not None else None
        same = [one for one in (without, changed) if one is not None and acting(one[1]) != acting(found[1])]
        assert same, f"{prefixed} {value} of a {kind} does nothing"
