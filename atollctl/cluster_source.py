"""Reads a ClusterSnapshot from a live API server or a saved file.

Read-only. The lists run concurrently, so that they differ by a moment at most.
"""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from atoll.cluster.errors import MalformedValue
from atoll.cluster.ledger import Ledger
from atoll.cluster.request_history import recall
from atoll.explain.codec import BYTES_MAX, SnapshotMistake, decode_snapshot
from atoll.explain.history import RecordedEvent, decode_event
from atoll.explain.snapshot import ClusterSnapshot
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.credentials import default_namespace
from atoll.kube.errors import KubeError
from atoll.kube.snapshots import read_snapshot
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
        async with await ApiClient.connect(kubeconfig, context, user_agent="atoll") as client:
            return await read_snapshot(client)
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
