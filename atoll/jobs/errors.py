"""Errors of a job: the field, its value, the allowed values, and what to do.

JobMistake has an AttributeProblem of atoll.ml, so that fields and attributes use the same words.
"""

from atoll.ml.problems import AttributeProblem, shown


class JobMistake(ValueError):
    """A field of a job is invalid. `field`: its path, such as policy.topology or ext_ml_gpu_count."""

    def __init__(self, field: str, value: object, limit: str, hint: str) -> None:
        self.problem = AttributeProblem(field, "" if value is None else shown(value), limit, hint)
        super().__init__(str(self.problem))


class NodesUnknown(JobMistake):
    """A field needs the cluster's nodes: the job is valid, but can only be rendered against a cluster."""
