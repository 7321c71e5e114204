"""Asks the API server who a token belongs to, and whether that user may GET a path, such as /debug/ledger.

It stores and compares no secret: the API server reviews the token, and a ClusterRole with `nonResourceURLs` allows the
path.
"""

import msgspec

from atoll.kube import paths
from atoll.kube.api import Api
from atoll.kube.errors import KubeError

TOKEN_LENGTH_MAX = 16_384


class TokenUser(msgspec.Struct, frozen=True):
    """The user of a token."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, list[str]] = {}


class _TokenStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: TokenUser = TokenUser()
    audiences: tuple[str, ...] = ()


class _TokenReview(msgspec.Struct, frozen=True):
    status: _TokenStatus = _TokenStatus()


class _AccessStatus(msgspec.Struct, frozen=True):
    allowed: bool = False


class _AccessReview(msgspec.Struct, frozen=True):
    status: _AccessStatus = _AccessStatus()


async def review_token(client: Api, token: str, *, audience: str = "") -> TokenUser | None:
    """Return the user of the token; None if the API server does not know it, or it has another audience.

    `audience`: required audience of the token; empty means the API server. Raises KubeError, and
    msgspec.MsgspecError for an unreadable response.
    """
    spec: dict[str, object] = {"token": token}
    if audience:
        spec["audiences"] = [audience]
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
    answer = await client.create(paths.group("authentication.k8s.io/v1", "tokenreviews"), body)
    status = msgspec.json.decode(answer, type=_TokenReview).status
    if not status.authenticated or (audience and audience not in status.audiences):
        return None
    return status.user


class PathAuthorizer:
    """Asks the API server about each call, without a cache, because such calls are rare."""

    def __init__(self, client: Api) -> None:
        self._client = client

    async def refusal(self, authorization: str, path: str) -> tuple[int, str] | None:
        """Return None if the user may GET the path, else a status and the reason; `authorization` is the header's
        value."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > TOKEN_LENGTH_MAX:
            return 401, "a bearer token is needed: kubectl create token ..."
        try:
            user = await review_token(self._client, token)
            if user is None:
                return 401, "the API server does not know the token"
            is_allowed = await self._may_get(user, path)
        except (KubeError, msgspec.MsgspecError):
            return 503, "the API server cannot be asked about the token"
        return None if is_allowed else (403, f"{user.username} may not get {path}")

    async def _may_get(self, user: TokenUser, path: str) -> bool:
        attributes = {"path": path, "verb": "get"}
        spec = {"user": user.username, "uid": user.uid, "groups": list(user.groups), "extra": user.extra}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {**spec, "nonResourceAttributes": attributes},
        }
        answer = await self._client.create(paths.group("authorization.k8s.io/v1", "subjectaccessreviews"), body)
        return msgspec.json.decode(answer, type=_AccessReview).status.allowed
