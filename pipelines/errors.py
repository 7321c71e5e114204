"""Errors of pipelines.

PipelineError
├── PipelineUnknown   no such pipeline, or the caller may not see it
├── RunUnknown        no such run
├── TriggerUnknown    no such trigger
├── DeploymentUnknown  no such deployment of a use case
├── DeploymentTaken    its name is taken
├── PipelineDeployed   the pipeline belongs to a deployment
├── RunActive         a run of the pipeline is active
├── RunNotEnded       only a run that has failed or was cancelled can be run again
└── KeyTaken          an idempotency key was used before for another run
"""


class PipelineError(Exception):
    """Base of every error that this package raises."""


class PipelineUnknown(PipelineError):
    """There is no such pipeline, or the caller may not see it."""

    def __init__(self, wanted: str) -> None:
        super().__init__(f"there is no pipeline {wanted}")


class RunUnknown(PipelineError):
    """There is no such run, or the caller may not see it."""

    def __init__(self, wanted: str) -> None:
        super().__init__(f"there is no run {wanted}")


class RunActive(PipelineError):
    """A run of the pipeline is active: its overlap policy forbids a second one, and it cannot be deleted."""

    def __init__(self, pipeline: str, number: int) -> None:
        super().__init__(f"run {number} of pipeline {pipeline} is active: wait for its end, or cancel it")


class RunNotEnded(PipelineError):
    """The run cannot be run again."""

    def __init__(self, pipeline: str, number: int, state: str) -> None:
        super().__init__(
            f"run {number} of pipeline {pipeline} is {state}: only a failed or cancelled run can be run again"
        )


class KeyTaken(PipelineError):
    """An idempotency key was used before for another run."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the idempotency key {key} belongs to a run with other inputs")


class TriggerUnknown(PipelineError):
    """There is no such trigger, or the caller may not see it."""

    def __init__(self, wanted: str) -> None:
        super().__init__(f"there is no trigger {wanted}")


class DeploymentUnknown(PipelineError):
    """There is no such deployment of a use case, or the caller may not see it."""

    def __init__(self, wanted: str) -> None:
        super().__init__(f"there is no deployment {wanted}")


class DeploymentTaken(PipelineError):
    """The tenant has a deployment of that name, or a pipeline of the name that it would have."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the name {name} is taken: delete what has it, or give another one")


class PipelineDeployed(PipelineError):
    """The pipeline belongs to a deployment of a use case."""

    def __init__(self, pipeline: str, deployment: str) -> None:
        super().__init__(f"pipeline {pipeline} belongs to use case {deployment}: delete that")
