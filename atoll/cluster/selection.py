"""Which GPUs of one node a request would get, and what that choice costs against other nodes.

In: a node's devices, the mask of its free ones, a request. Out: a Candidate or a Rejection. Filter, prioritize, bind
and wake-up all ask here, so they cannot disagree. Ties between nodes are broken by (model preference, cost, node name).
Everything but the name is decided per cell, see atoll.cluster.machines, and kept: filter asks the same of thousands.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from atoll.api import names
from atoll.cluster.machines import Card, Cell, NodeDevices, Shape, cell_of
from atoll.cluster.requests import Rejection, Request
from topology.choice import Choice, Refusal, choose, would_ever_fit

REQUESTS_MAX = 64
ANSWERS_MAX = 8192
MASKS_MAX = 8192


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
class Offer:
    """The set that every node of one cell would give, and its place in the order over cells: smaller is better."""

    order: tuple[int, float]
    choice: Choice

    def at(self, node: str) -> Candidate:
        """Return the offer as that of one node."""
        return Candidate(node, self.order[0], self.choice)


def matches_model(model: str, wanted: str) -> bool:
    """Tell whether a model slug matches by dash-separated prefix: nvidia-h100 matches nvidia-h100-80gb-hbm3."""
    return model == wanted or model.startswith(wanted + "-")


def select(devices: NodeDevices, free: int, request: Request) -> Candidate | Rejection:
    """Choose GPUs among the `free` ones of a node (bit mask over positions)."""
    cell = cell_of(devices.shape, free & devices.usable)
    answers = Answers.of(request)
    answers.learn({cell})
    if cell in answers.reasons:
        return Rejection(answers.reasons[cell])
    return answers.offers[cell].at(devices.node)


class Answers:
    """What one request gets of every cell that was asked for: an offer, or the reason why there is none."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._ranked: list[tuple[tuple[int, float], int, Cell]] = []
        self.offers: dict[Cell, Offer] = {}
        self.reasons: dict[Cell, str] = {}

    @staticmethod
    def of(request: Request) -> "Answers":
        """Return the answers to a request; they are kept, and shared by all claims that ask for the same."""
        return _kept_answers(replace(request, claim="", visible_devices=None, container_counts=()))

    def learn(self, cells: set[Cell]) -> None:
        """Have an answer for each of these cells."""
        if len(self.offers) + len(self.reasons) > ANSWERS_MAX:
            self._ranked.clear()
            self.offers.clear()
            self.reasons.clear()
        for cell in cells.difference(self.offers, self.reasons):
            answer = offer(cell, self._request)
            if isinstance(answer, Rejection):
                self.reasons[cell] = answer.reason
            else:
                self.offers[cell] = answer
                insort(self._ranked, (answer.order, len(self._ranked), cell))

    def best(self, cells: set[Cell]) -> set[Cell]:
        """Return those of these cells whose offers come first in the order; all of them were learnt before."""
        offered = (row for row in self._ranked if row[2] in cells)
        _, equals = next(groupby(offered, key=itemgetter(0)), (None, ()))
        return {cell for _, _, cell in equals}


@lru_cache(maxsize=REQUESTS_MAX)
def _kept_answers(request: Request) -> Answers:
    return Answers(request)


def offer(cell: Cell, request: Request) -> Offer | Rejection:
    """Choose among the free positions of a cell.

    Models are tried in the order of the claim; without a preference every model of the node is tried, the most numerous
    first, then by name.
    """
    masks = _model_masks(cell.shape, request)
    if isinstance(masks, Rejection):
        return masks
    refusals: list[Refusal] = []
    best: Offer | None = None
    for preference, mask in masks:
        answer = choose(cell.shape.machine, cell.free & mask, request.ask)
        if isinstance(answer, Refusal):
            refusals.append(answer)
            continue
        candidate = Offer((preference, answer.cost), answer)
        if best is None or candidate.order < best.order:
            best = candidate
    return best or _rejection(cell.shape, masks, request, refusals)


def _matching(shape: Shape, request: Request) -> int | Rejection:
    """Return the mask of devices that each satisfy the request, or the first requirement that none satisfies."""
    tests: tuple[tuple[str, Callable[[Card], bool]], ...] = (
        (names.REJECT_MIG, lambda card: card.mig_profile == request.mig_profile),
        (names.REJECT_NO_MODEL, lambda card: card.vendor == request.vendor and _is_wanted(card, request)),
        (names.REJECT_NO_MEMORY, lambda card: card.memory_bytes >= request.memory_bytes),
        (names.REJECT_NO_CAPABILITY, lambda card: card.compute_capability >= request.compute_capability),
    )
    left = list(enumerate(shape.cards))
    for reason, holds in tests:
        left = [(position, card) for position, card in left if holds(card)]
        if not left:
            return Rejection(reason)
    return sum(1 << position for position, _ in left)


def _is_wanted(card: Card, request: Request) -> bool:
    return not request.models or any(matches_model(card.model, wanted) for wanted in request.models)


@lru_cache(maxsize=MASKS_MAX)
def _model_masks(shape: Shape, request: Request) -> tuple[tuple[int, int], ...] | Rejection:
    """Return (preference, mask) pairs, each of one model unless the claim allows mixing; what is free is no matter."""
    matching = _matching(shape, request)
    if isinstance(matching, Rejection):
        return matching
    if request.mixed_models:
        return ((0, matching),)
    by_model: dict[str, int] = {}
    for position, card in enumerate(shape.cards):
        if matching >> position & 1:
            by_model[card.model] = by_model.get(card.model, 0) | 1 << position
    ranked = [(_preference(model, request), model, mask) for model, mask in by_model.items()]
    ranked.sort(key=lambda row: (row[0], -row[2].bit_count(), row[1]))
    return tuple((rank, mask) for rank, _, mask in ranked)


def _preference(model: str, request: Request) -> int:
    return next((rank for rank, wanted in enumerate(request.models) if matches_model(model, wanted)), 0)


def _rejection(
    shape: Shape, masks: tuple[tuple[int, int], ...], request: Request, refusals: list[Refusal]
) -> Rejection:
    if max(mask.bit_count() for _, mask in masks) < request.ask.count:
        return Rejection(names.REJECT_NEVER_FITS)
    never = would_ever_fit(shape.machine, request.ask)
    return Rejection(str((never or refusals[0]).reason))
