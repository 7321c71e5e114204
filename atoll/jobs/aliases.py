"""Other words for the same thing: priority classes of ML jobs, and short names of GPUs.

In: a word as users write it. Out: the word that the platform and Kubernetes know. Separate, because the vocabularies of
platform and model jobs meet here.
"""

import re
from collections.abc import Mapping
from typing import Final

from atoll.jobs.words import Priority
from atoll.ml.attributes import PriorityClass
from atoll.ml.tables import gpu_id

MODEL_LENGTH_MAX: Final = 63
_MODEL: Final = re.compile(r"[a-z0-9]+(-[a-z0-9.]*[a-z0-9])+")

PRIORITIES: Final[Mapping[PriorityClass, tuple[Priority, ...]]] = {
    PriorityClass.RESERVED: (Priority.HIGH, Priority.CRITICAL),
    PriorityClass.ON_DEMAND: (Priority.NORMAL, Priority.HIGH),
    PriorityClass.SPOT: (Priority.LOW,),
}
"""Priority class of an ML job: the priorities that agree with it, the one that it means first."""


def gpu_model(text: str) -> str | None:
    """Return the type of a GPU as vendor-model; None for a word that is neither a known short name nor of that form."""
    word = gpu_id(text)
    return word if _MODEL.fullmatch(word) and len(word) <= MODEL_LENGTH_MAX else None
