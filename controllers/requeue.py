"""Wakes the waiting pods that fit now, and records on the others what is missing.

Capacity changes (a Lease that ended, a report, an uncordoned node, a new claim) lead to one write per pod to wake, at a
bounded rate. The generation on the pod is the resourceVersion of the newest such change, so that cause and effect can
be read from the API server. All waiting pods are weighed together under one key.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import structlog

from atoll.api import names
from atoll.cluster import pods
from atoll.cluster.hints import HintInput, LastHint, named_node, next_hint, plan_hints
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Request, request_of
from atoll.cluster.wakeups import (
    LastWake,
    NodeCapacity,
    WakeInput,
    WakePlan,
    WakePod,
    is_nominated_by_us,
    is_rejected,
    plan_wakeups,
    together,
    waiting_note,
)
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.client import RETRIED_STATUSES
from atoll.kube.errors import Conflict, Forbidden, Invalid, NotFound, ServerError
from atoll.kube.limits import TokenBucket
from atoll.kube.mirror import WatchedKind
from atoll.kube.patches import merge_patch
from controllers.capacity_changes import CapacityChanges
from controllers.context import Context, pod_reference

log = structlog.get_logger(__name__)

ALL = "waiting pods"
BLIND_SECONDS = 5.0
CONFLICT_SECONDS = 0.5
CUT_SECONDS = 0.1
NOMINATION_SECONDS = 15.0
"""A nomination that led to no bind by then is withdrawn: it keeps its node from others."""
SETTLE_SECONDS = 1.0
"""A pod that was set aside this moment may have been refused for binds whose Leases are not seen yet."""
EVENT_SECONDS = 60.0
"""Pause between two events on one waiting pod."""
EVENTS_PER_SECOND = 1.0


class RequeueReconciler:
    """Plans over all waiting pods together, and carries the plan out."""

    name = "wake"

    def __init__(self, context: Context, *, wakes_per_second: float, burst: int, hints: bool = True) -> None:
        now = context.clock.monotonic_seconds
        self._hints = hints
        self._context = context
        self._changes = CapacityChanges(context.mirror, context.clock)
        self._bucket = TokenBucket(rate=wakes_per_second, burst=burst, now=now)
        self._event_bucket = TokenBucket(rate=EVENTS_PER_SECOND, burst=20, now=now)
        self._recorded_at: dict[str, float] = {}
        self._last_wakes: dict[str, LastWake] = {}
        self._set_aside: dict[str, tuple[float, int]] = {}
        self._skipped: set[str] = set()
        self._nominated_at: dict[str, float] = {}
        self._last_hints: dict[str, LastHint] = {}
        self._waiting = {uid for uid, pod in context.mirror.ledger.pods.items() if pods.is_waiting(pod)}

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the one key for a change that made room, or that set a pod aside."""
        if kind is WatchedKind.POD:
            return (ALL,) if self._observe_pod(change) else ()
        return (ALL,) if self._changes.observe(kind, change) and self._waiting else ()

    def all_keys(self) -> Iterable[str]:
        """Return the one key."""
        return (ALL,)

    async def reconcile(self, key: str) -> float | None:  # noqa: ARG002 - there is only one
        """Wake what fits; return when some pod may be woken again. Raises KubeError."""
        now = self._context.clock.monotonic_seconds()
        if self._context.mirror.unready_reason():
            return BLIND_SECONDS
        waits = [self._settle(now), await self._withdraw_overdue(now), await self._send_hints(now)]
        waiting = [entry for entry in self._requests() if entry[0].metadata.uid not in self._set_aside]
        if not waiting:
            return _first(waits)
        plans = []
        for reservation in sorted({request.reservation for _, request in waiting}):
            asking = [entry for entry in waiting if entry[1].reservation == reservation]
            rooms = self._changes.capacities(reservation)
            plans.append(plan_wakeups(self._wake_input(asking, rooms, now)))
            self._record_missing(asking, rooms, plans[-1], now)
        plan = together(plans)
        self._skipped = self._skipped.union(plan.without_room) if plan.is_cut else set()
        for uid in plan.without_room:
            self._last_wakes.pop(uid, None)
        waits.append(await self._carry_out(plan))
        return _first(waits)

    def _settle(self, now: float) -> float | None:
        """Forget which pods were just set aside, once something made room or some time has passed; return the rest."""
        self._set_aside = {
            uid: (at, generation)
            for uid, (at, generation) in self._set_aside.items()
            if generation == self._changes.generation and at + SETTLE_SECONDS > now
        }
        return min((at + SETTLE_SECONDS - now for at, _ in self._set_aside.values()), default=None)

    def _requests(self) -> list[tuple[Pod, Request]]:
        mirror = self._context.mirror
        found: list[tuple[Pod, Request]] = []
        for uid in self._waiting:
            pod = mirror.ledger.pods.get(uid)
            if pod is None or not is_rejected(pod):
                continue
            claim = mirror.claim(pod.metadata.namespace, pods.claim_name(pod))
            request = request_of(pod, claim, reservation=mirror.reservation_of(pod))
            if isinstance(request, Request):
                found.append((pod, request))
        return found

    def _wake_input(
        self, waiting: Sequence[tuple[Pod, Request]], rooms: Sequence[NodeCapacity], now: float
    ) -> WakeInput:
        ledger = self._context.mirror.ledger
        return WakeInput(
            waiting=waiting,
            rooms=rooms,
            last_wakes=self._last_wakes,
            lease_holders={pod.metadata.uid for pod, _ in waiting if ledger.leases_of(pod.metadata.uid)},
            generation=self._changes.generation,
            now_seconds=now,
            skipped=self._skipped,
            kept=self._kept(waiting, now),
            demand=ledger.demand,
            nominates=self._hints,
        )

    def _kept(self, waiting: Sequence[tuple[Pod, Request]], now: float) -> dict[str, tuple[str, int]]:
        """Return what is kept and free for each of the pods for which something is."""
        ledger = self._context.mirror.ledger
        found = {}
        for pod, _ in waiting:
            kept = ledger.kept(pod.metadata.uid)
            if kept is not None and kept.node in ledger.nodes:
                free = ledger.free(
                    kept.node, now_seconds=now, asking_uid=pod.metadata.uid, asking_priority=pod.spec.priority
                )
                found[pod.metadata.uid] = (kept.node, free & ledger.nodes[kept.node].mask_of(kept.device_ids))
        return found

    async def _send_hints(self, now: float) -> float | None:
        """Send pods to the nodes that the extender named for them; return when to look again."""
        waiting = [entry for entry in self._requests() if named_node(entry[0])] if self._hints else []
        if not waiting:
            return None
        ledger = self._context.mirror.ledger
        question = HintInput(
            waiting=waiting,
            room_of=lambda node, request: self._changes.capacity(node, request.reservation),
            last_hints=self._last_hints,
            lease_holders={pod.metadata.uid for pod, _ in waiting if ledger.leases_of(pod.metadata.uid)},
            generation=self._changes.generation,
            now_seconds=now,
        )
        hints = plan_hints(question)
        sent = [hint for hint in hints if self._bucket.try_take()]
        landed = await asyncio.gather(*(self._wake(hint) for hint in sent))
        for hint, has_landed in zip(sent, landed, strict=True):
            if has_landed:
                self._last_hints[hint.uid] = next_hint(self._last_hints.get(hint.uid), now)
        if len(sent) < len(hints) or not all(landed):
            return CONFLICT_SECONDS
        ends = (last.ends_seconds for pod, _ in waiting if (last := self._last_hints.get(pod.metadata.uid)))
        return _first((NOMINATION_SECONDS if sent else None, *(end - now for end in ends if end > now)))

    async def _carry_out(self, plan: WakePlan) -> float | None:
        """Send as many wake-ups as the rate allows; return when to plan again."""
        sent = []
        for wake in plan.wakes:
            if not self._bucket.try_take():
                break
            sent.append(wake)
        landed = await asyncio.gather(*(self._wake(wake) for wake in sent))
        if len(sent) < len(plan.wakes) or not all(landed):
            return CONFLICT_SECONDS
        return CUT_SECONDS if plan.is_cut else plan.again_seconds

    async def _wake(self, wake: WakePod) -> bool:
        """Write one wake-up on the pod as it was judged; False when it has changed since.

        A pod that takes no write (its annotations are full, a policy of its namespace, or a webhook that is dead, which
        is a 500) must not keep others waiting: it counts as woken, and is tried again ever more rarely.
        """
        metadata = wake.pod.metadata
        status = {"status": {"nominatedNodeName": wake.node}} if wake.nominate else {}
        body = merge_patch(
            uid=metadata.uid,
            resource_version=metadata.resource_version,
            annotations={names.WOKEN: wake.woken},
            **status,
        )
        path = paths.pods(metadata.namespace, metadata.name, "status" if wake.nominate else "")
        try:
            await self._context.api.patch(path, body)
        except (NotFound, Conflict):
            return False
        except (Forbidden, Invalid, ServerError) as error:
            if error.status in RETRIED_STATUSES:
                raise
            self._last_wakes[wake.uid] = wake.wake
            log.warning(
                "Could not wake a pod",
                pod=f"{metadata.namespace}/{metadata.name}",
                uid=metadata.uid,
                err=str(error),
            )
            return True
        self._last_wakes[wake.uid] = wake.wake
        if wake.nominate:
            self._nominated_at[wake.uid] = wake.wake.at_seconds
        self._context.metrics.pods_woken.inc()
        log.info(
            "Woke a pod",
            pod=f"{metadata.namespace}/{metadata.name}",
            uid=metadata.uid,
            node=wake.node,
            woken=wake.woken,
        )
        self._context.events.record(
            pod_reference(wake.pod),
            reason=names.REASON_POD_WOKEN,
            note=f"{len(wake.uuids)} GPUs that fit are free, for example on node {wake.node} (generation {wake.woken})",
            action="Wake",
        )
        return True

    async def _withdraw_overdue(self, now: float) -> float | None:
        """Withdraw nominations that led to no bind in time, or of which this process knows no time; return the rest."""
        ledger = self._context.mirror.ledger
        nominated = [pod for uid in self._waiting if (pod := ledger.pods.get(uid)) and is_nominated_by_us(pod)]
        ends = {
            pod.metadata.uid: self._nominated_at.get(pod.metadata.uid, 0.0) + NOMINATION_SECONDS for pod in nominated
        }
        await asyncio.gather(*(self._withdraw(pod) for pod in nominated if ends[pod.metadata.uid] <= now))
        return min((end - now for end in ends.values() if end > now), default=None)

    async def _withdraw(self, pod: Pod) -> None:
        metadata = pod.metadata
        body = merge_patch(
            uid=metadata.uid, resource_version=metadata.resource_version, status={"nominatedNodeName": None}
        )
        try:
            await self._context.api.patch(paths.pods(metadata.namespace, metadata.name, "status"), body)
        except (NotFound, Conflict, Forbidden, Invalid):
            return
        except ServerError as error:
            if error.status in RETRIED_STATUSES:
                raise
            return
        log.info("Withdrew a nomination", pod=f"{metadata.namespace}/{metadata.name}", uid=metadata.uid)

    def _record_missing(
        self, waiting: Sequence[tuple[Pod, Request]], rooms: Sequence[NodeCapacity], plan: WakePlan, now: float
    ) -> None:
        """Record what is missing, per pod at most once a minute, and only some in each pass."""
        rested = {
            uid for uid in plan.without_room if now - self._recorded_at.get(uid, now - EVENT_SECONDS) >= EVENT_SECONDS
        }
        unseen = self._changes.unseen() if rested else ()
        for pod, request in waiting:
            uid = pod.metadata.uid
            if uid not in rested:
                continue
            if not self._event_bucket.try_take():
                return
            self._recorded_at[uid] = now
            note = waiting_note(pod, request, rooms, unseen)
            self._context.events.record(pod_reference(pod), reason=names.REASON_WAITING, note=note, action="Wait")

    def _observe_pod(self, change: Change[Any]) -> bool:
        """Keep the set of waiting pods; tell whether the pod has just been set aside by kube-scheduler."""
        pod: Pod = change.object
        uid = pod.metadata.uid
        if change.kind is ChangeKind.DELETED or not pods.is_waiting(pod) or uid not in self._context.mirror.ledger.pods:
            self._waiting.discard(uid)
            self._last_wakes.pop(uid, None)
            self._recorded_at.pop(uid, None)
            self._nominated_at.pop(uid, None)
            self._last_hints.pop(uid, None)
            return False
        self._waiting.add(uid)
        before = change.old if isinstance(change.old, Pod) and is_rejected(change.old) else None
        if not is_rejected(pod) or before is not None:
            return before is not None and bool(named_node(pod)) and _hint_of(before) != _hint_of(pod)
        self._set_aside[uid] = (self._context.clock.monotonic_seconds(), self._changes.generation)
        return True


def _hint_of(pod: Pod) -> tuple[str, str]:
    return named_node(pod), pod.status.nominated_node_name


def _first(waits: Iterable[float | None]) -> float | None:
    return min((seconds for seconds in waits if seconds is not None), default=None)
