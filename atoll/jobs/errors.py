"""What is wrong with a job: the field, what stands there, what may, and what to do.

JobMistake carries an AttributeProblem of atoll.ml, so that fields and attributes are told in the same words.
"""

from atoll.ml.problems import AttributeProblem, shown


class JobMistake(ValueError):
    """A wish of a job cannot be taken. `field`: its path, such as policy.topology or ext_ml_gpu_count."""

    def __init__(self, field: str, value: object, limit: str, hint: str) -> None:
        self.problem = AttributeProblem(field, "" if value is None else shown(value), limit, hint)
        super().__init__(str(self.problem))


class NodesUnknown(JobMistake):
    """A wish can be taken only where the nodes of the cluster are known: the job is valid, and is rendered there."""
