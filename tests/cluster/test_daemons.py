"""Pods of DaemonSets that are coming: to a new node what others have, and to any node what waits for it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from atoll.cluster.daemons import coming_daemons, waits_for_node
from atoll.cluster.objects import Node, Pod
from tests.cluster.test_host_fit import affinity, node, pod

NOW = 1_800_000_000.0
LATELY, LONG_AGO = "2027-01-15T07:59:30Z", "2027-01-15T07:00:00Z"
PIN = affinity(fields=[{"key": "metadata.name", "operator": "In", "values": ["old"]}])


def daemon(name: str, owner: str = "logs", *, at: str = "old", **spec: Any) -> Pod:
    """Return a DaemonSet's pod on the old node."""
    made = pod(name, nodeName=at, **{"affinity": PIN, **spec})
    owners = msgspec.convert([{"kind": "DaemonSet", "name": owner, "uid": owner, "controller": True}], tuple[Any, ...])
    metadata = msgspec.convert({**msgspec.to_builtins(made.metadata), "ownerReferences": owners}, type(made.metadata))
    return msgspec.structs.replace(made, metadata=metadata)


def born(name: str, created: str, **spec: Any) -> Node:
    """Return a node that joined then."""
    made = node(name, **spec)
    return msgspec.structs.replace(
        made, metadata=msgspec.structs.replace(made.metadata, creation_timestamp=created)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("created", "there", "spec", "expected"),
    [
        pytest.param(LATELY, [], {}, ["d"], id="a new node will get one"),
        pytest.param(LONG_AGO, [], {}, [], id="an old node would have it"),
        pytest.param(LATELY, [daemon("e", at="new")], {}, [], id="it has come"),
        pytest.param(LATELY, [], {"nodeSelector": {"disk": "ssd"}}, [], id="made for other nodes"),
        pytest.param(LATELY, [], {"taints": True}, [], id="it does not endure the taint"),
    ],
)
def test_a_new_node_counts_the_pods_that_daemon_sets_will_bring(
    created: str, there: Sequence[Pod], spec: dict[str, Any], expected: list[str]
) -> None:
    """One for each DaemonSet that has a pod elsewhere and fits the node."""
    taints = [{"key": "k", "effect": "NoSchedule"}] if spec.pop("taints", False) else []
    nodes = {"old": born("old", LONG_AGO), "new": born("new", created, taints=taints)}

    coming = coming_daemons(nodes, {"old": [daemon("d", **spec)], "new": list(there)}, now_seconds=NOW)

    assert [one.metadata.name for one in coming.get("new", [])] == expected


def test_a_pod_of_a_daemon_set_waits_for_one_node() -> None:
    """Its controller names the node; a pod of anybody else may name one too, and does not count there yet."""
    assert waits_for_node(daemon("d", at="")) == "old"
    assert waits_for_node(pod("p", affinity=PIN)) == ""
    for field in ({"operator": "In", "values": ["old", "new"]}, {"operator": "NotIn", "values": ["old"]}):
        anywhere = affinity(fields=[{"key": "metadata.name", **field}])
        assert waits_for_node(daemon("d", at="", affinity=anywhere)) == ""
