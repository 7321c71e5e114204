"""What the reconcilers need of the API server, and the guard that stops a loser of leadership before its next write.

In: a client and the question whether we lead. Out: the same calls, of which writes raise NotLeading when we do not.
Separate, so that no reconciler can forget to ask.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from atoll.kube.client import Listing
from atoll.kube.patches import MERGE_PATCH
from controllers.errors import NotLeading

T = TypeVar("T")
WRITE_SECONDS = 5.0
Check = Callable[[], None]


class Api(Protocol):
    """The calls that reconcilers make; ApiClient fits, and so does what tests put in its place."""

    async def get(self, path: str, *, params: Mapping[str, str | int] | None = ...) -> bytes: ...

    async def list(
        self, path: str, decode: Callable[[bytes], T], *, params: Mapping[str, str | int] | None = ...
    ) -> Listing[T]: ...

    async def create(self, path: str, body: Mapping[str, Any], *, timeout_seconds: float = ...) -> bytes: ...

    async def patch(
        self, path: str, body: Mapping[str, Any], *, content_type: str = ..., timeout_seconds: float = ...
    ) -> bytes: ...

    async def delete(
        self, path: str, options: Mapping[str, Any] | None = ..., *, timeout_seconds: float = ...
    ) -> bytes: ...


class AskingApi(Api, Protocol):
    """An Api whose writes call `check` when they are about to be sent, after they have waited for their turn."""

    async def create(
        self, path: str, body: Mapping[str, Any], *, timeout_seconds: float = ..., check: Check | None = ...
    ) -> bytes: ...

    async def patch(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        content_type: str = ...,
        timeout_seconds: float = ...,
        check: Check | None = ...,
    ) -> bytes: ...

    async def delete(
        self,
        path: str,
        options: Mapping[str, Any] | None = ...,
        *,
        timeout_seconds: float = ...,
        check: Check | None = ...,
    ) -> bytes: ...


class GuardedApi:
    """An Api that writes only while `may_write` says so, at the moment when the write is sent."""

    def __init__(self, api: AskingApi, may_write: Callable[[], bool]) -> None:
        self._api = api
        self._may_write = may_write

    async def get(self, path: str, *, params: Mapping[str, str | int] | None = None) -> bytes:
        """Read one object."""
        return await self._api.get(path, params=params)

    async def list(
        self, path: str, decode: Callable[[bytes], T], *, params: Mapping[str, str | int] | None = None
    ) -> Listing[T]:
        """Read a collection as of one moment."""
        return await self._api.list(path, decode, params=params)

    async def create(self, path: str, body: Mapping[str, Any], *, timeout_seconds: float = WRITE_SECONDS) -> bytes:
        """Create an object."""
        return await self._api.create(path, body, timeout_seconds=timeout_seconds, check=self._checked(path))

    async def patch(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        content_type: str = MERGE_PATCH,
        timeout_seconds: float = WRITE_SECONDS,
    ) -> bytes:
        """Patch an object."""
        check = self._checked(path)
        return await self._api.patch(
            path, body, content_type=content_type, timeout_seconds=timeout_seconds, check=check
        )

    async def delete(
        self, path: str, options: Mapping[str, Any] | None = None, *, timeout_seconds: float = WRITE_SECONDS
    ) -> bytes:
        """Delete an object."""
        return await self._api.delete(path, options, timeout_seconds=timeout_seconds, check=self._checked(path))

    def _checked(self, path: str) -> Check:
        """Raise NotLeading if we do not lead now; return what does so again later."""

        def check() -> None:
            if not self._may_write():
                raise NotLeading(path)

        check()
        return check
