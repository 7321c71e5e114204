"""Harness for the page: the real application, and a mirror whose objects a test sets."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from atoll.cluster.ledger import Ledger
from atoll.explain.snapshot import ClusterSnapshot
from atoll.kube.authorization import PathAuthorizer
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.clock import Clock
from atoll.kube.mirror import ClusterMirror, WatchedKind
from controllers.page.app import PageParts, build_page
from controllers.page.authorization import PageAuthorizer
from controllers.page.refresher import OverviewRefresher

LISTS = {
    "nodes": "nodes",
    "pods": "pods",
    "claims": "claims",
    "node_statuses": "reports",
    "leases": "leases",
    "heartbeats": "heartbeats",
    "gangs": "gangs",
    "topologies": "topologies",
    "reservations": "reservations",
    "volumes": "volumes",
    "volume_claims": "volume_claims",
    "storage_classes": "storage_classes",
    "csi_nodes": "csi_nodes",
    "csi_drivers": "csi_drivers",
    "capacities": "storage_capacities",
    "namespaces": "namespaces",
}


@dataclass
class SnapshotMirror:
    """A mirror with the lists of a snapshot; it notifies listeners of changes."""

    snapshot: ClusterSnapshot
    reason: str = ""
    listeners: list[Callable[[WatchedKind, Change[Any]], None]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)

    def __getattr__(self, name: str) -> Any:
        if name not in LISTS:
            raise AttributeError(name)
        return SimpleNamespace(store=dict(enumerate(getattr(self.snapshot, LISTS[name]) or ())))

    def unready_reason(self) -> str:
        return self.reason

    def on_change(self, listener: Callable[[WatchedKind, Change[Any]], None]) -> None:
        self.listeners.append(listener)

    def become(self, snapshot: ClusterSnapshot) -> None:
        """Replace the objects and notify the listeners."""
        self.snapshot = snapshot
        for listener in self.listeners:
            listener(WatchedKind.POD, Change(ChangeKind.MODIFIED, snapshot.pods[0]))


@dataclass
class Page:
    """A served page."""

    client: TestClient[Any, Any]
    mirror: SnapshotMirror
    refresher: OverviewRefresher

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.client.port}{path}"


@asynccontextmanager
async def served(
    snapshot: ClusterSnapshot,
    clock: Clock,
    *,
    authorizer: PathAuthorizer | None = None,
    watchers_max: int = 3,
    port: int = 0,
) -> AsyncIterator[Page]:
    """Serve the page for a cluster."""
    mirror = SnapshotMirror(snapshot)
    refresher = OverviewRefresher(cast("ClusterMirror", mirror), clock)
    app = build_page(PageParts(refresher, PageAuthorizer(authorizer, clock.monotonic_seconds), clock, watchers_max))
    async with TestClient(TestServer(app)) as client:
        yield Page(client, mirror, refresher)
    refresher.close()


async def next_event(response: ClientResponse) -> tuple[str, Any]:
    """Return the next event of a stream: its kind, and its data, decoded if it is JSON."""
    kind, data = "", ""
    while line := (await response.content.readline()).decode().rstrip("\n"):
        key, _, value = line.partition(": ")
        kind, data = (value, data) if key == "event" else (kind, value) if key == "data" else (kind, data)
    return kind, json.loads(data) if data.startswith("{") else data
