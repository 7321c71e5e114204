"""GPUs that are kept for waiting pods: freed by a preemption, for a gang that waits for all of them at once, or on the
node that a pod is nominated to.

A soft reservation hides devices from pods of the same or a lower priority, never from the pod itself, and holds nothing
by Lease. It lasts as long as the pod's annotation or nomination.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.api import names
from atoll.cluster import pods
from atoll.cluster.allocations import parse_ids
from atoll.cluster.objects import Pod


@dataclass(frozen=True, slots=True)
class SoftReservation:
    """Devices of one node that are kept for a waiting pod of this priority."""

    node: str
    device_ids: tuple[int, ...]
    priority: int

    def __str__(self) -> str:
        return f"{self.node}:{','.join(map(str, self.device_ids))}"

    def binds(self, asking_priority: int | None) -> bool:
        """Tell whether a pod of that priority must leave the devices alone; None stands for one below all others."""
        return asking_priority is None or asking_priority <= self.priority


def soft_reservation_of(pod: Pod) -> SoftReservation | None:
    """Read what the pod's annotation keeps; None for a pod that does not wait, and for a text that says nothing.

    Members of a gang wait behind its gate, others do not wait while they are gated.
    """
    text = pod.metadata.annotations.get(names.KEPT)
    is_member = names.GANG in pod.metadata.annotations and pods.is_unplaced(pod)
    if text is None or not (is_member or pods.is_waiting(pod)):
        return None
    node, _, ids_text = text.rpartition(":")
    ids = parse_ids(ids_text)
    return SoftReservation(node, ids, pod.spec.priority) if node and ids else None


class SoftReservations:
    """What is kept, by pod uid and by node."""

    def __init__(self) -> None:
        self._kept: dict[str, SoftReservation] = {}
        self._on: dict[str, dict[str, SoftReservation]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, uid: str) -> SoftReservation | None:
        """Return what is kept for a pod."""
        return self._kept.get(uid)

    def put(self, uid: str, kept: SoftReservation | None) -> tuple[str, ...]:
        """Keep this for the pod and nothing else; return the nodes on which something changed."""
        old = self._kept.pop(uid, None)
        if old == kept:
            if kept is not None:
                self._kept[uid] = kept
            return ()
        if old is not None:
            others = self._on[old.node]
            del others[uid]
            if not others:
                del self._on[old.node]
        if kept is not None:
            self._kept[uid] = kept
            self._on.setdefault(kept.node, {})[uid] = kept
        return tuple({each.node for each in (old, kept) if each is not None})

    def on(self, node: str, *, asking_uid: str = "", asking_priority: int | None = None) -> Iterator[tuple[int, ...]]:
        """Yield the device ids of a node that the asking pod must leave alone."""
        for uid, kept in self._on.get(node, {}).items():
            if uid != asking_uid and kept.binds(asking_priority):
                yield kept.device_ids

    def opens_for(self, asking_uid: str, asking_priority: int | None) -> set[str]:
        """Return the nodes where the asking pod may take what others below it must leave alone."""
        return {
            node
            for node, kept_there in self._on.items()
            for uid, kept in kept_there.items()
            if uid == asking_uid or not kept.binds(asking_priority)
        }
