"""The archive of logs: an object per pod in an object store, below the tenant's own prefix.

obstore writes to S3, Google's and Azure's stores, with credentials from the variables and metadata servers of the
clouds' own tools; `file://` is a folder. Nothing here knows a credential, and of a store's refusal neither the body nor
the query of a URL is told: they may hold parts of one.
"""

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterable
from datetime import timedelta
from typing import Any, Final

import obstore
import structlog
from obstore.exceptions import BaseError
from obstore.store import from_url

from atoll.kube.clock import Clock
from atoll.service.metrics import Metrics
from jobs.settings import TENANT_PLACE

log = structlog.get_logger(__name__)

FILE: Final = "file"
STORE_SECONDS: Final = 20.0
"""How long the store may take for one object."""
PAUSE_SECONDS: Final = 30.0
"""After a failure the store is left alone for this long: it must not hold up jobs one after the other."""
TOLD_LENGTH_MAX: Final = 200
AT_ONCE_MAX: Final = 4
"""Logs that are in memory at a time."""
RETRIES: Final[Any] = {"max_retries": 2, "retry_timeout": timedelta(seconds=STORE_SECONDS)}


class ArchiveUnavailable(Exception):
    """The object store did not take or return a log."""


class LogMissing(Exception):
    """The archive has no such log any more."""


class LogTail:
    """The last bytes of a log, in whole lines. What is left out is said in the first line."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._chunks: deque[bytes] = deque()
        self._kept = self._total = 0

    def add(self, chunk: bytes) -> None:
        """Add what follows."""
        self._chunks.append(chunk)
        self._kept += len(chunk)
        self._total += len(chunk)
        while self._kept - len(self._chunks[0]) >= self._bytes_max:
            self._kept -= len(self._chunks.popleft())

    def text(self) -> bytes:
        """Return the end of the log."""
        whole = b"".join(self._chunks)
        if self._total <= self._bytes_max:
            return whole
        end = whole[-self._bytes_max :]
        lines = end.partition(b"\n")[2] or end
        return b"[the first %d bytes of this log are not in the archive]\n" % (self._total - len(lines)) + lines


def log_in(folder: str, pod: str) -> str:
    """Return where the log of a pod is in the folder of its attempt."""
    return f"{folder}{pod}.log"


class LogArchive:
    """One archive. `template`: the prefix of a tenant, with {tenant} in it. `bytes_max`: of one log."""

    def __init__(self, template: str, *, bytes_max: int, clock: Clock) -> None:
        self._template = template
        self._bytes_max = bytes_max
        self._clock = clock
        self._stores: dict[str, Any] = {}
        self._turns = asyncio.Semaphore(AT_ONCE_MAX)
        self._silent_until_seconds = 0.0
        self.saved_count = self.failures_count = 0

    def register(self, metrics: Metrics) -> None:
        """Publish what was saved."""
        metrics.counter_of("logs_archived", "Logs of pods written to the archive", lambda: self.saved_count)
        metrics.counter_of("log_archive_failures", "Logs that the archive did not take", lambda: self.failures_count)

    def folder_of(self, tenant: str, job_id: str, attempt: str) -> str:
        """Return where the logs of an attempt are."""
        return f"{self._template.replace(TENANT_PLACE, tenant)}{job_id}/{attempt}/"

    def place_of(self, tenant: str, job_id: str, attempt: str, pod: str) -> str:
        """Return where the log of a pod is."""
        return log_in(self.folder_of(tenant, job_id, attempt), pod)

    async def save(self, place: str, chunks: AsyncIterable[bytes]) -> None:
        """Save the end of a log; one that is there is replaced. Raises ArchiveUnavailable, and what `chunks` raises."""
        if self._clock.monotonic_seconds() < self._silent_until_seconds:
            raise ArchiveUnavailable("the archive of logs did not answer lately")
        async with self._turns:
            tail = LogTail(self._bytes_max)
            async for chunk in chunks:
                tail.add(chunk)
            store, key = self._split(place)
            try:
                async with asyncio.timeout(STORE_SECONDS):
                    await obstore.put_async(store, key, tail.text())
            except (BaseError, OSError) as error:  # a TimeoutError is an OSError
                self._silent_until_seconds = self._clock.monotonic_seconds() + PAUSE_SECONDS
                self.failures_count += 1
                raise ArchiveUnavailable(f"cannot write {place}: {_told(error)}") from None
            self.saved_count += 1

    async def read(self, place: str) -> bytes:
        """Return a saved log. Raises LogMissing, ArchiveUnavailable."""
        store, key = self._split(place)
        tail = LogTail(self._bytes_max)
        try:
            async with asyncio.timeout(STORE_SECONDS):
                found = await obstore.get_async(store, key)
                async for chunk in found.stream():
                    tail.add(bytes(chunk))
        except FileNotFoundError:
            raise LogMissing(f"{place} is not there any more") from None
        except (BaseError, OSError) as error:
            raise ArchiveUnavailable(f"cannot read {place}: {_told(error)}") from None
        return tail.text()

    def _split(self, place: str) -> tuple[Any, str]:
        """Return the store of a place, and the rest of the place. Raises ArchiveUnavailable for variables that the
        store's client refuses."""
        scheme, _, rest = place.partition("://")
        bucket, _, key = ("", "", rest.lstrip("/")) if scheme == FILE else rest.partition("/")
        root = f"{scheme}://{bucket}/"
        try:
            if root not in self._stores:
                options = {} if scheme == FILE else {"retry_config": RETRIES}
                self._stores[root] = from_url(root, **options)
        except (BaseError, ValueError) as error:
            raise ArchiveUnavailable(f"cannot use {root}: {_told(error)}") from None
        return self._stores[root], key


def _told(error: Exception) -> str:
    """Return why a store refuses, without the body of its answer and the queries of URLs."""
    first = str(error).partition("\n")[0]
    own = re.split(r"[<{]", re.sub(r"\?\S*", "", first))[0].strip(" :")
    return own.rpartition(" - ")[2][:TOLD_LENGTH_MAX] or type(error).__name__


def last_lines(text: bytes, count: int) -> bytes:
    """Return the last lines of a text."""
    lines = text.splitlines(keepends=True)
    return b"".join(lines[len(lines) - count :] if count < len(lines) else lines) if count else b""
