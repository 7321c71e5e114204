"""With the right to remove taints, the controllers can change only start taints of a Node."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.api_server import RealApi, collection, manifests, wait_for

pytestmark = pytest.mark.e2e

FILE = "rbac/optional/start-taint.yaml"
POLICY = "atoll-start-taint"
KEY = "startup-taint.cluster-autoscaler.kubernetes.io/gpus"
START, TEAM = {"key": KEY, "effect": "NoSchedule"}, {"key": "team", "value": "a", "effect": "NoSchedule"}
NODE = "/api/v1/nodes/tainted"
MERGE = "application/merge-patch+json"


def write(api: RealApi, body: dict[str, Any]) -> tuple[int, str]:
    """Patch the node as the controllers, without effect."""
    answer = api.send("PATCH", NODE, body, content_type=MERGE, identity="controllers", dry_run=True)
    return answer.status, answer.message


@pytest.fixture(scope="module")
def allowed(api: RealApi) -> Iterator[RealApi]:
    """An API server with a tainted node, where the right and its policy are in force; afterwards they are gone."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "tainted"}, "spec": {"taints": [START, TEAM]}}
    api.send("POST", "/api/v1/nodes", node)
    for manifest in manifests(FILE):
        assert api.apply(manifest, path=collection(manifest)).is_accepted
    wait_for(lambda: POLICY in write(api, {"metadata": {"labels": {"a": "b"}}})[1], "the policy refuses")
    yield api
    for manifest in manifests(FILE):
        api.send("DELETE", f"{collection(manifest)}/{manifest['metadata']['name']}")
    api.send("DELETE", NODE)


def test_a_taint_of_the_start_may_be_taken_off(allowed: RealApi) -> None:
    """The write that the controllers make."""
    assert write(allowed, {"spec": {"taints": [TEAM]}})[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        {"spec": {"taints": [START]}},
        {"spec": {"taints": None}},
        {"spec": {"taints": [{**TEAM, "value": "b"}]}},
        {"spec": {"taints": [START, TEAM, {"key": f"{KEY}2", "effect": "NoSchedule"}]}},
        {"spec": {"unschedulable": True}},
        {"metadata": {"labels": {"team": "mine"}}},
        {"metadata": {"annotations": {"a": "b"}}},
    ],
    ids=["a team's taint", "all taints", "a taint's value", "one taint more", "a cordon", "a label", "an annotation"],
)
def test_nothing_else_of_a_node_may_be_changed(allowed: RealApi, body: dict[str, Any]) -> None:
    """The right alone would allow all of it."""
    status, message = write(allowed, body)

    assert status == 403
    assert POLICY in message
