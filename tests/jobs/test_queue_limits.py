"""A queue's defaults and limits for whole jobs: fields of the same meaning as an attribute count as it."""

from typing import Any

import pytest

from atoll.jobs.model import Job
from atoll.jobs.queue_file import TenantQueue
from atoll.jobs.queue_limits import rules_of, within_limits
from atoll.ml.policy import MlPolicy
from tests.jobs.render import job

LIMITS = {
    "max_gpu_count": 4,
    "max_memory_gb": 64,
    "max_timeout_seconds": 3600,
    "allowed_gpu_types": ["a100"],
    "allowed_priority_classes": ["on-demand"],
}
DEFAULTS = {"timeout_seconds": 600, "priority_class": "on-demand", "memory_gb": 8, "cpu_cores": 2, "preemptible": True}


def queue(**fields: Any) -> TenantQueue:
    """Return a queue with these rules."""
    flavor = {"flavor": "any", "quota": {"gpu": 8}}
    return TenantQueue.model_validate({"name": "q", "flavors": [flavor], **fields})


@pytest.mark.parametrize(
    ("fields", "attribute"),
    [
        ({"policy": {"max_runtime": 7200}}, "ext_ml_timeout_seconds"),
        ({"ext_ml_timeout_seconds": 7200}, "ext_ml_timeout_seconds"),
        ({"resources": {"memory_request": "65G"}}, "ext_ml_memory_gb"),
        ({"resources": {"memory_limit": "64Gi"}}, "ext_ml_memory_gb"),
        ({"resources": {"gpu_count": 5}}, "ext_ml_gpu_count"),
        ({"resources": {"gpu_type": "H100"}}, "ext_ml_gpu_type"),
        ({"policy": {"priority_class": "critical"}}, "ext_ml_priority_class"),
        ({"policy": {"priority_class": "low"}}, "ext_ml_priority_class"),
    ],
)
def test_no_field_is_a_way_around_a_limit(fields: dict[str, Any], attribute: str) -> None:
    """The refusal names the attribute that is limited, and the queue."""
    found = within_limits(job(**fields), rules_of(queue(ml_limits=LIMITS)), MlPolicy())

    assert isinstance(found, tuple)
    assert [one.attribute for one in found] == [attribute]
    assert "queue than q" in found[0].hint or "queue q" in found[0].hint


@pytest.mark.parametrize(
    ("fields", "stays"),
    [
        ({}, ()),
        ({"policy": {"max_runtime": 60}}, ("timeout_seconds",)),
        ({"policy": {"priority_class": "normal", "preemptible": False}}, ("priority_class", "preemptible")),
        ({"resources": {"memory_request": "1G", "cpu_request": "500m"}}, ("memory_gb", "cpu_cores")),
        ({"ext_ml_timeout_seconds": 60}, ("timeout_seconds",)),
    ],
)
def test_defaults_fill_what_the_job_says_nowhere(fields: dict[str, Any], stays: tuple[str, ...]) -> None:
    """What the job says in any field stands."""
    before = job(**fields)
    found = within_limits(before, rules_of(queue(ml_defaults=DEFAULTS)), MlPolicy())

    assert isinstance(found, Job)
    want = {name: getattr(before.attributes, name) if name in stays else value for name, value in DEFAULTS.items()}
    assert {name: getattr(found.attributes, name) for name in DEFAULTS} == want
    assert found.model_copy(update={"attributes": before.attributes}) == before


def test_rules_that_have_become_invalid_refuse_no_job() -> None:
    """The file was checked when it was applied, perhaps by an earlier version."""
    found = within_limits(job(ext_ml_gpu_count=8), rules_of(queue(ml_limits={"max_of_old": 1})), MlPolicy())

    assert isinstance(found, Job)
