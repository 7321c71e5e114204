"""What a training imports inside of its container: the notice of a preemption, and checkpoints that survive one.

Needs Python alone for `file://`; `fsspec` and `obstore` for `s3://`, `gs://` and `az://`; torch for nothing, though
state dicts are saved through it where it is installed. Knows nothing of Kubernetes' API.
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
