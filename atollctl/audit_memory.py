"""Reads what an extender remembers, from its debug endpoint.

In: an address, a token, the authority of the extender's certificate. Out: a Memory. The extender listens on its pod's
loopback: `kubectl -n atoll-system port-forward deployment/atoll-scheduler 8888` brings it here, and the extender asks
the API server whether the token's bearer may read it.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from atoll.cluster.ledger_dump import LedgerDump, decode_memory
from atoll.cluster.request_history import RequestHistory, decode_past_asks

PATH = "/debug/ledger"
PATH_OF_PAST = "/debug/snapshot"
SECONDS = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExtenderAddress:
    """Where an extender listens, and how it is asked. `token` is not shown."""

    url: str
    token: str
    authority: Path | None = None

    def __repr__(self) -> str:
        return f"ExtenderAddress({self.url!r})"


async def read_memory(address: ExtenderAddress) -> LedgerDump:
    """Return the memory. Raises OSError when there is no answer, or one that says no."""
    return await _read(address, PATH, decode_memory)


async def read_past_asks(address: ExtenderAddress) -> RequestHistory:
    """Return the asks of the past. Raises OSError when there is no answer, or one that says no."""
    return await _read(address, PATH_OF_PAST, decode_past_asks)


async def _read(address: ExtenderAddress, path: str, decode: Callable[[bytes], T]) -> T:
    if not address.url.startswith(("http://", "https://")):
        raise OSError(f"--extender {address.url}: write an address such as http://127.0.0.1:8888")
    context = ssl.create_default_context(cafile=str(address.authority)) if address.authority is not None else True
    headers = {"Authorization": f"Bearer {address.token}"}
    url = address.url.rstrip("/") + path
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session,
            session.get(url, headers=headers, ssl=context) as answer,
        ):
            body = await answer.read()
            if answer.status != 200:
                raise OSError(f"{url} answers {answer.status}: {body[:200].decode(errors='replace').strip()}")
            return decode(body)
    except aiohttp.ClientConnectorError as error:
        raise OSError(f"no extender answers at {address.url} ({error.strerror}); is its port forwarded?") from error
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        raise OSError(f"{url} cannot be read: {error}") from error
