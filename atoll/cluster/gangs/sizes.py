"""The size of a gang according to its pods, and two pods that contradict each other. Pure.

Pods name the size if there is no GpuGang yet, and one is created from that. While they contradict each other, nobody
knows how many pods must start together.
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
    """Two pods of one gang that contradict each other, with their sizes."""

    pods: tuple[Pod, Pod]
    sizes: tuple[str, str]

    def __str__(self) -> str:
        one, other = (
            f"pod {pod.metadata.name} says that it has {size[:SHOWN_LENGTH_MAX]} pods"
            for pod, size in zip(self.pods, self.sizes, strict=True)
        )
        return f"{one}, and {other}; set the annotation {names.GANG_SIZE} to the same number on every one of them"


def size_conflict(found: Iterable[Pod]) -> SizeConflict | None:
    """Return the first two pods, by name, that contradict each other, or None. Pods that name no size, have ended or
    are being deleted do not count."""
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
    """Return the contradiction among the pods of a gang that was created from their sizes. In a GpuGang written by a
    user, its own size counts."""
    return size_conflict(found) if names.GANG_MADE_FOR in gang.metadata.annotations else None


def size_of(members: Iterable[Pod]) -> int | None:
    """Return the gang's size if every member names it and all agree."""
    sizes = {pod.metadata.annotations.get(names.GANG_SIZE) for pod in members}
    text = sizes.pop() if len(sizes) == 1 else None
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= SIZE_LENGTH_MAX):
        return None
    return int(text)
