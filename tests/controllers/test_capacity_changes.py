"""Changes that trigger a new check of waiting pods and of topologies."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from atoll.api.topologies import Topology
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Node
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import ClusterMirror, WatchedKind
from controllers.capacity_changes import CapacityChanges
from controllers.context import Context
from controllers.topologies import TopologyReconciler
from tests.builders import make_pod
from tests.fakes.clock import ManualClock


def node(*, ready: str = "True", reason: str = "", labels: dict[str, str] | None = None, **spec: Any) -> Node:
    """Return a Node of this readiness."""
    status = {"conditions": [{"type": "Ready", "status": ready, "reason": reason}]}
    metadata = {"name": "n1", "resourceVersion": "7", "labels": labels or {}}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": status}, Node)


RACK = {"rack": "r1"}
TOPOLOGY = Topology.model_validate({"metadata": {"name": "a"}, "spec": {"levels": [{"nodeLabel": "rack"}]}})


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


@pytest.mark.parametrize(
    ("kind", "change", "affected"),
    [
        pytest.param(WatchedKind.NODE, Change(ChangeKind.ADDED, node()), ["a"], id="a node came"),
        pytest.param(WatchedKind.NODE, Change(ChangeKind.DELETED, node(), node()), ["a"], id="a node went"),
        pytest.param(WatchedKind.NODE, Change(ChangeKind.MODIFIED, node(labels=RACK), node()), ["a"], id="labels"),
        pytest.param(WatchedKind.NODE, Change(ChangeKind.MODIFIED, node(ready="False"), node()), [], id="readiness"),
        pytest.param(WatchedKind.POD, Change(ChangeKind.ADDED, make_pod()), [], id="a pod came"),
        pytest.param(WatchedKind.TOPOLOGY, Change(ChangeKind.MODIFIED, TOPOLOGY), ["a"], id="the topology itself"),
        pytest.param(WatchedKind.TOPOLOGY, Change(ChangeKind.DELETED, TOPOLOGY), [], id="a topology that is gone"),
    ],
)
def test_topologies_are_counted_again_when_labels_may_differ(
    kind: WatchedKind, change: Change[Any], affected: list[str]
) -> None:
    """Kubelets write each Node's status all the time, and thousands of pods come and go."""
    mirror = SimpleNamespace(topologies=SimpleNamespace(store={("", "a"): TOPOLOGY}))
    reconciler = TopologyReconciler(cast("Context", SimpleNamespace(mirror=mirror)))
    assert list(reconciler.affected(kind, change)) == affected
