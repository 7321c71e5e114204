"""Tells the members of a waiting gang by events for what they wait, and how many gangs come before theirs.

In: gangs that found no place. Out: events on the gang and on its first gated members, on each at most one a minute.
Whoever watches a pod that waits behind a gate for hours, a person or the pod's owner, can tell it from a pod that has
failed. Nothing is decided here.
"""

from atoll.api import names
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.membership import GangKey, has_gate, key_of
from atoll.cluster.gangs.queue import in_order
from atoll.kube.events import ObjectReference
from controllers.context import Context, pod_reference
from controllers.gang_cache import GangCache
from controllers.gangs import gang_reference

TELL_SECONDS = 60.0
ORDER_SECONDS = 10.0
"""How long an order of all waiting gangs is good enough for an event."""
MEMBERS_TOLD = 8


class GangEvents:
    """Remembers which objects were told within the last minute."""

    def __init__(self, context: Context, book: GangCache) -> None:
        self._context = context
        self._book = book
        self._told_at: dict[ObjectReference, float] = {}
        self._places: dict[GangKey, int] = {}
        self._ordered_at = 0.0

    def tell(self, view: GangView, message: str) -> None:
        """Tell a gang and its first members that it waits, except those that were told within the last minute."""
        now = self._context.clock.monotonic_seconds()
        self._told_at = {one: at for one, at in self._told_at.items() if now - at < TELL_SECONDS}
        members = sorted(view.members, key=lambda member: member.pod.metadata.name)
        gated = [pod_reference(member.pod) for member in members if has_gate(member.pod)]
        untold = [one for one in (gang_reference(view.gang), *gated[:MEMBERS_TOLD]) if one not in self._told_at]
        if not untold:
            return
        place = self._place(key_of(view.gang), now)
        note = f"number {place} of {len(self._places)} gangs that wait: {message}"
        for reference in untold:
            self._context.events.record(reference, reason=names.REASON_GANG_WAITING, note=note, action="Wait")
        self._told_at |= dict.fromkeys(untold, now)

    def _place(self, key: GangKey, now: float) -> int:
        """Return how many gangs are tried until this one, itself among them."""
        if key not in self._places or now - self._ordered_at > ORDER_SECONDS:
            gangs = [self._book.gang(one) for one in sorted({*self._book.candidates, key})]
            views = [self._book.view(gang) for gang in gangs if gang is not None]
            waiting = in_order(view for view in views if not view.is_admitted)
            ordered = [key_of(view.gang) for view in waiting]
            self._places = {one: number for number, one in enumerate(ordered, start=1)}
            self._ordered_at = now
        return self._places.get(key, len(self._places))
