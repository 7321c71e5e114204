"""Waits a moment for GPUs whose pod has provably ended and whose Leases are about to be deleted.

kube-scheduler hears of a pod's end when the controllers do, and tries the waiting pods at once. A pod that is refused
then sits in back-off for seconds, which no wake-up ends, although the Leases are deleted milliseconds later. So filter,
before it refuses every node, waits for those Leases: only where they alone keep the pod out, for at most `HOLD_SECONDS`
after an end. kube-scheduler may even hear of an end before us: then it offers nodes that have room by its count and not
by ours, and filter waits for news of an end for `LAG_SECONDS`. kube-scheduler does nothing meanwhile, so after a wait
in vain there is none for a while.

No GPU is free before its Lease is gone.
"""

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod
from atoll.cluster.release import has_ended
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import select
from atoll.kube.cache import Change
from atoll.kube.clock import Clock, within
from atoll.kube.mirror import WatchedKind

HOLD_SECONDS = 1.0
"""Within this the controllers free proven GPUs when all is well."""
LAG_SECONDS = 0.1
DISTRUST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PendingRelease:
    """What a pod that ended at `at_seconds` still keeps by Leases."""

    node: str
    device_ids: tuple[int, ...]
    at_seconds: float


class PendingReleases:
    """The endings of the last moment, by pod uid."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._endings: dict[str, PendingRelease] = {}
        self._changed = asyncio.Event()
        self._no_frees_until = -math.inf
        self._no_news_until = -math.inf

    def observe(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Take a change that the ledger has taken before."""
        if kind is WatchedKind.POD:
            self._note_end(change.object)
        elif kind is WatchedKind.LEASE and self._endings:
            self._drop_freed()

    async def wait(self, node_names: Collection[str], request: Request | Rejection) -> bool:
        """Wait for a pod's Leases to go that keep this request out; tell whether some did, so that it may fit now."""
        now = self._clock.monotonic_seconds()
        self._endings = {uid: e for uid, e in self._endings.items() if now - e.at_seconds < HOLD_SECONDS}
        if isinstance(request, Rejection) or now < self._no_frees_until:
            return False
        helpful = self._helpful(node_names, request, now) or await self._news(node_names, request, now)
        if not helpful:
            return False
        until = max(self._endings[uid].at_seconds for uid in helpful) + HOLD_SECONDS
        while helpful <= self._endings.keys():
            if not await self._change(until):
                self._no_frees_until = self._clock.monotonic_seconds() + DISTRUST_SECONDS
                return False
        return True

    async def _news(self, node_names: Collection[str], request: Request, now: float) -> set[str]:
        """Wait for the end of a pod that kube-scheduler seems to know of; return the pods whose end helps."""
        if now < self._no_news_until or not any(self._is_behind(node, request, now) for node in node_names):
            return set()
        while await self._change(now + LAG_SECONDS):
            if helpful := self._helpful(node_names, request, now):
                return helpful
        self._no_news_until = self._clock.monotonic_seconds() + DISTRUST_SECONDS
        return set()

    async def _change(self, until_seconds: float) -> bool:
        """Wait for the next ending, or end of one; False when none came until then."""
        rest_seconds = until_seconds - self._clock.monotonic_seconds()
        try:
            await within(self._clock, rest_seconds, self._changed.wait())
        except TimeoutError:
            return False
        return True

    def _is_behind(self, node: str, request: Request, now: float) -> bool:
        """Tell whether the offered node has room by kube-scheduler's count, and none by ours."""
        devices = self._ledger.nodes.get(node)
        count = request.ask.count
        if devices is None or devices.usable.bit_count() < count:
            return False
        return (self._ledger.free(node, now_seconds=now) & devices.usable).bit_count() < count

    def _note_end(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        leases = self._ledger.leases_of(uid)
        if leases and uid not in self._endings and has_ended(pod):
            ids = tuple(record.device_id for record in leases if record.node == pod.spec.node_name)
            self._endings[uid] = PendingRelease(pod.spec.node_name, ids, self._clock.monotonic_seconds())
            self._tell()

    def _drop_freed(self) -> None:
        freed = [uid for uid in self._endings if not self._ledger.leases_of(uid)]
        for uid in freed:
            del self._endings[uid]
        if freed:
            self._tell()

    def _tell(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def _helpful(self, node_names: Collection[str], request: Request, now: float) -> set[str]:
        """Return the ended pods on nodes that could take the request once the Leases of all of those are gone."""
        kept: dict[str, tuple[int, ...]] = {}
        for ending in self._endings.values():
            kept[ending.node] = kept.get(ending.node, ()) + ending.device_ids
        fitting = {
            node for node, ids in kept.items() if node in node_names and self._would_fit(node, ids, request, now)
        }
        return {uid for uid, ending in self._endings.items() if ending.node in fitting}

    def _would_fit(self, node: str, ids: tuple[int, ...], request: Request, now: float) -> bool:
        devices = self._ledger.nodes.get(node)
        if devices is None or self._ledger.is_stale(node, now):
            return False
        free = self._ledger.free(node, now_seconds=now) | devices.mask_of(ids)
        return not isinstance(select(devices, free, request), Rejection)
