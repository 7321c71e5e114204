"""What a job's containers print, streamed from the kubelet through the API server.

In: a record and which of its pods. Out: bytes as they come. Nothing is kept.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, Protocol

import msgspec

from atoll.api import job_names
from atoll.kube import paths
from atoll.kube.client import ApiClient
from jobs.records import JobRecord

SILENCE_SECONDS: Final = 3600.0
"""A container that prints nothing for this long is no longer followed."""


class NoPods(Exception):
    """The job has no such pod."""


class LogReader(Protocol):
    """Reads what containers print."""

    def read(self, record: JobRecord, *, pod: str | None, tail: int, follow: bool) -> AsyncGenerator[bytes, None]:
        """Yield the last lines, and what follows. Raises NoPods, KubeError."""
        ...


class _Meta(msgspec.Struct):
    name: str = ""
    creation: str = msgspec.field(name="creationTimestamp", default="")


class _Pod(msgspec.Struct):
    metadata: _Meta


class PodLogs:
    """Asks the API server."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def read(self, record: JobRecord, *, pod: str | None, tail: int, follow: bool) -> AsyncGenerator[bytes, None]:
        """Yield the last lines of the named pod of the job, or of its newest try's first one."""
        name = await self._pod(record, pod)
        path = paths.pods(record.namespace, name, "log")
        params = {"tailLines": tail, "follow": "true" if follow else "false"}
        async with aclosing(self._client.stream(path, params, silence_seconds=SILENCE_SECONDS)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _pod(self, record: JobRecord, wanted: str | None) -> str:
        """Return the name of a pod of this job and of no other."""
        selector = {"labelSelector": f"{job_names.JOB_ID}={record.id}"}
        decode = msgspec.json.Decoder(_Pod).decode
        listing = await self._client.list(paths.pods(record.namespace), decode, params=selector)
        found = [one.metadata for one in listing.items if wanted in (None, one.metadata.name)]
        if not found:
            which = f"pod {wanted}" if wanted else "pods now"
            raise NoPods(f"job {record.name} has no {which}: it is {record.state}")
        newest = max(one.creation for one in found)
        return min(one.name for one in found if one.creation == newest)
