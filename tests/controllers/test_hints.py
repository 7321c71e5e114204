"""The controllers send pods to the nodes that the extender named for them, and take the names back.

Real client and mirror, the API server in memory.
"""

from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from atoll.cluster.hints import refusal
from tests.controllers.harness import PODS, ControllerHarness, InMemoryServer, running_controllers
from tests.controllers.test_reconcilers import put_pod


def set_aside(server: InMemoryServer, name: str, node: str, gpus: int = 1, **options: Any) -> None:
    """Put a pod on the server that kube-scheduler refused, because the extender named this node."""
    message = f"0/200 nodes are available: 200 {refusal(node)}."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    put_pod(server, name, gpus=gpus, status={"conditions": [condition]}, **options)


def nominated(running: ControllerHarness, name: str) -> str:
    """Return the node that is named for a pod."""
    return str(running.server.objects[f"{PODS}/{name}"]["status"].get("nominatedNodeName") or "")


async def test_pod_is_sent_where_the_extender_named_a_node(tmp_path: Path) -> None:
    """At once, in one write, by rank, to no GPU twice, whatever the number of nodes; the name is ours to withdraw."""

    def setup(server: InMemoryServer) -> None:
        set_aside(server, "first", "n1", gpus=5, priority=1)
        set_aside(server, "second", "n1", gpus=5)
        set_aside(server, "astray", "gone")

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: nominated(running, "first") == "n1")
        annotations = running.server.objects[f"{PODS}/first"]["metadata"]["annotations"]
        assert annotations[names.WOKEN].endswith("@n1")
        assert not nominated(running, "second")
        assert not nominated(running, "astray")
        assert ("PATCH", f"{PODS}/first/status") in running.api.writes


async def test_name_that_led_to_no_bind_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain pod may need that node; what the extender says again comes to nothing for a while."""
    monkeypatch.setattr("controllers.requeue.NOMINATION_SECONDS", 3.0)

    async with running_controllers(tmp_path, lambda server: set_aside(server, "p", "n1")) as running:
        await running.settled(lambda: nominated(running, "p") == "n1")
        await running.settled(lambda: not nominated(running, "p"))


async def test_nobody_is_named_a_node_where_hints_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod is woken all the same."""
    monkeypatch.setattr("atoll.cluster.wakeups.NOMINATION_NODES_MIN", 1)

    async with running_controllers(
        tmp_path, lambda server: set_aside(server, "p", "n1"), settings={"node_hints": False}
    ) as running:
        await running.settled(lambda: names.WOKEN in running.server.objects[f"{PODS}/p"]["metadata"]["annotations"])
        assert not nominated(running, "p")
