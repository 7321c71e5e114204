"""AdmissionReview v1: bytes in, a frozen `Review` out; a decision in, the bytes of the answer out. Decides nothing.

Anything that is not a review is a `MalformedReview`, which the server answers with HTTP 400: the API server then
applies the failure policy.
"""

import base64
from typing import Any, Final

import msgspec

from atoll.api.names import GROUP
from webhook.errors import MalformedReview
from webhook.pods import AdmittedPod, decode_pod, decode_template

API_VERSION: Final = "admission.k8s.io/v1"
BODY_BYTES_MAX: Final = 8 << 20
"""The API server takes objects of up to 3 MiB and sends at most two of them; anything larger is no review."""
OBJECT_BYTES_MAX: Final = 512 << 10
"""Of a new pod or Job that asks Atoll for anything: to read a larger one holds up all other reviews."""
MESSAGE_LENGTH_MAX: Final = 1024
WARNING_LENGTH_MAX: Final = 240
"""The API server cuts single warnings at 256 characters."""
WARNINGS_MAX: Final = 16

REASONS: Final = {400: "BadRequest", 403: "Forbidden", 503: "ServiceUnavailable"}


class GroupResource(msgspec.Struct, frozen=True):
    """Which collection the request is about."""

    group: str = ""
    resource: str = ""


class User(msgspec.Struct, frozen=True):
    """Who asks."""

    username: str = ""
    groups: tuple[str, ...] = ()


class Review(msgspec.Struct, frozen=True, rename="camel"):
    """One question of the API server."""

    uid: str
    operation: str
    resource: GroupResource
    namespace: str = ""
    sub_resource: str = ""
    user: User = msgspec.field(name="userInfo", default=User())
    object: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def creates_pod(self) -> bool:
        """True only for the CREATE of a pod itself: of pods, nothing else is ever changed."""
        is_pod = self.resource == GroupResource(resource="pods") and not self.sub_resource
        return is_pod and self.operation == "CREATE"

    @property
    def writes_job(self) -> bool:
        """True for the CREATE and the UPDATE of a Job itself, not of its status."""
        is_job = self.resource == GroupResource(group="batch", resource="jobs") and not self.sub_resource
        return is_job and self.operation in {"CREATE", "UPDATE"}

    @property
    def is_too_large(self) -> bool:
        """True for a new pod or Job that names Atoll and is larger than any that asks for GPUs in earnest."""
        is_new = self.operation == "CREATE" and (self.creates_pod or self.writes_job)
        raw = bytes(self.object) if is_new else b""
        return len(raw) > OBJECT_BYTES_MAX and GROUP.encode() in raw

    def pod(self) -> AdmittedPod:
        """Decode the object as a pod; raises `MalformedPod`."""
        return decode_pod(bytes(self.object))

    def template(self) -> AdmittedPod:
        """Decode the object as a Job and return what its template describes; raises `MalformedPod`."""
        return decode_template(bytes(self.object))


class _Envelope(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    request: Review


class Denial(msgspec.Struct, frozen=True):
    """The object may not be stored as it is; the message says what to change.

    `code` is 400 for a contradiction in the pod, 403 for something that Atoll does not allow, 503 for "try again".
    """

    message: str
    code: int = 403


class Mutation(msgspec.Struct, frozen=True):
    """What changes in the object; without operations it is admitted as it is."""

    operations: tuple[dict[str, Any], ...] = ()
    """JSON patch (RFC 6902)."""
    warnings: tuple[str, ...] = ()


_DECODER: Final = msgspec.json.Decoder(_Envelope)


def decode_review(body: bytes) -> Review:
    """Decode a request body; raises `MalformedReview` for anything but an AdmissionReview v1 with a uid."""
    if len(body) > BODY_BYTES_MAX:
        raise MalformedReview(f"body of {len(body)} bytes is larger than {BODY_BYTES_MAX}")
    try:
        envelope = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedReview(str(error)) from error
    if (envelope.api_version, envelope.kind) != (API_VERSION, "AdmissionReview"):
        raise MalformedReview(f"it is {envelope.api_version} {envelope.kind}")
    if not envelope.request.uid:
        raise MalformedReview("request.uid is empty")
    return envelope.request


def encode_answer(uid: str, decision: Mutation | Denial) -> bytes:
    """Encode the answer to the review `uid`; texts are cut to what the API server passes on."""
    response: dict[str, Any] = {"uid": uid, "allowed": isinstance(decision, Mutation)}
    if isinstance(decision, Denial):
        message = decision.message[:MESSAGE_LENGTH_MAX]
        response["status"] = {"code": decision.code, "reason": REASONS[decision.code], "message": message}
    else:
        if decision.operations:
            patch = msgspec.json.encode(decision.operations)
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}
        if decision.warnings:
            response["warnings"] = [text[:WARNING_LENGTH_MAX] for text in decision.warnings[:WARNINGS_MAX]]
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})
