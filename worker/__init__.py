"""Library for a training's container: preemption notice, and checkpoints that survive a preemption.

`file://` needs only Python; `s3://`, `gs://` and `az://` need `fsspec` and `obstore`. torch is optional: if installed,
it saves state dicts. The library does not use Kubernetes' API.
"""

from worker.checkpoints import Checkpoints, Restored, State
from worker.errors import CheckpointError, CorruptCheckpoint, Fenced, PlaceRefused, StoreUnfit
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
    "Part",
    "PlaceRefused",
    "Preemption",
    "Record",
    "Restored",
    "State",
    "StoreUnfit",
    "Version",
    "parts_of",
    "states_of",
]
