"""Whether the jobs of a parallel step fit the free quota together; if not, in which order they run.

Kueue counts quota and admits; it would let the jobs wait in their queue all the same. What follows here is that they
are submitted one after the other, in the order of their priority, and that the run says so.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from atoll.jobs.costs.estimates import gpu_total
from atoll.jobs.documents import parse_job
from atoll.jobs.errors import JobMistake
from atoll.jobs.needs import needs_of
from atoll.jobs.notes import NoteBook
from atoll.jobs.queue_file import QueueFile, QueueTenant, TenantQueue, full_name
from atoll.jobs.settings import RenderSettings
from atoll.jobs.words import PRIORITY_VALUES, Priority

ORDER: Final = "order"
MESSAGE: Final = "message"
GPU: Final = full_name("gpu")


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """GPUs that the queues of a tenant have free, by name; and the queues of jobs that name none."""

    free: Mapping[str, int]
    queue: str
    critical_queue: str


@dataclass(frozen=True, slots=True)
class BranchNeed:
    """What the job of a branch needs. `after`: steps that end before it begins."""

    branch: str
    gpus: int
    queue: str
    priority: Priority
    after: frozenset[str] = frozenset()


def need_of(
    branch: str, job: Mapping[str, Any], room: GpuRoom, *, copies: int = 1, after: frozenset[str] = frozenset()
) -> BranchNeed | None:
    """Return the need of a branch; None if the job cannot be read. `copies`: jobs at a time."""
    parsed = parse_job(json.dumps({"name": "branch", **job}).encode()).job
    if parsed is None:
        return None
    try:
        needs = needs_of(parsed, RenderSettings(), now_seconds=None, book=NoteBook())
    except JobMistake:
        return None
    default = room.critical_queue if needs.priority is Priority.CRITICAL else room.queue
    queue = parsed.policy.queue_name or default
    return BranchNeed(branch, gpu_total(parsed, needs) * copies, queue, needs.priority, after)


def order_of(needs: tuple[BranchNeed, ...], room: GpuRoom) -> dict[str, Any]:
    """Return what a parallel step keeps: the order of the branches that run one after the other, and why; empty if all
    fit together."""
    crowded: list[BranchNeed] = []
    told: list[str] = []
    for queue, free in sorted(room.free.items()):
        mine = [one for one in needs if one.queue == queue and one.gpus]
        total = sum(one.gpus for one in mine)
        if len(mine) > 1 and total > free:
            crowded += mine
            told.append(f"they need {total} GPUs together, and queue {queue} has {free} free")
    order = _by_priority(crowded)
    message = f"{', '.join(order)} run one after the other, by priority: {'; '.join(told)}"
    return {ORDER: order, MESSAGE: message} if order else {}


def _by_priority(waiting: list[BranchNeed]) -> list[str]:
    """Return branches by priority, each after those that it depends on."""
    left = sorted(waiting, key=lambda one: -PRIORITY_VALUES[one.priority])
    order: list[str] = []
    while left:
        names = {one.branch for one in left}
        first = next(one for one in left if not one.after & names)
        left.remove(first)
        order.append(first.branch)
    return order


def room_of(file: QueueFile, tenant: QueueTenant, used: Mapping[str, int]) -> GpuRoom:
    """Return the room of a tenant: what its queues may use at most, borrowed quota included, less what they use."""
    capacities = {queue.name: _most(file, queue) for queue in tenant.queues}
    free = {name: max(0, most - used.get(name, 0)) for name, most in capacities.items() if most is not None}
    return GpuRoom(free, tenant.queue_for(critical=False).name, tenant.queue_for(critical=True).name)


def _most(file: QueueFile, queue: TenantQueue) -> int | None:
    """Return how many GPUs a queue may use at most; None if that cannot be told."""
    quotas = [one for flavor in queue.flavors for name, one in flavor.resources().items() if name == GPU]
    own = [one.nominal for one in quotas]
    if not all(amount.isdigit() for amount in own):
        return None
    nominal = sum(map(int, own))
    if queue.cohort is None or queue.critical:
        return nominal
    others = _lent(file, queue)
    limits = [one.borrow for one in quotas]
    if all(limit is not None and limit.isdigit() for limit in limits):
        others = min(others, sum(int(limit or 0) for limit in limits))
    return nominal + others


def _lent(file: QueueFile, queue: TenantQueue) -> int:
    """Return how many GPUs the cohort of a queue has beside the queue's own."""
    sources = [flavor for cohort in file.cohorts if cohort.name == queue.cohort for flavor in cohort.flavors]
    sources += [
        flavor
        for tenant in file.tenants
        for other in tenant.queues
        if other.cohort == queue.cohort and other.name != queue.name
        for flavor in other.flavors
    ]
    amounts = [one.nominal for flavor in sources for name, one in flavor.resources().items() if name == GPU]
    return sum(int(amount) for amount in amounts if amount.isdigit())
