"""Which machines are weaker than others of their class: the last choice for pods that need links.

A class is all machines with the same cards: as many of the same models. The reference is the best ring that any of them
offers to a set of each size. A machine whose links are damaged, or narrower by construction, misses it. Without this a
damaged machine would look best: each machine's own cost compares a set with that machine's own best set alone.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from atoll.cluster.machines import NodeShape
from topology.choice import Choice, choose
from topology.device_requests import DeviceRequest, Policy
from topology.model import Machine
from topology.quality import TABLE_DEVICES_MAX, qualities, sizes_of
from topology.rates import rates_known

WEAKER: Final = 1000.0
"""What a weaker machine costs more than a sound one: more than any cost of a set, less than a rank of the models."""
SLACK: Final = 0.05
"""A share of the reference that is no damage: rates differ so much between boards of one model."""


def weaknesses(shapes: Iterable[NodeShape]) -> Mapping[NodeShape, float]:
    """Return the shapes that miss the reference of their class, with the largest share that they miss of it."""
    classes: dict[tuple[str, ...], list[NodeShape]] = {}
    for shape in dict.fromkeys(shapes):
        if rates_known(shape.machine):
            classes.setdefault(tuple(sorted(card.model for card in shape.cards)), []).append(shape)
    found: dict[NodeShape, float] = {}
    for alike in classes.values():
        rings = [_best_rings(shape.machine) for shape in alike]
        reference = [max(each) for each in zip(*rings, strict=True)]
        for shape, own in zip(alike, rings, strict=True):
            missing = [1 - gbps / best for gbps, best in zip(own, reference, strict=True) if best > 0]
            if (share := max(missing, default=0.0)) > SLACK:
                found[shape] = share
    return found


def needs_links(request: DeviceRequest) -> bool:
    """Tell whether links matter to a request: several GPUs, near to each other."""
    return request.count > 1 and request.policy in {Policy.CONTIGUOUS, Policy.ISLAND}


@lru_cache(maxsize=1024)
def _best_rings(machine: Machine) -> tuple[float, ...]:
    """Return GB/s of the best ring for 2, 3, ... GPUs of the empty machine; of a large one for all of them alone."""
    if machine.count > TABLE_DEVICES_MAX:
        answer = choose(machine, machine.full, DeviceRequest(count=machine.count))
        return (answer.ring_gbps if isinstance(answer, Choice) else 0.0,)
    rings, sizes = qualities(machine).ring_gbps, sizes_of(machine.count)
    return tuple(float(rings[sizes == size].max()) for size in range(2, machine.count + 1))
