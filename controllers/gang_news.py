"""Tells the members of a waiting gang by events for what they wait, and how many gangs come before theirs.

In: gangs that found no place. Out: events on the gang and on its first gated members, about each gang at most one a
minute. Whoever watches a pod that waits behind a gate for hours, a person or the pod's owner, can tell it from a pod
that has failed. Nothing is decided here.
"""

from atoll.api import names
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.membership import GangKey, has_gate
from atoll.cluster.gangs.queue import in_order
from controllers.context import Context, pod_reference
from controllers.gang_book import GangBook
from controllers.gangs import gang_reference

TELL_SECONDS = 60.0
ORDER_SECONDS = 10.0
"""How long an order of all waiting gangs is good enough for an event."""
MEMBERS_TOLD = 8


class GangNews:
    """Remembers when each waiting gang was told last."""

    def __init__(self, context: Context, book: GangBook) -> None:
        self._context = context
        self._book = book
        self._told_at: dict[GangKey, float] = {}
        self._places: dict[GangKey, int] = {}
        self._ordered_at = 0.0

    def tell(self, view: GangView, message: str) -> None:
        """Tell a gang that it waits, unless it was told within the last minute."""
        key = (view.gang.metadata.namespace, view.gang.metadata.name)
        now = self._context.clock.monotonic_seconds()
        if now - self._told_at.get(key, now - TELL_SECONDS) < TELL_SECONDS:
            return
        place = self._place(key, now)
        self._told_at = {one: at for one, at in self._told_at.items() if one in self._places} | {key: now}
        note = f"number {place} of {len(self._places)} gangs that wait: {message}"
        members = sorted(view.members, key=lambda member: member.pod.metadata.name)
        gated = [pod_reference(member.pod) for member in members if has_gate(member.pod)]
        for reference in (gang_reference(view.gang), *gated[:MEMBERS_TOLD]):
            self._context.events.record(reference, reason=names.REASON_GANG_WAITING, note=note, action="Wait")

    def _place(self, key: GangKey, now: float) -> int:
        """Return how many gangs are tried until this one, itself among them."""
        if key not in self._places or now - self._ordered_at > ORDER_SECONDS:
            gangs = [self._book.gang(one) for one in sorted({*self._book.candidates, key})]
            views = [self._book.view(gang) for gang in gangs if gang is not None]
            waiting = in_order(view for view in views if not view.is_admitted)
            ordered = [(view.gang.metadata.namespace, view.gang.metadata.name) for view in waiting]
            self._places = {one: number for number, one in enumerate(ordered, start=1)}
            self._ordered_at = now
        return self._places.get(key, len(self._places))
