"""An object may be nested 10,000 levels deep: the API server takes such managed fields of whoever may write it.

The watch of all other objects goes on, and the object itself is read as if it had none.
"""

from typing import Any

import orjson
import pytest

from agent.kubelet import PodListReader
from atoll.api.depth import LEVELS_MAX
from atoll.kube.mirror import WatchedKind
from atoll.kube.watch_events import decode_metadata, parse_event
from tests.builders import pod_json
from tests.test_hostile_kinds import OBJECTS, Cluster

DEEP = b'{"f:a":' * LEVELS_MAX + b"{}" + b"}" * LEVELS_MAX


def deep(body: dict[str, Any]) -> bytes:
    """Return the object with managed fields as deep as may be, as JSON."""
    fields = [{"manager": "mallory", "fieldsV1": "DEEP"}]
    return orjson.dumps({**body, "metadata": {**body["metadata"], "managedFields": fields}}).replace(b'"DEEP"', DEEP)


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_deep_object_is_watched_as_any_other(kind: WatchedKind) -> None:
    """Neither the event nor the object is refused."""
    event = parse_event(b'{"type":"ADDED","object":' + deep(OBJECTS[kind]) + b"}")
    cluster = Cluster()

    cluster.watch(kind, event.type, bytes(event.object))

    reflector = cluster.mirror.reflectors[kind]
    assert len(reflector.store) == 1
    assert not reflector.untrusted
    assert decode_metadata(bytes(event.object)).metadata.name == OBJECTS[kind]["metadata"]["name"]


def test_a_deep_pod_in_a_kubelets_list_is_read() -> None:
    """The agent goes on to learn which containers run."""
    reader = PodListReader()
    reader.feed(b'{"kind":"PodList","items":[' + deep(pod_json("p", uid="u")) + b"]}")

    reading = reader.reading()
    assert reading is not None
    assert reading.listed == {"u"}
