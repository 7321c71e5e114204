"""Which labels and annotations of a watched object stay in memory.

Pure; used by every model of watched objects while it is decoded. Kubernetes bounds the annotations of one object by 256
KiB and its labels only by the size of the object, so a tenant could fill the memory of every part that watches.
"""

from collections.abc import Mapping
from itertools import chain, islice
from typing import Final

from atoll.api import names

LABELS_MAX: Final = 256
"""Labels kept of one object. Selectors may name any of them, so Atoll's and Kueue's come first, then the others in the
order of the API server, which is that of the alphabet."""
RANKS_MAX: Final = 64
"""Foreign annotations kept of one object. Only ranks in a gang are read, whose keys a GpuGang chooses."""
RANK_DIGITS_MAX: Final = 6
TEXT_MAX: Final = 8192
"""Characters kept of an annotation that Atoll reads; 64 uuids of devices are shorter."""
MODELS_TEXT_MAX: Final = 65_536
"""The same for lists of loaded models, which are JSON."""
KUEUE_WORKLOAD: Final = "kueue.x-k8s.io/workload"
"""Kueue writes the name of the Workload on the pods of whatever it has admitted."""
KUEUE_PODSET: Final = "kueue.x-k8s.io/podset-"
_KUEUE: Final = (
    KUEUE_WORKLOAD,
    *(f"{KUEUE_PODSET}{mode}-topology" for mode in ("required", "preferred", "unconstrained", "slice-required")),
    f"{KUEUE_PODSET}slice-size",
    f"{KUEUE_PODSET}group-name",
)
_READ: Final = frozenset(
    (*_KUEUE, *(text for text in vars(names).values() if isinstance(text, str) and "/" in text and text != names.HOSTS))
)
_DOMAINS: Final = (f"{names.GROUP}/", f"job.{names.GROUP}/", "kueue.x-k8s.io/")


def kept_labels(labels: dict[str, str]) -> dict[str, str]:
    """Return at most LABELS_MAX labels, the given mapping itself if it has no more."""
    if len(labels) <= LABELS_MAX:
        return labels
    first = (key for key in labels if key.startswith(_DOMAINS))
    others = (key for key in labels if not key.startswith(_DOMAINS))
    return {key: labels[key] for key in islice(chain(first, others), LABELS_MAX)}


def kept_annotations(annotations: Mapping[str, str]) -> tuple[dict[str, str], int]:
    """Return the annotations that some decision may read, and the bytes of keys and values of all others.

    Of a text that is too long for its meaning only the beginning stays, and the rest counts as left out.
    """
    if not annotations:
        return {}, 0
    ranks = (key for key, text in annotations.items() if len(text) <= RANK_DIGITS_MAX and text.isdecimal())
    devices = (key for key in annotations if key.startswith(names.OWN_ANNOTATION_PREFIXES))
    wanted = {*(_READ & annotations.keys()), *devices, *islice((key for key in ranks if key not in _READ), RANKS_MAX)}
    kept = {
        key: text[: MODELS_TEXT_MAX if key in names.MODEL_ANNOTATIONS else TEXT_MAX]
        for key, text in annotations.items()
        if key in wanted
    }
    return kept, _bytes(annotations) - _bytes(kept)


def _bytes(annotations: Mapping[str, str]) -> int:
    return len("".join(chain(annotations, annotations.values())).encode())
