"""Authentication: bearer tokens, reviewed by the API server.

Turns an Authorization header into an Identity, or into the reason why there is none. Valid tokens are cached for a
short time, by digest only. Separate from the API, so that another identity provider can replace it.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Protocol

import msgspec

from atoll.kube.api import Api
from atoll.kube.authorization import TOKEN_LENGTH_MAX, review_token
from atoll.kube.errors import KubeError
from atoll.kube.limits import TokenBucket

REMEMBERED_SECONDS: Final = 30.0
"""How long a revoked token may still be accepted, seconds."""
REMEMBERED_MAX: Final = 4096
REVIEWS_PER_SECOND: Final = 20.0
REVIEWS_BURST: Final = 100
"""Limit on token reviews that unknown callers can cause."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A user and their groups."""

    name: str
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NotIdentified:
    """Why authentication failed: `status` is the HTTP status, `told` the message for the caller."""

    status: int
    told: str


class Authenticator(Protocol):
    """Identifies the caller."""

    async def identify(self, authorization: str) -> Identity | NotIdentified:
        """Return the user of the token in an Authorization header."""
        ...


class LocalUser:
    """Treats every caller as the one local user."""

    async def identify(self, authorization: str) -> Identity | NotIdentified:  # noqa: ARG002 - nothing is asked for
        """Return the user."""
        return Identity("local")


class TokenReviewer:
    """Lets the API server review tokens."""

    def __init__(self, client: Api, *, audience: str, now: Callable[[], float]) -> None:
        self._client = client
        self._audience = audience
        self._now = now
        self._reviews = TokenBucket(rate=REVIEWS_PER_SECOND, burst=REVIEWS_BURST, now=now)
        self._known: OrderedDict[bytes, tuple[Identity, float]] = OrderedDict()

    async def identify(self, authorization: str) -> Identity | NotIdentified:
        """Return the user of the token."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > TOKEN_LENGTH_MAX:
            return NotIdentified(401, "a bearer token is needed: kubectl create token ...")
        digest = sha256(token.encode()).digest()
        known = self._known.get(digest)
        if known is not None and self._now() < known[1]:
            return known[0]
        if not self._reviews.try_take():
            return NotIdentified(429, "too many token reviews; try again in a second")
        try:
            user = await review_token(self._client, token, audience=self._audience)
        except (KubeError, msgspec.MsgspecError):
            return NotIdentified(503, "the API server cannot review the token now; try again")
        if user is None or not user.username:
            return NotIdentified(401, "the API server does not know the token")
        identity = Identity(user.username, user.groups)
        self._remember(digest, identity)
        return identity

    def _remember(self, digest: bytes, identity: Identity) -> None:
        self._known[digest] = (identity, self._now() + REMEMBERED_SECONDS)
        self._known.move_to_end(digest)
        while len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
