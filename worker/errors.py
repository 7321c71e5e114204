"""Errors of checkpoints and models.

CheckpointError
├── PlaceRefused       the URI is invalid, or outside the allowed prefixes
├── StoreUnfit         the store lets two writers create one object; checkpoints would not be safe there
├── Fenced             a newer attempt of this job has begun; this process must save no more and end
├── KeyRefused         the key that encrypted a checkpoint is missing, or it is malformed
├── CorruptCheckpoint  the data differ from what was committed; restore takes the one before
└── OtherKey           both: the key does not open a checkpoint; restore takes the one before, never none

ModelMismatch          a model's file is not the one that the job wants
ModelRefused           a model's URI is invalid, its host is not public, or its file is too large

Errors of the network and the disk pass through unchanged: treating them as a missing checkpoint would lose work.
"""


class CheckpointError(Exception):
    """Base of this package's errors."""


class PlaceRefused(CheckpointError, ValueError):
    """The URI is malformed, or outside the allowed prefixes."""


class StoreUnfit(CheckpointError):
    """The store does not refuse to create an existing object."""


class Fenced(CheckpointError):
    """A newer attempt of the same job owns the place now."""


class KeyRefused(CheckpointError):
    """The key is missing or malformed: starting from zero would lose work."""


class CorruptCheckpoint(CheckpointError):
    """A record or a part differs from what was committed."""


class OtherKey(KeyRefused, CorruptCheckpoint):
    """The key does not open a part: another one encrypted it, or its beginning is damaged."""


class ModelMismatch(Exception):
    """A model's file differs from the checksum that the job gives."""


class ModelRefused(ValueError):
    """A model's URI is malformed, leads where no model may come from, or to more bytes than the limit."""
