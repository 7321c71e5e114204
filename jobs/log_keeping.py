"""Archives the logs of a job's pods when they end, and before they are removed. What fails never stops a job.

What was archived, where, and why not, is in the record: it tells the next look what is left to do. A log is uploaded
again if the process dies before it is recorded; the place stays the same.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Annotated, Final, Protocol

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.kube.errors import ApiError, KubeError
from jobs.log_archive import ArchiveUnavailable, LogArchive, log_in
from jobs.records import JobRecord

log = structlog.get_logger(__name__)

PODS_MAX: Final = 100
"""Pods of an attempt whose logs are kept."""
ATTEMPTS_MAX: Final = 20
"""Attempts in the record of a job; the objects of earlier ones stay in the store."""
KEEP_SECONDS: Final = 30.0
"""How long the logs of a job may take at a time; the rest is tried again while the pods are there."""
AGAIN_SECONDS: Final = 60.0
"""Pause after a failure."""
TOLD_LENGTH_MAX: Final = 256


class KeptLogs(BaseModel):
    """What the archive has of one attempt."""

    model_config = ConfigDict(frozen=True)

    attempt: int
    folder: Annotated[str, Field(description="where the logs are, one object per pod, named POD.log")]
    pods: Annotated[dict[str, str], Field(description="empty for a pod whose log is there, else why it is not")] = {}
    left_out: Annotated[int, Field(description="pods beyond the first hundred")] = 0
    message: Annotated[str, Field(description="why the last try failed; empty if it did not")] = ""
    at: Annotated[datetime, Field(description="of the last try")]


class PodOfAttempt(Protocol):
    """A pod of an attempt."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def attempt(self) -> str:
        """The number of its attempt."""
        ...


class PodOutput(Protocol):
    """Reads what containers printed."""

    def output(self, namespace: str, pod: str) -> AsyncGenerator[bytes, None]:
        """Yield the whole log of a pod. Raises KubeError."""
        ...


class LogKeeper:
    """Archives the logs of the jobs of one cluster; without an archive it does nothing."""

    def __init__(self, pods: PodOutput, archive: LogArchive | None) -> None:
        self._pods = pods
        self._archive = archive

    @property
    def is_on(self) -> bool:
        """Return whether there is an archive."""
        return self._archive is not None

    async def keep(self, record: JobRecord, pods: Sequence[PodOfAttempt], now: datetime) -> tuple[KeptLogs, ...] | None:
        """Archive the logs of these pods that are not in the archive yet; return what to record, None for no change."""
        if self._archive is None:
            return None
        kept = {one.attempt: one for one in kept_logs(record)}
        is_changed = False
        for attempt in sorted({pod.attempt for pod in pods if pod.attempt.isdecimal()}, key=int):
            names = sorted(pod.name for pod in pods if pod.attempt == attempt)
            done = await self._keep_attempt(self._archive, record, attempt, names, kept.get(int(attempt)), now)
            if done is not None:
                kept[int(attempt)], is_changed = done, True
        newest = sorted(kept.values(), key=lambda one: one.attempt)[-ATTEMPTS_MAX:]
        return tuple(newest) if is_changed else None

    async def _keep_attempt(
        self,
        archive: LogArchive,
        record: JobRecord,
        attempt: str,
        names: Sequence[str],
        before: KeptLogs | None,
        now: datetime,
    ) -> KeptLogs | None:
        known = before.pods if before is not None else {}
        missing = [name for name in names if name not in known]
        todo = missing[: max(0, PODS_MAX - len(known))]
        is_pausing = before is not None and before.message and (now - before.at).total_seconds() < AGAIN_SECONDS
        if not todo or is_pausing:
            return None
        found: dict[str, str] = {}
        failures: list[str] = []

        async def keep_one(name: str) -> None:
            place = archive.place_of(record.tenant_id, record.id, attempt, name)
            try:
                async with aclosing(self._pods.output(record.namespace, name)) as chunks:
                    await archive.save(place, chunks)
                found[name] = ""
            except (KubeError, ArchiveUnavailable) as error:
                if isinstance(error, ApiError) and error.status in (400, 404):  # its container never ran, or is gone
                    found[name] = f"the cluster returns no log: {error.message}"[:TOLD_LENGTH_MAX]
                    return
                failures.append(f"pod {name}: {error}"[:TOLD_LENGTH_MAX])

        try:
            async with asyncio.timeout(KEEP_SECONDS):
                await asyncio.gather(*map(keep_one, todo))
        except TimeoutError:
            failures.append(f"it took longer than {KEEP_SECONDS:g} s")
        if failures:
            log.warning("Could not archive the logs of a job", job=record.id, attempt=attempt, err=failures[0])
        return KeptLogs(
            attempt=int(attempt),
            folder=archive.folder_of(record.tenant_id, record.id, attempt),
            pods=known | dict(sorted(found.items())),
            left_out=len(missing) - len(todo),
            message=failures[0] if failures else "",
            at=now,
        )


def kept_logs(record: JobRecord) -> tuple[KeptLogs, ...]:
    """Return what the archive has of a job, by attempt; without what can no longer be read."""
    found = []
    for one in record.log_archive or ():
        try:
            found.append(KeptLogs.model_validate(one))
        except ValidationError:
            continue
    return tuple(found)


def place_in_archive(record: JobRecord, pod: str | None) -> str | None:
    """Return where the log of a pod is, or of the first pod of the newest attempt that has one; None for none."""
    for one in reversed(kept_logs(record)):
        for name, why_not in sorted(one.pods.items()):
            if not why_not and pod in (None, name):
                return log_in(one.folder, name)
    return None
