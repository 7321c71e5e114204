"""GPUs of one node that are used by others than promised, and what each pod concerned is told.

A promise is broken where somebody holds the GPU, or where the user is a pod of ours; see `atoll.cluster.foreign` for
foreign use as such.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from atoll.cluster.foreign import ForeignUse
from atoll.cluster.holds import HoldSource
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod

TOLD_MAX = 4


@dataclass(frozen=True, slots=True, order=True)
class Mismatch:
    """One foreign use of a GPU, and the pods that hold that GPU; none where nobody does."""

    device_id: int
    use: ForeignUse
    holders: tuple[str, ...] = ()


def mismatches(ledger: Ledger, node: str) -> tuple[Mismatch, ...]:
    """Return every foreign use on a node."""
    devices = ledger.nodes.get(node)
    return tuple(
        sorted(
            Mismatch(device.id, use, _holders(ledger, node, device.id, device.uuid))
            for device in (devices.devices if devices is not None else ())
            for use in ledger.foreign_uses(node, device.uuid)
        )
    )


def _holders(ledger: Ledger, node: str, device_id: int, uuid: str) -> tuple[str, ...]:
    return tuple(hold.key for hold in ledger.holds(node, device_id, uuid) if hold.source is HoldSource.POD)


def user_name(use: ForeignUse, pods: Mapping[str, Pod]) -> str:
    """Return who uses the GPU, for people; `pods` are all pods of the API, by uid."""
    if not use.pod_uid:
        return f"processes outside of pods (pid {', '.join(map(str, use.pids)) or 'unknown'})"
    pod = pods.get(use.pod_uid)
    return f"pod {pod.metadata.namespace}/{pod.metadata.name}" if pod is not None else f"unknown pod {use.pod_uid}"


def complaint(uid: str, found: Iterable[Mismatch], pods: Mapping[str, Pod]) -> str:
    """Return what is wrong with a pod's GPUs, empty when nothing is."""
    texts = []
    for mismatch in found:
        if uid == mismatch.use.pod_uid:
            texts.append(f"it uses GPU {mismatch.device_id} ({mismatch.use.uuid}), which it does not hold")
        elif uid in mismatch.holders:
            texts.append(
                f"its GPU {mismatch.device_id} ({mismatch.use.uuid}) is used by {user_name(mismatch.use, pods)}"
            )
    more = [f"and {len(texts) - TOLD_MAX} more"] if len(texts) > TOLD_MAX else []
    return "; ".join([*texts[:TOLD_MAX], *more])
