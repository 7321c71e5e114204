"""Settings of checkpoints from the container's variables.

A ValueError names the bad variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker.checkpoints import INTERVAL_SECONDS, KEPT, Checkpoints

JOB_ID: Final = "ATOLL_JOB_ID"
URI: Final = "ATOLL_CHECKPOINT_URI"
PREFIXES: Final = "ATOLL_CHECKPOINT_PREFIXES"
INTERVAL: Final = "ATOLL_CHECKPOINT_INTERVAL_SECONDS"
MAX_COUNT: Final = "ATOLL_CHECKPOINT_MAX_COUNT"
KEY_FILE: Final = "ATOLL_CHECKPOINT_KEY_FILE"
YEAR_SECONDS: Final = 31_536_000
COUNT_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """uri: place of the checkpoints. prefixes: allowed places. interval_seconds: between saves. kept: the newest n.
    key_file: of the age identity that encrypts them; None stores them as they are."""

    job_id: str
    uri: str
    prefixes: tuple[str, ...]
    interval_seconds: int = INTERVAL_SECONDS
    kept: int = KEPT
    key_file: Path | None = None

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> CheckpointSettings:
        """Read the variables; ATOLL_CHECKPOINT_PREFIXES has URIs separated by spaces. Raises ValueError."""
        missing = [name for name in (JOB_ID, URI, PREFIXES) if not variables.get(name)]
        if missing:
            raise ValueError(f"{missing[0]} is not set: a job with checkpoints sets it; set it yourself elsewhere")
        return cls(
            job_id=variables[JOB_ID],
            uri=variables[URI],
            prefixes=tuple(variables[PREFIXES].split()),
            interval_seconds=_number(variables, INTERVAL, default=INTERVAL_SECONDS, limit=YEAR_SECONDS),
            kept=_number(variables, MAX_COUNT, default=KEPT, limit=COUNT_MAX),
            key_file=Path(variables[KEY_FILE]) if variables.get(KEY_FILE) else None,
        )

    def open(self) -> Checkpoints:
        """Start an attempt at the place; see Checkpoints.open."""
        return Checkpoints.open(
            self.uri,
            job_id=self.job_id,
            allowed=self.prefixes,
            kept=self.kept,
            interval_seconds=self.interval_seconds,
            key_file=self.key_file,
        )


def _number(variables: Mapping[str, str], name: str, *, default: int, limit: int) -> int:
    text = variables.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= limit:
        raise ValueError(f"{name}={text[:50]!r}: a whole number from 1 to {limit}")
    return int(text)
