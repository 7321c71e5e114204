"""Library for a training's container: preemption notice, checkpoints that survive a preemption, and models.

`file://` needs only Python; `s3://`, `gs://` and `az://` need `fsspec` and `obstore`, and encryption `pyrage`. torch is
optional: if installed, it saves state dicts. The library does not use Kubernetes' API.
"""

from worker.checkpoints import Checkpoints, Restored, State
from worker.errors import (
    CheckpointError,
    CorruptCheckpoint,
    Fenced,
    KeyRefused,
    ModelMismatch,
    ModelRefused,
    OtherKey,
    PlaceRefused,
    StoreUnfit,
)
from worker.models import FetchLimits, fetch_model, verify_model
from worker.preemption import EXIT_PREEMPTED, Preemption
from worker.records import Part, Record, Version
from worker.settings import CheckpointSettings
from worker.states import parts_of, states_of

__all__ = [
    "EXIT_PREEMPTED",
    "CheckpointError",
    "CheckpointSettings",
    "Checkpoints",
    "CorruptCheckpoint",
    "Fenced",
    "FetchLimits",
    "KeyRefused",
    "ModelMismatch",
    "ModelRefused",
    "OtherKey",
    "Part",
    "PlaceRefused",
    "Preemption",
    "Record",
    "Restored",
    "State",
    "StoreUnfit",
    "Version",
    "fetch_model",
    "parts_of",
    "states_of",
    "verify_model",
]
