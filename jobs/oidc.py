"""Authentication by OpenID Connect: ID tokens of one issuer, verified with its published keys.

Names and groups get a prefix, so that no identity provider can name itself a ServiceAccount. Tokens of any other issuer
go to the API server. Keys are fetched again when a token names an unknown one, at most once in a while.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import jwt
import structlog

from atoll.kube.authorization import TOKEN_LENGTH_MAX
from jobs.authentication import Authenticator, Identity, NotIdentified

log = structlog.get_logger(__name__)

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "ES256", "ES384", "PS256")
"""Signatures with public keys alone: a token that is signed with a shared secret is refused."""
FETCH_SECONDS: Final = 60.0
"""Least time between two fetches of the keys."""
TIMEOUT_SECONDS: Final = 10.0
ANSWER_BYTES_MAX: Final = 1024 * 1024
LEEWAY_SECONDS: Final = 30
GROUPS_MAX: Final = 1000

FetchJson = Callable[[str], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class OidcIssuer:
    """Whose tokens are taken, and which claims say who somebody is."""

    issuer: str
    audience: str
    user_claim: str
    groups_claim: str
    prefix: str


class OidcTokens:
    """Verifies the tokens of an issuer, and passes any other on."""

    def __init__(
        self, issuer: OidcIssuer, others: Authenticator, *, fetch: FetchJson, now: Callable[[], float]
    ) -> None:
        self._issuer = issuer
        self._others = others
        self._fetch = fetch
        self._now = now
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched: float | None = None
        self._lock = asyncio.Lock()

    async def identify(self, authorization: str) -> Identity | NotIdentified:
        """Return the user of the token."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or len(token) > TOKEN_LENGTH_MAX or not self._is_ours(token):
            return await self._others.identify(authorization)
        try:
            key = await self._key(str(jwt.get_unverified_header(token).get("kid", "")))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
            log.warning("Could not fetch the keys of the identity provider", err=str(error))
            return NotIdentified(503, "the identity provider does not answer now; try again")
        except jwt.PyJWTError:
            return NotIdentified(401, "the token cannot be read")
        if key is None:
            return NotIdentified(401, "the identity provider has no such key")
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self._issuer.audience,
                issuer=self._issuer.issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            return NotIdentified(401, f"the token is not valid: {error}")
        return self._identity(claims)

    def _is_ours(self, token: str) -> bool:
        try:
            claims = jwt.decode(token, options={"verify_signature": False})
        except jwt.PyJWTError:
            return False
        return claims.get("iss") == self._issuer.issuer

    def _identity(self, claims: Mapping[str, Any]) -> Identity | NotIdentified:
        name, groups = claims.get(self._issuer.user_claim), claims.get(self._issuer.groups_claim, ())
        if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
            return NotIdentified(401, f"the token has no claim {self._issuer.user_claim}")
        if self._issuer.user_claim == "email" and claims.get("email_verified") is False:
            return NotIdentified(401, "the identity provider did not verify the e-mail address")
        found = [one for one in groups if isinstance(one, str)] if isinstance(groups, list) else []
        prefix = self._issuer.prefix
        return Identity(prefix + name, tuple(prefix + one for one in found[:GROUPS_MAX]))

    async def _key(self, kid: str) -> jwt.PyJWK | None:
        """Return a key of the issuer; fetches them if it is unknown and the last fetch is not recent."""
        async with self._lock:
            is_due = self._fetched is None or self._now() - self._fetched >= FETCH_SECONDS
            if kid not in self._keys and is_due:
                self._fetched = self._now()
                where = await self._fetch(self._issuer.issuer.rstrip("/") + "/.well-known/openid-configuration")
                if where["issuer"] != self._issuer.issuer:
                    raise ValueError(f"the issuer calls itself {where['issuer']}")
                keys = jwt.PyJWKSet.from_dict(dict(await self._fetch(str(where["jwks_uri"]))))
                self._keys = {one.key_id or "": one for one in keys.keys}
            return self._keys.get(kid)


async def fetch_json(url: str) -> Mapping[str, Any]:
    """Return the JSON object at a URL of the identity provider. Raises aiohttp's errors, TimeoutError, ValueError."""
    if not url.startswith("https://"):
        raise ValueError(f"{url} is not https")
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
        session.get(url, allow_redirects=False) as answer,
    ):
        body = await answer.content.read(ANSWER_BYTES_MAX)
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError(f"{url} holds no JSON object")  # noqa: TRY004 - what a peer sent
    return found
