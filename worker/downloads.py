"""Downloads over HTTPS that reach only public addresses, or hosts that are listed.

A host is resolved once, each of its addresses is judged, and the connection goes to one of these and never to the name
again; so does every redirect. The rules are those of atoll.ml.uris, which this package cannot import.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import urljoin, urlsplit

from worker.errors import ModelRefused
from worker.places import shown

REDIRECTS_MAX: Final = 5
SILENCE_SECONDS: Final = 30.0
"""Longest wait for the next bytes."""
PIECE_BYTES: Final = 1024 * 1024
_SPECIAL: Final = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16"),
            *("192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
            "168.63.129.16/32",  # Azure's own services on every machine
            *("::/3", "4000::/2", "8000::/1"),  # all but global unicast: NAT64, site-local and the like among them
            *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
        ),
    )
)
"""IANA's registries of special-purpose addresses, and what clouds use beside them. Networks whose IPv6 addresses carry
an IPv4 address for a gateway (6to4, Teredo, NAT64) are among them."""


def is_public(address: str) -> bool:
    """True for an address of the public internet; an IPv4 address mapped into IPv6 is judged as itself."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return not any(found.version == network.version and found in network for network in _SPECIAL)


@contextmanager
def download(
    url: str, *, hosts: Sequence[str], headers: Mapping[str, str]
) -> Iterator[tuple[int | None, Iterator[bytes]]]:
    """Yield the size, None if the server does not tell it, and the pieces of what a URL leads to.

    hosts: that may have private addresses and be spoken to without TLS. headers: for the URL's own host alone. Raises
    ModelRefused, FileNotFoundError, PermissionError and other OSErrors.
    """
    asked = url
    for _ in range(REDIRECTS_MAX + 1):
        connection, response = _answer(asked, hosts, headers if _origin(asked) == _origin(url) else {})
        try:
            if response.status in (301, 302, 303, 307, 308) and response.headers["Location"]:
                asked = _joined(asked, response.headers["Location"])
                continue
            _check_status(response.status, asked)
            yield response.length, _pieces(response, asked)
            return
        finally:
            response.close()
            connection.close()
    raise ModelRefused(f"{shown(url)} redirects more than {REDIRECTS_MAX} times")


def _origin(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port. Raises ModelRefused."""
    try:
        parts = urlsplit(url)
        return parts.scheme, (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise ModelRefused(f"{shown(url)!r} is no URL: its host or port cannot be read") from None


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise ModelRefused(f"{shown(url)!r} redirects to no URL") from None


def _answer(url: str, hosts: Sequence[str], headers: Mapping[str, str]) -> tuple[HTTPConnection, HTTPResponse]:
    scheme, host, port = _origin(url)
    parts, is_listed = urlsplit(url), not {host, f"{host}:{port}"}.isdisjoint(hosts)
    if not host or "@" in parts.netloc or not (scheme == "https" or (scheme == "http" and is_listed)):
        hint = "write https://HOST/PATH without a user; http:// is for hosts in ATOLL_MODEL_HOSTS"
        raise ModelRefused(f"{shown(url)!r} is refused: {hint}")
    kind, standard = (HTTPSConnection, 443) if scheme == "https" else (HTTPConnection, 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or not path.isprintable() or " " in path:
        raise ModelRefused(f"{shown(url)!a} has other characters than a URL has: its server must encode them as %XX")
    try:
        with ExitStack() as unless_answered:
            connection = unless_answered.enter_context(closing(kind(host, port or standard)))
            connection.auto_open = 0  # it would resolve the name again
            connection.sock = _connected(host, port or standard, is_listed=is_listed)
            if kind is HTTPSConnection:
                context = ssl.create_default_context()
                connection.sock = context.wrap_socket(connection.sock, server_hostname=host)
            connection.request("GET", path, headers={"Accept-Encoding": "identity", **headers})
            response = connection.getresponse()
            unless_answered.pop_all()
            return connection, response
    except HTTPException as error:
        raise ConnectionError(f"{shown(url)}: {error!r}") from error


def _connected(host: str, port: int, *, is_listed: bool) -> socket.socket:
    """Return a connection to one of a host's addresses, none of which may be private."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise ModelRefused(f"{host[:200]!r} is no name of a host: {error}") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    inner = [one for one in addresses if not is_public(one)]
    if inner and not is_listed:
        raise ModelRefused(f"{host} leads to {inner[0]}, which is not public: ATOLL_MODEL_HOSTS can list the host")
    for address in addresses[:-1]:
        try:
            return socket.create_connection((address, port), timeout=SILENCE_SECONDS)
        except OSError:
            continue
    return socket.create_connection((addresses[-1], port), timeout=SILENCE_SECONDS)


def _check_status(status: int, url: str) -> None:
    told = f"{shown(url)}: the server answers {status}"
    if status in (404, 410):
        raise FileNotFoundError(told)
    if status in (401, 403):
        raise PermissionError(told)
    if status != 200:
        raise ConnectionError(told)


def _pieces(response: HTTPResponse, url: str) -> Iterator[bytes]:
    """Yield what comes, as it comes. Raises ConnectionError where the end is missing."""
    left = response.length
    try:
        while piece := response.read1(PIECE_BYTES):
            left = None if left is None else left - len(piece)
            yield piece
    except HTTPException as error:
        raise ConnectionError(f"{shown(url)}: {error!r}") from error
    if left:
        raise ConnectionError(f"{shown(url)} ended {left} bytes too early")
