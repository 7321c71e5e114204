"""The last checkpoint of a job, from the termination messages of its containers.

Pure. The worker library writes the message, see worker.termination; but whatever runs in a container can write it, so
that it is only shown, and what is not such a checkpoint is ignored.
"""

from typing import Annotated, Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

MESSAGE_LENGTH_MAX: Final = 4096
"""Kubelet cuts off what goes beyond."""


class LastCheckpoint(BaseModel):
    """The newest committed checkpoint that the job's containers told when they ended."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    job_id: Annotated[str, Field(max_length=253)]
    epoch: Annotated[int | None, Field(ge=0, lt=2**63, description="null if the training counts none")] = None
    step: Annotated[int, Field(ge=0, lt=10**15, description="after which it was saved; a resume begins at the next")]
    loss: float | None = None
    metrics: Annotated[
        dict[Annotated[str, Field(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")], float],
        Field(default_factory=dict, max_length=100, description="empty if they did not fit into the message"),
    ]
    storage_key: Annotated[
        str, Field(max_length=1200, pattern=r"^(s3|gs|az|file)://[!-~]+$", description="URI of the folder of its parts")
    ]
    created_at: AwareDatetime


class _Message(BaseModel):
    last_checkpoint: LastCheckpoint


def checkpoint_in(message: str) -> LastCheckpoint | None:
    """Return the checkpoint that a termination message tells; None for any other text."""
    if len(message) > MESSAGE_LENGTH_MAX:
        return None
    try:
        return _Message.model_validate_json(message).last_checkpoint
    except ValueError:
        return None


def told_at_end(message: str, job: str, checkpoint: LastCheckpoint, *, may_retry: bool) -> str:
    """Return why a training's time is over, with what it leaves. `may_retry`: a retry has time of its own."""
    told = f"{message}; its last checkpoint, of step {checkpoint.step}, is {checkpoint.storage_key}"
    return f"{told}: `atoll job retry {job}` goes on from it" if may_retry else told
