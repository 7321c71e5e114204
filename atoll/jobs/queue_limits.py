"""What a queue's `ml_defaults` and `ml_limits` mean for a job. Pure.

A job may say the same in an attribute or in another field, such as policy.max_runtime for the timeout. Such a field
counts as the attribute: a default does not override it, and it is no way around a limit.
"""

from typing import Final

from atoll.cluster.quantities import parse_amount
from atoll.jobs.aliases import PRIORITIES
from atoll.jobs.model import Job
from atoll.jobs.queue_file import TenantQueue, rules_in
from atoll.jobs.working_out import given_attributes
from atoll.ml.attributes import MlAttributes
from atoll.ml.policy import MlPolicy
from atoll.ml.problems import Problems
from atoll.ml.queue_rules import QueueRules, filled_names, submit

GIGABYTE: Final = 10**9


def rules_of(queue: TenantQueue) -> QueueRules:
    """Return the rules of a queue; none if they were stored before they became invalid."""
    found = rules_in(queue)
    return found if isinstance(found, QueueRules) else QueueRules(queue.name)


def within_limits(job: Job, rules: QueueRules, policy: MlPolicy) -> Job | Problems:
    """Return the job with the queue's defaults in its gaps, or why the queue refuses it."""
    said = _said(job)
    answer = submit(said, rules, policy)
    if isinstance(answer, tuple):
        return answer
    more = {name: getattr(rules.defaults, name) for name in filled_names(said, rules)}
    return job.model_copy(update={"attributes": job.attributes.model_copy(update=more)}) if more else job


def _said(job: Job) -> MlAttributes:
    """Return the job's attributes, and as attributes its fields of the same meaning."""
    given, policy, resources = given_attributes(job), job.policy, job.resources
    cores = parse_amount("cpu", resources.cpu_request or resources.cpu_limit or "0")
    memory = max(parse_amount("memory", one or "0") for one in (resources.memory_request, resources.memory_limit))
    ml_class = next((one for one, agreeing in PRIORITIES.items() if policy.priority_class in agreeing), None)
    same = {
        "timeout_seconds": policy.max_runtime,
        "preemption_grace_period_s": policy.preemption_grace_period,
        "preemptible": policy.preemptible,
        "priority_class": ml_class,
        "cpu_cores": -(-cores // 1000) or None,
        "memory_gb": memory / GIGABYTE or None,
    }
    more = {name: value for name, value in same.items() if value is not None and getattr(given, name) is None}
    return given.model_copy(update=more)
