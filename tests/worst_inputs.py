"""The worst objects that the API server accepts, made to cost memory or time in whoever watches or admits them."""

from typing import Any

import orjson

from atoll.api import names
from tests.builders import pod_json

OBJECT_BYTES_MAX = 1_572_864
"""What etcd takes by default of one object."""


def many(count: int, entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return copies of an entry, with different names if it has one."""
    return [{**entry, "name": f"{entry['name']}-{number}"} if "name" in entry else entry for number in range(count)]


LABELS = {"labels": {f"team.example/label-{number}": f"value-{number}" for number in range(35_000)}}
NOTES = {"annotations": {f"gpu.scheduling/note-{number}": "" for number in range(9_000)}}
NUMBERS = {"annotations": {f"n{number}": str(number) for number in range(20_000)}}
LONG_NAME = {"annotations": {names.CLAIM: "x" * 250_000}}
STATUS = {"name": "c", "state": {"running": {"startedAt": "2026-01-31T12:00:00Z"}}}
OWNER = {"kind": "Job", "name": "o", "uid": "u", "apiVersion": "v"}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
MANAGED = {f"f:{number:x}": {} for number in range(110_000)}
TERM = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "web"}}}
ANTI = {"podAntiAffinity": {REQUIRED: many(12_000, TERM)}}
KIB_254 = 254 * 1024
MOST = {
    "affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}] * (KIB_254 // 3)}}},
    "tolerations": [{}] * (KIB_254 // 3),
    "nodeSelector": {f"a{number:x}": "" for number in range(22_000)},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "z"}] * 8_000,
}
"""Fields of which each alone is just small enough to be read."""
READ = {
    "tolerations": many(4_000, {"operator": "Exists"}),
    "affinity": {"podAntiAffinity": {REQUIRED: many(900, TERM)}},
    "nodeSelector": {f"a{number:x}": "" for number in range(5_000)},
}
"""Fields that are read, in one pod."""
OWNERS = {"ownerReferences": [{**OWNER, "uid": f"u{number:x}"} for number in range(22_000)]}
PODS = {
    "labels": {"metadata": LABELS},
    "annotations like Atoll's": {"metadata": NOTES},
    "annotations like ranks": {"metadata": NUMBERS},
    "a long name of a claim": {"metadata": LONG_NAME},
    "owners": {"metadata": OWNERS},
    "tolerations": {"spec": {"tolerations": many(60_000, {"operator": "Exists"})}},
    "anti-affinity": {"spec": {"affinity": ANTI}},
    "containers": {"spec": {"containers": many(9_000, {"name": "c", "resources": {"requests": {"cpu": "1m"}}})}},
    "ports": {"spec": {"containers": [{"name": "c", "ports": [{"hostPort": port} for port in range(1, 60_000)]}]}},
    "node selector": {"spec": {"nodeSelector": LABELS["labels"]}},
    "as much as is read": {"spec": READ},
    "large fields": {"spec": MOST},
    "large fields and ports": {
        "spec": {**MOST, "containers": [{"name": "c", "ports": [{"hostPort": 1}] * 14_000}]},
        "metadata": {"annotations": {f"n{number}": str(number) for number in range(14_000)}},
    },
    "short node selector": {"spec": {"nodeSelector": {f"a{number:x}": "" for number in range(130_000)}}},
    "empty terms": {"spec": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}] * 490_000}}}}},
    "managed fields": {"metadata": {"managedFields": [{"manager": "m", "fieldsV1": MANAGED}]}},
    "volumes": {"spec": {"volumes": many(15_000, {"name": "v", "persistentVolumeClaim": {"claimName": "data"}})}},
    "templates of volumes": {"spec": {"volumes": [{"name": "v", "ephemeral": {"metadata": LABELS}}]}},
    "conditions": {"status": {"conditions": many(20_000, {"type": "T", "status": "True", "message": "m" * 20})}},
    "a long message": {"status": {"conditions": [{"type": "T", "status": "True", "message": "m" * 1_400_000}]}},
    "resources": {
        "spec": {"containers": [{"name": "c", "resources": {"requests": {f"e.x/{n:x}": "1" for n in range(75_000)}}}]}
    },
    "resources of many containers": {
        "spec": {
            "containers": [
                {"name": "c", "resources": {"requests": {f"e{m}.x/{n:x}": f"{m}{n}" for n in range(2_000)}}}
                for m in range(25)
            ]
        }
    },
    "ports of many containers": {"spec": {"containers": [{"name": "c", "ports": [{"hostPort": 1}] * 300}] * 250}},
    "init containers": {"spec": {"initContainers": [{"name": f"c{number:x}"} for number in range(60_000)]}},
    "gates": {"spec": {"schedulingGates": [{"name": f"g{number:x}"} for number in range(70_000)]}},
    "resource claims": {"spec": {"resourceClaims": [{"name": f"c{number:x}"} for number in range(70_000)]}},
    "container statuses": {"status": {"containerStatuses": many(18_000, STATUS)}},
}
"""Sections of a pod by what they abuse."""


def large_pod(parts: dict[str, dict[str, Any]], **options: Any) -> bytes:
    """Return a pod with these sections, as JSON."""
    body = pod_json(**options)
    for section, fields in parts.items():
        body.setdefault(section, {}).update(fields)
    raw: bytes = orjson.dumps(body)
    return raw
