"""Holds the GPUs of whole nodes without kube-scheduler and extender, by the same writes as a bind, in the same order.

For each of the waiting pods, one per node, it writes a Lease per GPU and a Binding with the allocation, under the
scheduler's account and the shipped policies, so that every part accepts them. It is for machines that are too slow to
bind thousands of pods in a run: later measurements do not depend on the writer.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.api.times import format_microtime
from atoll.cluster import pods
from atoll.cluster.allocations import Allocation, ContainerDevices, allocation_annotations
from atoll.cluster.leases import Reservation, lease_body
from atoll.cluster.objects import decode_pod
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.service.clock import SystemClock

SCHEDULER = f"system:serviceaccount:{names.SYSTEM_NAMESPACE}:atoll-scheduler"
AT_ONCE = 16
ANSWER_SECONDS = 60.0


def plant(kubeconfig: Path, namespace: str, planted: Sequence[str]) -> None:
    """Give each pod all GPUs of its own node, in order of the nodes' names. Raises KubeError."""
    asyncio.run(_plant(kubeconfig, namespace, planted))


async def _plant(kubeconfig: Path, namespace: str, planted: Sequence[str]) -> None:
    limit = asyncio.Semaphore(AT_ONCE)
    connect = ApiClient.connect(kubeconfig, requests_per_second=1000, burst=1000, impersonate=SCHEDULER)
    async with await connect as client:
        reports = (await client.list(paths.gpunodestatuses(), GpuNodeStatus.model_validate_json)).items

        async def one(name: str, report: GpuNodeStatus) -> None:
            async with limit:
                await _bind(client, namespace, name, report)

        ordered = sorted(reports, key=lambda report: report.metadata.name)
        await asyncio.gather(*(one(name, report) for name, report in zip(planted, ordered, strict=True)))


async def _bind(client: ApiClient, namespace: str, name: str, report: GpuNodeStatus) -> None:
    assert report.status is not None
    node, devices = report.metadata.name, report.status.devices
    pod = decode_pod(await client.get(paths.pods(namespace, name), timeout_seconds=ANSWER_SECONDS))
    now = format_microtime(SystemClock().now())
    holder, claim = pods.holder_of(pod), pods.claim_name(pod)
    reservation = Reservation(node, report.status.node_uid, holder, claim, "planted", now, now)
    for device in devices:
        body = lease_body(reservation, device.id, device.uuid)
        await client.create(paths.leases(names.SYSTEM_NAMESPACE), body, timeout_seconds=ANSWER_SECONDS)
    allocation = Allocation(node, tuple(device.id for device in devices), tuple(device.uuid for device in devices))
    uuids = ",".join(allocation.uuids)
    values = tuple(ContainerDevices(one, uuids, uuids) for one in pods.all_container_names(pod))
    metadata: dict[str, Any] = {"name": name, "uid": pod.metadata.uid}
    metadata["annotations"] = allocation_annotations(allocation, values)
    binding = {"metadata": metadata, "target": {"kind": "Node", "name": node}}
    await client.create(paths.binding(namespace, name), binding, timeout_seconds=ANSWER_SECONDS)
