"""The controllers send pods to the nodes that the extender named for them, and take the names back.

Real client and mirror, the API server in memory.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import orjson
import pytest

from atoll.api import names
from atoll.cluster.hints import refusal
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import decode_node, decode_pod
from atoll.kube.errors import Conflict
from atoll.kube.mirror import ClusterMirror
from controllers.context import Context
from controllers.requeue import CONFLICT_SECONDS, EVENT_SECONDS, NOMINATION_SECONDS, RequeueReconciler
from tests.builders import make_report, pod_json
from tests.controllers.harness import PODS, ControllerHarness, InMemoryServer, running_controllers
from tests.controllers.test_reconcilers import put_pod
from tests.fakes.clock import ManualClock


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


def waking(clock: ManualClock, ledger: Ledger) -> tuple[RequeueReconciler, Any, Any]:
    """Return the reconciler that wakes pods, over one machine n1 of eight GPUs; its API, and its events."""
    api, events = AsyncMock(), Mock()
    ledger.put_report(make_report("n1"))
    ledger.put_heartbeat("n1", clock.monotonic_seconds(), 180.0)
    node = decode_node(orjson.dumps({"metadata": {"name": "n1"}}))
    mirror = SimpleNamespace(
        ledger=ledger,
        reflectors={"any": SimpleNamespace(resource_version="1")},
        nodes=SimpleNamespace(store={("", "n1"): node}),
        unready_reason=str,
        claim=lambda *_: None,
        reservation_of=lambda _: "",
    )
    context = Context(api, cast("ClusterMirror", mirror), clock, events, Mock(), str)
    return RequeueReconciler(context, wakes_per_second=1.0, burst=9), api, events


def unscheduled(message: str = "") -> dict[str, Any]:
    """Return the status of a pod that kube-scheduler refused."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"conditions": [condition]}


async def test_name_is_left_until_its_time_is_over() -> None:
    """The bind may still come. A name of which this process knows no time is withdrawn at once."""
    clock, ledger = ManualClock(), Ledger()
    pod = pod_json("p")
    ledger.put_pod(decode_pod(orjson.dumps({**pod, "status": unscheduled(refusal("n1"))})))
    requeue, api, _ = waking(clock, ledger)
    await requeue.reconcile("")
    (named,) = (call.args[1] for call in api.patch.await_args_list)
    assert named["status"] == {"nominatedNodeName": "n1"}

    marks = named["metadata"]["annotations"]
    ledger.put_pod(decode_pod(orjson.dumps({**pod_json("p", annotations=marks), "status": named["status"]})))
    await clock.advance(NOMINATION_SECONDS - 1.0)
    assert await requeue.reconcile("") == 1.0
    assert api.patch.await_count == 1
    await clock.advance(1.0)
    await requeue.reconcile("")
    assert api.patch.await_args.args[1]["status"] == {"nominatedNodeName": None}


async def test_a_pod_that_changed_before_it_was_woken_is_looked_at_again_soon() -> None:
    """Nothing else may happen that reminds of it."""
    clock, ledger = ManualClock(), Ledger()
    ledger.put_pod(decode_pod(orjson.dumps({**pod_json("p"), "status": unscheduled()})))
    requeue, api, _ = waking(clock, ledger)
    api.patch.side_effect = Conflict("changed", status=409, reason="Conflict", path="")

    assert await requeue.reconcile("") == CONFLICT_SECONDS


async def test_a_pod_is_told_what_is_missing_once_a_minute() -> None:
    """However often all waiting pods are looked at meanwhile."""
    clock, ledger = ManualClock(), Ledger()
    ledger.put_pod(decode_pod(orjson.dumps({**pod_json("p", gpus=9), "status": unscheduled()})))
    requeue, _, events = waking(clock, ledger)
    for expected in (1, 1, 2):
        await requeue.reconcile("")
        assert [call.kwargs["reason"] for call in events.record.call_args_list] == [names.REASON_WAITING] * expected
        await clock.advance(EVENT_SECONDS / 2)


async def test_nobody_is_named_a_node_where_hints_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod is woken all the same."""
    monkeypatch.setattr("atoll.cluster.wakeups.NOMINATION_NODES_MIN", 1)

    async with running_controllers(
        tmp_path, lambda server: set_aside(server, "p", "n1"), settings={"node_hints": False}
    ) as running:
        await running.settled(lambda: names.WOKEN in running.server.objects[f"{PODS}/p"]["metadata"]["annotations"])
        assert not nominated(running, "p")
