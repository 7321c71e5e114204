"""Who may see the page's data: on loopback everybody who can connect, elsewhere bearers whom a role allows.

On loopback the host name of the URL is checked, because a web site in a browser on this machine could otherwise point a
name of its own at 127.0.0.1 and read along.
"""

from collections.abc import Callable
from typing import Final

from aiohttp import web

from atoll.kube.authorization import PathAuthorizer
from atoll.kube.limits import TokenBucket

PATH: Final = "/page"
"""What a role has to open, as a nonResourceURL."""
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
REVIEWS_PER_SECOND: Final = 5.0
"""A token costs two questions to the API server, so strangers may ask no more often than this."""
REVIEWS_BURST: Final = 20


class PageAuthorizer:
    """Allows or refuses requests."""

    def __init__(self, authorizer: PathAuthorizer | None, now: Callable[[], float]) -> None:
        """Without a authorizer the page is on loopback."""
        self._authorizer = authorizer
        self._reviews = TokenBucket(rate=REVIEWS_PER_SECOND, burst=REVIEWS_BURST, now=now)

    async def refusal(self, request: web.Request) -> web.Response | None:
        """Return None for an allowed request, else the answer that refuses it."""
        if request.headers.get("Sec-Fetch-Site", "none") == "cross-site":
            return web.Response(status=403, text="asked for by another site\n")
        if self._authorizer is None:
            return None if host_name(request.host) in LOOPBACK_NAMES else _wrong_name()
        if not self._reviews.try_take():
            return web.Response(status=429, text="too many calls\n", headers={"Retry-After": "2"})
        refusal = await self._authorizer.refusal(request.headers.get("Authorization", ""), PATH)
        return None if refusal is None else web.Response(status=refusal[0], text=refusal[1] + "\n")


def host_name(host: str) -> str:
    """Return the Host header's name without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def _wrong_name() -> web.Response:
    return web.Response(status=421, text="call this page by localhost or 127.0.0.1\n")
