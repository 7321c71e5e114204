"""Protocols of the API client, for callers and for fakes in tests.

Callers that only read take an `ApiReader`. `ApiClient` documents the methods.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol, TypeVar

from atoll.kube.client import Listing

T = TypeVar("T")


class ApiReader(Protocol):
    """Reads objects and collections."""

    async def get(
        self, path: str, *, params: Mapping[str, str | int] | None = ..., timeout_seconds: float = ...
    ) -> bytes: ...

    async def list(
        self, path: str, decode: Callable[[bytes], T], *, params: Mapping[str, str | int] | None = ...
    ) -> Listing[T]: ...


class Api(ApiReader, Protocol):
    """Also writes. `check` is called just before a write is sent, after its wait for the rate limit."""

    async def create(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout_seconds: float = ...,
        check: Callable[[], None] | None = ...,
    ) -> bytes: ...

    async def patch(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        content_type: str = ...,
        timeout_seconds: float = ...,
        check: Callable[[], None] | None = ...,
    ) -> bytes: ...

    async def delete(
        self,
        path: str,
        options: Mapping[str, Any] | None = ...,
        *,
        timeout_seconds: float = ...,
        check: Callable[[], None] | None = ...,
    ) -> bytes: ...


class StreamingApi(Api, Protocol):
    """Also reads what has no end, or may be large, chunk by chunk."""

    def stream(
        self, path: str, params: Mapping[str, str | int], *, silence_seconds: float = ...
    ) -> AsyncGenerator[bytes, None]: ...
