"""The audit: does what the API server holds keep Atoll's promises?

It takes all pods, GPU Leases and GpuNodeStatuses as listed, and optionally the values that containers printed. Each
finding names the promise that it breaks. Lists taken one after another may disagree for a moment while pods come and
go; a finding that is there twice is real.

    1  no GPU for two pods            4  what was promised is what is seen
    2  no Lease without a live holder 6  identity is the uid
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus, GpuNodeStatusReport
from atoll.api.reservations import GpuReservation
from atoll.cluster import pods
from atoll.cluster.allocations import Allocation, bound_allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.leases import Holder, LeaseRecord, lease_name, may_be_gpu_lease, parse_lease
from atoll.cluster.objects import Lease, Pod
from atoll.cluster.renumbering import stale_containers
from atoll.cluster.repairs import LeaseState, lease_state
from atoll.cluster.reservation_use import may_hold
from atoll.cluster.stranded import gone_gpus

NEVER = "9999-12-31T23:59:59.999999Z"
"""A time after every deadline."""


class Problem(StrEnum):
    """What is wrong, and by its value the words for it."""

    DOUBLE_USE = "two bound pods name one GPU"
    FOREIGN_LEASE = "the GPU's Lease names another holder than the pod that is bound to it"
    FOREIGN_PROCESS = "a pod's processes use a GPU that the pod does not hold"
    FOREIGN_HOST = "processes outside of any pod use a GPU"
    LEAKED_LEASE = "the Lease's holder is gone or has ended"
    DOUBTFUL_LEASE = "the Lease's holder is gone, and its end is not proven"
    STRAY_LEASE = "the Lease's holder is bound to other GPUs"
    OVERDUE_LEASE = "the Lease's holder was not bound in time, and nobody took the GPU back"
    KEPT_FOR_NOBODY = "a GpuReservation that is gone or over holds the GPU"
    UNREADABLE_LEASE = "the Lease cannot be read"
    MISSING_LEASE = "a bound pod's GPU has no Lease"
    MISSING_ALLOCATION = "a pod that asks for GPUs is bound without an allocation"
    MALFORMED_ALLOCATION = "the pod's allocation cannot be read"
    WRONG_UUID = "id and uuid of the allocation are not the same GPU in the node's report"
    WRONG_LEASE_UUID = "Lease and allocation name different GPUs under one id"
    WRONG_CONTAINER_VALUE = "the containers' annotations do not add up to the pod's GPUs"
    GONE_GPU = "a bound pod's GPU is no longer on its machine"
    STALE_NUMBERS = "a container was told numbers that mean other GPUs since its machine was renumbered"
    WRONG_PRINTED_VALUE = "a container saw other GPUs than its annotation says"
    WRONG_HOLDER_NAME = "the Lease's holder has the uid of one pod and the name of another"
    WRONG_MEMORY = "the extender remembers something else than the API server"


PROMISES: Mapping[Problem, int] = {
    Problem.DOUBLE_USE: 1,
    Problem.FOREIGN_LEASE: 1,
    Problem.FOREIGN_PROCESS: 1,
    Problem.FOREIGN_HOST: 1,
    Problem.WRONG_MEMORY: 1,
    Problem.LEAKED_LEASE: 2,
    Problem.DOUBTFUL_LEASE: 2,
    Problem.STRAY_LEASE: 2,
    Problem.OVERDUE_LEASE: 2,
    Problem.KEPT_FOR_NOBODY: 2,
    Problem.UNREADABLE_LEASE: 2,
    Problem.MISSING_LEASE: 4,
    Problem.MISSING_ALLOCATION: 4,
    Problem.MALFORMED_ALLOCATION: 4,
    Problem.WRONG_UUID: 4,
    Problem.WRONG_LEASE_UUID: 4,
    Problem.WRONG_CONTAINER_VALUE: 4,
    Problem.GONE_GPU: 4,
    Problem.STALE_NUMBERS: 4,
    Problem.WRONG_PRINTED_VALUE: 4,
    Problem.WRONG_HOLDER_NAME: 6,
}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One broken promise. `subject` is the object, `detail` the values that disagree: the evidence.

    `pod`, `lease` and `node` name the objects that a repair would touch; they do not tell findings apart.
    """

    promise: int
    problem: Problem
    subject: str
    detail: str
    pod: Holder | None = field(default=None, compare=False)
    lease: str = field(default="", compare=False)
    node: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"promise {self.promise}: {self.problem}: {self.subject}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Printed:
    """What a container printed of its variables, as lists of entries; None where the variable was not read."""

    pod_uid: str
    container: str
    cuda: tuple[str, ...] | None = None
    nvidia: tuple[str, ...] | None = None


@dataclass(slots=True)
class _AuditIndex:
    """Everything indexed once."""

    pods: dict[str, Pod]
    allocations: dict[str, Allocation] = field(default_factory=dict)
    leases: dict[str, LeaseRecord] = field(default_factory=dict)
    in_doubt: set[str] = field(default_factory=set)
    reports: dict[str, GpuNodeStatusReport] = field(default_factory=dict)
    reservations: frozenset[str] | None = None


def audit(
    pods_seen: Iterable[Pod],
    leases: Iterable[Lease],
    reports: Iterable[GpuNodeStatus],
    printed: Iterable[Printed] = (),
    *,
    now: str = "",
    reservations: Iterable[GpuReservation] | None = None,
) -> tuple[Finding, ...]:
    """Return every finding, by promise, problem and object; empty when all promises hold.

    `leases` may hold Leases of other kinds; only those of GPUs are read. `now`: a UTC time past whose reservations the
    controllers should have taken back; without it none is overdue. Without `reservations` their Leases are not checked.
    """
    books = _AuditIndex({pod.metadata.uid: pod for pod in pods_seen})
    if reservations is not None:
        books.reservations = frozenset(one.metadata.uid for one in reservations if may_hold(one))
    statuses = tuple(reports)
    books.reports = {status.metadata.name: status.status for status in statuses if status.status is not None}
    findings = [*_read_pods(books), *_read_leases(books, leases)]
    findings += [*_double_uses(books), *_lease_holders(books, now), *_missing_leases(books)]
    findings += [*_reported_uuids(books), *_container_values(books), *_stale_numbers(books), *_processes(books)]
    findings += _gone_gpus(books, {status.metadata.name: status for status in statuses})
    findings += [finding for value in printed for finding in _printed_value(books, value)]
    return tuple(sorted(set(findings)))


def _finding(
    problem: Problem, subject: str, detail: str, *, pod: Holder | None = None, lease: str = "", node: str = ""
) -> Finding:
    return Finding(PROMISES[problem], problem, subject, detail, pod, lease, node)


def _name(pod: Pod) -> str:
    return f"pod {pod.metadata.namespace}/{pod.metadata.name} ({pod.metadata.uid})"


def _read_pods(books: _AuditIndex) -> Iterator[Finding]:
    for uid, pod in books.pods.items():
        if not pod.spec.node_name or pods.is_terminal(pod):
            continue
        try:
            allocation = bound_allocation(pod)
        except MalformedValue as error:
            yield _finding(Problem.MALFORMED_ALLOCATION, _name(pod), str(error))
            continue
        if allocation is not None:
            books.allocations[uid] = allocation
        elif _must_have_gpus(pod):
            yield _finding(Problem.MISSING_ALLOCATION, _name(pod), f"bound to {pod.spec.node_name}")


def _must_have_gpus(pod: Pod) -> bool:
    return bool(pods.device_counts(pod) or pods.claim_name(pod)) or names.ALLOCATED in pod.metadata.annotations


def _read_leases(books: _AuditIndex, leases: Iterable[Lease]) -> Iterator[Finding]:
    for lease in leases:
        if not may_be_gpu_lease(lease):
            continue
        try:
            record = parse_lease(lease)
        except MalformedValue as error:
            yield _finding(Problem.UNREADABLE_LEASE, f"Lease {lease.metadata.name}", str(error))
            continue
        books.leases[record.lease_name] = record
        if names.LEASE_IN_DOUBT in lease.metadata.annotations:
            books.in_doubt.add(record.lease_name)


def _double_uses(books: _AuditIndex) -> Iterator[Finding]:
    users: dict[tuple[str, str], set[str]] = {}
    for uid, allocation in books.allocations.items():
        for device_id, uuid in zip(allocation.device_ids, allocation.uuids, strict=True):
            users.setdefault((allocation.node, f"id {device_id}"), set()).add(uid)
            users.setdefault(("", uuid), set()).add(uid)
    for (node, device), uids in users.items():
        if len(uids) > 1:
            detail = ", ".join(sorted(_name(books.pods[uid]) for uid in uids))
            yield _finding(Problem.DOUBLE_USE, f"GPU {device} {node}".rstrip(), detail)


def _lease_holders(books: _AuditIndex, now: str) -> Iterator[Finding]:
    for record in books.leases.values():
        subject = f"Lease {record.lease_name}"
        pod = books.pods.get(record.holder.uid)
        state = lease_state(record, pod, NEVER)
        if state is LeaseState.KEPT and books.reservations is not None:
            if record.holder.uid not in books.reservations:
                yield _finding(Problem.KEPT_FOR_NOBODY, subject, f"GpuReservation {record.holder.name}")
        elif state is LeaseState.DEPARTED:
            problem = Problem.DOUBTFUL_LEASE if record.lease_name in books.in_doubt else Problem.LEAKED_LEASE
            yield _finding(problem, subject, f"holder {record.holder}", lease=record.lease_name, node=record.node)
        elif state is LeaseState.STRAY:
            evidence = f"holder {record.holder}"
            yield _finding(Problem.STRAY_LEASE, subject, evidence, pod=record.holder, lease=record.lease_name)
        elif now and lease_state(record, pod, now) is LeaseState.OVERDUE:
            evidence = f"holder {record.holder} waits, reserved until {record.deadline or 'no time'}"
            yield _finding(Problem.OVERDUE_LEASE, subject, evidence, lease=record.lease_name, node=record.node)
        if pod is not None and (pod.metadata.namespace, pod.metadata.name) != (
            record.holder.namespace,
            record.holder.name,
        ):
            yield _finding(Problem.WRONG_HOLDER_NAME, subject, f"holder {record.holder}, but that is {_name(pod)}")


def _missing_leases(books: _AuditIndex) -> Iterator[Finding]:
    for uid, allocation in books.allocations.items():
        for device_id, uuid in zip(allocation.device_ids, allocation.uuids, strict=True):
            name = lease_name(allocation.node, device_id)
            record = books.leases.get(name)
            subject = _name(books.pods[uid])
            if record is None:
                holder = pods.holder_of(books.pods[uid])
                yield _finding(Problem.MISSING_LEASE, subject, name, pod=holder, lease=name, node=allocation.node)
            elif record.holder.uid != uid:
                yield _finding(Problem.FOREIGN_LEASE, subject, f"{name} is held by {record.holder}")
            elif record.device_uuid != uuid:
                yield _finding(Problem.WRONG_LEASE_UUID, subject, f"{name} says {record.device_uuid}, the pod {uuid}")


def _reported_uuids(books: _AuditIndex) -> Iterator[Finding]:
    for uid, allocation in books.allocations.items():
        report = books.reports.get(allocation.node)
        if report is None:
            continue
        by_id = {device.id: device.uuid for device in report.devices}
        for device_id, uuid in zip(allocation.device_ids, allocation.uuids, strict=True):
            if by_id.get(device_id, uuid) != uuid:
                detail = f"id {device_id} is {by_id[device_id]} on {allocation.node}, the pod was given {uuid}"
                yield _finding(Problem.WRONG_UUID, _name(books.pods[uid]), detail)


def _gone_gpus(books: _AuditIndex, statuses: Mapping[str, GpuNodeStatus]) -> Iterator[Finding]:
    for uid, allocation in books.allocations.items():
        pod = books.pods[uid]
        for uuid in gone_gpus(pod, statuses.get(allocation.node)):
            detail = f"{allocation.node} no longer has {uuid}"
            yield _finding(Problem.GONE_GPU, _name(pod), detail, pod=pods.holder_of(pod), node=allocation.node)


def _container_values(books: _AuditIndex) -> Iterator[Finding]:
    for uid, allocation in books.allocations.items():
        pod = books.pods[uid]
        given: set[str] = set()
        for container in pods.all_container_names(pod):
            uuids = _entries(pod.metadata.annotations.get(names.CONTAINER_UUIDS_PREFIX + container, ""))
            told = _entries(pod.metadata.annotations.get(names.CONTAINER_DEVICES_PREFIX + container, ""))
            given |= set(uuids)
            if told != uuids and not (len(told) == len(uuids) and all(map(_is_number, told))):
                detail = f"container {container} computes on {','.join(told) or 'none'}, its GPUs are {','.join(uuids)}"
                yield _finding(Problem.WRONG_CONTAINER_VALUE, _name(pod), detail)
        if given != set(allocation.uuids):
            detail = (
                f"containers have {','.join(sorted(given)) or 'none'}, the pod {','.join(sorted(allocation.uuids))}"
            )
            yield _finding(Problem.WRONG_CONTAINER_VALUE, _name(pod), detail)


def _stale_numbers(books: _AuditIndex) -> Iterator[Finding]:
    for uid, allocation in books.allocations.items():
        report = books.reports.get(allocation.node)
        for stale in stale_containers(books.pods[uid], report.devices if report is not None else ()):
            pod = books.pods[uid]
            detail = f"on {allocation.node}: {stale}"
            yield _finding(Problem.STALE_NUMBERS, _name(pod), detail, pod=pods.holder_of(pod), node=allocation.node)


def _processes(books: _AuditIndex) -> Iterator[Finding]:
    leased: dict[str, set[str]] = {}
    for record in books.leases.values():
        leased.setdefault(record.holder.uid, set()).add(record.device_uuid)
    for node, report in books.reports.items():
        ours = {device.uuid for device in report.devices}
        for entry in report.pods:
            allocation = books.allocations.get(entry.uid)
            foreign = set(entry.uuids) & ours - set(allocation.uuids if allocation is not None else ())
            pod = books.pods.get(entry.uid)
            if pod is None:
                foreign -= leased.get(entry.uid, set())
            if foreign and (pod is None or not pods.is_terminal(pod)):
                detail = f"on {node}: {', '.join(sorted(foreign))}"
                subject = _name(pod) if pod is not None else f"unknown pod ({entry.uid})"
                holder = pods.holder_of(pod) if pod is not None else None
                yield _finding(Problem.FOREIGN_PROCESS, subject, detail, pod=holder, node=node)
        for use in report.host_uses:
            pids = ", ".join(map(str, use.pids)) or "unknown"
            yield _finding(Problem.FOREIGN_HOST, f"GPU {use.uuid} {node}", f"{use.count} processes: {pids}", node=node)


def _printed_value(books: _AuditIndex, value: Printed) -> Iterator[Finding]:
    pod = books.pods.get(value.pod_uid)
    if pod is None:
        return
    annotations = pod.metadata.annotations
    seen = ((names.CONTAINER_DEVICES_PREFIX, value.cuda), (names.CONTAINER_UUIDS_PREFIX, value.nvidia))
    for prefix, entries in seen:
        expected = _entries(annotations.get(prefix + value.container, ""))
        if entries is not None and entries != expected:
            detail = f"container {value.container} printed {','.join(entries)}, expected {','.join(expected)}"
            yield _finding(Problem.WRONG_PRINTED_VALUE, _name(pod), detail)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _entries(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)
