"""Notices that another kube-scheduler leads, and rebuilds the mirror before the next answer.

It watches kube-scheduler's leader Lease. During the rebuild every verb answers 503. What a former leader bound a moment
ago may not have reached this replica yet; a list that began in the new term has it. Readiness belongs to a term, never
to the process.

A term is new when its holder or its number of transitions is new, and also when the same holder comes back after its
Lease expired: somebody else may have led in between.
"""

from datetime import timedelta
from typing import Any

import structlog

from atoll.api import names
from atoll.api.times import parse_microtime
from atoll.cluster.objects import Lease, LeaseSpec
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import ClusterMirror, WatchedKind

log = structlog.get_logger(__name__)


class SchedulerLeaderWatch:
    """Follows the Lease `lease_name` of the system namespace. One that was there at our own start begins no term."""

    def __init__(self, mirror: ClusterMirror, lease_name: str = names.SCHEDULER_LEADER_LEASE) -> None:
        self._mirror = mirror
        self._lease_name = lease_name
        self._seen: LeaseSpec | None = None

    def observe(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Take a change of the mirror."""
        if kind is not WatchedKind.LEASE or change.kind is ChangeKind.DELETED:
            return
        lease: Lease = change.object
        if lease.metadata.name != self._lease_name:
            return
        before, self._seen = self._seen, lease.spec
        is_news = before is not None or self._mirror.leases.synced.is_set()
        if lease.spec.holder_identity and is_news and is_new_term(before, lease.spec):
            log.info("Reading everything anew for another leader", holder=lease.spec.holder_identity)
            self._mirror.relist()


def is_new_term(before: LeaseSpec | None, now: LeaseSpec) -> bool:
    """Tell whether leadership changed hands, or may have, between two states of the Lease."""
    if before is None or before.holder_identity != now.holder_identity:
        return True
    return before.lease_transitions != now.lease_transitions or _had_run_out(before, now)


def _had_run_out(before: LeaseSpec, now: LeaseSpec) -> bool:
    """Both times are the holder's own, so no two clocks are compared."""
    if before.renew_time is None or now.renew_time is None or before.lease_duration_seconds is None:
        return False
    try:
        pause = parse_microtime(now.renew_time) - parse_microtime(before.renew_time)
    except (ValueError, OverflowError):
        return True
    return pause > timedelta(seconds=before.lease_duration_seconds)
