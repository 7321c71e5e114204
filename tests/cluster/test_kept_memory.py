"""What a watch keeps of one object is bounded, whatever a tenant writes there."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import orjson
import pytest

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.api.kept import ENTRIES_MAX, KUEUE_WORKLOAD, LABELS_MAX, kept_annotations, kept_labels, without_excess
from atoll.cluster.allocations import pod_annotations_bytes
from atoll.cluster.bounded import LARGE_BYTES
from atoll.cluster.budgets import decode_budget
from atoll.cluster.gangs.kueue_topology import KUEUE_ANNOTATIONS
from atoll.cluster.host_fit import host_ports, needs
from atoll.cluster.objects import ContainerStatus, Pod, decode_namespace, decode_node, decode_pod
from atoll.cluster.pod_fit import PodNeighbours
from atoll.cluster.pods import device_counts, has_own_counts
from atoll.cluster.release import has_ended
from atoll.cluster.storage import decode_volume_claim
from tests.builders import claim_json, pod_json
from tests.worst_inputs import (
    LABELS,
    LONG_NAME,
    NOTES,
    NUMBERS,
    OBJECT_BYTES_MAX,
    PODS,
    REQUIRED,
    TERM,
    large_pod,
    many,
)

KEPT_BYTES_MAX = 400_000
"""The controllers may use 1 GiB: 2,000 such objects are more than etcd's quota of 2 GiB holds."""
METADATA_KEPT_BYTES_MAX = 100_000
COPIES = 2


def kept_bytes(decode: Callable[[bytes], Any], raw: bytes) -> int:
    """Return the memory of one decoded object, in bytes."""
    decode(raw)
    gc.collect()
    tracemalloc.start()
    try:
        kept = [decode(raw) for _ in range(COPIES)]
        gc.collect()
        return tracemalloc.get_traced_memory()[0] // len(kept)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("parts", PODS.values(), ids=PODS)
def test_no_pod_fills_the_memory(parts: dict[str, dict[str, Any]]) -> None:
    """As many labels, tolerations, containers or conditions as etcd takes in one pod cost at most 400 kB."""
    raw = large_pod(parts)
    assert len(raw) <= OBJECT_BYTES_MAX
    assert kept_bytes(decode_pod, raw) < KEPT_BYTES_MAX


@pytest.mark.parametrize(
    ("decode", "body"),
    [
        (decode_pod, pod_json(gpus=1)),
        (decode_node, {"metadata": {"name": "n1"}}),
        (decode_namespace, {"metadata": {"name": "team"}}),
        (decode_volume_claim, {"metadata": {"name": "data"}}),
        (GpuClaim.model_validate_json, claim_json()),
        (GpuGang.model_validate_json, {"metadata": {"name": "g"}, "spec": {"podSets": [{"name": "w", "count": 1}]}}),
    ],
    ids=["pod", "node", "namespace", "volume claim", "GpuClaim", "GpuGang"],
)
def test_labels_and_annotations_that_nobody_reads_are_not_kept(
    decode: Callable[[bytes], Any], body: dict[str, Any]
) -> None:
    """Of 35,000 labels 256 stay, and of annotations those with a meaning, on every kind of object."""
    annotations = {**NOTES["annotations"], **NUMBERS["annotations"]}
    raw = orjson.dumps({**body, "metadata": {**body["metadata"], **LABELS, "annotations": annotations}})
    assert kept_bytes(decode, raw) < METADATA_KEPT_BYTES_MAX


SHORT = {f"a{number:x}": "" for number in range(130_000)}
EMPTY_TERMS = {"nodeSelectorTerms": [{}] * 500_000}
LARGE_FIELDS = {
    "nodeSelector": SHORT,
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": EMPTY_TERMS}},
    "tolerations": [{"operator": "Exists"}] * 60_000,
    "selector": {"matchLabels": SHORT},
    "resources": {"requests": SHORT},
}
"""Fields of the spec of a pod, a claim for a volume or a budget, as large as etcd takes, with the smallest entries."""


@pytest.mark.parametrize("decode", [decode_pod, decode_volume_claim, decode_budget])
@pytest.mark.parametrize("field", LARGE_FIELDS)
def test_a_large_field_of_many_entries_counts_as_empty(decode: Callable[[bytes], Any], field: str) -> None:
    """None of its entries is decoded, each of which takes the time of a hundred bytes of text."""
    body = {"metadata": {"name": "x", "namespace": "team"}, "spec": {field: LARGE_FIELDS[field]}}
    raw = orjson.dumps(body)
    assert len(raw) <= OBJECT_BYTES_MAX
    gc.collect()
    tracemalloc.start()
    try:
        decode(raw)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(raw)


def test_no_more_than_one_entry_too_many_is_read_of_a_list() -> None:
    """It tells whoever decodes the pod that something was left out; ports have one bound for all containers."""
    ports = [{"hostPort": port, "protocol": "TCP"} for port in range(8_000, 8_300)]
    containers = [{"name": f"c{number}", "ports": ports, "image": "x"} for number in range(120)]
    claims = [{"name": f"c{number}"} for number in range(2_000)]

    cut = orjson.loads(without_excess(large_pod({"spec": {"containers": containers, "resourceClaims": claims}})))

    assert cut["spec"]["resourceClaims"] == claims[: ENTRIES_MAX + 1]
    whole = 64 * 1024 // len(orjson.dumps(ports))
    bare = [{"name": one["name"], "image": "x"} for one in containers[whole:]]
    assert cut["spec"]["containers"] == [*containers[:whole], *bare]


NOTHING_ASKED = {f"a{number:x}.example/x": "0" for number in range(2_000)}
LAST = {"name": "last", "resources": {"requests": {"cpu": "60", "memory": "400Gi"}}}
SMALL = {"requests": {"cpu": "100m"}, "limits": {"cpu": "1", "memory": "1Gi"}}


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [{"name": "c", "ports": [{"containerPort": port} for port in range(1, 2_000)]}, LAST]},
        {"containers": [{"name": "c", "resources": {"requests": NOTHING_ASKED}}, LAST]},
        {"containers": [{"name": "c", "resources": {"requests": {**NOTHING_ASKED, "cpu": "60"}}}]},
        {"containers": [*({"name": "c", "resources": {"requests": NOTHING_ASKED}} for _ in range(20)), LAST]},
        {"containers": [*({"name": f"c{number}", "resources": SMALL} for number in range(500)), LAST]},
        {"containers": [LAST], "tolerations": many(3_000, {"operator": "Exists"}), "overhead": {"cpu": "1"}},
        {"containers": [LAST], "nodeSelector": SHORT, "overhead": {"cpu": "1"}},
        {"containers": [LAST], "initContainers": [{**LAST, "restartPolicy": "Always"} for _ in range(400)]},
    ],
    ids=["ports", "amounts of 0", "amounts of 0 beside others", "amounts of 0 above any bound", "many containers",
         "tolerations", "a node selector above any bound", "many sidecars"],
)  # fmt: skip
def test_what_a_large_pod_takes_from_others_stays_known(spec: dict[str, Any]) -> None:
    """Whoever hides it makes a node look free, and others would be evicted there, or placed, for nothing."""
    raw = large_pod({"spec": spec, "status": {"phase": "Running"}})
    assert len(raw) > LARGE_BYTES
    taken = needs(msgspec.json.decode(raw, type=Pod))
    assert {name: amount for name, amount in needs(decode_pod(raw)).items() if amount} == {
        name: amount for name, amount in taken.items() if amount
    }


def test_a_large_pod_keeps_its_ports_and_counts_of_gpus() -> None:
    """Whatever other containers have; and a limit that a request of 0 replaces stays replaced."""
    ports = [{"containerPort": 1, "hostPort": port} for port in range(1, 500)]
    asks = {"requests": {names.GPU_RESOURCE: "8", "cpu": "0"}, "limits": {names.GPU_RESOURCE: "8", "cpu": "4"}}
    others = {"limits": {names.GPU_RESOURCE: "0"}}
    containers = [
        {"name": "a", "resources": others, "ports": [{"containerPort": port} for port in range(1, 2_000)]},
        {"name": "b", "resources": asks, "ports": ports},
    ]
    raw = large_pod({"spec": {"containers": containers}})
    plain, kept = msgspec.json.decode(raw, type=Pod), decode_pod(raw)
    assert host_ports(kept) == host_ports(plain)
    assert device_counts(kept) == device_counts(plain) == (("b", 8),)
    assert has_own_counts(kept)
    assert needs(kept)["cpu"] == 0


WIDE = {**TERM, "labelSelector": {"matchExpressions": [{"key": f"k{n}", "operator": "Exists"} for n in range(2_000)]}}
NAMES = {
    "nodeSelectorTerms": many(1_500, {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]})
}


@pytest.mark.parametrize(
    "affinity",
    [
        {"podAntiAffinity": {REQUIRED: many(3_000, TERM)}},
        {"podAntiAffinity": {REQUIRED: [WIDE, TERM]}},
        {"nodeAffinity": {REQUIRED: NAMES}, "podAntiAffinity": {REQUIRED: [{**TERM, "labelSelector": {}}]}},
    ],
    ids=["many terms", "behind a wide term", "behind terms of nodes"],
)
def test_anti_affinity_too_large_to_read_keeps_others_off_its_node(affinity: dict[str, Any]) -> None:
    """It may be that it keeps every pod away; kube-scheduler, which reads it, would refuse whoever is placed there."""
    raw = large_pod({"spec": {"affinity": affinity}, "status": {"phase": "Running"}})
    assert len(raw) > LARGE_BYTES
    node = decode_node(orjson.dumps({"metadata": {"name": "n", "labels": {"kubernetes.io/hostname": "n"}}}))
    anybody = decode_pod(orjson.dumps(pod_json("anybody")))
    assert PodNeighbours.of(anybody, [node], {"n": [decode_pod(raw)]}, {}).refuse(node)


@pytest.mark.parametrize("text", [b'{"metadata":{"\xff":1}}', b'{"metadata":{"name":"x"},"spec":{"\xe9":{}}}'])
def test_a_key_that_is_no_text_is_passed_on(text: bytes) -> None:
    """Whoever decodes it says what is wrong with it."""
    assert without_excess(text + b" " * 200_000) == text + b" " * 200_000


def test_a_pod_of_ordinary_lists_stays_as_it_is() -> None:
    """However large its variables and messages make it."""
    body = pod_json(gpus=2)
    body["spec"]["containers"][0] |= {"env": [{"name": "A", "value": "x" * 200_000}], "ports": [{"hostPort": 1}]}
    body["status"] = {"conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [{"name": "main"}]}
    assert orjson.loads(without_excess(orjson.dumps(body))) == body


@pytest.mark.parametrize("count", [2_000, 130_000])
def test_a_claim_or_budget_with_many_conditions_is_read(count: int) -> None:
    """One that could not be read would fail every list of all claims."""
    selector = {"matchLabels": {f"a{number:x}": "" for number in range(count)}}
    raw = orjson.dumps({"metadata": {"name": "x"}, "spec": {"selector": selector}, "status": {"phase": "Bound"}})
    assert kept_bytes(decode_volume_claim, raw) < KEPT_BYTES_MAX
    assert kept_bytes(decode_budget, raw) < KEPT_BYTES_MAX
    claim = decode_volume_claim(raw)
    assert (claim.status.phase, claim.spec.selector is not None) == ("Bound", True)


def test_what_is_read_stays() -> None:
    """Atoll's and Kueue's keys and ranks stay, in pods with any number of others; the size of all stays known. The
    addresses of a gang's members are read by their containers alone."""
    own = dict.fromkeys(
        (
            {*names.USER_ANNOTATIONS, *names.OWN_ANNOTATIONS} - {names.HOSTS}
            | {*KUEUE_ANNOTATIONS, KUEUE_WORKLOAD, names.MIRROR}
        ),
        "x",
    )
    own |= {prefix + "worker": "0,1" for prefix in names.OWN_ANNOTATION_PREFIXES} | {"corp.example/rank": "17"}
    foreign = {"kubectl.kubernetes.io/last-applied-configuration": "{}" * 50, names.HOSTS: "a,b"}
    labels = {**LABELS["labels"], names.PREEMPTIBLE: "false"}
    body = pod_json(gpus=1)
    body["metadata"] |= {"annotations": {**own, **foreign}, "labels": labels}

    pod = decode_pod(orjson.dumps(body))

    assert pod.metadata.annotations == own
    assert pod_annotations_bytes(pod) == sum(len(key) + len(text) for key, text in {**own, **foreign}.items())
    assert (len(pod.metadata.labels), pod.metadata.labels[names.PREEMPTIBLE]) == (LABELS_MAX, "false")


MANY = LABELS["labels"]
OWN = {f"kueue.x-k8s.io/own-{number}": "x" for number in range(300)}
LONGEST = {f"{number:0253d}/{'k' * 63}": "v" * 63 for number in range(2_000)}


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param(MANY, id="none of Atoll's"),
        pytest.param({**MANY, **OWN}, id="Atoll's after all others"),
        pytest.param({**OWN, **MANY}, id="Atoll's before all others"),
        pytest.param({**LONGEST, **OWN}, id="the longest that Kubernetes allows"),
        pytest.param({**MANY, 'a","b': '\\","gpu.scheduling/x":"', "c": ","}, id="texts that look like labels"),
        pytest.param({**MANY, "n": None}, id="no text"),
        pytest.param(None, id="null"),
        pytest.param(["x" * 200_000], id="a list"),
        pytest.param({"x": "y" * 200_000}, id="one label"),
    ],
)
@pytest.mark.parametrize("indented", [False, True], ids=["as Go writes it", "indented"])
def test_labels_are_cut_before_they_are_read_and_nothing_else(labels: object, *, indented: bool) -> None:
    """What stays of a large object's labels is what would stay of all of them; the rest of the object is untouched."""
    body = pod_json(gpus=1)
    body["metadata"] |= {"labels": labels, "annotations": {"note": "n" * 200_000}}
    raw = orjson.dumps(body, option=orjson.OPT_INDENT_2 if indented else 0)

    cut = orjson.loads(without_excess(raw))

    left = cut["metadata"].pop("labels")
    del body["metadata"]["labels"]
    assert cut == body
    assert kept_labels(left) == kept_labels(labels) if isinstance(labels, dict) else left == labels


@pytest.mark.parametrize("text", ["", "[]", '{"metadata":null}', '{"metadata":{"labels":{"a":'])
def test_what_is_no_object_is_passed_on(text: str) -> None:
    """Whoever decodes it says what is wrong with it."""
    raw = text.encode() + b" " * 200_000
    assert without_excess(raw) == raw


def test_containers_left_out_of_a_spec_prove_no_end() -> None:
    """The kubelet told of some of its containers; the others may still run."""
    over = {"terminated": {"exitCode": 0, "finishedAt": "2026-01-31T12:00:00Z"}}
    spec = {"containers": [{"name": f"c{number}"} for number in range(3_000)]}
    statuses = [{"name": f"c{number}", "state": over} for number in range(ENTRIES_MAX)]
    ready = [{"type": "Ready", "status": "False", "reason": "PodFailed"}]
    status = {"phase": "Failed", "containerStatuses": statuses, "conditions": ready}
    assert not has_ended(decode_pod(large_pod({"spec": spec, "status": status})))


def test_a_text_too_long_is_cut_and_counted() -> None:
    """A name of 250,000 characters names nothing, cut or not; the pod's annotations still count in full."""
    kept, left_out = kept_annotations(LONG_NAME["annotations"])
    assert len(kept[names.CLAIM]) + left_out == 250_000


def test_containers_left_out_prove_no_end() -> None:
    """A pod with so many containers that some are left out never counts as ended by those that are kept."""
    over = {"terminated": {"exitCode": 0, "finishedAt": "2026-01-31T12:00:00Z"}}
    few, more = ([*many(n, {"name": "c", "state": over}), {"name": "main", "state": over}] for n in (100, 3_000))
    ready = {"type": "Ready", "status": "False", "reason": "PodFailed"}
    others = many(200, {"type": "T", "status": "True", "message": "m" * 100})
    ended, large, unclear = (
        decode_pod(large_pod({"status": {"phase": "Failed", "containerStatuses": statuses, "conditions": conditions}}))
        for statuses, conditions in ((few, [ready]), (more, [ready]), (few, [ready, *others]))
    )
    assert has_ended(ended)
    assert not has_ended(large)
    assert not has_ended(unclear)
    assert large.status.container_statuses[-1] == ContainerStatus("more containers")
