"""Aliases: priority classes of ML jobs, and short names of GPUs."""

import re
from collections.abc import Mapping
from typing import Final

from atoll.jobs.words import Priority
from atoll.ml.attributes import MlPriorityClass
from atoll.ml.tables import gpu_id

MODEL_LENGTH_MAX: Final = 63
_MODEL: Final = re.compile(r"[a-z0-9]+(-[a-z0-9.]*[a-z0-9])+")

PRIORITIES: Final[Mapping[MlPriorityClass, tuple[Priority, ...]]] = {
    MlPriorityClass.RESERVED: (Priority.HIGH, Priority.CRITICAL),
    MlPriorityClass.ON_DEMAND: (Priority.NORMAL, Priority.HIGH),
    MlPriorityClass.SPOT: (Priority.LOW,),
}
"""Priority class of an ML job: the compatible priorities, its own meaning first."""


def gpu_model(text: str) -> str | None:
    """Return the type of a GPU as vendor-model; None for any other word."""
    word = gpu_id(text)
    return word if _MODEL.fullmatch(word) and len(word) <= MODEL_LENGTH_MAX else None
