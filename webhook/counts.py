"""How many GPUs each container asks for, and what the webhook adds so that kube-scheduler counts the same.

These are the rules that users read in docs/reference.md; the extender counts by the same ones.

- **Nobody asks**: the claim's count goes to the first regular container, and every container sees the whole set.
- **Somebody asks**: the sums over regular containers and sidecars must equal the claim's count; each sees its own part,
  the others none. To say so for a single asking container, the others get an explicit 0. So: one container that
  mentions the resource = the whole set for all; several = a split.
- A plain init container may not ask: kube-scheduler would count the larger of it and the rest, not the sum.
- Requests and limits must be equal; a missing one is completed.
- MIG instances are counted under their own name, with an explicit `gpu: 0` beside, because kube-scheduler hands a pod
  to the extender by the exact name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atoll.api import names
from atoll.api.claims import COUNT_MAX
from atoll.kube.patches import add_op, pointer
from webhook.pods import AdmittedContainer, AdmittedPod, PlacedContainer, atoll_resources, placed_containers
from webhook.requests import ResolvedRequest
from webhook.review import Denial
from webhook.variables import is_shaped

Patch = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ContainerCount:
    """What one container asks for under the demanded resource."""

    placed: PlacedContainer
    asked: int


def count_gpus(pod: AdmittedPod, *, demand: ResolvedRequest) -> Patch | Denial:
    """Check the counts of all containers against the demand and return what must be added to them."""
    denial = _refuse_other_resources(pod, demand=demand)
    if denial is not None:
        return denial
    counts: list[ContainerCount] = []
    for placed in placed_containers(pod):
        asked = _asked(placed.container, resource=demand.resource)
        if isinstance(asked, Denial):
            return asked
        if asked is not None:
            counts.append(ContainerCount(placed, asked))
    return _refuse_counts(counts, demand=demand) or tuple(_additions(pod, counts=counts, demand=demand))


def _additions(pod: AdmittedPod, *, counts: list[ContainerCount], demand: ResolvedRequest) -> Iterator[dict[str, Any]]:
    asking = {count.placed.where: count.asked for count in counts}
    first = next(placed_containers(pod))
    if not asking:
        asking = {first.where: demand.count or 0}
    elif len(asking) == 1 and not is_shaped(counts[0].placed.container, demand=demand):
        asking |= {placed.where: 0 for placed in placed_containers(pod) if placed.where not in asking}
    for placed in placed_containers(pod):
        wanted = {demand.resource: str(asking[placed.where])} if placed.where in asking else {}
        if demand.is_mig and (placed == first or names.GPU_RESOURCE in placed.container.resource_names()):
            wanted[names.GPU_RESOURCE] = "0"
        yield from _complete(placed, wanted=wanted)


def _complete(placed: PlacedContainer, *, wanted: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Add what is missing of `wanted` to limits and requests; what stands there is known to be equal."""
    if not wanted:
        return
    resources = placed.container.resources
    if resources is None:
        yield add_op(pointer(*placed.where, "resources"), {"limits": wanted, "requests": wanted})
        return
    for section, present in (("limits", resources.limits), ("requests", resources.requests)):
        if present is None:
            yield add_op(pointer(*placed.where, "resources", section), wanted)
        else:
            missing = {name: value for name, value in wanted.items() if name not in present}
            for name, value in missing.items():
                yield add_op(pointer(*placed.where, "resources", section, name), value)


def _asked(container: AdmittedContainer, *, resource: str) -> int | Denial | None:
    """Return what the container asks for, None when it does not mention the resource."""
    resources = container.resources
    if resources is None:
        return None
    found = [section[resource] for section in (resources.limits, resources.requests) if section and resource in section]
    if not found:
        return None
    numbers = {_whole_number(value) for value in found}
    number = numbers.pop()
    if numbers:
        return Denial(
            f"container {container.name!r} sets {resource} in requests and limits to different values; make them equal",
            400,
        )
    if number is None:
        return Denial(
            f"container {container.name!r} asks for {str(found[0])[:40]!r} of {resource}; "
            f"write a whole number from 0 to {COUNT_MAX}",
            400,
        )
    return number


def _whole_number(value: str | float) -> int | None:
    text = str(value)
    is_number = text.isascii() and text.isdigit() and len(text) <= 6
    return int(text) if is_number and int(text) <= COUNT_MAX else None


def _refuse_other_resources(pod: AdmittedPod, *, demand: ResolvedRequest) -> Denial | None:
    known = {demand.resource, names.GPU_RESOURCE} if demand.is_mig else {demand.resource}
    unknown = sorted(atoll_resources(pod) - known)
    if unknown and not demand.claim_name:
        return Denial(
            f"{unknown[0][:120]} needs a claim: create a GpuClaim with devices.migProfile "
            f"and name it in the annotation {names.CLAIM}",
            400,
        )
    if unknown:
        return Denial(
            f"the pod asks for {unknown[0][:120]}, but GpuClaim {demand.claim_name!r} is for {demand.resource}; "
            "remove the resource",
            400,
        )
    if not demand.is_mig:
        return None
    for placed in placed_containers(pod):
        if _asked(placed.container, resource=names.GPU_RESOURCE) not in {None, 0}:
            return Denial(
                f"container {placed.container.name!r} asks for whole GPUs, but GpuClaim {demand.claim_name!r} "
                f"is for MIG instances; ask for {demand.resource}, or leave the resource out",
                400,
            )
    return None


def _refuse_counts(counts: list[ContainerCount], *, demand: ResolvedRequest) -> Denial | None:
    for count in counts:
        if count.asked and not count.placed.may_ask:
            return Denial(
                f"init container {count.placed.container.name!r} asks for {demand.resource}; "
                "only regular containers and sidecars (restartPolicy: Always) may: remove it there",
                400,
            )
    total = sum(count.asked for count in counts)
    if demand.count is None:
        return _refuse_total(total)
    if counts and total != demand.count:
        return Denial(
            f"the containers ask for {total} of {demand.resource} together, GpuClaim {demand.claim_name!r} "
            f"for {demand.count}; make the sums equal, or leave the resource out and let the claim decide",
            400,
        )
    return None


def _refuse_total(total: int) -> Denial | None:
    if 1 <= total <= COUNT_MAX:
        return None
    return Denial(
        f"the containers ask for {total} of {names.GPU_RESOURCE} together; "
        f"ask for 1 to {COUNT_MAX}, or remove the resource",
        400,
    )
