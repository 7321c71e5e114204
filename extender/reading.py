"""Live reads of one object, decoded: what the API server has now, not what a watch has shown.

Separate, because an answer that cannot be decoded must look like a failed API server, never like a missing object.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from atoll.kube.client import ApiClient
from atoll.kube.errors import MalformedAnswer, NotFound, truncate

READ_SECONDS = 5.0

T = TypeVar("T")


async def read_live(client: ApiClient, path: str, decode: Callable[[bytes], T]) -> T | None:
    """Return the object at `path`, None when there is none. Raises KubeError."""
    try:
        raw = await client.request("GET", path, timeout_seconds=READ_SECONDS, retry=True)
    except NotFound:
        return None
    return decode_answer(raw, path, decode)


def decode_answer(raw: bytes, path: str, decode: Callable[[bytes], T]) -> T:
    """Decode an answer. Raises MalformedAnswer."""
    try:
        return decode(raw)
    except msgspec.MsgspecError as error:
        raise MalformedAnswer(f"cannot read the answer of {path}: {truncate(str(error))}") from error
