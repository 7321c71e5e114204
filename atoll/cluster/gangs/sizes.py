"""What pods say about the size of their gang, and the two that contradict each other. Pure.

Pods say it where there is no GpuGang yet. One that was made from them is only as good as what they say: while they
contradict each other nobody knows how many must start together.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from atoll.api import names
from atoll.api.gangs import GpuGang
from atoll.cluster import pods
from atoll.cluster.objects import Pod

SIZE_LENGTH_MAX: Final = 6
SHOWN_LENGTH_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class SizeConflict:
    """Two pods of one gang that contradict each other, and what they say."""

    pods: tuple[Pod, Pod]
    sizes: tuple[str, str]

    def __str__(self) -> str:
        one, other = (
            f"pod {pod.metadata.name} says that it has {size[:SHOWN_LENGTH_MAX]} pods"
            for pod, size in zip(self.pods, self.sizes, strict=True)
        )
        return f"{one}, and {other}; set the annotation {names.GANG_SIZE} to the same number on every one of them"


def size_conflict(found: Iterable[Pod]) -> SizeConflict | None:
    """Return the first two pods, by name, that contradict each other; None where there are none. Pods that say nothing,
    have ended or are being deleted contradict nobody."""
    first: dict[str, Pod] = {}
    for pod in sorted(found, key=lambda pod: (pod.metadata.name, pod.metadata.uid)):
        size = pod.metadata.annotations.get(names.GANG_SIZE)
        if size is not None and pod.metadata.deletion_timestamp is None and not pods.is_terminal(pod):
            first.setdefault(size, pod)
    if len(first) < 2:
        return None
    (one, pod), (other, another) = list(first.items())[:2]
    return SizeConflict((pod, another), (one, other))


def size_conflict_of(gang: GpuGang, found: Iterable[Pod]) -> SizeConflict | None:
    """Return the contradiction among the pods of a gang that was made from what they say. Whoever wrote a GpuGang said
    there how many they are."""
    return size_conflict(found) if names.GANG_MADE_FOR in gang.metadata.annotations else None


def size_of(members: Iterable[Pod]) -> int | None:
    """Return the gang's size if every member says it and all say the same."""
    sizes = {pod.metadata.annotations.get(names.GANG_SIZE) for pod in members}
    text = sizes.pop() if len(sizes) == 1 else None
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= SIZE_LENGTH_MAX):
        return None
    return int(text)
