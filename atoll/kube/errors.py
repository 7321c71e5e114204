"""Errors of calls to the API server.

    KubeError
    ├── ConfigurationError     no usable kubeconfig, context, credentials or certificates
    ├── Unanswered             no complete answer; `sent` says whether the server may have acted
    ├── MalformedAnswer        an invalid answer (not JSON, ...)
    │   └── AnswerTooLarge     an answer larger than the bound
    ├── LeadershipLost         another process may lead now; stop writing
    └── ApiError               the server answered and refused
        ├── Unauthorized 401, Forbidden 403, NotFound 404, Gone 410, Invalid 422, TooManyRequests 429
        ├── AlreadyExists 409 (reason AlreadyExists)
        ├── Conflict      409 (every other reason), and failed preconditions that come as 422
        └── ServerError   5xx

Own classes keep callers independent of the HTTP library. Foreign text is cut first, because it ends up in logs, events
and conditions.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

MESSAGE_LENGTH_MAX = 512


class KubeError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(KubeError):
    """The API server's address or our credentials could not be determined."""


class MalformedAnswer(KubeError):
    """The server's answer violates the API."""


class AnswerTooLarge(MalformedAnswer):
    """The server's answer is larger than what is read; a smaller page may fit."""


class LeadershipLost(KubeError):
    """The leader Lease could not be kept; the work has been cancelled and has ended."""


class Unanswered(KubeError):
    """No complete answer arrived.

    `sent` is False when no connection was ever made, so the server cannot have acted. With True the outcome is
    unknown: it may or may not have acted.
    """

    def __init__(self, message: str, *, path: str, sent: bool) -> None:
        super().__init__(f"{message}: {path} ({'outcome unknown' if sent else 'never sent'})")
        self.path = path
        self.sent = sent


class ApiError(KubeError):
    """The server answered with a status of 400 or more, or with an ERROR event inside a watch."""

    def __init__(
        self, message: str, *, status: int, reason: str, path: str, retry_after_seconds: float | None = None
    ) -> None:
        self.status = status
        self.reason = reason
        self.message = truncate(message)
        self.path = path
        self.retry_after_seconds = retry_after_seconds
        super().__init__(f"{status} {reason or 'without a reason'}: {self.message} ({path})")


class Unauthorized(ApiError):
    """401: the server does not accept our credentials."""


class Forbidden(ApiError):
    """403: RBAC, a quota or an admission policy says no."""


class NotFound(ApiError):
    """404: the object or the resource type does not exist."""


class Conflict(ApiError):
    """409: a precondition on uid or resourceVersion did not hold.

    Also a merge patch with another uid, which the API server reports as 422 (it calls the uid immutable).
    """


class AlreadyExists(ApiError):
    """409: an object of that name already exists."""


class Gone(ApiError):
    """410: the resourceVersion or continue token is too old; list again."""


class Invalid(ApiError):
    """422: the object does not pass validation."""


class TooManyRequests(ApiError):
    """429: the server throttles us, or an eviction would break a disruption budget."""


class ServerError(ApiError):
    """5xx: the server failed."""


_BY_STATUS: dict[int, type[ApiError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: TooManyRequests,
}


class _Cause(msgspec.Struct, gc=False):
    field: str = ""


class _Details(msgspec.Struct, gc=False):
    kind: str = ""
    causes: list[_Cause] | None = None


class _Status(msgspec.Struct, gc=False):
    """The fields of a Kubernetes Status that decide what to do next."""

    kind: str = ""
    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details | None = None


_decode_status = msgspec.json.Decoder(_Status).decode


def api_error(
    body: bytes,
    *,
    path: str,
    status: int = 0,
    retry_after_seconds: float | None = None,
) -> ApiError:
    """Turn an answer into the matching error; a body that is not a Status is never quoted beyond its first bytes.

    `status` 0 takes the code from the body (an ERROR event in a watch).
    """
    try:
        decoded = _decode_status(body)
    except msgspec.MsgspecError:
        decoded = _Status()
    if decoded.kind != "Status":
        decoded = _Status(message=body[:MESSAGE_LENGTH_MAX].decode(errors="replace"))
    code = status or decoded.code or 500
    kind = Conflict if code == 422 and _is_failed_fence(decoded) else _class_for(code, decoded.reason)
    return kind(decoded.message, status=code, reason=decoded.reason, path=path, retry_after_seconds=retry_after_seconds)


def _is_failed_fence(status: _Status) -> bool:
    """True for a failed precondition, False for an invalid object."""
    details = status.details or _Details()
    return any(cause.field == "metadata.uid" for cause in details.causes or ())


def _class_for(status: int, reason: str) -> type[ApiError]:
    if status == 409 and reason == "AlreadyExists":
        return AlreadyExists
    if status >= 500:
        return ServerError
    return _BY_STATUS.get(status, ApiError)


def truncate(text: str, *, length_max: int = MESSAGE_LENGTH_MAX) -> str:
    """Cut foreign text to `length_max` characters, on one line."""
    line = " ".join(_printable_words(text[: 4 * length_max]))
    return line if len(line) <= length_max else line[: length_max - 1] + "…"


def _printable_words(text: str) -> Iterator[str]:
    for word in text.split():
        yield "".join(character for character in word if character.isprintable())
