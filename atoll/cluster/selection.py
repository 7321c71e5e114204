"""Which GPUs of one node a request would get, and what that choice costs against other nodes.

`select` returns a Candidate or a Rejection. Filter, prioritize, bind and wake-ups all use it, so they agree. Ties
between nodes are broken by (model preference, cost, node name); `verdicts` and `fleet` choose the node.
Everything but the name is decided per cell, see atoll.cluster.machines, and kept: `offer` for one cell, `keys_of` for
many at once from the same tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from atoll.api import names
from atoll.cluster.machines import Cell, DeviceAttributes, NodeDevices, NodeShape, cell_of
from atoll.cluster.requests import Rejection, Request, Verdict
from topology.choice import Choice, ChoiceRefusal, choose, island_names, would_ever_fit
from topology.demand import PRIOR, Demand
from topology.model import Machine
from topology.parts import SubMachine, part_of
from topology.scores import costs_of

ANSWERS_MAX = 1 << 16
GROUPS_MAX = 8192
PREFERENCE: Final = 1e6
"""What one rank of the claim's list of models weighs in a key: more than any cost."""
VECTOR_DEVICES_MAX: Final = 62
"""Masks of so many devices fit into the elements of an array."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The set that `node` would give. `preference` is the rank of its model in the claim, 0 first."""

    node: str
    preference: int
    choice: Choice

    @property
    def order(self) -> tuple[int, float, str]:
        """The total order over nodes: smaller is better."""
        return (self.preference, self.choice.cost, self.node)


@dataclass(frozen=True, slots=True)
class CellOffer:
    """The set that every node of one cell would give, and its place in the order over cells: smaller is better."""

    order: tuple[int, float]
    choice: Choice

    def at(self, node: str) -> Candidate:
        """Return the offer as that of one node."""
        return Candidate(node, self.order[0], self.choice)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that one request may take together. `mask`: those of the shape that match; `part`: all of their kind;
    `model`: empty where models may be mixed."""

    preference: int
    mask: int
    part: SubMachine
    model: str = ""


def matches_model(model: str, wanted: str) -> bool:
    """Tell whether a model slug matches by dash-separated prefix: nvidia-h100 matches nvidia-h100-80gb-hbm3."""
    return model == wanted or model.startswith(wanted + "-")


def select(devices: NodeDevices, free: int, request: Request, demand: Demand = PRIOR) -> Candidate | Rejection:
    """Choose GPUs among the `free` ones of a node (bit mask over positions); demand: what fragmentation is weighed by.

    Bind passes the demand that filter and prioritize judged by; whoever only asks whether a request fits needs none.
    """
    answer = offer(cell_of(devices.shape, free & devices.usable), plain(request), demand)
    return answer if isinstance(answer, Rejection) else answer.at(devices.node)


@lru_cache(maxsize=1024)
def plain(request: Request) -> Request:
    """Return the request without what the choice of devices does not depend on."""
    return replace(request, claim="", visible_devices=None, container_counts=(), reservation="")


@lru_cache(maxsize=ANSWERS_MAX)
def offer(cell: Cell, request: Request, demand: Demand = PRIOR) -> CellOffer | Rejection:
    """Choose among the free positions of a cell.

    Models are tried in the order of the claim; without a preference every model of the node is tried, the most numerous
    first, then by name.
    """
    groups = _groups(cell.shape, request)
    if isinstance(groups, Rejection):
        return groups
    refusals: list[ChoiceRefusal] = []
    best: CellOffer | None = None
    for group in groups:
        answer = choose(group.part.machine, group.part.inside(cell.free & group.mask), request.ask, demand=demand)
        if isinstance(answer, ChoiceRefusal):
            refusals.append(answer)
            continue
        candidate = CellOffer((group.preference, answer.cost), _on_the_whole(answer, group.part, cell.shape.machine))
        if best is None or candidate.order < best.order:
            best = candidate
    return best or _rejection(groups, request, refusals)


def keys_of(
    shape: NodeShape, free_masks: Sequence[int], request: Request, demand: Demand = PRIOR
) -> npt.NDArray[np.float64]:
    """Return the place in the order over cells, as one number, for many masks of free positions; infinity where none
    fits. Equal to PREFERENCE x the offer's preference + its cost."""
    groups = _groups(shape, request)
    keys = np.full(len(free_masks), np.inf)
    if isinstance(groups, Rejection):
        return keys
    if shape.machine.count > VECTOR_DEVICES_MAX:
        return np.array([_key(offer(cell_of(shape, mask), request, demand)) for mask in free_masks])
    free = np.array(free_masks, dtype=np.int64)
    for group in groups:
        inside = group.part.inside_all(free & group.mask)
        costs = costs_of(group.part.machine, inside, request.ask, demand)
        keys = np.minimum(keys, group.preference * PREFERENCE + costs)
    return keys


def _key(answer: CellOffer | Rejection) -> float:
    return float("inf") if isinstance(answer, Rejection) else answer.order[0] * PREFERENCE + answer.order[1]


def _on_the_whole(choice: Choice, part: SubMachine, whole: Machine) -> Choice:
    """Return a choice among the devices of one kind in the positions and islands of the whole machine."""
    if part.is_whole:
        return choice
    positions = part.outside(choice.positions)
    return replace(choice, positions=positions, islands=island_names(whole, positions))


def _matching(shape: NodeShape, request: Request) -> int | Rejection:
    """Return the mask of devices that each satisfy the request, or the first requirement that none satisfies."""
    tests: tuple[tuple[str, Callable[[DeviceAttributes], bool]], ...] = (
        (
            names.REJECT_MIG if request.mig_profile else names.REJECT_NEVER_FITS,
            lambda card: card.mig_profile == request.mig_profile,
        ),
        (names.REJECT_NO_MODEL, lambda card: card.vendor == request.vendor and _is_wanted(card, request)),
        (names.REJECT_NO_MEMORY, lambda card: card.memory_bytes >= request.memory_bytes),
        (names.REJECT_NO_CAPABILITY, lambda card: card.compute_capability >= request.compute_capability),
    )
    left = list(enumerate(shape.cards))
    for reason, holds in tests:
        kept = [(position, card) for position, card in left if holds(card)]
        if not kept:
            if reason == names.REJECT_NO_MEMORY and any(not card.memory_bytes for _, card in left):
                reason = names.REJECT_MEMORY_UNKNOWN
            return Rejection(reason)
        left = kept
    return sum(1 << position for position, _ in left)


def _is_wanted(card: DeviceAttributes, request: Request) -> bool:
    return not request.models or any(matches_model(card.model, wanted) for wanted in request.models)


@lru_cache(maxsize=GROUPS_MAX)
def _groups(shape: NodeShape, request: Request) -> tuple[DeviceGroup, ...] | Rejection:
    """Return the groups that have enough devices whose fabric is ready; what is free is no matter."""
    matching = _matching(shape, request)
    if isinstance(matching, Rejection):
        return matching
    ready = sum(1 << position for position, card in enumerate(shape.cards) if card.fabric_ready)
    if groups := _by_model(shape, request, matching & ready):
        return groups
    if _by_model(shape, request, matching):
        return Rejection(names.REJECT_FABRIC, Verdict.UNKNOWN)
    return Rejection(names.REJECT_NEVER_FITS)


def _by_model(shape: NodeShape, request: Request, matching: int) -> tuple[DeviceGroup, ...]:
    """Return the devices of one model, of each that has enough; of all models together if the claim mixes them."""
    kind = sum(1 << i for i, card in enumerate(shape.cards) if card.mig_profile == request.mig_profile)
    part = part_of(shape.machine, kind)
    by_model: dict[str, int] = {}
    for position, card in enumerate(shape.cards):
        if matching >> position & 1:
            model = "" if request.mixed_models else card.model
            by_model[model] = by_model.get(model, 0) | 1 << position
    ranked = [
        (_preference(model, request), model, mask)
        for model, mask in by_model.items()
        if mask.bit_count() >= request.ask.count
    ]
    ranked.sort(key=lambda row: (row[0], -row[2].bit_count(), row[1]))
    return tuple(DeviceGroup(rank, mask, part, model) for rank, model, mask in ranked)


def device_groups(shape: NodeShape, request: Request) -> tuple[DeviceGroup, ...] | Rejection:
    """Return the devices that a request may take together, in its order of preference; free or not."""
    return _groups(shape, plain(request))


def _preference(model: str, request: Request) -> int:
    return next((rank for rank, wanted in enumerate(request.models) if matches_model(model, wanted)), 0)


def _rejection(groups: tuple[DeviceGroup, ...], request: Request, refusals: list[ChoiceRefusal]) -> Rejection:
    never = would_ever_fit(groups[0].part.machine, request.ask)
    return Rejection(str((never or refusals[0]).reason), Verdict.NEVER if never else Verdict.BUSY)
