"""Resolves names for requests that somebody else's words cause, and refuses what must not be contacted.

The connection goes to the very address that was judged: a name that changes its address in between leads nowhere.
"""

import errno
import socket
from collections.abc import Callable, Sequence

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

Judge = Callable[[str, Sequence[str]], str]
"""Tells why a host with these addresses must not be contacted; empty if it may be."""


class GuardedResolver(AbstractResolver):
    """Resolves names to addresses that may be contacted, for a session without a cache of its own."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._inner = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a host. Raises OSError if one of them must not be contacted."""
        found = await self._inner.resolve(host, port, family)
        refused = self._judge(host, [one["host"] for one in found])
        if refused:
            raise OSError(errno.EACCES, refused)  # aiohttp tells no other part of it
        return found

    async def close(self) -> None:
        """Close the resolver."""
        await self._inner.close()
