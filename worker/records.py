"""The record of a checkpoint: its content, format and order.

Pure. A record has a checksum of itself and one of each part, which are verified before anything else. Names are built
from two numbers and never read from a record, so that no record can point elsewhere.

    attempts/GENERATION.json               one per start of the job, created by the first process
    weights/GENERATION-STEP/PART           the saved data; ignored without its record
    committed/GENERATION-STEP.json         the record
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from worker.errors import CorruptCheckpoint

FORMAT: Final = 1
RECORD_BYTES_MAX: Final = 256 * 1024
PARTS_MAX: Final = 1000
METRICS_MAX: Final = 100
STEP_MAX: Final = 10**15 - 1
GENERATION_MAX: Final = 10**8 - 1
JOB_ID_LENGTH_MAX: Final = 253

ATTEMPTS: Final = "attempts/"
WEIGHTS: Final = "weights/"
COMMITTED: Final = "committed/"
STAGING: Final = "staging/"

_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NAME: Final = re.compile(r"(?P<generation>[0-9]{8})-(?P<step>[0-9]{15})")
_LEADING: Final = re.compile(r"(?:attempts|weights|committed|staging)/(?P<generation>[0-9]{8})\b")


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Version of a checkpoint: a newer attempt of the job ranks before any step of an older one."""

    generation: int
    step: int

    @property
    def name(self) -> str:
        """The name, which sorts like the numbers."""
        return f"{self.generation:08d}-{self.step:015d}"

    @property
    def record_key(self) -> str:
        """Key of its record."""
        return f"{COMMITTED}{self.name}.json"

    def part_key(self, part: str) -> str:
        """Key of one of its parts."""
        return f"{WEIGHTS}{self.name}/{part}"


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a checkpoint: its size in bytes and its SHA-256 in hexadecimal digits."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A committed checkpoint. storage_key: URI of the folder of its parts. created_at: RFC 3339, UTC."""

    job_id: str
    version: Version
    epoch: int | None
    loss: float | None
    metrics: Mapping[str, float]
    storage_key: str
    created_at: str
    parts: tuple[Part, ...]

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.version.step

    def told(self) -> dict[str, Any]:
        """The last checkpoint for the job's metadata."""
        return {
            "job_id": self.job_id,
            "epoch": self.epoch,
            "step": self.step,
            "loss": self.loss,
            "metrics": dict(self.metrics),
            "storage_key": self.storage_key,
            "created_at": self.created_at,
        }


def check_part_name(name: str) -> None:
    """Raise ValueError for anything but a plain file name."""
    if not _PART.fullmatch(name):
        raise ValueError(f"part {name!r}: up to 100 letters, digits and . _ -, and no dot in front")


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics, up to METRICS_MAX, in order: a diverged one must not stop a save."""
    kept = {str(key)[:100]: float(value) for key, value in numbers.items() if math.isfinite(value)}
    return dict(list(kept.items())[:METRICS_MAX])


def encode(record: Record) -> bytes:
    """Return the bytes of a record, including its own checksum."""
    told = {"format": FORMAT, "generation": record.version.generation, **record.told()}
    body = {**told, "parts": [asdict(part) for part in record.parts]}
    return _canonical({"record": body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def decode(data: bytes, *, version: Version, job_id: str) -> Record:
    """Return the record of a version. Raises CorruptCheckpoint for anything but what was written."""
    try:
        document = json.loads(data)
        body = document["record"]
        is_whole = document["sha256"] == hashlib.sha256(_canonical(body)).hexdigest()
        if not is_whole or body["format"] != FORMAT:
            raise CorruptCheckpoint(f"record {version.name}: its checksum or its format is not ours")
        record = _record(body)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"record {version.name} is unreadable: {error!r:.200}") from error
    if record.version != version or record.job_id != job_id:
        raise CorruptCheckpoint(f"record {version.name} is one of job {record.job_id!r}, {record.version.name}")
    return record


def _record(body: Mapping[str, Any]) -> Record:
    parts = tuple(Part(**part) for part in body["parts"])
    for part in parts:
        check_part_name(part.name)
    return Record(
        job_id=body["job_id"],
        version=Version(body["generation"], body["step"]),
        epoch=body["epoch"],
        loss=body["loss"],
        metrics=body["metrics"],
        storage_key=body["storage_key"],
        created_at=body["created_at"],
        parts=parts,
    )


def committed(keys: Iterable[str]) -> list[Version]:
    """Return the versions whose records are among the keys of a store, the newest first."""
    names = (key.removeprefix(COMMITTED).removesuffix(".json") for key in keys if key.startswith(COMMITTED))
    found = (_NAME.fullmatch(name) for name in names)
    return sorted((Version(int(one["generation"]), int(one["step"])) for one in found if one), reverse=True)


def newest_attempt(keys: Iterable[str]) -> int:
    """Return the highest generation begun; 0 for none."""
    return max((generation_of(key) or 0 for key in keys if key.startswith(ATTEMPTS)), default=0)


def generation_of(key: str) -> int | None:
    """Return the attempt that a key belongs to, None for a foreign key."""
    found = _LEADING.match(key)
    return int(found["generation"]) if found else None


def leftovers(keys: Iterable[str], *, generation: int, kept: int) -> tuple[list[Version], list[str]]:
    """Return expired versions, the oldest first, and keys that no record needs.

    Leftovers of the previous attempt stay, because its process may still be writing. Leftovers of older attempts, and
    of failures in this one, are returned.
    """
    keys = list(keys)
    versions = committed(keys)
    expired = versions[kept:]
    named = {version.name for version in versions}
    loose = []
    for key in keys:
        owner = generation_of(key)
        if owner is None or not (owner == generation or owner <= generation - 2):
            continue
        is_unused_attempt = key.startswith(ATTEMPTS) and owner < generation
        is_unrecorded = key.startswith(WEIGHTS) and key.removeprefix(WEIGHTS).partition("/")[0] not in named
        if is_unused_attempt or is_unrecorded or key.startswith(STAGING):
            loose.append(key)
    return expired[::-1], loose


def _canonical(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
