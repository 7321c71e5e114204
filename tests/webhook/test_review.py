"""The AdmissionReview codec: accepted requests, errors, and the JSON of answers."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webhook.errors import MalformedPod, MalformedReview
from webhook.review import BODY_BYTES_MAX, Denial, Mutation, decode_review, encode_answer

POD = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "main"}]}}


def make_review(**request: Any) -> dict[str, Any]:
    """Build a review as the API server sends it for the CREATE of a pod."""
    asked = {
        "uid": "u-1",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": "CREATE",
        "namespace": "team",
        "userInfo": {"username": "alice", "groups": ["system:authenticated"], "extra": {"a": ["b"]}},
        "object": POD,
        "oldObject": None,
        "dryRun": True,
        **request,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked}


def encode(review: object) -> bytes:
    return json.dumps(review).encode()


def test_a_review_is_decoded() -> None:
    """Everything that the decision needs is there, under plain names."""
    review = decode_review(encode(make_review()))

    assert (review.uid, review.namespace, review.user.username) == ("u-1", "team", "alice")
    assert review.creates_pod
    assert review.pod().spec.containers[0].name == "main"


@pytest.mark.parametrize(
    "request_part",
    [
        pytest.param({"operation": "UPDATE"}, id="update"),
        pytest.param({"operation": "CONNECT"}, id="connect"),
        pytest.param({"subResource": "ephemeralcontainers"}, id="subresource"),
        pytest.param({"subResource": "binding"}, id="binding"),
        pytest.param({"resource": {"group": "apps", "version": "v1", "resource": "deployments"}}, id="other-kind"),
        pytest.param({"resource": {"group": "x.io", "version": "v1", "resource": "pods"}}, id="foreign-pods"),
    ],
)
def test_only_the_creation_of_a_pod_is_ours(request_part: dict[str, Any]) -> None:
    """Whatever else a configuration sends here is admitted unchanged."""
    assert not decode_review(encode(make_review(**request_part))).creates_pod


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"null", id="null"),
        pytest.param(b"\xff\xfe", id="not-text"),
        pytest.param(b"[" * 100_000, id="deep-nesting"),
        pytest.param(b" " * (BODY_BYTES_MAX + 1), id="too-large"),
        pytest.param(encode({}), id="no-kind"),
        pytest.param(encode({**make_review(), "apiVersion": "admission.k8s.io/v1beta1"}), id="old-version"),
        pytest.param(encode({**make_review(), "kind": "Pod"}), id="other-kind"),
        pytest.param(encode({**make_review(), "request": None}), id="no-request"),
        pytest.param(encode(make_review(uid="")), id="empty-uid"),
        pytest.param(encode(make_review(uid=7)), id="number-as-uid"),
        pytest.param(encode(make_review(userInfo={"groups": "all"})), id="groups-no-list"),
    ],
)
def test_anything_else_is_a_malformed_review(body: bytes) -> None:
    """The caller learns what is wrong; nothing crashes."""
    with pytest.raises(MalformedReview) as caught:
        decode_review(body)

    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(None, id="null"),
        pytest.param([], id="list"),
        pytest.param({}, id="empty"),
        pytest.param({"metadata": {}, "spec": {"containers": {}}}, id="containers-no-list"),
        pytest.param({"metadata": {"annotations": {"a": 1}}, "spec": {"containers": []}}, id="annotation-no-text"),
        pytest.param({"metadata": {}, "spec": {"containers": [{"env": []}]}}, id="nameless-container"),
    ],
)
def test_an_object_that_is_no_pod_is_a_fault_of_the_caller(pod: object) -> None:
    """The API server never sends such a thing, so it is refused as malformed, not judged."""
    with pytest.raises(MalformedPod):
        decode_review(encode(make_review(object=pod))).pod()


@given(
    body=st.binary(max_size=200)
    | st.recursive(st.none() | st.text(), lambda x: st.dictionaries(st.text(), x)).map(encode)
)
def test_no_body_raises_anything_else(body: bytes) -> None:
    """Hostile bytes end in the one documented fault."""
    with pytest.raises(MalformedReview):
        decode_review(body)


def test_a_mutation_is_answered_with_a_base64_patch() -> None:
    """The wire form of an admitted, changed pod."""
    operation = {"op": "remove", "path": "/metadata/annotations/gpu.scheduling~1uuids"}

    answer = json.loads(encode_answer("u-1", Mutation(operations=(operation,), warnings=("stripped",))))

    response = answer["response"]
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert (response["uid"], response["allowed"], response["patchType"]) == ("u-1", True, "JSONPatch")
    assert json.loads(base64.b64decode(response["patch"])) == [operation]
    assert response["warnings"] == ["stripped"]


def test_an_unchanged_pod_is_answered_without_a_patch() -> None:
    """An empty patch would be re-encoded and compared by the API server for nothing."""
    assert json.loads(encode_answer("u-1", Mutation()))["response"] == {"uid": "u-1", "allowed": True}


def test_a_denial_carries_code_reason_and_message() -> None:
    """kubectl prints the message; controllers look at the code."""
    response = json.loads(encode_answer("u-1", Denial("say what to change", 400)))["response"]

    assert response == {
        "uid": "u-1",
        "allowed": False,
        "status": {"code": 400, "reason": "BadRequest", "message": "say what to change"},
    }


def test_texts_are_cut_to_what_the_api_server_passes_on() -> None:
    """A pod with a thousand forged annotations gets an answer of bounded size."""
    answer = encode_answer("u-1", Mutation(warnings=("w" * 5000,) * 50))

    assert len(answer) < 8192
    assert len(encode_answer("u-1", Denial("d" * 50_000))) < 2048
