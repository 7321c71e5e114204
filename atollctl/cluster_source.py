"""Reads a ClusterSnapshot from a live API server or a saved file.

Read-only. The lists run concurrently, so that they differ by a moment at most.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.api.node_status import GpuNodeStatus
from atoll.api.reservations import GpuReservation
from atoll.api.times import text_of
from atoll.api.topologies import Topology
from atoll.cluster.budgets import decode_budget
from atoll.cluster.errors import MalformedValue
from atoll.cluster.leases import may_be_gpu_lease
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import (
    decode_heartbeat,
    decode_lease,
    decode_node,
    decode_pod,
    decode_priority_class,
    decode_volume,
    decode_volume_claim,
)
from atoll.cluster.reports import as_stored
from atoll.cluster.request_history import recall
from atoll.explain.codec import BYTES_MAX, SnapshotMistake, decode_snapshot
from atoll.explain.history import RecordedEvent, decode_event
from atoll.explain.snapshot import ClusterSnapshot
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.credentials import default_namespace
from atoll.kube.errors import Forbidden, KubeError
from atollctl.audit_repair import ExtenderAddress, read_past_asks
from atollctl.sentences import sentence

T = TypeVar("T")

STATUS_WAITS = 1
STATUS_UNREACHABLE = 2

Namespace = Annotated[
    str, typer.Option("-n", "--namespace", help="Namespace; the context's by default, as with kubectl.")
]
SnapshotFile = Annotated[
    Path | None, typer.Option("--snapshot", help="Use this file from `atoll snapshot` instead of a cluster.")
]


def read_cluster(
    kubeconfig: Path | None, context: str | None, *, snapshot: Path | None = None, purpose: str
) -> ClusterSnapshot:
    """Return the file's snapshot, or the cluster's current one. Ends the command with one sentence on failure."""
    try:
        return read_file(snapshot) if snapshot is not None else asyncio.run(read_live(kubeconfig, context))
    except (KubeError, OSError, SnapshotMistake) as error:
        typer.echo(f"cannot {purpose}: {sentence(error)}", err=True)
        raise typer.Exit(STATUS_UNREACHABLE) from error


def namespace_of(given: str, kubeconfig: Path | None, context: str | None, snapshot: Path | None) -> str:
    """Return the namespace to use; call it after `read_cluster`, which reports a broken kubeconfig."""
    if given or snapshot is not None:
        return given or "default"
    return default_namespace(kubeconfig, context)


def read_file(path: Path) -> ClusterSnapshot:
    """Return a saved snapshot. Raises OSError and SnapshotMistake."""
    with path.open("rb") as file:
        return decode_snapshot(file.read(BYTES_MAX + 1))


async def read_live(kubeconfig: Path | None, context: str | None) -> ClusterSnapshot:
    """List all objects that decisions depend on. Raises the first KubeError, and OSError if nothing answers."""
    try:
        return await _read_live(kubeconfig, context)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors


TOKEN_VARIABLE = "ATOLL_EXTENDER_TOKEN"  # noqa: S105 - the name of a variable

Extender = Annotated[
    str,
    typer.Option("--extender", help=f"Address of an extender whose past requests count; token in ${TOKEN_VARIABLE}."),
]
ExtenderAuthority = Annotated[Path | None, typer.Option("--extender-ca", help="CA of that extender's certificate.")]


def with_past_asks(found: ClusterSnapshot, extender: str, authority: Path | None, *, purpose: str) -> ClusterSnapshot:
    """Return the snapshot with an extender's past requests; unchanged if no extender is named."""
    if not extender:
        return found
    try:
        address = ExtenderAddress(extender, os.environ.get(TOKEN_VARIABLE, ""), authority)
        past = asyncio.run(read_past_asks(address))
        recall(Ledger(), past)
        return replace(found, past_asks=past)
    except (OSError, MalformedValue) as error:
        typer.echo(f"cannot {purpose}: {error}", err=True)
        raise typer.Exit(STATUS_UNREACHABLE) from error


async def read_events(kubeconfig: Path | None, context: str | None) -> tuple[RecordedEvent, ...]:
    """List the events that the API server still has. Raises KubeError and OSError."""
    async with await ApiClient.connect(kubeconfig, context, user_agent="atoll") as client:
        return tuple((await client.list(paths.events(), decode_event)).items)


async def _read_live(kubeconfig: Path | None, context: str | None) -> ClusterSnapshot:
    async with (
        await ApiClient.connect(kubeconfig, context, user_agent="atoll") as client,
        asyncio.TaskGroup() as group,
    ):
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
        priorities = group.create_task(client.list(paths.priorityclasses(), decode_priority_class))
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
        volumes=volumes.result(),
        volume_claims=claims_of_volumes.result(),
    )


async def _listed_if_allowed(client: ApiClient, path: str, decode: Callable[[bytes], T]) -> tuple[T, ...]:
    """List an optional collection; empty if the user may not read it."""
    try:
        return tuple((await client.list(path, decode)).items)
    except Forbidden:
        return ()
