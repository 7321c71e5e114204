"""Calls to other services for api_call and notification steps.

Only public addresses are reached, checked for the address that is connected to; hosts of the cluster must be allowed
by name. Redirects are not followed. Secrets are read when a call is made, and are cut out of what comes back.
"""

import json
from base64 import b64decode
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from yarl import URL

from atoll.ml.uris import is_public
from atoll.service.resolving import GuardedResolver

BODY_BYTES_MAX: Final = 64 * 1024
SECRET_BYTES_MAX: Final = 64 * 1024
SECRET_LENGTH_MIN: Final = 8
"""Shorter secrets are refused: cutting them out would garble every text."""
HIDDEN: Final = "***"


class CallRefused(Exception):
    """The call is not made: no retry would help."""


class CallFailed(Exception):
    """The call was made, or tried, and failed."""


@dataclass(frozen=True, slots=True)
class OutgoingCall:
    """One request. `secret_headers`: names of headers, with the names of the tenant's secrets; `hidden`: what must not
    come back beside them."""

    method: str
    url: str
    tenant: str
    headers: Mapping[str, str]
    secret_headers: Mapping[str, str]
    body: Any
    hidden: Sequence[str] = ()


class OutgoingClient:
    """Makes calls. `allowed`: hosts that may have private addresses; `secrets`: folder with a folder per tenant."""

    def __init__(self, *, allowed: Iterable[str] = (), secrets: Path | None = None) -> None:
        self._allowed = frozenset(allowed)
        self._secrets = secrets

    async def call(self, asked: OutgoingCall) -> dict[str, Any]:
        """Return status_code and body. Raises CallRefused, CallFailed."""
        url = self._checked(asked.url)
        if (asked.secret_headers or asked.hidden) and url.scheme != "https" and url.host not in self._allowed:
            raise CallRefused(f"secrets are sent by https alone, and the URL begins with {url.scheme}")
        secrets = {name: self.secret(asked.tenant, secret) for name, secret in asked.secret_headers.items()}
        hidden = {form for secret in secrets.values() for form in forms_of(secret)} | {*asked.hidden}
        connector = aiohttp.TCPConnector(resolver=GuardedResolver(self._refusal), use_dns_cache=False)
        jar = aiohttp.DummyCookieJar()
        body = {} if asked.body is None else {"json": asked.body}
        try:
            async with (
                aiohttp.ClientSession(connector=connector, cookie_jar=jar) as session,
                session.request(
                    asked.method, url, headers={**asked.headers, **secrets}, allow_redirects=False, **body
                ) as answer,
            ):
                data = await answer.content.read(BODY_BYTES_MAX + 1)
                while len(data) <= BODY_BYTES_MAX and (more := await answer.content.read(BODY_BYTES_MAX)):
                    data += more
        except (aiohttp.ClientError, OSError, ValueError) as error:
            told = str(error).replace(str(url), str(url.with_query(None)))
            raise CallFailed(f"{asked.method} {url.origin()}: {without(told, hidden)}") from error
        if len(data) > BODY_BYTES_MAX:
            raise CallFailed(f"{asked.method} {url.origin()}: the answer is larger than {BODY_BYTES_MAX} bytes")
        return {"status_code": answer.status, "body": without(_decoded(data), hidden)}

    def _refusal(self, host: str, addresses: Sequence[str]) -> str:
        """Return why a host may not be reached."""
        if host in self._allowed or all(map(is_public, addresses)):
            return ""
        return f"{host} is not a public host, and outgoing_hosts does not name it"

    def _checked(self, text: str) -> URL:
        """Return the URL if it may be called. Names are checked when they are resolved."""
        try:
            url = URL(text)
            host = url.host
        except ValueError:
            raise CallRefused("the URL cannot be read") from None
        if url.scheme not in ("http", "https") or not host or url.user is not None or url.password is not None:
            raise CallRefused("the URL must be https://HOST/... or http://HOST/..., without a user")
        is_literal = ":" in host or host.replace(".", "").isdigit()
        if is_literal and host not in self._allowed and not is_public(host):
            raise CallRefused(f"{host} is not a public address, and outgoing_hosts does not name it")
        return url

    def secret(self, tenant: str, name: str) -> str:
        """Return the value of a tenant's secret. Raises CallRefused, without the value."""
        if self._secrets is None:
            raise CallRefused(f"secret {name}: this service has no secrets; set --secrets")
        try:
            with (self._secrets / tenant / name).open("rb") as stream:
                value = stream.read(SECRET_BYTES_MAX).decode().strip()
        except (OSError, UnicodeDecodeError):
            raise CallRefused(f"secret {name}: tenant {tenant} has no such secret") from None
        if len(value) < SECRET_LENGTH_MIN or not value.isprintable():
            raise CallRefused(f"secret {name} must have {SECRET_LENGTH_MIN} printable characters or more")
        return value


def forms_of(secret: str) -> frozenset[str]:
    """Return a secret, and what a service may send back of it alone: the token after a word such as Bearer, and what
    Basic encodes, with its password."""
    scheme, _, token = secret.partition(" ")
    found = {secret, token.strip()}
    if scheme.lower() == "basic":
        with suppress(ValueError):
            plain = b64decode(token).decode()
            found |= {plain, plain.partition(":")[2]}
    return frozenset(one for one in found if len(one) >= SECRET_LENGTH_MIN)


def without(value: Any, secrets: Collection[str]) -> Any:  # noqa: ANN401 - a value of JSON's types
    """Return a value without secrets."""
    if isinstance(value, str):
        for secret in sorted(secrets, key=len, reverse=True):  # one may begin another
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, int | float):
        return HIDDEN if any(secret in str(value) for secret in secrets) else value
    if isinstance(value, list):
        return [without(one, secrets) for one in value]
    if isinstance(value, dict):
        return {without(key, secrets): without(one, secrets) for key, one in value.items()}
    return value


def _decoded(data: bytes) -> Any:  # noqa: ANN401 - a value of JSON's types
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode(errors="replace")
