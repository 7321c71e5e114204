"""Who may see the page's data: on loopback everybody who can connect, elsewhere bearers whom a role allows.

On loopback the host name of the URL is checked, because a web site in a browser on this machine could otherwise point a
name of its own at 127.0.0.1 and read along.
"""

from collections import OrderedDict
from collections.abc import Callable
from ipaddress import ip_address
from typing import Final

from aiohttp import web

from atoll.kube.authorization import PathAuthorizer
from atoll.kube.limits import TokenBucket

PATH: Final = "/page"
"""What a role has to open, as a nonResourceURL."""
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
REVIEWS_PER_SECOND: Final = 10.0
"""A token costs two questions to the API server, so strangers may ask no more often than this, all together."""
REVIEWS_BURST: Final = 60
PEER_REVIEWS_PER_SECOND: Final = 1.0
"""The same for one peer, so that one stranger shuts nobody out."""
PEER_REVIEWS_BURST: Final = 20
PEERS_MAX: Final = 1024
"""Peers whose budget is remembered; the one that was not heard of for longest is forgotten."""
PEER_BYTES: Final = 8
"""Of an IPv6 address, what names the peer: whoever has one address of a /64 usually has all of them."""


class PageAuthorizer:
    """Allows or refuses requests."""

    def __init__(self, authorizer: PathAuthorizer | None, now: Callable[[], float]) -> None:
        """Without a authorizer the page is on loopback."""
        self._authorizer = authorizer
        self._now = now
        self._reviews = TokenBucket(rate=REVIEWS_PER_SECOND, burst=REVIEWS_BURST, now=now)
        self._peers: OrderedDict[bytes, TokenBucket] = OrderedDict()

    async def refusal(self, request: web.Request) -> web.Response | None:
        """Return None for an allowed request, else the answer that refuses it."""
        if request.headers.get("Sec-Fetch-Site", "none") == "cross-site":
            return web.Response(status=403, text="asked for by another site\n")
        if self._authorizer is None:
            return None if host_name(request.host) in LOOPBACK_NAMES else _wrong_name()
        if not self._peer(request.remote or "").try_take() or not self._reviews.try_take():
            return web.Response(status=429, text="too many calls\n", headers={"Retry-After": "2"})
        refusal = await self._authorizer.refusal(request.headers.get("Authorization", ""), PATH)
        return None if refusal is None else web.Response(status=refusal[0], text=refusal[1] + "\n")

    def _peer(self, address: str) -> TokenBucket:
        """Return the budget of whoever has this address."""
        peer = peer_of(address)
        bucket = self._peers.pop(peer, None) or TokenBucket(
            rate=PEER_REVIEWS_PER_SECOND, burst=PEER_REVIEWS_BURST, now=self._now
        )
        self._peers[peer] = bucket
        if len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)
        return bucket


def peer_of(address: str) -> bytes:
    """Return what names a peer: its IPv4 address, or the network of its IPv6 address. Proxies hide their clients."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address.encode()
    mapped = getattr(found, "ipv4_mapped", None)
    packed = mapped.packed if mapped is not None else found.packed
    return packed[:PEER_BYTES]


def host_name(host: str) -> str:
    """Return the Host header's name without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def _wrong_name() -> web.Response:
    return web.Response(status=421, text="call this page by localhost or 127.0.0.1\n")
