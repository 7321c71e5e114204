"""The guard that stops a process that has lost leadership before its next write."""

from collections.abc import Awaitable, Callable
from typing import Any

from atoll.kube.api import Api
from controllers.errors import NotLeading

WRITE_SECONDS = 5.0
Write = Callable[..., Awaitable[bytes]]


class GuardedApi:
    """An Api whose writes raise NotLeading unless `may_write` holds, now and at the moment when the write is sent."""

    def __init__(self, api: Api, may_write: Callable[[], bool]) -> None:
        self.get, self.list = api.get, api.list
        self._may_write = may_write
        self.create: Any = self._guarded(api.create)
        self.patch: Any = self._guarded(api.patch)
        self.delete: Any = self._guarded(api.delete)

    def _guarded(self, write: Write) -> Write:
        async def send(path: str, *arguments: object, **options: object) -> bytes:
            def check() -> None:
                if not self._may_write():
                    raise NotLeading(path)

            check()
            return await write(path, *arguments, check=check, **{"timeout_seconds": WRITE_SECONDS, **options})

        return send
