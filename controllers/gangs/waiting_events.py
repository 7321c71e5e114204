"""Events on gangs that wait and on their first gated members, so that nobody takes them for failed ones."""

from atoll.api import names
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.membership import GangKey, has_gate, key_of
from atoll.cluster.gangs.queue import in_order
from atoll.kube.events import ObjectReference
from controllers.context import Context, pod_reference
from controllers.gangs.cache import GangCache, gang_reference

EVENT_SECONDS = 60.0
ORDER_SECONDS = 10.0
"""How long an order of all waiting gangs is good enough for an event."""
MEMBERS_MAX = 8


class GangEvents:
    """Records what waiting gangs wait for, on each object at most once a minute."""

    def __init__(self, context: Context, cache: GangCache) -> None:
        self._context = context
        self._cache = cache
        self._recorded_at: dict[ObjectReference, float] = {}
        self._places: dict[GangKey, int] = {}
        self._ordered_at = 0.0

    def record_waiting(self, view: GangView, message: str) -> None:
        """Record on a gang and its first members what it waits for, except on those with an event within a minute."""
        now = self._context.clock.monotonic_seconds()
        self._recorded_at = {one: at for one, at in self._recorded_at.items() if now - at < EVENT_SECONDS}
        members = sorted(view.members, key=lambda member: member.pod.metadata.name)
        gated = [pod_reference(member.pod) for member in members if has_gate(member.pod)]
        due = [one for one in (gang_reference(view.gang), *gated[:MEMBERS_MAX]) if one not in self._recorded_at]
        if not due:
            return
        note = message
        if not view.is_admitted:
            place = self._place(key_of(view.gang), now)
            note = f"number {place} of {len(self._places)} gangs that wait: {message}"
        for reference in due:
            self._context.events.record(reference, reason=names.REASON_GANG_WAITING, note=note, action="Wait")
        self._recorded_at |= dict.fromkeys(due, now)

    def _place(self, key: GangKey, now: float) -> int:
        """Return how many gangs are tried until this one, itself among them."""
        if key not in self._places or now - self._ordered_at > ORDER_SECONDS:
            gangs = [self._cache.gang(one) for one in sorted({*self._cache.candidates, key})]
            views = [self._cache.view(gang) for gang in gangs if gang is not None]
            waiting = in_order(view for view in views if not view.is_admitted)
            ordered = [key_of(view.gang) for view in waiting]
            self._places = {one: number for number, one in enumerate(ordered, start=1)}
            self._ordered_at = now
        return self._places.get(key, len(self._places))
