"""Whatever stands in an object of any kind that Atoll reviews or watches: nothing crashes, and nothing is acted on.

Each example is a valid object with one place abused: nonsense instead of its value, a list or mapping as long as etcd
takes, or a text of that length. Names and uids stay, since the API server checks or writes them itself. Work is counted
in calls of Python functions, memory as it is kept.
"""

import asyncio
import copy
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api import names
from atoll.kube.mirror import ClusterMirror, WatchedKind
from tests.builders import NOW, claim_json, lease_json, make_report, pod_json, report_json
from tests.fakes.clock import ManualClock
from tests.test_hostile_objects import CALLS_MIN, CALLS_PER_BYTE, CLAIM, FUZZ, KEPT_BYTES_MAX, NONSENSE, calls_of, quiet  # noqa: F401
from tests.worst_inputs import LABELS, NUMBERS, OBJECT_BYTES_MAX
from webhook.app import Lookups, decide
from webhook.errors import WebhookError
from webhook.requests import ClaimLookup, Defaults
from webhook.review import Denial, Mutation, decode_review, encode_answer

Path = tuple[str | int, ...]
IDENTITY = {"name", "namespace", "uid", "resourceVersion"}
OF_TENANTS = {WatchedKind.POD, WatchedKind.CLAIM, WatchedKind.GANG, WatchedKind.VOLUME_CLAIM}
"""Kinds of which whoever may edit a namespace makes as many as he likes."""
KEPT_TIMES_MAX = 12
"""Memory per byte of other objects, which administrators, Atoll's own parts or nodes write."""
LABEL = "example.com/rack"
OBJECTS: dict[WatchedKind, dict[str, Any]] = {
    WatchedKind.POD: pod_json("p", gpus=1, node="n2", phase="Running", annotations={names.GANG: "g"}),
    WatchedKind.NODE: {
        "metadata": {"name": "n2", "uid": "u", "labels": {LABEL: "r1"}, "resourceVersion": "2"},
        "spec": {"unschedulable": True, "taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]},
        "status": {
            "allocatable": {"cpu": "64", names.GPU_RESOURCE: "8"},
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {"bootID": "b"},
        },
    },
    WatchedKind.LEASE: lease_json("n2", 0),
    WatchedKind.HEARTBEAT: {
        "metadata": {"name": "n2", "namespace": "atoll-nodes", "resourceVersion": "2"},
        "spec": {"holderIdentity": "n2", "leaseDurationSeconds": 40, "renewTime": NOW},
    },
    WatchedKind.CLAIM: claim_json(models=["nvidia-h100"], memory="40Gi"),
    WatchedKind.REPORT: report_json("n2"),
    WatchedKind.GANG: {
        "metadata": {"name": "g", "namespace": "team", "uid": "u"},
        "spec": {
            "podSets": [{"name": "w", "count": 2, "topology": {"mode": "required", "level": LABEL}}],
            "waitForPodsReady": {"enable": True, "timeout": "5m"},
        },
        "status": {
            "conditions": [{"type": "Admitted", "status": "True", "reason": "Admitted", "lastTransitionTime": NOW}],
            "admission": "a",
        },
    },
    WatchedKind.TOPOLOGY: {
        "metadata": {"name": "t"},
        "spec": {"nodeSelector": {"pool": "gpu"}, "levels": [{"nodeLabel": LABEL}]},
    },
    WatchedKind.RESERVATION: {
        "metadata": {"name": "nightly", "uid": "u"},
        "spec": {"shape": {"count": 4, "models": ["nvidia-h100"]}, "namespaces": ["team"], "starts": NOW},
    },
    WatchedKind.VOLUME: {
        "metadata": {"name": "v"},
        "spec": {
            "claimRef": {"namespace": "team", "name": "data"},
            "nodeAffinity": {
                "required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": LABEL, "operator": "Exists"}]}]}
            },
        },
    },
    WatchedKind.VOLUME_CLAIM: {
        "metadata": {"name": "data", "namespace": "team"},
        "spec": {
            "volumeName": "v",
            "storageClassName": "local",
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "selector": {"matchLabels": {LABEL: "x"}},
        },
        "status": {"phase": "Bound"},
    },
    WatchedKind.STORAGE_CLASS: {
        "metadata": {"name": "local"},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowedTopologies": [{"matchLabelExpressions": [{"key": LABEL, "values": ["x"]}]}],
    },
    WatchedKind.CSI_NODE: {
        "metadata": {"name": "n1"},
        "spec": {"drivers": [{"name": "disks.example.com", "nodeID": "n1", "allocatable": {"count": 8}}]},
    },
    WatchedKind.CSI_DRIVER: {"metadata": {"name": "disks.example.com"}, "spec": {"storageCapacity": True}},
    WatchedKind.STORAGE_CAPACITY: {
        "metadata": {"name": "c", "namespace": "team"},
        "storageClassName": "local",
        "nodeTopology": {"matchLabels": {LABEL: "x"}},
        "capacity": "10Gi",
    },
    WatchedKind.NAMESPACE: {"metadata": {"name": "team", "labels": {LABEL: "x"}}},
}
JOB = {
    "metadata": {"name": "j", "namespace": "team"},
    "spec": {"template": {"metadata": {"annotations": {names.CLAIM: "c"}}, "spec": pod_json(gpus=1)["spec"]}},
}
REVIEWED = {
    ("", "pods", ""): OBJECTS[WatchedKind.POD],
    ("", "pods", "status"): OBJECTS[WatchedKind.POD],
    ("", "nodes", "status"): OBJECTS[WatchedKind.NODE],
    ("batch", "jobs", ""): JOB,
    ("batch", "jobs", "status"): JOB,
    ("coordination.k8s.io", "leases", ""): OBJECTS[WatchedKind.LEASE],
    ("gpu.scheduling", "gpuclaims", ""): OBJECTS[WatchedKind.CLAIM],
    ("gpu.scheduling", "gpugangs", ""): OBJECTS[WatchedKind.GANG],
    ("gpu.scheduling", "gpureservations", ""): OBJECTS[WatchedKind.RESERVATION],
    ("gpu.scheduling", "gpunodestatuses", "status"): OBJECTS[WatchedKind.REPORT],
    ("gpu.scheduling", "topologies", ""): OBJECTS[WatchedKind.TOPOLOGY],
}
"""By group, resource and subresource: what the webhook's rules name, and what a wrong configuration could send."""


def places(value: Any, above: Path = ()) -> Iterator[Path]:
    """Yield the path of every value in an object."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*above, key)
        yield from places(inner, (*above, key))


def enlarged(value: Any, size_bytes: int) -> Any:
    """Return the value again and again, until it has about that size."""
    if isinstance(value, list):
        return value * (size_bytes // (len(orjson.dumps(value)) + 1) + 1) if value else list(range(size_bytes // 7))
    if isinstance(value, dict):
        return {**value, **{f"key-{number}": "v" for number in range(size_bytes // 18)}}
    return "x" * size_bytes


@st.composite
def abused(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    """Return the object with one place abused, and sometimes more labels than anybody needs."""
    made = copy.deepcopy(body)
    known = (path for path in places(made) if path[0] != "metadata" or path[-1] not in IDENTITY)
    path = draw(st.sampled_from(sorted(known, key=str)))
    holder = made
    for key in path[:-1]:
        holder = holder[key]  # type: ignore[index]
    size_bytes = draw(st.sampled_from([0, 2_000, 300_000, 1_300_000]))
    holder[path[-1]] = enlarged(holder[path[-1]], size_bytes) if size_bytes else draw(NONSENSE)  # type: ignore[index]
    if isinstance(made["metadata"], dict) and draw(st.booleans()):
        made["metadata"] |= draw(st.sampled_from([LABELS, NUMBERS]))
    raw = orjson.dumps(made)
    return raw if len(raw) <= OBJECT_BYTES_MAX else orjson.dumps(body)


class Cluster:
    """A mirror with one free machine, n1, which no hostile object is about."""

    def __init__(self) -> None:
        client: Any = SimpleNamespace(server_seconds=lambda: 0.0)
        self.mirror = ClusterMirror(client, ManualClock(), with_gangs=True)
        self.mirror.ledger.put_report(make_report("n1"))
        self.mirror.ledger.put_heartbeat("n1", 0.0, 180.0)

    def watch(self, kind: WatchedKind, event: str, raw: bytes) -> None:
        self.mirror.reflectors[kind]._observe(event, raw)

    def free(self) -> int:
        return self.mirror.ledger.free("n1", now_seconds=0.0)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", OBJECTS)
@FUZZ
@given(data=st.data())
def test_an_object_of_any_kind_is_watched_with_bounded_work_and_memory(kind: WatchedKind, data: st.DataObject) -> None:
    """It comes, changes and goes; the watch goes on, and no GPU of a machine that it is not about is taken or freed."""
    raw = data.draw(abused(OBJECTS[kind]))
    cluster, again = Cluster(), Cluster()
    free = cluster.free()

    calls = calls_of(lambda: cluster.watch(kind, "ADDED", raw))
    cluster.watch(kind, "MODIFIED", orjson.dumps(OBJECTS[kind]))
    cluster.watch(kind, "MODIFIED", raw)
    cluster.watch(kind, "DELETED", raw)
    tracemalloc.start()
    again.watch(kind, "ADDED", raw)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert calls <= CALLS_MIN + CALLS_PER_BYTE * len(raw)
    assert kept_bytes < (KEPT_BYTES_MAX if kind in OF_TENANTS else KEPT_BYTES_MAX + KEPT_TIMES_MAX * len(raw))
    assert cluster.free() == free


class Lookup:
    """Finds the claim, and no other devices."""

    async def find(self, _namespace: str, _name: str) -> ClaimLookup:
        return CLAIM

    async def refusal(self, _namespace: str, _pod: Any) -> Denial | None:
        return None

    async def gang_of(self, _namespace: str, _pod: Any) -> str:
        return ""


def answer_of(body: bytes) -> tuple[Mutation | Denial | None, bytes]:
    """Return the webhook's decision and its answer; None for what it takes for no review."""
    try:
        review = decode_review(body)
        decision = asyncio.run(decide(review, lookups=Lookups(Lookup(), Lookup(), Lookup()), defaults=Defaults()))
    except WebhookError as error:
        return None, str(error).encode()
    return decision, encode_answer(review.uid, decision)


@pytest.mark.parametrize("reviewed", REVIEWED, ids="/".join)
@FUZZ
@given(data=st.data())
def test_a_review_of_any_kind_is_answered_with_bounded_work(
    reviewed: tuple[str, str, str], data: st.DataObject
) -> None:
    """Pods and Jobs are changed or denied; whatever else a wrong configuration sends is let through as it is."""
    group, resource, subresource = reviewed
    raw = data.draw(abused(REVIEWED[reviewed]))
    operation = data.draw(st.sampled_from(["CREATE", "UPDATE", "DELETE", "CONNECT", "x"]))
    request: dict[str, Any] = {
        "uid": "u",
        "operation": operation,
        "resource": {"group": group, "version": "v1", "resource": resource},
        "subResource": subresource,
        "userInfo": {"username": "mallory", "groups": ["system:authenticated"]},
        "object": orjson.Fragment(raw),
        "oldObject": orjson.Fragment(raw),
    }
    if data.draw(st.booleans()):
        request[data.draw(st.sampled_from(sorted(request)))] = data.draw(NONSENSE)
    body = orjson.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})
    found: list[tuple[Mutation | Denial | None, bytes]] = []

    calls = calls_of(lambda: found.append(answer_of(body)))

    decision, answer = found[0]
    assert calls <= CALLS_MIN + CALLS_PER_BYTE * len(body)
    assert len(answer) <= 4096 + 2 * len(body)
    if resource not in {"pods", "jobs"} or subresource:
        assert decision in {None, Mutation()}
