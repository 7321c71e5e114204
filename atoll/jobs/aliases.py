"""Other words for the same thing: short names of GPUs, priority classes of ML jobs, labels of workers.

In: a word as users write it. Out: the word that Kubernetes and Atoll know. Separate, because the vocabularies of
platform and model jobs meet here, and nowhere else.
"""

import re
from collections.abc import Mapping
from typing import Final

from atoll.jobs.words import Priority

GPU_MODELS: Final[Mapping[str, str]] = {
    "a100": "nvidia-a100",
    "h100": "nvidia-h100",
    "h200": "nvidia-h200",
    "b200": "nvidia-b200",
    "l4": "nvidia-l4",
    "l40s": "nvidia-l40s",
    "t4": "nvidia-t4",
    "v100": "nvidia-v100",
    "a10g": "nvidia-a10g",
    "mi250": "amd-mi250",
    "mi300x": "amd-mi300x",
}
"""Short name of a GPU: its model."""
CLAIMED_MODELS: Final[Mapping[str, str]] = {
    "amd-mi250": "amd-instinct-mi250",
    "amd-mi300x": "amd-instinct-mi300x",
}
"""Models whose drivers print another name: what claims say for them."""
_MODEL: Final = re.compile(r"[a-z0-9]+(-[a-z0-9][a-z0-9.]*)+")
MODEL_LENGTH_MAX: Final = 63

WORKER_LABELS: Final[Mapping[str, str]] = {
    "region": "topology.kubernetes.io/region",
    "zone": "topology.kubernetes.io/zone",
    "instance_type": "node.kubernetes.io/instance-type",
    "hostname": "kubernetes.io/hostname",
    "arch": "kubernetes.io/arch",
}
"""Short label of a worker: the label of a Kubernetes node that says the same."""


def gpu_model(text: str) -> str | None:
    """Return the model of a GPU as vendor-model; None for a word that is neither a known short name nor of that form."""
    word = text.strip().lower()
    word = GPU_MODELS.get(word, word)
    return word if _MODEL.fullmatch(word) and len(word) <= MODEL_LENGTH_MAX else None


def claimed_model(model: str) -> str:
    """Return what a GpuClaim says for a model, so that it matches what the drivers print."""
    return CLAIMED_MODELS.get(model, model)


def node_label(key: str) -> str:
    """Return the label of Kubernetes nodes for the label of a worker; other labels stay what they are."""
    return WORKER_LABELS.get(key, key)


ML_PRIORITIES: Final[Mapping[str, tuple[Priority, ...]]] = {
    "reserved": (Priority.HIGH, Priority.CRITICAL),
    "on-demand": (Priority.NORMAL, Priority.HIGH),
    "spot": (Priority.LOW,),
}
"""Priority class of an ML job: the priorities that agree with it, the one that it means first."""
