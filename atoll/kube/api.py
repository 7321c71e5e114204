"""What callers need of the API client; `ApiClient` fits, and so does what tests put in its place.

Whoever only reads asks for an `ApiReader`. The methods are those of `ApiClient`, which documents them.
"""

from collections.abc import Callable, Mapping
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
    """Also writes. `check` is called when a write is about to be sent, after its wait for the rate limit."""

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
