"""Promises of what makes room: a Node that lets pods in that it refused before has the waiting ones looked at again."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Node
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import ClusterMirror, WatchedKind
from controllers.capacity_changes import CapacityChanges
from tests.fakes.clock import ManualClock


def node(*, ready: str = "True", reason: str = "", labels: dict[str, str] | None = None, **spec: Any) -> Node:
    """Return a Node of this readiness."""
    status = {"conditions": [{"type": "Ready", "status": ready, "reason": reason}]}
    metadata = {"name": "n1", "resourceVersion": "7", "labels": labels or {}}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": status}, Node)


@pytest.mark.parametrize(
    ("before", "after", "makes_room"),
    [
        pytest.param(node(ready="False"), node(), True, id="it became ready"),
        pytest.param(node(unschedulable=True), node(), True, id="it was uncordoned"),
        pytest.param(node(), node(labels={"zone": "a"}), True, id="a label that an affinity may want"),
        pytest.param(node(), node(reason="KubeletReady"), False, id="kubelet says the same in other words"),
    ],
)
def test_a_node_that_opens_makes_room(before: Node, after: Node, *, makes_room: bool) -> None:
    """Whatever `node_reason` reads counts; the many status writes of kubelet do not."""
    mirror = cast("ClusterMirror", SimpleNamespace(ledger=Ledger(), reflectors={}))
    mirror.reflectors["any"] = SimpleNamespace(resource_version="1")  # type: ignore[index,assignment]
    changes = CapacityChanges(mirror, ManualClock())

    assert changes.observe(WatchedKind.NODE, Change(ChangeKind.MODIFIED, after, before)) is makes_room
