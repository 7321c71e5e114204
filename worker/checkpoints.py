"""Checkpoints of one job at one place. A kill at any moment loses at most the checkpoint that was being saved.

    Initiated ──▶ Uploading ──▶ Committed ──▶ Expired
    nothing is    parts are     the record    pushed out by newer ones:
    written yet   written       is there      the record goes, then the parts

The record is created last and atomically; it is the checkpoint. Parts without a record are ignored, and a record is
deleted before its parts, so that a record never names missing parts.

Every start of the job claims the next generation, which the store gives to only one process. A process that finds a
newer generation stops saving (Fenced). One that slept between check and commit may commit late, which is harmless: its
checkpoint is complete, ranks behind all of the newer generation's, and expires first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from worker import records
from worker.encryption import EncryptedStore, read_key
from worker.errors import CheckpointError, CorruptCheckpoint, Fenced, OtherKey, PlaceRefused, StoreUnfit
from worker.places import allowed_place
from worker.records import Record, Version
from worker.stores import Produce, Store, open_store, scratch_folder, sha256_of
from worker.termination import tell_last

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

INTERVAL_SECONDS: Final = 300
KEPT: Final = 3
CLAIMS_MAX: Final = 100
LISTINGS_MAX: Final = 10

logger = logging.getLogger(__name__)


class State(StrEnum):
    """State of a checkpoint."""

    INITIATED = "Initiated"
    UPLOADING = "Uploading"
    COMMITTED = "Committed"
    EXPIRED = "Expired"


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint whose parts are in local files with verified checksums."""

    record: Record
    paths: Mapping[str, Path]

    @property
    def next_step(self) -> int:
        """The step to continue with."""
        return self.record.step + 1


def _unobserved(version: Version, state: State) -> None:
    """Observe nothing."""


class Checkpoints:
    """Saves and restores; safe to call from several threads of one process, of which one saves at a time."""

    def __init__(
        self,
        store: Store,
        *,
        job_id: str,
        uri: str,
        kept: int = KEPT,
        interval_seconds: float = INTERVAL_SECONDS,
        observe: Callable[[Version, State], None] = _unobserved,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Claim the next generation at the place, which fences earlier writers. Raises CheckpointError."""
        if not 0 < len(job_id) <= records.JOB_ID_LENGTH_MAX or kept < 1:
            raise ValueError(f"job id {job_id!r:.300} and kept {kept}: a name of 1 to 253 characters, and one at least")
        self._store, self._job_id, self._uri = store, job_id, uri
        self._kept, self._interval_seconds = kept, interval_seconds
        self._observe, self._monotonic, self._now = observe, monotonic, now
        self._saving = threading.Lock()
        self._due_at = monotonic() + interval_seconds
        self.generation = self._claim()

    @classmethod
    def open(
        cls,
        uri: str,
        *,
        job_id: str,
        allowed: Iterable[str],
        kept: int = KEPT,
        interval_seconds: float = INTERVAL_SECONDS,
        filesystem: AbstractFileSystem | None = None,
        key_file: Path | None = None,
    ) -> Checkpoints:
        """Checkpoints at a URI below an allowed prefix; filesystem: of fsspec, instead of the built-in client.
        key_file: of an age identity that encrypts what is stored.

        Raises PlaceRefused, KeyRefused, StoreUnfit, and errors of the disk or the network.
        """
        prefixes = tuple(allowed)
        place = allowed_place(uri, prefixes)
        key = read_key(key_file) if key_file is not None else None
        store = EncryptedStore(open_store(place, allowed=prefixes, filesystem=filesystem), key)
        return cls(store, job_id=job_id, uri=place.uri, kept=kept, interval_seconds=interval_seconds)

    def is_due(self) -> bool:
        """True if the interval since the last commit, or since the start, is over."""
        return self._monotonic() >= self._due_at

    def save(
        self,
        step: int,
        parts: Mapping[str, bytes | Produce],
        *,
        epoch: int | None = None,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Record:
        """Save the state after a step; a part is bytes, or a function that writes into an open binary file.

        Returns when the checkpoint is committed; a step saved before does not change. Raises Fenced if a newer attempt
        of the job has begun, ValueError for an invalid step or name, and errors of the store; earlier checkpoints do
        not change.
        """
        self._check(step, parts)
        version = Version(self.generation, step)
        with self._saving:
            self._enter(version, State.INITIATED)
            if version in records.committed(self._unfenced()):  # by this process, whose answer may have been lost
                return records.decode(self._store.read(version.record_key), version=version, job_id=self._job_id)
            self._enter(version, State.UPLOADING)
            written = tuple(
                self._store.write(version.part_key(name), _producer(part)) for name, part in sorted(parts.items())
            )
            record = Record(
                job_id=self._job_id,
                version=version,
                epoch=epoch,
                loss=loss if loss is not None and math.isfinite(loss) else None,
                metrics=records.finite(metrics or {}),
                storage_key=f"{self._uri}{version.part_key('')}",
                created_at=self._now().isoformat(timespec="seconds").replace("+00:00", "Z"),
                parts=written,
            )
            keys = self._unfenced()
            self._commit(record)
            self._expire([*keys, version.record_key])
        return record

    @contextlib.contextmanager
    def restore(self) -> Iterator[Restored | None]:
        """The newest complete checkpoint, for the duration of the block; None to start from zero.

        A corrupt one is logged and skipped for the one before. Errors of the store pass through, because an unreadable
        store may have checkpoints.
        """
        with scratch_folder() as folder:
            restored = self._newest_whole(folder)
            if restored is None:
                logger.warning("Found no checkpoint to resume from, starting from zero: %s", self._uri)
            else:
                record = restored.record
                logger.info("Resumed from a checkpoint: step %s, epoch %s, %s", record.step, record.epoch, self._uri)
            yield restored

    def _claim(self) -> int:
        """Create the next attempt. Raises StoreUnfit if the store would let another process create it too."""
        claim = json.dumps({"job_id": self._job_id}).encode()
        for _ in range(CLAIMS_MAX):
            newest = records.newest_attempt(self._store.list_sizes())
            if newest:
                self._refuse_another_job(newest)
            key = f"{records.ATTEMPTS}{newest + 1:08d}.json"
            try:
                self._store.create(key, claim)
            except FileExistsError:
                continue
            with contextlib.suppress(FileExistsError):
                self._store.create(key, claim)
                raise StoreUnfit(f"{self._uri}: the store let {key} be created twice; use one with conditional writes")
            return newest + 1
        raise CheckpointError(f"{self._uri}: {CLAIMS_MAX} other processes began first; end those that are too many")

    def _refuse_another_job(self, newest: int) -> None:
        try:
            owner = json.loads(self._store.read(f"{records.ATTEMPTS}{newest:08d}.json"))["job_id"]
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return
        if owner != self._job_id:
            raise PlaceRefused(
                f"{self._uri} belongs to job {owner!r:.300}: give job {self._job_id!r} a folder of its own"
            )

    def _unfenced(self) -> dict[str, int]:
        """Return the objects at the place. Raises Fenced if a newer attempt has begun."""
        keys = self._store.list_sizes()
        newest = records.newest_attempt(keys)
        if newest > self.generation:
            raise Fenced(f"attempt {newest} of job {self._job_id!r} has begun; attempt {self.generation} must end")
        return keys

    def _commit(self, record: Record) -> None:
        data = records.encode(record)
        if len(data) > records.RECORD_BYTES_MAX:
            raise ValueError(f"record of {len(data)} bytes: at most {records.RECORD_BYTES_MAX}; save fewer parts")
        try:
            self._store.create(record.version.record_key, data)
        except FileExistsError:
            if self._store.read(record.version.record_key) != data:  # else it is ours, and only the answer was lost
                raise
        self._due_at = self._monotonic() + self._interval_seconds
        self._enter(record.version, State.COMMITTED)
        tell_last(record)

    def _expire(self, keys: list[str]) -> None:
        """Remove expired checkpoints. A failure is logged; the next save tries again."""
        expired, loose = records.leftovers(keys, generation=self.generation, kept=self._kept)
        try:
            for version in expired:
                self._store.delete(version.record_key)
                for key in keys:
                    if key.startswith(version.part_key("")):
                        self._store.delete(key)
                self._enter(version, State.EXPIRED)
            for key in loose:
                self._store.delete(key)
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed; stores raise errors of many families
            logger.warning("Failed to remove old checkpoints, the next save will: %s: %r", self._uri, error)

    def _newest_whole(self, folder: Path) -> Restored | None:
        for _ in range(LISTINGS_MAX):
            sizes, refused = self._store.list_sizes(), None
            for version in records.committed(sizes):
                try:
                    return self._fetch(version, sizes, folder)
                except CorruptCheckpoint as error:
                    if version.record_key not in self._store.list_sizes():
                        break  # it expired meanwhile: newer ones exist
                    logger.warning("Skipped a corrupt checkpoint for the one before: %s%s", self._uri, error)
                    refused = error if isinstance(error, OtherKey) else refused
            else:
                if refused is not None:
                    raise refused
                return None
        raise CheckpointError(f"{self._uri}: checkpoints expire faster than they can be read; end the other writer")

    def _fetch(self, version: Version, sizes: Mapping[str, int], folder: Path) -> Restored:
        """Raises CorruptCheckpoint if anything is missing or differs."""
        try:
            if sizes[version.record_key] > records.RECORD_BYTES_MAX:
                raise CorruptCheckpoint(f"record {version.name} has {sizes[version.record_key]} bytes")
            record = records.decode(self._store.read(version.record_key), version=version, job_id=self._job_id)
            for part in record.parts:
                if sizes.get(version.part_key(part.name)) != part.size_bytes:
                    raise CorruptCheckpoint(f"{version.name}/{part.name} is missing or has another size")
            below = folder / version.name
            below.mkdir(exist_ok=True)
            paths = {part.name: self._store.fetch(version.part_key(part.name), below) for part in record.parts}
            for part in record.parts:
                if sha256_of(paths[part.name]) != part.sha256:
                    raise CorruptCheckpoint(f"{version.name}/{part.name} differs from its checksum")
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"{version.name}: {error}") from error
        return Restored(record, paths)

    def _check(self, step: int, parts: Mapping[str, bytes | Produce]) -> None:
        if not 0 <= step <= records.STEP_MAX:
            raise ValueError(f"step {step}: 0 to {records.STEP_MAX}")
        if not 0 < len(parts) <= records.PARTS_MAX:
            raise ValueError(f"{len(parts)} parts: 1 to {records.PARTS_MAX}")
        for name in parts:
            records.check_part_name(name)

    def _enter(self, version: Version, state: State) -> None:
        logger.info("Checkpoint %s: %s%s", state, self._uri, version.part_key(""))
        self._observe(version, state)


def _producer(part: bytes | Produce) -> Produce:
    return part if callable(part) else lambda file: file.write(part)
