"""Reads a ClusterSnapshot from an API server. The lists run concurrently, so that they differ by a moment at most."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.api.node_status import GpuNodeStatus
from atoll.api.reservations import GpuReservation
from atoll.api.times import text_of
from atoll.api.topologies import Topology
from atoll.cluster.budgets import decode_budget
from atoll.cluster.csi import decode_csi_driver, decode_csi_node, decode_storage_capacity, decode_storage_class
from atoll.cluster.leases import may_be_gpu_lease
from atoll.cluster.objects import (
    decode_heartbeat,
    decode_lease,
    decode_namespace,
    decode_node,
    decode_pod,
    decode_priority_class,
)
from atoll.cluster.reports import as_stored
from atoll.cluster.storage import decode_volume, decode_volume_claim
from atoll.explain.snapshot import ClusterSnapshot
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import Forbidden

T = TypeVar("T")


async def read_snapshot(client: ApiClient) -> ClusterSnapshot:
    """List all objects that decisions depend on. Raises an ExceptionGroup of KubeError, OSError and MsgspecError."""
    async with asyncio.TaskGroup() as group:
        nodes = group.create_task(client.list(paths.nodes(), decode_node))
        pods = group.create_task(client.list(paths.pods(), decode_pod))
        leases = group.create_task(client.list(paths.leases(names.SYSTEM_NAMESPACE), decode_lease))
        heartbeats = group.create_task(client.list(paths.leases(names.HEARTBEAT_NAMESPACE), decode_heartbeat))
        claims = group.create_task(client.list(paths.gpuclaims(), GpuClaim.model_validate_json))
        reports = group.create_task(client.list(paths.gpunodestatuses(), GpuNodeStatus.model_validate_json))
        gangs = group.create_task(client.list(paths.gpugangs(), GpuGang.model_validate_json))
        topologies = group.create_task(client.list(paths.topologies(), Topology.model_validate_json))
        reservations = group.create_task(client.list(paths.gpureservations(), GpuReservation.model_validate_json))
        budgets = group.create_task(client.list(paths.poddisruptionbudgets(), decode_budget))
        volumes = group.create_task(_listed_if_allowed(client, paths.persistentvolumes(), decode_volume))
        claims_of_volumes = group.create_task(
            _listed_if_allowed(client, paths.persistentvolumeclaims(), decode_volume_claim)
        )
        classes = group.create_task(_listed_if_allowed(client, paths.storageclasses(), decode_storage_class))
        csi_nodes = group.create_task(_listed_if_allowed(client, paths.csinodes(), decode_csi_node))
        csi_drivers = group.create_task(_listed_if_allowed(client, paths.csidrivers(), decode_csi_driver))
        capacities = group.create_task(
            _listed_if_allowed(client, paths.csistoragecapacities(), decode_storage_capacity)
        )
        namespaces = group.create_task(_listed_if_allowed(client, paths.namespaces(), decode_namespace))
        priorities = group.create_task(client.list(paths.priorityclasses(), decode_priority_class))
    asked = {
        paths.persistentvolumes(): volumes.result(),
        paths.persistentvolumeclaims(): claims_of_volumes.result(),
        paths.storageclasses(): classes.result(),
        paths.csinodes(): csi_nodes.result(),
        paths.csidrivers(): csi_drivers.result(),
        paths.csistoragecapacities(): capacities.result(),
        paths.namespaces(): namespaces.result(),
    }
    now = client.server_seconds() or datetime.now(UTC).timestamp()
    return ClusterSnapshot(
        taken_at=text_of(now),
        nodes=tuple(nodes.result().items),
        pods=tuple(pods.result().items),
        claims=tuple(claims.result().items),
        reports=tuple(reports.result().items),
        leases=tuple(lease for lease in leases.result().items if may_be_gpu_lease(lease)),
        heartbeats=tuple(map(as_stored, heartbeats.result().items)),
        gangs=tuple(gangs.result().items),
        topologies=tuple(topologies.result().items),
        reservations=tuple(reservations.result().items),
        budgets=tuple(budgets.result().items),
        priority_classes=tuple(priorities.result().items),
        volumes=volumes.result() or (),
        volume_claims=claims_of_volumes.result() or (),
        storage_classes=classes.result(),
        csi_nodes=csi_nodes.result() or (),
        csi_drivers=csi_drivers.result() or (),
        storage_capacities=capacities.result() or (),
        namespaces=namespaces.result() or (),
        unread=tuple(path.rpartition("/")[2] for path, found in asked.items() if found is None),
    )


async def _listed_if_allowed(client: ApiClient, path: str, decode: Callable[[bytes], T]) -> tuple[T, ...] | None:
    """List an optional collection; None if the user may not."""
    try:
        return tuple((await client.list(path, decode)).items)
    except Forbidden:
        return None
