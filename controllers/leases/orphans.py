"""Ends Leases of living pods that are not bound to the GPU: expired reservations, and strays beside the real one.

An expired reservation ends in this order: mark its Leases as fenced (no bind adopts them from now on), move the pod's
resourceVersion (no Binding that was prepared before can land from now on), and delete the Leases only if the answer to
that very write shows no node. The wake-up annotation moves the version, which also makes kube-scheduler try the pod
again. Strays are deleted after a live look-up. Neither the clock nor the cache decides alone. Keys are pod uids.
"""

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import structlog

from atoll.api import names
from atoll.api.times import format_microtime, parse_microtime
from atoll.cluster.consistency import NEVER
from atoll.cluster.leases import LeaseRecord
from atoll.cluster.objects import Pod
from atoll.cluster.release import version_number
from atoll.cluster.repairs import LeaseState, lease_state, names_device
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import Forbidden, Invalid
from atoll.kube.mirror import WatchedKind
from controllers.context import Context, holder_reference
from controllers.leases.writes import annotate_lease, end_lease
from controllers.pauses import Pauses
from controllers.pod_calls import look_up, move

log = structlog.get_logger(__name__)

SKEW_SECONDS = 5.0
"""Deadlines come from another machine's clock. If that clock is behind, a bind only loses its retry; if it is ahead,
the reservation ends once this controller has seen it for as long as it was made for."""
BLIND_SECONDS = 15.0
WAIT_SECONDS_MIN = 1.0
WAIT_SECONDS_MAX = 3600.0


class OrphanReconciler:
    """Unreserves what a living pod holds without being bound to it. What a pod holds that is gone is the release's."""

    name = "orphans"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pauses: Pauses[str] = Pauses(context.clock)
        self._seen: dict[str, dict[str, tuple[str, float]]] = {}
        """By pod uid and Lease uid: the deadline, and when it was first seen, by our own clock."""

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the holder of a Lease that came, and the pod that changed while it holds any."""
        if change.kind is ChangeKind.DELETED:
            return ()
        ledger = self._context.mirror.ledger
        if kind is WatchedKind.LEASE:
            record = ledger.leases.get(change.object.metadata.name)
            return (record.holder.uid,) if record is not None else ()
        if kind is WatchedKind.POD:
            uid = change.object.metadata.uid
            return (uid,) if ledger.leases_of(uid) else ()
        return ()

    def all_keys(self) -> Iterable[str]:
        """Return every holder of a Lease that its own allocation does not name."""
        ledger = self._context.mirror.ledger
        self._seen = {uid: seen for uid, seen in self._seen.items() if ledger.leases_of(uid)}
        return {
            record.holder.uid
            for record in ledger.leases.values()
            if (allocation := ledger.allocation_of(record.holder.uid)) is None or not names_device(allocation, record)
        }

    async def reconcile(self, uid: str) -> float | None:
        """Look at all Leases of a pod. Raises KubeError."""
        mirror = self._context.mirror
        pod = mirror.pods.by_uid.get(uid)
        leases = mirror.ledger.leases_of(uid)
        if pod is None or not leases:
            return None
        if mirror.unready_reason():
            return BLIND_SECONDS
        if (pause := self._pauses.left_seconds(uid)) > 0:
            return pause
        standings = {record.lease_name: self._state(record, pod) for record in leases}
        overdue = [record for record in leases if standings[record.lease_name] is LeaseState.OVERDUE]
        strays = [record for record in leases if standings[record.lease_name] is LeaseState.STRAY]
        try:
            if overdue:
                await self._unreserve(overdue)
        except (Forbidden, Invalid) as error:
            log.warning("Could not take reserved GPUs back", pod=str(leases[0].holder), uid=uid, err=str(error))
            return self._pauses.begin(uid)
        if strays:
            await self._delete_strays(strays)
        waits = [self._wait_seconds(r) for r in leases if standings[r.lease_name] is LeaseState.RESERVED]
        return min(waits, default=None)

    def _state(self, record: LeaseRecord, pod: Pod | None) -> LeaseState:
        past = format_microtime(self._context.clock.now() - timedelta(seconds=SKEW_SECONDS))
        return lease_state(record, pod, past if self._own_seconds(record) > 0 else NEVER)

    def _own_seconds(self, record: LeaseRecord) -> float:
        """Return how much is left of a reservation by our own clock, from when it was first seen here."""
        now = self._context.clock.monotonic_seconds()
        seen = self._seen.setdefault(record.holder.uid, {})
        deadline, since = seen.get(record.lease_uid, ("", now))
        if deadline != record.deadline:
            since = now
        seen[record.lease_uid] = (record.deadline, since)
        try:
            made_for = (parse_microtime(record.deadline) - parse_microtime(record.renewed)).total_seconds()
        except (ValueError, OverflowError):
            made_for = WAIT_SECONDS_MAX
        return since + min(made_for, WAIT_SECONDS_MAX) + SKEW_SECONDS - now

    def _wait_seconds(self, record: LeaseRecord) -> float:
        own_seconds = self._own_seconds(record)
        try:
            left = (parse_microtime(record.deadline) - self._context.clock.now()).total_seconds() + SKEW_SECONDS
        except (ValueError, OverflowError):
            left = WAIT_SECONDS_MAX
        return min(WAIT_SECONDS_MAX, max(WAIT_SECONDS_MIN, min(left, own_seconds)))

    async def _unreserve(self, records: Sequence[LeaseRecord]) -> None:
        mark = {names.LEASE_FENCED: self._context.new_token()}
        answers = await asyncio.gather(*(annotate_lease(self._context.api, record, mark) for record in records))
        fenced = [record for record in answers if record is not None]
        if not fenced:
            return
        generation = max(version_number(record.resource_version) for record in fenced)
        pod = await move(self._context, fenced[0].holder, generation=generation)
        states = {record.lease_name: self._state(record, pod) for record in fenced}
        ended = [r for r in fenced if states[r.lease_name] in {LeaseState.OVERDUE, LeaseState.STRAY}]
        kept = [r for r in fenced if states[r.lease_name] is LeaseState.HELD]
        await self._delete(ended, outcome="taken-back")
        await asyncio.gather(
            *(annotate_lease(self._context.api, record, {names.LEASE_FENCED: None}) for record in kept)
        )

    async def _delete_strays(self, records: Sequence[LeaseRecord]) -> None:
        """Delete Leases that the bound pod does not name, if a live look confirms it: a pod's node never changes."""
        lookup = await look_up(self._context.api, records[0].holder)
        ended = [record for record in records if self._state(record, lookup.pod) is LeaseState.STRAY]
        await self._delete(ended, outcome="stray")

    async def _delete(self, records: Sequence[LeaseRecord], *, outcome: str) -> None:
        await asyncio.gather(*(end_lease(self._context.api, record, self._context.now_text()) for record in records))
        for record in records:
            self._context.metrics.orphans.labels(outcome).inc()
            log.info(
                "Deleted an orphan Lease",
                lease=record.lease_name,
                pod=str(record.holder),
                uid=record.holder.uid,
                attempt=record.attempt,
                outcome=outcome,
            )
            self._context.events.record(
                holder_reference(record.holder),
                reason=names.REASON_ORPHAN_LEASE,
                note=f"reservation of GPU {record.device_id} on node {record.node} ended: the pod was not bound to it",
                action="Release",
            )
