"""Thin objects keep only the fields that Atoll reads."""

import msgspec
import orjson
import pytest

from atoll.cluster.objects import decode_node, decode_pod
from tests.builders import pod_json

CHATTER = {"managedFields": [{"manager": "kubelet", "fieldsV1": {f"f:{number}": {} for number in range(2000)}}]}
KEPT_BYTES_MAX = 2048


def large_pod() -> bytes:
    """Return a pod with all that makes pods large."""
    body = pod_json(gpus=2)
    (container,) = body["spec"]["containers"]
    container |= {
        "command": ["x" * 5000],
        "env": [{"name": f"NAME_{number}", "value": "v" * 100} for number in range(500)],
        "volumeMounts": [{"name": f"v{number}", "mountPath": f"/v/{number}"} for number in range(50)],
    }
    body["metadata"] |= CHATTER
    return orjson.dumps(body)


def large_node() -> bytes:
    """Return a node that pulled many images."""
    images = [{"names": [f"registry.example/{number}@sha256:{'0' * 64}"], "sizeBytes": 1} for number in range(500)]
    return orjson.dumps({"metadata": {"name": "n1", "uid": "u", **CHATTER}, "status": {"images": images}})


@pytest.mark.parametrize(
    ("decode", "body"), [(decode_pod, large_pod()), (decode_node, large_node())], ids=["pod", "node"]
)
def test_what_nobody_reads_is_not_kept(decode: type, body: bytes) -> None:
    """Environment, commands, images, managed fields: tens of kilobytes come, and a few hundred bytes stay."""
    assert len(body) > 50_000
    assert len(msgspec.json.encode(decode(body))) < KEPT_BYTES_MAX
