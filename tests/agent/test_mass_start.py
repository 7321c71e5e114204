"""Hundreds of agents that start together, against a real API server."""

import asyncio
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from agent.evidence import KubeletReading
from agent.node_agent import Intervals, NodeAgent
from agent.observation import MachineObserver
from agent.simulated import SimulatedBackend, play
from atoll.api import names
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.credentials import Credentials
from atoll.kube.errors import NotFound
from atoll.service.clock import SystemClock
from topology.profiles import profile

pytestmark = pytest.mark.e2e

AGENTS = int(os.environ.get("ATOLL_AGENTS", "100"))
"""All of them run in this process, whose handshakes are what a busy machine of two cores is short of, not the API
server's answers: the time to wait grows with their number."""
SPREAD_SECONDS = 60.0
WAIT_SECONDS = 180.0 + 2.0 * AGENTS
WRITES_MAX = 5
"""The object, its report, the heartbeat's patch that finds nothing, the heartbeat, the Node's capacity."""


class SilentKubelet:
    """A kubelet that does not answer: nothing is owed then, and each agent writes what a start takes."""

    async def read(self) -> KubeletReading | None:
        return None


class Counted(ApiClient):
    """A client that notes its writes: (method, when)."""

    writes: list[tuple[str, float]]

    async def request(self, method: str, path: str, **options: Any) -> bytes:
        if method != "GET":
            self.writes.append((method, time.monotonic()))
        return await super().request(method, path, **options)


async def start(node: str, credentials: Credentials, folder: Path, writes: list[tuple[str, float]]) -> None:
    """Run one agent until it is cancelled, with a client of its own, as a DaemonSet's pod has it."""
    async with Counted(credentials, user_agent="atoll-agent", requests_per_second=10, burst=50) as client:
        client.writes = writes
        agent = NodeAgent(
            node,
            client=client,
            observer=MachineObserver(
                SimulatedBackend(play(profile("t4-4"), seed=node)), cgroup_mount=folder, timeout_seconds=60
            ),
            kubelet=SilentKubelet(),
            intervals=Intervals(600.0, 600.0, heartbeat_seconds=600.0, start_spread_seconds=SPREAD_SECONDS),
            agent_version="1",
            clock=SystemClock(),
            rng=random.Random(node),
        )
        async with asyncio.TaskGroup() as group:
            for work in (
                agent.follow_pods(),
                agent.follow_node(),
                agent.follow_report(),
                agent.keep_observing(),
                agent.keep_heartbeat(),
                agent.keep_capacity(),
            ):
                group.create_task(work)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_agents_that_start_together_spread_their_writes(control_plane: Path, tmp_path: Path) -> None:
    """Every report, heartbeat and capacity arrives; an agent writes a handful of times and then rests; and the writes
    are spread: no tenth of the time sees a third of them."""
    nodes = [f"mass-{number:03}" for number in range(AGENTS)]
    writes: dict[str, list[tuple[str, float]]] = {node: [] for node in nodes}
    async with await ApiClient.connect(control_plane, requests_per_second=500, burst=500) as admin:
        for node in nodes:
            await admin.create(paths.nodes(), {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
        credentials = await Credentials.load(control_plane)
        began, cpu = time.monotonic(), time.process_time()
        agents = [asyncio.ensure_future(start(node, credentials, tmp_path, writes[node])) for node in nodes]
        try:
            await all_told(admin, set(nodes))
        finally:
            for agent in agents:
                agent.cancel()
            ended = await asyncio.gather(*agents, return_exceptions=True)
            for path in (path for node in nodes for path in traces(node)):
                with suppress(NotFound):
                    await admin.delete(path)

    firsts = sorted(min(when for _, when in told) - began for told in writes.values())
    tenths = Counter(int(10 * first / SPREAD_SECONDS) for first in firsts)
    print(f"{time.process_time() - cpu:.1f} s of CPU in this process")
    print(f"first writes by tenths of {SPREAD_SECONDS:g} s: {sorted(tenths.items())}, last at {firsts[-1]:.1f} s")
    assert [one for one in ended if not isinstance(one, asyncio.CancelledError)] == []
    assert {node: len(told) for node, told in writes.items() if len(told) > WRITES_MAX} == {}
    assert max(tenths.values()) < AGENTS / 3


def traces(node: str) -> tuple[str, ...]:
    """What a node and its agent leave."""
    return paths.nodes(node), paths.gpunodestatuses(node), paths.leases(names.HEARTBEAT_NAMESPACE, node)


async def all_told(admin: ApiClient, nodes: set[str]) -> None:
    """Wait until every node has its report, heartbeat and capacity."""
    deadline = time.monotonic() + WAIT_SECONDS
    while missing := nodes - await told(admin):
        assert time.monotonic() < deadline, f"{len(missing)} nodes are not told, {min(missing)} among them"
        await asyncio.sleep(2.0)


async def told(admin: ApiClient) -> set[str]:
    """Nodes that have it all."""
    wanted = (paths.gpunodestatuses(), paths.leases(names.HEARTBEAT_NAMESPACE), paths.nodes())
    reports, beats, nodes = [orjson.loads(await admin.get(one, timeout_seconds=60))["items"] for one in wanted]
    offering = {one["metadata"]["name"] for one in nodes if names.GPU_RESOURCE in one["status"].get("capacity", {})}
    reported = {one["metadata"]["name"] for one in reports if one.get("status", {}).get("deviceCount") == 4}
    return offering & reported & {one["metadata"]["name"] for one in beats}
