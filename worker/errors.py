"""What can go wrong between a training and its checkpoints.

CheckpointError
├── PlaceRefused       the URI is none of ours, or leads to where nobody allowed us
├── StoreUnfit         the store lets two writers create one object; checkpoints would not be safe there
├── Fenced             a newer attempt of this job has begun; this process must save no more and end
└── CorruptCheckpoint  what lies there is not what was committed; restore takes the one before

Errors of the network and the disk pass through as they are: whoever took them for a missing checkpoint would throw work
away.
"""


class CheckpointError(Exception):
    """Base of what this package raises itself."""


class PlaceRefused(CheckpointError, ValueError):
    """The URI is malformed, or outside of what is allowed."""


class StoreUnfit(CheckpointError):
    """The store does not refuse to create what exists."""


class Fenced(CheckpointError):
    """A newer attempt of the same job owns the place now."""


class CorruptCheckpoint(CheckpointError):
    """A record or a part differs from what was committed."""
