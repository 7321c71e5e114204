"""Longest steps of an event loop for the worst objects that the API server accepts: `python -m bench.worst_inputs`.

Each row is one step of a part's loop: a watched pod or claim is read, a review is answered, a pod with as many terms
and tolerations as the policies allow is compared with nodes full of pods that have as many as they like. Milliseconds
of CPU of one process, the least of some repeats. Exits with 1 if a step takes longer than 20 ms.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from agent.kubelet import CHUNK_BYTES_MAX, PodListReader
from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.cluster.host_fit import excluded_nodes
from atoll.cluster.objects import Affinity, Node, decode_node, decode_pod
from atoll.kube.watch_events import parse_event
from atoll.service.collector import without_collector
from tests.builders import claim_json, make_claim, pod_json
from tests.worst_inputs import LABELS, PODS, REQUIRED, TERM, large_pod, many
from webhook.app import TOO_LARGE
from webhook.mutation import mutate
from webhook.requests import Defaults
from webhook.review import decode_review, encode_answer

STEP_MILLISECONDS_MAX: Final = 20.0
NODES, PODS_PER_NODE = 400, 4

Step = Callable[[], object]


def watched(raw: bytes, decode: Callable[[bytes], object]) -> Step:
    """Return the step that reads one event of a watch."""
    line = b'{"type":"ADDED","object":' + raw + b"}"
    return lambda: decode(bytes(parse_event(line).object))


def reviewed(raw: bytes) -> Step:
    """Return the step that answers one review of a new pod."""
    request = {"uid": "u", "operation": "CREATE", "resource": {"group": "", "version": "v1", "resource": "pods"}}
    body = orjson.dumps(
        {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {**request, "namespace": "team", "userInfo": {"username": "m"}, "object": orjson.Fragment(raw)},
        }
    )

    def answer() -> bytes:
        review = decode_review(body)
        if review.is_too_large:
            return encode_answer(review.uid, TOO_LARGE)
        pod = review.pod()
        claim = make_claim() if names.CLAIM in pod.annotations else None
        decision = mutate(pod, namespace="team", user=review.user, claim=claim, defaults=Defaults())
        return encode_answer(review.uid, decision)

    return answer


def compared() -> Step:
    """Return the step that looks for the nodes that refuse a pod."""
    terms = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": many(32, TERM)}}
    tolerations = [{"key": f"k{number}", "operator": "Exists"} for number in range(64)]
    pod = decode_pod(large_pod({"spec": {"affinity": terms, "tolerations": tolerations}}, gpus=1))
    crowd = {"podAntiAffinity": {REQUIRED: many(2_000, TERM)}}  # more of them count as none
    other = large_pod({"spec": {"affinity": crowd, "nodeName": "n"}, "status": {"phase": "Running"}})
    assert decode_pod(other).spec.affinity != Affinity()
    nodes = [_node(f"n{number}") for number in range(NODES)]
    running = {node.metadata.name: [decode_pod(other) for _ in range(PODS_PER_NODE)] for node in nodes}
    return lambda: excluded_nodes(pod, nodes, running)


def _node(name: str) -> Node:
    taints = [{"key": f"other-{number}", "effect": "PreferNoSchedule"} for number in range(8)]
    labels = {"kubernetes.io/hostname": name}
    return decode_node(orjson.dumps({"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}}))


def listed(raw: bytes) -> Step:
    """Return the step that reads one chunk of a kubelet's list."""
    chunk = (b'{"kind":"PodList","items":[' + raw)[:CHUNK_BYTES_MAX]
    return lambda: PodListReader().feed(chunk)


def steps() -> Iterator[tuple[str, Step]]:
    """Yield every step with its name."""
    for name, parts in PODS.items():
        raw = large_pod(parts)
        yield f"watch: {name}", watched(raw, decode_pod)
        if "spec" not in parts or "containers" not in parts["spec"]:
            claimed = pod_json(gpus=1)
            for section, fields in parts.items():
                claimed.setdefault(section, {}).update(fields)
            yield f"review: {name}", reviewed(orjson.dumps(claimed))
    claim: dict[str, Any] = claim_json()
    claim["metadata"] |= LABELS
    yield "watch: a claim's labels", watched(orjson.dumps(claim), GpuClaim.model_validate_json)
    node = {"metadata": {"name": "n", "labels": {f"a{number:x}": "" for number in range(130_000)}}}
    yield "watch: a node's labels", watched(orjson.dumps(node), decode_node)
    yield "kubelet's list: one chunk of labels", listed(large_pod(PODS["labels"]))
    yield f"{NODES} nodes with {NODES * PODS_PER_NODE} crowded pods", compared()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    slow = []
    with without_collector():
        for name, step in steps():
            times = []
            for _ in range(options.repeats):
                began = time.process_time()
                step()
                times.append(time.process_time() - began)
            milliseconds = min(times) * 1e3
            print(f"{milliseconds:8.1f} ms  {name}")
            if milliseconds > STEP_MILLISECONDS_MAX:
                slow.append(name)
    sys.exit(f"longer than {STEP_MILLISECONDS_MAX:g} ms: {', '.join(slow)}" if slow else 0)


if __name__ == "__main__":
    main()
