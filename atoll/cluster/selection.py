"""Which GPUs of one node a request would get, and what that choice costs against other nodes.

In: a node's devices, the mask of its free ones, a request. Out: a Candidate or a Rejection. Filter, prioritize, bind
and wake-up all ask here, so they cannot disagree. Ties between nodes are broken by (model preference, cost, node name).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from atoll.api import names
from atoll.api.node_status import Device
from atoll.cluster.machines import NodeDevices, nominal_memory_bytes
from atoll.cluster.requests import Rejection, Request, parse_capability
from topology.choice import Choice, Refusal, choose, would_ever_fit


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


def matches_model(model: str, wanted: str) -> bool:
    """Tell whether a model slug matches by dash-separated prefix: nvidia-h100 matches nvidia-h100-80gb-hbm3."""
    return model == wanted or model.startswith(wanted + "-")


def select(devices: NodeDevices, free: int, request: Request) -> Candidate | Rejection:
    """Choose GPUs among the `free` ones of a node (bit mask over positions).

    Models are tried in the order of the claim; without a preference every model of the node is tried, the most numerous
    first, then by name.
    """
    masks = _model_masks(devices, request)
    if isinstance(masks, Rejection):
        return masks
    refusals: list[Refusal] = []
    best: Candidate | None = None
    for preference, mask in masks:
        answer = choose(devices.machine, free & mask & devices.usable, request.ask)
        if isinstance(answer, Refusal):
            refusals.append(answer)
            continue
        candidate = Candidate(devices.node, preference, answer)
        if best is None or candidate.order < best.order:
            best = candidate
    return best or _rejection(devices, masks, request, refusals)


def _matching(devices: NodeDevices, request: Request) -> int | Rejection:
    """Return the mask of devices that each satisfy the request, or the first requirement that none satisfies."""
    tests: tuple[tuple[str, Callable[[Device], bool]], ...] = (
        (names.REJECT_MIG, lambda device: _mig_profile(device) == request.mig_profile),
        (names.REJECT_NO_MODEL, lambda device: device.vendor == request.vendor and _is_wanted(device, request)),
        (names.REJECT_NO_MEMORY, lambda device: nominal_memory_bytes(device) >= request.memory_bytes),
        (
            names.REJECT_NO_CAPABILITY,
            lambda device: parse_capability(device.compute_capability) >= request.compute_capability,
        ),
    )
    left = list(enumerate(devices.devices))
    for reason, holds in tests:
        left = [(position, device) for position, device in left if holds(device)]
        if not left:
            return Rejection(reason)
    return sum(1 << position for position, _ in left)


def _mig_profile(device: Device) -> str:
    return device.mig.profile if device.mig is not None else ""


def _is_wanted(device: Device, request: Request) -> bool:
    return not request.models or any(matches_model(device.model, wanted) for wanted in request.models)


@lru_cache(maxsize=65_536)
def _model_masks(devices: NodeDevices, request: Request) -> tuple[tuple[int, int], ...] | Rejection:
    """Return (preference, mask) pairs, each of one model unless the claim allows mixing.

    Neither depends on what is free, so the answer is kept per report and request.
    """
    matching = _matching(devices, request)
    if isinstance(matching, Rejection):
        return matching
    if request.mixed_models:
        return ((0, matching),)
    by_model: dict[str, int] = {}
    for position, device in enumerate(devices.devices):
        if matching >> position & 1:
            by_model[device.model] = by_model.get(device.model, 0) | 1 << position
    ranked = [(_preference(model, request), model, mask) for model, mask in by_model.items()]
    ranked.sort(key=lambda row: (row[0], -row[2].bit_count(), row[1]))
    return tuple((rank, mask) for rank, _, mask in ranked)


def _preference(model: str, request: Request) -> int:
    return next((rank for rank, wanted in enumerate(request.models) if matches_model(model, wanted)), 0)


def _rejection(
    devices: NodeDevices, masks: tuple[tuple[int, int], ...], request: Request, refusals: list[Refusal]
) -> Rejection:
    if max(mask.bit_count() for _, mask in masks) < request.ask.count:
        return Rejection(names.REJECT_NEVER_FITS)
    never = would_ever_fit(devices.machine, request.ask)
    return Rejection(str((never or refusals[0]).reason))
