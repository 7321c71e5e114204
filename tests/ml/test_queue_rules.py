"""Queues: defaults fill gaps, jobs over a limit are refused, jobs over budget wait, submissions have a rate limit."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.ml.attributes import MlAttributes
from atoll.ml.queue_rules import Accepted, QueueRules, Refused, SubmissionRate, Usage, Waits, parse_queue_rules, submit

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

    assert isinstance(answer, Accepted)
    found = answer.completed.attributes
    assert (found.gpu_count, found.timeout_seconds, found.priority_class) == (2, 60, "on-demand")
    assert "ext_ml_timeout_seconds: 60 (default of queue gpu-inference)" in map(str, answer.completed.notes)


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

    assert isinstance(submit(job(**at_it), rules()), Accepted)
    assert isinstance(refused, Refused)
    assert [text in str(problem) for problem in refused.problems] == [True]
    assert "gpu-inference" in refused.problems[0].hint


def test_every_limit_that_is_exceeded_is_named() -> None:
    """One answer says all that has to change."""
    answer = submit(job(gpu_count=8, gpu_type="nvidia-t4", timeout_seconds=7200), rules())

    assert isinstance(answer, Refused)
    assert {problem.attribute for problem in answer.problems} == {
        "ext_ml_gpu_count", "ext_ml_gpu_type", "ext_ml_timeout_seconds",
    }  # fmt: skip


def test_default_that_the_job_contradicts_is_named_as_such() -> None:
    """A CPU job in a queue that adds a GPU learns who asked for the GPU."""
    answer = submit(job(accelerator="cpu"), rules())

    assert isinstance(answer, Refused)
    assert "it is a default of queue gpu-inference" in str(answer.problems[0])


BUDGETS: dict[str, tuple[dict[str, Any], Usage, str]] = {
    "room for the last job": ({"gpu_count": 1}, Usage(99, 63), ""),
    "no job more": ({"gpu_count": 1}, Usage(100, 10), "100 of 100 jobs with GPUs run from queue gpu-inference"),
    "no GPU more": ({"gpu_count": 1}, Usage(50, 64), "64 of 64 GPUs of queue gpu-inference are in use"),
    "too few GPUs left": ({"gpu_count": 4}, Usage(1, 61), "the job asks for 4; waits for GPUs to be freed"),
    "a job without GPUs": ({"accelerator": "cpu", "gpu_count": 0}, Usage(100, 64), ""),
}


@pytest.mark.parametrize(("given_", "usage", "reason"), BUDGETS.values(), ids=BUDGETS)
def test_budget_that_is_spent_makes_the_job_wait(given_: dict[str, Any], usage: Usage, reason: str) -> None:
    """Budgets queue a job and never refuse it, and say what it waits for."""
    answer = submit(job(**given_), rules(), usage)

    assert isinstance(answer, Waits if reason else Accepted)
    assert reason in (answer.reason if isinstance(answer, Waits) else "")


@pytest.mark.parametrize(("gpus", "told"), [(2, "until max_total_gpus is raised"), (1, "for GPUs to be freed")])
def test_job_larger_than_the_budget_is_told_that_it_waits_for_an_administrator(gpus: int, told: str) -> None:
    """It is queued all the same; one that is as large waits for the others to end."""
    answer = submit(job(gpu_count=gpus), rules({"ml_limits": {"max_total_gpus": 1}}), Usage(1, 1))

    assert isinstance(answer, Waits)
    assert told in answer.reason


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
    assert isinstance(submit(job(gpu_count=512), rules({})), Accepted)
    assert isinstance(submit(job(gpu_count=513), rules({})), Refused)


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(1, 5), st.floats(0.1, 10))
def test_submissions_never_exceed_burst_and_rate(times: list[float], burst: int, per_second: float) -> None:
    """In any span no more are taken than the burst and what the rate adds; whoever waits as told is taken."""
    rate, taken = SubmissionRate(per_second, burst, float(burst)), []
    for now in sorted(times):
        after, wait = rate.take(now)
        if wait:
            assert after == rate
            assert rate.take(now + wait + 1e-6)[1] == 0
        else:
            taken.append(now)
        rate = after

    for first, start in enumerate(taken):
        for count, end in enumerate(taken[first:], 1):
            assert count <= burst + (end - start) * per_second + 1e-6
