"""What an extender remembers, as its debug endpoint shows it, and where that differs from the API server.

A dump is a moment older or younger than a list, so the audit compares twice.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from atoll.cluster import pods
from atoll.cluster.allocations import bound_allocation
from atoll.cluster.consistency import PROMISES, Finding, Problem
from atoll.cluster.errors import MalformedValue
from atoll.cluster.leases import may_be_gpu_lease, parse_lease
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Lease, Pod


class LedgerDump(msgspec.Struct, frozen=True, rename="camel"):
    """leases: Lease name to holder identity. pods: uid of a bound pod to NODE:ID,ID. assumed: the same of binds under
    way. kept: what is kept for waiting pods. free: ids that could be given out, per node."""

    leases: dict[str, str] = {}
    pods: dict[str, str] = {}
    assumed: dict[str, str] = {}
    kept: dict[str, str] = {}
    free: dict[str, list[int]] = {}


decode_memory = msgspec.json.Decoder(LedgerDump).decode
encode_memory = msgspec.json.Encoder().encode


def ledger_dump_of(ledger: Ledger, now_seconds: float) -> LedgerDump:
    """Return what a ledger holds now."""
    held = {uid: ledger.allocation_of(uid) for uid in ledger.pods}
    assumed = {uid: ledger.assumed(uid) for uid in ledger.pods}
    kept = {uid: ledger.kept(uid) for uid in ledger.pods}
    free = {}
    for node, devices in sorted(ledger.nodes.items()):
        mask = ledger.free(node, now_seconds=now_seconds) & devices.usable
        free[node] = [device.id for position, device in enumerate(devices.devices) if mask >> position & 1]
    return LedgerDump(
        leases={name: str(record.holder) for name, record in sorted(ledger.leases.items())},
        pods={uid: _text(found.node, found.device_ids) for uid, found in sorted(held.items()) if found is not None},
        assumed={uid: _text(f.node, f.device_ids) for uid, f in sorted(assumed.items()) if f is not None},
        kept={uid: str(found) for uid, found in sorted(kept.items()) if found is not None},
        free=free,
    )


def compare(memory: LedgerDump, pods_seen: Iterable[Pod], leases: Iterable[Lease]) -> tuple[Finding, ...]:
    """Return where the memory holds something else than the API server."""
    holders = {lease.metadata.name: lease.spec.holder_identity for lease in leases if _is_readable(lease)}
    bound = dict(_bound(pods_seen))
    return (*_differences("Lease ", holders, memory.leases), *_differences("GPUs of pod ", bound, memory.pods))


def _is_readable(lease: Lease) -> bool:
    """Tell whether a ledger knows the holder of the Lease; what it cannot read is a finding of its own."""
    try:
        return may_be_gpu_lease(lease) and bool(parse_lease(lease))
    except MalformedValue:
        return False


def _bound(pods_seen: Iterable[Pod]) -> Iterator[tuple[str, str]]:
    for pod in pods_seen:
        try:
            found = bound_allocation(pod)
        except MalformedValue:
            continue
        if found is not None and not pods.is_terminal(pod):
            yield pod.metadata.uid, _text(found.node, found.device_ids)


def _differences(what: str, stored: Mapping[str, str], remembered: Mapping[str, str]) -> Iterator[Finding]:
    for key in sorted(stored.keys() | remembered.keys()):
        if stored.get(key) != remembered.get(key):
            detail = f"the API server has {stored.get(key, 'none')}, the extender {remembered.get(key, 'none')}"
            yield Finding(PROMISES[Problem.WRONG_MEMORY], Problem.WRONG_MEMORY, what + key, detail)


def _text(node: str, ids: tuple[int, ...]) -> str:
    return f"{node}:{','.join(map(str, ids))}"
