"""What a watch keeps of one object is bounded, whatever a tenant writes there."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.api.kept import KUEUE_WORKLOAD, LABELS_MAX, kept_annotations
from atoll.cluster.allocations import pod_annotations_bytes
from atoll.cluster.gangs.kueue_topology import KUEUE_ANNOTATIONS
from atoll.cluster.objects import ContainerStatus, decode_node, decode_pod, decode_volume_claim
from atoll.cluster.release import has_ended
from tests.builders import claim_json, pod_json
from tests.worst_inputs import LABELS, LONG_NAME, NOTES, NUMBERS, OBJECT_BYTES_MAX, PODS, large_pod, many

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
        (decode_volume_claim, {"metadata": {"name": "data"}}),
        (GpuClaim.model_validate_json, claim_json()),
        (GpuGang.model_validate_json, {"metadata": {"name": "g"}, "spec": {"podSets": [{"name": "w", "count": 1}]}}),
    ],
    ids=["pod", "node", "volume claim", "GpuClaim", "GpuGang"],
)
def test_labels_and_annotations_that_nobody_reads_are_not_kept(
    decode: Callable[[bytes], Any], body: dict[str, Any]
) -> None:
    """Of 35,000 labels 256 stay, and of annotations those with a meaning, on every kind of object."""
    annotations = {**NOTES["annotations"], **NUMBERS["annotations"]}
    raw = orjson.dumps({**body, "metadata": {**body["metadata"], **LABELS, "annotations": annotations}})
    assert kept_bytes(decode, raw) < METADATA_KEPT_BYTES_MAX


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
