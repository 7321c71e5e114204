"""Logs of a job's containers, streamed from the kubelet through the API server."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, Protocol

import msgspec

from atoll.api import job_names
from atoll.kube import paths
from atoll.kube.client import ApiClient
from jobs.records import JobRecord

SILENCE_SECONDS: Final = 3600.0
"""Following ends when a container prints nothing for this long."""


class NoPods(Exception):
    """The job has no such pod."""


class LogReader(Protocol):
    """Reads container logs."""

    def read(self, record: JobRecord, *, pod: str | None, tail: int, follow: bool) -> AsyncGenerator[bytes, None]:
        """Yield the last `tail` lines, then new ones if `follow`. Raises NoPods, KubeError."""
        ...


class _Meta(msgspec.Struct):
    name: str = ""
    creation: str = msgspec.field(name="creationTimestamp", default="")


class _Pod(msgspec.Struct):
    metadata: _Meta


class PodLogs:
    """Reads logs through the API server of the job's cluster."""

    def __init__(self, client_of: Callable[[JobRecord], Awaitable[ApiClient]]) -> None:
        self._client_of = client_of

    async def read(self, record: JobRecord, *, pod: str | None, tail: int, follow: bool) -> AsyncGenerator[bytes, None]:
        """Yield the last lines of the named pod of the job, or of the first pod of its newest attempt."""
        client = await self._client_of(record)
        name = await pod_of(client, record, pod)
        path = paths.pods(record.namespace, name, "log")
        params = {"tailLines": tail, "follow": "true" if follow else "false"}
        async with aclosing(client.stream(path, params, silence_seconds=SILENCE_SECONDS)) as chunks:
            async for chunk in chunks:
                yield chunk


async def pod_of(client: ApiClient, record: JobRecord, wanted: str | None) -> str:
    """Return the wanted pod of a job, or the first of its newest attempt, by name. Raises NoPods, KubeError."""
    selector = {"labelSelector": f"{job_names.JOB_ID}={record.id}"}
    decode = msgspec.json.Decoder(_Pod).decode
    listing = await client.list(paths.pods(record.namespace), decode, params=selector)
    found = [one.metadata for one in listing.items if wanted in (None, one.metadata.name)]
    if not found:
        which = f"pod {wanted}" if wanted else "pods now"
        raise NoPods(f"job {record.name} has no {which}: it is {record.state}")
    newest = max(one.creation for one in found)
    return min(one.name for one in found if one.creation == newest)
