"""A small client of the cluster's own API server, for what the cluster itself needs: readiness, tokens, fake nodes.

In: the relay's port, the authority and the administrator's certificate. Out: decoded JSON. It is not atoll.kube, which is
what tests of a cluster examine; kubectl would cost a process start per question.
"""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any

from devcluster.certificates import KeyPair
from devcluster.errors import ApiError

_TIMEOUT_SECONDS = 30.0


class Api:
    """Requests as the cluster's administrator; one connection per request, safe to share between threads."""

    def __init__(self, port: int, *, authority: KeyPair, client: KeyPair) -> None:
        """Reach the API server through the relay on 127.0.0.1:port."""
        self._port = port
        self._context = ssl.create_default_context(cafile=str(authority.certificate))
        self._context.load_cert_chain(client.certificate, client.key)

    def get(self, path: str) -> Any:
        """The object or text at a path. Raises ApiError for any status over 299, OSError while nobody answers."""
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Any = None, *, content_type: str = "application/json") -> Any:
        """Send a body as JSON and decode the answer, text where it is no JSON. Raises as get does."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._port, context=self._context, timeout=_TIMEOUT_SECONDS
        )
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, body=payload, headers={"Content-Type": content_type})
            response = connection.getresponse()
            text = response.read().decode()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        if response.status > 299:
            raise ApiError(f"{method} {path}", status=response.status, answer=text)
        return json.loads(text) if "json" in response.headers.get("Content-Type", "") else text
