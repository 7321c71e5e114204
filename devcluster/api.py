"""A small client of the cluster's API server for the cluster's own needs: readiness, tokens, fake nodes.

It returns decoded JSON. It does not use atoll.kube, which is under test, nor kubectl, which starts a process per call.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from devcluster.certificates import KeyPairFiles
from devcluster.errors import AdminApiError

Json: TypeAlias = Any

_TIMEOUT_SECONDS = 60.0
_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """One request; the body is sent as JSON."""

    method: str
    path: str
    body: Json = None
    content_type: str = "application/json"


class AdminApi:
    """Sends requests as the cluster's administrator; threads may share it."""

    def __init__(self, port: int, *, authority: KeyPairFiles, client: KeyPairFiles) -> None:
        """Use the relay to the API server on 127.0.0.1:port."""
        self._port = port
        self._authority = authority
        self._client = client
        self.reload()

    def reload(self) -> None:
        """Read authority and client certificate again."""
        self._context = ssl.create_default_context(cafile=str(self._authority.certificate))
        self._context.load_cert_chain(self._client.certificate, self._client.key)

    def get(self, path: str) -> Json:
        """Get the object or text at a path. Raises AdminApiError for a status over 299, OSError if nobody answers."""
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Json = None, *, content_type: str = "application/json") -> Json:
        """Send a body as JSON; return the decoded answer, or its text if it is not JSON. Raises as get does."""
        connection = self._connect()
        try:
            return _exchange(connection, AdminRequest(method, path, body, content_type))
        finally:
            connection.close()

    def request_all(self, requests: Iterable[AdminRequest]) -> None:
        """Send many requests over a few persistent connections. Raises as get does for the first failure."""
        local, opened = threading.local(), []

        def connect() -> None:
            local.connection = self._connect()
            opened.append(local.connection)

        try:
            with ThreadPoolExecutor(max_workers=_CONNECTIONS, initializer=connect) as pool:
                for _ in pool.map(lambda request: _exchange(local.connection, request), requests):
                    pass
        finally:
            for connection in opened:
                connection.close()

    def _connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self._port, context=self._context, timeout=_TIMEOUT_SECONDS)


def _exchange(connection: http.client.HTTPSConnection, request: AdminRequest) -> Json:
    payload = None if request.body is None else json.dumps(request.body)
    try:
        connection.request(request.method, request.path, payload, headers={"Content-Type": request.content_type})
        response = connection.getresponse()
        text = response.read().decode()
    except http.client.HTTPException as error:
        raise ConnectionError(f"{request.method} {request.path}: {error!r}") from error
    if response.status > 299:
        raise AdminApiError(f"{request.method} {request.path}", status=response.status, answer=text)
    return json.loads(text) if "json" in response.headers.get("Content-Type", "") else text
