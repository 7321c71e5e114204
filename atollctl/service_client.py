"""HTTP client of the job service, with readable errors.

Sends one request at a time. Requests that are safe to repeat are retried: reads, and submissions, because they carry
an idempotency key.
"""

import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from atoll.service.http import is_loopback

TIMEOUT_SECONDS: Final = 30.0
FOLLOW_SECONDS: Final = 3600.0
TRIES: Final = 3
PAUSE_SECONDS: Final = 1.0
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
TOKEN_BYTES_MAX: Final = 64 * 1024
CHUNK_BYTES: Final = 16 * 1024
GLOBAL: Final = ("pipelines", "usecases")
"""Collections that belong to no cluster."""


class ServiceUnreachable(Exception):
    """The service does not answer, or something else answers."""


@dataclass(frozen=True, slots=True)
class ServiceAnswer:
    """A response of the service."""

    status: int
    body: bytes

    def json(self) -> Any:  # noqa: ANN401 - plain values
        """Return the decoded body. Raises ServiceUnreachable if it is not from the job service."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise ServiceUnreachable("the server at that address is not the job service") from error

    def told(self) -> str:
        """Return why the service refuses, in one line."""
        try:
            return str(json.loads(self.body)["detail"])
        except (ValueError, KeyError, TypeError):
            return f"the response has status {self.status}"

    def lines(self) -> Iterator[str]:
        """Yield why the service refuses, a line for each invalid field."""
        try:
            errors = json.loads(self.body).get("errors") or ()
        except (ValueError, AttributeError):
            errors = ()
        told = False
        for one in errors:
            line = f"line {one['line']}: " if one.get("line") else ""
            value = f" is {one['value']}" if one.get("value") else ""
            hint = f"; {one['hint']}" if one.get("hint") else ""
            yield f"{line}{one['field']}{value}: {one['limit']}{hint}"
            told = True
        if not told:
            yield self.told()


@dataclass(frozen=True, slots=True)
class ServiceClient:
    """The job service at one address, one of its clusters, and one collection in it, such as jobs; empty for all
    clusters, and for the cluster itself."""

    url: str
    cluster: str
    collection: str
    token: str
    opener: OpenerDirector
    context: ssl.SSLContext
    """Trusts the service's certificate."""

    @classmethod
    def of(
        cls, server: str, *, token_file: Path | None, ca: Path | None, cluster: str, collection: str = "jobs"
    ) -> "ServiceClient":
        """Return a client. Raises OSError for unreadable files, ValueError if the token would be sent unencrypted."""
        address = urlsplit(server)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(f"{server} is no URL: write https://HOST:PORT")
        token = ""
        if token_file is not None:
            with token_file.open("rb") as stream:
                token = stream.read(TOKEN_BYTES_MAX).decode("ascii", "replace").strip()
            if not token.isprintable() or not token:
                raise ValueError(f"{token_file} holds no token")
        if token and address.scheme == "http" and not is_loopback(address.hostname):
            raise ValueError(f"{server} would receive the token unencrypted: use https")
        context = ssl.create_default_context(cafile=str(ca) if ca is not None else None)
        handlers = (HTTPSHandler(context=context), *((ProxyHandler({}),) if is_loopback(address.hostname) else ()))
        return cls(server.rstrip("/"), cluster, collection, token, build_opener(*handlers), context)

    def ask(
        self, method: str, path: str, *, query: Mapping[str, Any], body: bytes | None, headers: Mapping[str, str]
    ) -> ServiceAnswer:
        """Send a request and return the response; `path` is relative to the collection. Raises ServiceUnreachable."""
        may_repeat = method == "GET" or "Idempotency-Key" in headers
        for number in range(TRIES if may_repeat else 1):
            if number:
                time.sleep(PAUSE_SECONDS)
            try:
                with self._opened(method, path, query, body, headers, TIMEOUT_SECONDS) as answer:
                    return ServiceAnswer(answer.status, answer.read(ANSWER_BYTES_MAX))
            except HTTPError as refusal:
                with refusal:
                    return ServiceAnswer(refusal.code, refusal.read(ANSWER_BYTES_MAX))
            except (OSError, HTTPException) as error:
                problem = error
        raise ServiceUnreachable(f"cannot reach the job service at {self.url}: {_reason(problem)}") from problem

    def stream(
        self,
        path: str,
        query: Mapping[str, Any],
        take: Callable[[bytes], None],
        *,
        begin: Callable[[Mapping[str, str]], None] = lambda _headers: None,
    ) -> ServiceAnswer | None:
        """Pass the headers of the response to `begin` and each chunk to `take`; return a refusal, or None. Raises
        ServiceUnreachable."""
        try:
            with self._opened("GET", path, query, None, {}, FOLLOW_SECONDS) as answer:
                begin(dict(answer.headers.items()))
                while chunk := answer.read1(CHUNK_BYTES):
                    take(chunk)
            return None
        except HTTPError as refusal:
            with refusal:
                return ServiceAnswer(refusal.code, refusal.read(ANSWER_BYTES_MAX))
        except (OSError, HTTPException) as error:
            raise ServiceUnreachable(f"cannot reach the job service at {self.url}: {_reason(error)}") from error

    def address(self, path: str, query: Mapping[str, Any]) -> str:
        """Return the URL of a path, which is relative to the collection."""
        asked = f"?{urlencode(query, doseq=True)}" if query else ""
        within = () if self.collection in GLOBAL else ("clusters", self.cluster)
        parts = (quote(part, safe="") for part in (*within, self.collection) if part)
        return "/".join((f"{self.url}/api", *parts)) + path + asked

    def identity(self) -> dict[str, str]:
        """Return the headers that say who asks."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def _opened(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: bytes | None,
        headers: Mapping[str, str],
        timeout_seconds: float,
    ) -> HTTPResponse:
        url = self.address(path, query)
        request = Request(url, data=body, method=method, headers={**headers, **self.identity()})  # noqa: S310 - http or https, above
        opened: HTTPResponse = self.opener.open(request, timeout=timeout_seconds)
        return opened


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, URLError) else error
    return str(inner) or type(inner).__name__
