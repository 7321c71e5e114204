"""Rows of the demo's tables.

Pure: computes frozen rows from pods, Leases, reports and containers' output. Promised GPUs come from the pod's
annotations, visible ones from the container's output; both become device ids through the agent's report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from atoll.api import names
from atoll.api.node_status import Device, GpuNodeStatus
from atoll.cluster.allocations import Allocation, bound_allocation
from atoll.cluster.consistency import Printed
from atoll.cluster.leases import LeaseRecord, parse_lease
from atoll.cluster.objects import Lease, Pod
from atoll.cluster.release import Proof

UNKNOWN_DEVICE = "?"
_VARIABLE = re.compile(r"\b(CUDA|NVIDIA)(?:_VISIBLE_DEVICES)?=(\S*)")


@dataclass(frozen=True, slots=True)
class DemoSnapshot:
    """Pods, Leases and reports, listed one after another."""

    pods: tuple[Pod, ...]
    leases: tuple[Lease, ...]
    reports: tuple[GpuNodeStatus, ...]

    @property
    def records(self) -> tuple[LeaseRecord, ...]:
        """Parse the GPU Leases. Raises MalformedValue for an unreadable one."""
        kinds = ((lease, lease.metadata.labels.get(names.LEASE_KIND_LABEL)) for lease in self.leases)
        return tuple(parse_lease(lease) for lease, kind in kinds if kind == names.LEASE_KIND_GPU)

    def pod(self, name: str) -> Pod | None:
        """Return the pod of that name."""
        return next((pod for pod in self.pods if pod.metadata.name == name), None)

    def held_by(self, uid: str) -> tuple[LeaseRecord, ...]:
        """Return the Leases of one pod."""
        return tuple(lease for lease in self.records if lease.holder.uid == uid)


@dataclass(frozen=True, slots=True)
class MachineRow:
    """One node: product, islands as device ids, and the driver's index of each device id in order."""

    node: str
    product: str
    islands: tuple[tuple[str, tuple[int, ...]], ...]
    indices: tuple[int, ...]


class Progress(StrEnum):
    """State of a container; the last two are verdicts."""

    WAITING = "waits"
    STARTING = "starts"
    KEPT = "kept"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class PodRow:
    """One container that was promised GPUs, or one pod that has none yet.

    `promised` and `saw` are device ids; `saw` is None until the container has printed. `indices` are the numbers it
    printed.
    """

    pod: str
    claim: str
    node: str
    promised: tuple[str, ...]
    islands: tuple[str, ...]
    saw: tuple[str, ...] | None
    progress: Progress
    indices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FreeGpus:
    """Free GPUs of one node."""

    node: str
    model: str
    ids: tuple[int, ...]


def parse_printed(log: str, *, pod_uid: str, container: str) -> Printed | None:
    """Parse the last variables that a container printed, such as `CUDA_VISIBLE_DEVICES=...`; None if there are none."""
    values = dict(_VARIABLE.findall(log))
    if "CUDA" not in values:
        return None
    nvidia = values.get("NVIDIA")
    return Printed(pod_uid, container, _entries(values["CUDA"]), None if nvidia is None else _entries(nvidia))


def machine_rows(reports: Iterable[GpuNodeStatus]) -> tuple[MachineRow, ...]:
    """Return one row per reported machine, by node name."""
    return tuple(
        _machine_row(report.metadata.name, report.status.devices)
        for report in sorted(reports, key=lambda report: report.metadata.name)
        if report.status is not None
    )


def _machine_row(node: str, devices: Sequence[Device]) -> MachineRow:
    islands: dict[str, list[int]] = {}
    ordered = sorted(devices, key=lambda device: device.id)
    for device in ordered:
        islands.setdefault(device.island, []).append(device.id)
    products = dict.fromkeys(f"{device.product_name or device.model}" for device in ordered)
    return MachineRow(
        node=node,
        product=f"{len(ordered)} x {', '.join(products)}",
        islands=tuple((name, tuple(ids)) for name, ids in islands.items()),
        indices=tuple(device.index for device in ordered),
    )


def pod_rows(
    pods: Iterable[Pod], reports: Iterable[GpuNodeStatus], printed: Mapping[tuple[str, str], Printed]
) -> tuple[PodRow, ...]:
    """Return rows in the order of the pods; a pod without GPUs has one row. Raises MalformedValue."""
    devices = {report.metadata.name: report.status.devices for report in reports if report.status is not None}
    rows: list[PodRow] = []
    for pod in pods:
        allocation = bound_allocation(pod)
        if allocation is None:
            rows.append(PodRow(pod.metadata.name, _claim(pod), "", (), (), None, Progress.WAITING))
        else:
            present = devices.get(allocation.node, ())
            told = told_containers(pod)
            for container in told:
                value = printed.get((pod.metadata.uid, container))
                if told[container] or value is not None:
                    rows.append(_container_row(pod, container, allocation, present, value))
    return tuple(rows)


def told_containers(pod: Pod) -> dict[str, tuple[str, ...]]:
    """Return the containers of a bound pod and the uuids promised to each, which may be none."""
    prefix = names.CONTAINER_UUIDS_PREFIX
    entries = sorted(pod.metadata.annotations.items())
    return {key.removeprefix(prefix): _entries(value) for key, value in entries if key.startswith(prefix)}


def is_printed(pod: Pod, printed: Mapping[tuple[str, str], Printed]) -> bool:
    """True if the pod was promised GPUs and every container with GPUs has printed what it sees."""
    promised = [container for container, uuids in told_containers(pod).items() if uuids]
    return bool(promised) and all((pod.metadata.uid, container) in printed for container in promised)


def is_of_job(pod: Pod) -> bool:
    """True if a Job owns the pod, so that it ends by itself."""
    return any(owner.kind == "Job" for owner in pod.metadata.owner_references)


def _container_row(
    pod: Pod, container: str, allocation: Allocation, devices: Sequence[Device], printed: Printed | None
) -> PodRow:
    ids = dict(zip(allocation.uuids, allocation.device_ids, strict=True))
    told = told_containers(pod)
    uuids = told[container]
    promised = tuple(str(ids.get(uuid, UNKNOWN_DEVICE)) for uuid in uuids)
    cuda = (printed.cuda or ()) if printed is not None else ()
    isolates = pod.spec.runtime_class_name == names.RUNTIME_CLASS
    saw = None if printed is None else own_ids(cuda, promised, devices) if isolates else device_ids(cuda, devices)
    progress = Progress.STARTING if saw is None else Progress.KEPT if saw == promised else Progress.BROKEN
    return PodRow(
        pod=pod.metadata.name if len(told) == 1 else f"{pod.metadata.name}/{container}",
        claim=_claim(pod),
        node=allocation.node,
        promised=promised,
        islands=tuple(dict.fromkeys(device.island for device in devices if device.uuid in uuids)),
        saw=saw,
        progress=progress,
        indices=tuple(entry for entry in cuda if entry.isdigit()),
    )


def device_ids(entries: Iterable[str], devices: Sequence[Device]) -> tuple[str, ...]:
    """Translate entries of CUDA_VISIBLE_DEVICES (uuids or indices) to device ids; `?` for an unknown one."""
    by_uuid = {device.uuid: str(device.id) for device in devices}
    by_index = {str(device.index): str(device.id) for device in devices}
    return tuple(by_uuid.get(entry) or by_index.get(entry) or UNKNOWN_DEVICE for entry in entries)


def own_ids(entries: Iterable[str], promised: Sequence[str], devices: Sequence[Device]) -> tuple[str, ...]:
    """Translate entries to device ids if the runtime isolates: a container then counts its own devices from 0."""
    numbered = {str(number): device_id for number, device_id in enumerate(promised)}
    by_uuid = {device.uuid: str(device.id) for device in devices}
    return tuple(by_uuid.get(entry) or numbered.get(entry) or UNKNOWN_DEVICE for entry in entries)


def free_gpus(snapshot: DemoSnapshot) -> tuple[FreeGpus, ...]:
    """Return the GPUs without a Lease per node, fewest first; nodes without free GPUs are omitted."""
    held = {lease.device_uuid for lease in snapshot.records}
    rooms = []
    for report in snapshot.reports:
        devices = [d for d in (report.status.devices if report.status else ()) if d.uuid not in held]
        if devices:
            ids = tuple(sorted(device.id for device in devices))
            rooms.append(FreeGpus(report.metadata.name, devices[0].model, ids))
    return tuple(sorted(rooms, key=lambda room: (len(room.ids), room.node)))


def waiting_reason(pod: Pod) -> str:
    """Return why kube-scheduler cannot place the pod, without its part on preemption; empty if it does not say."""
    conditions = (c for c in pod.status.conditions if c.type == "PodScheduled" and c.status == "False")
    return next((condition.message.partition(" preemption:")[0] for condition in conditions), "")


def _claim(pod: Pod) -> str:
    return pod.metadata.annotations.get(names.CLAIM, "(resource only)")


def _entries(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


@dataclass(frozen=True, slots=True)
class ReleaseEvent:
    """Time and proof of the release of a pod's GPUs."""

    time: str
    proof: str

    @property
    def words(self) -> str:
        """Describe the proof."""
        return PROOFS.get(self.proof, self.proof)


PROOFS: Mapping[str, str] = {
    Proof.UNBOUND: "it was never bound",
    Proof.ELSEWHERE: "it was bound elsewhere",
    Proof.ENDED: "kubelet wrote that all its containers have ended",
    Proof.VANISHED: "the agent saw its sandbox before and no longer sees it",
    Proof.UNLISTED: "neither kubelet nor the machine has it, in two reports in a row",
    Proof.REMOVED: "its GPUs were taken out of the machine",
    Proof.DECLARED: "an administrator declared its machine gone for good",
    Proof.REBOOTED: "its machine rebooted",
}


def find_release(lines: Iterable[str], pod_uid: str) -> ReleaseEvent | None:
    """Find the first release of a pod's GPUs in the controllers' log; lines that are not JSON are skipped."""
    for line in lines:
        if pod_uid not in line or not line.startswith("{"):
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry.get("event") == "Released GPUs":
            return ReleaseEvent(str(entry.get("timestamp", "")), str(entry.get("proof", "")))
    return None


def seconds_between(first: str, second: str) -> float:
    """Return the seconds between two UTC times in the format of the API server and our logs. Raises ValueError."""
    return (datetime.fromisoformat(second) - datetime.fromisoformat(first)).total_seconds()


def pod_count(document: Mapping[str, Any]) -> int:
    """Return how many pods a manifest creates at once: 1 for a Pod, a Job's parallelism, a workload's replicas."""
    spec = document.get("spec") or {}
    if document.get("kind") == "Pod":
        return 1
    return int(spec.get("parallelism", spec.get("replicas", 1))) if "template" in spec else 0
