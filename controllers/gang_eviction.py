"""Tells an admitted gang to give way whole to somebody of a higher priority; the loop of gangs then stops it.

In: the gang, and for whom. Out: its status, evicted with the reason Preempted, and the event. Separate, because a
waiting gang and a single pod that wants an island end gangs alike: less than a gang needs would run in vain.
"""

from atoll.api import names
from atoll.cluster.gangs import lifecycle
from atoll.cluster.gangs.membership import GangKey
from atoll.kube.errors import Conflict, NotFound
from controllers.context import Context
from controllers.gang_cache import GangCache
from controllers.gang_writes import write_status
from controllers.gangs import gang_reference


async def evict_gang(context: Context, book: GangCache, key: GangKey, message: str) -> None:
    """Write that the gang is evicted; nothing where it is not admitted, or somebody else is at it. Raises KubeError."""
    gang = book.gang(key)
    if gang is None or key in book.busy or not book.is_current(gang):
        return
    view = book.view(gang)
    if not view.is_admitted:
        return
    status = lifecycle.preempt(view, message, now_seconds=book.now_seconds())
    try:
        version = await write_status(context, gang, status)
    except (Conflict, NotFound):
        return
    if version:
        book.note_written(gang.metadata.uid, version)
    context.metrics.gang_evictions.labels("Preempted").inc()
    context.events.record(
        gang_reference(gang), reason=names.REASON_GANG_EVICTED, note=message, action="Preempt", type="Warning"
    )
