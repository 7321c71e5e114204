"""Queues: defaults fill gaps, jobs over a limit are refused, jobs over budget wait."""

from typing import Any

import pytest

from atoll.ml.attributes import MlAttributes
from atoll.ml.infer import Completed
from atoll.ml.queue_rules import QueueRules, QueueUsage, parse_queue_rules, submit, waits_for

CONFIG: dict[str, Any] = {
    "ml_defaults": {
        "ext_ml_accelerator": "gpu",
        "ext_ml_gpu_count": 1,
        "ext_ml_timeout_seconds": 60,
        "ext_ml_priority_class": "on-demand",
    },
    "ml_limits": {
        "max_gpu_count": 4,
        "max_gpu_memory_gb": 80,
        "max_memory_gb": 256,
        "max_timeout_seconds": 3600,
        "allowed_gpu_types": ["a100", "nvidia-h100", "L4"],
        "allowed_priority_classes": ["on-demand", "reserved"],
        "max_concurrent_gpu_jobs": 100,
        "max_total_gpus": 64,
    },
}


def rules(config: dict[str, Any] = CONFIG) -> QueueRules:
    """Return the rules of the queue gpu-inference."""
    found = parse_queue_rules("gpu-inference", config)
    assert isinstance(found, QueueRules), [str(problem) for problem in found]
    return found


def job(**fields: Any) -> MlAttributes:
    """Return attributes as an envelope gives them."""
    return MlAttributes.model_validate(fields)


def test_defaults_fill_only_gaps() -> None:
    """What the job says stands; what it leaves out is the queue's, and told so."""
    answer = submit(job(gpu_count=2), rules())

    assert isinstance(answer, Completed)
    found = answer.attributes
    assert (found.gpu_count, found.timeout_seconds, found.priority_class) == (2, 60, "on-demand")
    assert "ext_ml_timeout_seconds: 60 (default of queue gpu-inference)" in map(str, answer.notes)


LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "max_gpu_count": ({"gpu_count": 4}, {"gpu_count": 5}, "ext_ml_gpu_count is 5: may be at most 4 (max_gpu_count)"),
    "max_gpu_memory_gb": ({"gpu_memory_gb": 80}, {"gpu_memory_gb": 80.5}, "may be at most 80 (max_gpu_memory_gb)"),
    "max_memory_gb": ({"memory_gb": 256}, {"memory_gb": 257}, "may be at most 256 (max_memory_gb)"),
    "max_timeout_seconds": ({"timeout_seconds": 3600}, {"timeout_seconds": 7200}, "7200: may be at most 3600"),
    "allowed_gpu_types": (
        {"gpu_type": "nvidia-l4"},
        {"gpu_type": "nvidia-t4"},
        "ext_ml_gpu_type is nvidia-t4: must be one of nvidia-a100, nvidia-h100, nvidia-l4 (allowed_gpu_types)",
    ),
    "allowed_priority_classes": (
        {"priority_class": "reserved"},
        {"priority_class": "spot"},
        "ext_ml_priority_class is spot: must be one of on-demand, reserved (allowed_priority_classes)",
    ),
}


@pytest.mark.parametrize(("at_it", "beyond", "text"), LIMITS.values(), ids=LIMITS)
def test_limit_takes_what_reaches_it_and_refuses_what_exceeds_it(
    at_it: dict[str, Any], beyond: dict[str, Any], text: str
) -> None:
    """Each limit, at its edge and just beyond; another try would change nothing."""
    refused = submit(job(**beyond), rules())

    assert isinstance(submit(job(**at_it), rules()), Completed)
    assert isinstance(refused, tuple)
    assert [text in str(problem) for problem in refused] == [True]
    assert "gpu-inference" in refused[0].hint


def test_every_limit_that_is_exceeded_is_named() -> None:
    """One answer says all that has to change."""
    answer = submit(job(gpu_count=8, gpu_type="nvidia-t4", timeout_seconds=7200), rules())

    assert isinstance(answer, tuple)
    assert {problem.attribute for problem in answer} == {
        "ext_ml_gpu_count", "ext_ml_gpu_type", "ext_ml_timeout_seconds",
    }  # fmt: skip


def test_default_that_the_job_contradicts_is_named_as_such() -> None:
    """A CPU job in a queue that adds a GPU learns who asked for the GPU."""
    answer = submit(job(accelerator="cpu"), rules())

    assert isinstance(answer, tuple)
    assert "it is a default of queue gpu-inference" in str(answer[0])


BUDGETS: dict[str, tuple[int, QueueUsage, str]] = {
    "room for the last job": (1, QueueUsage(99, 63), ""),
    "no job more": (1, QueueUsage(100, 10), "100 of 100 jobs with GPUs run from queue gpu-inference"),
    "no GPU more": (1, QueueUsage(50, 64), "64 of 64 GPUs of queue gpu-inference are in use"),
    "too few GPUs left": (4, QueueUsage(1, 61), "the job asks for 4; waits for GPUs to be freed"),
    "more than ever": (65, QueueUsage(0, 0), "waits until max_total_gpus is raised"),
    "a job without GPUs": (0, QueueUsage(100, 64), ""),
}


@pytest.mark.parametrize(("gpus", "usage", "reason"), BUDGETS.values(), ids=BUDGETS)
def test_budget_that_is_spent_makes_the_job_wait(gpus: int, usage: QueueUsage, reason: str) -> None:
    """Budgets queue a job and never refuse it, and say what it waits for."""
    told = waits_for(gpus, rules(), usage)

    assert rules().has_budget
    assert reason in told
    assert bool(told) == bool(reason)


REFUSED: dict[str, tuple[Any, str]] = {
    "a default beyond its own limit": (
        {"ml_defaults": {"gpu_count": 8}, "ml_limits": {"max_gpu_count": 4}},
        "queue q ml_defaults.ext_ml_gpu_count is 8: may be at most 4",
    ),
    "a default that its own limit does not allow": (
        {"ml_defaults": {"priority_class": "spot"}, "ml_limits": {"allowed_priority_classes": ["reserved"]}},
        "ext_ml_priority_class is spot: must be one of reserved",
    ),
    "defaults that contradict each other": (
        {"ml_defaults": {"accelerator": "cpu", "gpu_count": 1}}, "must not stand beside ext_ml_accelerator cpu",
    ),
    "a default of no attribute": ({"ml_defaults": {"ext_ml_gpus": 1}}, "ext_ml_gpus is not known"),
    "a limit that there is not": ({"ml_limits": {"max_gpus": 1}}, "max_gpus is not known"),
    "a limit of another type": ({"ml_limits": {"max_gpu_count": "4"}}, "must be a whole number"),
    "defaults that are no mapping": ({"ml_defaults": ["gpu_count"]}, "must be a mapping"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "text"), REFUSED.values(), ids=REFUSED)
def test_configuration_that_would_refuse_every_job_is_refused(config: dict[str, Any], text: str) -> None:
    """The administrator learns it, not each user."""
    found = parse_queue_rules("q", config)

    assert isinstance(found, tuple)
    assert text in str(found[0])
    assert "queue q" in str(found[0])


def test_queue_without_rules_takes_every_valid_job() -> None:
    """No configuration, no limits but the cluster's."""
    assert isinstance(submit(job(gpu_count=512), rules({})), Completed)
    assert isinstance(submit(job(gpu_count=513), rules({})), tuple)
    assert not rules({}).has_budget
