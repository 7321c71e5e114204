"""What the cluster's ledger says of every GPU now: one GpuFact each, with its holder, state, share and price."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from atoll.api import job_names
from atoll.api.node_status import GpuNodeStatus
from atoll.api.times import seconds_of
from atoll.cluster import pods
from atoll.cluster.gpu_stats import is_waiting
from atoll.cluster.leases import LeaseRecord, lease_name
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import NodeDevices, is_mig_parent, nominal_memory_bytes, parent_uuid_of
from atoll.cluster.objects import Pod
from atoll.cluster.transitions import Availability, Occupancy
from atoll.jobs.costs.prices import PriceTable
from atoll.jobs.costs.spans import NOBODY, WHOLE_PPM, GpuAccount, GpuFact, TimeUse

RUNNING: Final = "Running"
Reports = Mapping[str, GpuNodeStatus]
ModelsOf = Callable[[Pod], Sequence[str]]
"""Models that a pod's claim names; none means any."""


@dataclass(frozen=True, slots=True)
class PricedNodes:
    """Prices, and the nodes on which the spot price applies."""

    table: PriceTable
    spot: frozenset[str] = frozenset()


def gpu_facts(
    ledger: Ledger, reports: Reports, prices: PricedNodes, models_of: ModelsOf, *, now_seconds: float
) -> dict[str, GpuFact]:
    """Return every GPU of the cluster, by uuid. `now_seconds`: of the monotonic clock that dates heartbeats."""
    facts: dict[str, GpuFact] = {}
    for name in sorted(ledger.nodes):
        for fact in _of_node(ledger, ledger.nodes[name], reports.get(name), prices, now_seconds):
            facts.setdefault(fact.gpu, fact)
    stranded = set(_stranded(facts.values(), ledger.pods.values(), models_of))
    return {gpu: fact if gpu not in stranded else _with_use(fact, TimeUse.STRANDED) for gpu, fact in facts.items()}


def _of_node(
    ledger: Ledger, devices: NodeDevices, report: GpuNodeStatus | None, prices: PricedNodes, now_seconds: float
) -> Iterator[GpuFact]:
    node = devices.node
    shares = _shares(devices)
    is_silent = ledger.is_stale(node, now_seconds)
    for device in devices.devices:
        share = shares[device.uuid]
        if not share:
            continue
        card = next((one for one in devices.devices if one.uuid == parent_uuid_of(device)), device)
        lease = ledger.leases.get(lease_name(node, device.id))
        uid = _holder_uid(ledger, node, device.id, device.uuid, lease)
        pod = ledger.pods.get(uid)
        if uid:
            use, account = _held_use(pod, device.uuid, None if is_silent else report), _account(pod, lease, uid)
        else:
            told = ledger.availability(node, device.id, now_seconds=now_seconds)
            is_usable = (
                told is Availability.HEALTHY
                and not is_silent
                and not is_mig_parent(device)
                and not ledger.foreign_uses(node, device.uuid)
            )
            use, account = TimeUse.FREE if is_usable else TimeUse.UNAVAILABLE, NOBODY
        price = prices.table.of_card(card.model, nominal_memory_bytes(card), is_spot=node in prices.spot)
        created = seconds_of(lease.created) if lease is not None else None
        since = datetime.fromtimestamp(created, UTC) if created is not None else None
        yield GpuFact(device.uuid, node, card.model, use, account, share, price, since)


def _shares(devices: NodeDevices) -> dict[str, int]:
    """Return the share of a card that each device is, by uuid: the shares of one card add up to a whole one."""
    shares = dict.fromkeys((device.uuid for device in devices.devices), WHOLE_PPM)
    memory = {device.uuid: nominal_memory_bytes(device) for device in devices.devices}
    for device in devices.devices:
        parent = parent_uuid_of(device)
        if not parent or parent not in shares:
            continue
        share = memory[device.uuid] * WHOLE_PPM // memory[parent] if memory[parent] else 0
        shares[device.uuid] = min(share, shares[parent])
        shares[parent] -= shares[device.uuid]
    return shares


def _holder_uid(ledger: Ledger, node: str, device_id: int, uuid: str, lease: LeaseRecord | None) -> str:
    if lease is not None:
        return lease.holder.uid
    if ledger.occupancy(node, device_id, uuid) in (Occupancy.FREE, Occupancy.ASSUMED):
        return ""
    keys = (hold.key for hold in ledger.holds(node, device_id, uuid))
    return next((key for key in keys if key in ledger.pods), "")


def _held_use(pod: Pod | None, uuid: str, report: GpuNodeStatus | None) -> TimeUse:
    """Return what a held GPU does; without a reading of its processes, a running pod counts as using it."""
    if pod is None or pod.status.phase != RUNNING or pod.metadata.deletion_timestamp is not None:
        return TimeUse.RESERVED
    status = report.status if report is not None else None
    if status is None or not status.evidence.processes_read or uuid in status.evidence.uses_unread:
        return TimeUse.USED
    seen = next((entry for entry in status.pods if entry.uid == pod.metadata.uid), None)
    return TimeUse.IDLE if seen is not None and uuid not in seen.uuids else TimeUse.USED


def _account(pod: Pod | None, lease: LeaseRecord | None, uid: str) -> GpuAccount:
    """Return who holds a GPU, as pod and Lease say; who of the tenants that is, the job service knows."""
    namespace = pod.metadata.namespace if pod is not None else lease.holder.namespace if lease is not None else ""
    labels = pod.metadata.labels if pod is not None else {}
    return GpuAccount(namespace=namespace, job_id=labels.get(job_names.JOB_ID, ""), pod_uid=uid)


def _stranded(facts: Iterable[GpuFact], waiting: Iterable[Pod], models_of: ModelsOf) -> Iterator[str]:
    """Yield the free GPUs that a waiting pod could have if they were on one machine."""
    free: dict[str, dict[str, list[str]]] = {}
    for fact in facts:
        if fact.use is TimeUse.FREE and fact.share_ppm == WHOLE_PPM:
            free.setdefault(fact.model, {}).setdefault(fact.node, []).append(fact.gpu)
    if not free:
        return
    wants = {(pods.device_count(pod), tuple(models_of(pod))) for pod in waiting if is_waiting(pod)}
    for model, nodes in free.items():
        total, most = sum(map(len, nodes.values())), max(map(len, nodes.values()))
        if any(most < count <= total and _names(models, model) for count, models in wants):
            yield from (gpu for gpus in nodes.values() for gpu in gpus)


def _names(models: Sequence[str], model: str) -> bool:
    return not models or any(model == one or model.startswith(f"{one}-") for one in models)


def _with_use(fact: GpuFact, use: TimeUse) -> GpuFact:
    return GpuFact(
        fact.gpu, fact.node, fact.model, use, fact.account, fact.share_ppm, fact.price_micros, fact.held_since
    )
