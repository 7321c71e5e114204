"""Whatever a tenant writes into a pod: nothing crashes, nothing is acted on, work and memory are bounded.

The fuzz of the two doors by which a tenant's words reach Atoll: reviews of new pods, and watched objects. Work is
counted in calls of Python functions, so that the result does not depend on the machine.
"""

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from atoll.api import names
from atoll.api.claims import COUNT_MAX
from atoll.cluster import pods
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import decode_pod
from atoll.cluster.requests import request_of
from atoll.cluster.selection import Rejection
from atoll.kube.reflector import Reflector
from tests.builders import make_claim, make_report, pod_json
from tests.fakes.clock import ManualClock
from tests.worst_inputs import OBJECT_BYTES_MAX, PODS
from webhook.errors import WebhookError
from webhook.mutation import mutate
from webhook.requests import Defaults
from webhook.review import WARNINGS_MAX, Denial, Mutation, decode_review, encode_answer

KEPT_BYTES_MAX = 400_000
CALLS_PER_BYTE = 0.6
CALLS_MIN = 6_000
"""An ordinary pod of 2 kB costs less."""
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
CLAIM = make_claim(count=1)
FIELDS = {
    "metadata": ("labels", "annotations", "ownerReferences", "deletionTimestamp", "generation", "uid", "name"),
    "spec": (
        "containers",
        "initContainers",
        "tolerations",
        "affinity",
        "volumes",
        "nodeSelector",
        "nodeName",
        "overhead",
    ),
    "status": ("phase", "conditions", "containerStatuses", "nominatedNodeName", "reason"),
}


@st.composite
def hostile_pods(draw: st.DrawFn) -> bytes:
    """Return a pod that abuses some fields up to the size that etcd takes, and has nonsense in others."""
    body = pod_json(gpus=draw(st.sampled_from([0, 0, 1, 64])))
    for name in draw(st.lists(st.sampled_from(sorted(PODS)), min_size=1, max_size=2, unique=True)):
        share = draw(st.sampled_from([0.01, 0.3, 1.0]))
        for section, fields in PODS[name].items():
            body.setdefault(section, {}).update({key: _part(value, share) for key, value in fields.items()})
    for section in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=2, unique=True)):
        body.setdefault(section, {})[draw(st.sampled_from(FIELDS[section]))] = draw(NONSENSE)
    key = draw(st.sampled_from([*names.USER_ANNOTATIONS, "gpu.scheduling/unknown"]))
    annotations = body["metadata"].get("annotations")
    if isinstance(annotations, dict):
        body["metadata"]["annotations"] = {**annotations, key: draw(st.text(max_size=300))}
    raw: bytes = orjson.dumps(body)
    return raw if len(raw) <= OBJECT_BYTES_MAX else orjson.dumps(pod_json())


def _part(value: Any, share: float) -> Any:
    count = int(len(value) * share) + 1 if isinstance(value, dict | list) else 0
    return dict(list(value.items())[:count]) if isinstance(value, dict) else value[:count] if count else value


def calls_of(action: Callable[[], object]) -> int:
    """Return how many functions of Python were called."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def review_of(raw: bytes) -> bytes:
    return (
        b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","operation":"CREATE",'
        b'"resource":{"group":"","version":"v1","resource":"pods"},"namespace":"team","userInfo":{"username":"mallory",'
        b'"groups":["system:authenticated"]},"object":' + raw + b"}}"
    )


def answer_of(body: bytes) -> tuple[Mutation | Denial | None, bytes]:
    """Return the webhook's decision and its answer; None for what it takes for no pod."""
    try:
        review = decode_review(body)
        pod = review.pod()
        claim = CLAIM if names.CLAIM in pod.annotations else None
        decision = mutate(pod, namespace="team", user=review.user, claim=claim, defaults=Defaults())
    except WebhookError as error:
        return None, str(error).encode()
    return decision, encode_answer(review.uid, decision)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Keep the warnings about unreadable pods out of the output."""
    with capture_logs():
        yield


@FUZZ
@given(raw=hostile_pods())
def test_every_review_is_answered_with_bounded_work(raw: bytes) -> None:
    """A denial, a patch, or a word about what is no pod; work grows with the bytes at most, and so does the answer."""
    body = review_of(raw)
    found: list[tuple[Mutation | Denial | None, bytes]] = []

    calls = calls_of(lambda: found.append(answer_of(body)))

    decision, answer = found[0]
    assert calls <= CALLS_MIN + CALLS_PER_BYTE * len(raw)
    assert len(answer) <= 4096 + 2 * len(raw)
    if isinstance(decision, Mutation):
        assert len(decision.warnings) <= WARNINGS_MAX + 2
        assert not any(op["path"].startswith("/status") for op in decision.operations)


@pytest.mark.usefixtures("quiet")
@FUZZ
@given(raw=hostile_pods())
def test_every_watched_pod_is_kept_small_and_frees_nothing(raw: bytes) -> None:
    """The watch goes on, the pod costs a bounded amount of memory, and no GPU is taken or freed for it."""
    ledger = Ledger()
    ledger.put_report(make_report("n1"))
    ledger.put_heartbeat("n1", 0.0, 180.0)
    free = ledger.free("n1", now_seconds=0.0)
    told: list[Any] = []
    watching, again = (
        Reflector(None, "/api/v1/pods", decode_pod, on_event=told.append, clock=ManualClock())  # type: ignore[arg-type]
        for _ in range(2)
    )

    def watch() -> None:
        watching._observe("ADDED", raw)
        for change in told:
            pod = change.object
            if pods.is_gpu_pod(pod):
                ledger.put_pod(pod)
                request = request_of(pod, None)
                assert isinstance(request, Rejection) or request.ask.count <= COUNT_MAX

    calls = calls_of(watch)
    told.clear()
    tracemalloc.start()
    again._observe("ADDED", raw)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert calls <= CALLS_MIN + CALLS_PER_BYTE * len(raw)
    assert kept_bytes < KEPT_BYTES_MAX
    assert ledger.free("n1", now_seconds=0.0) == free
