"""Verifies a model's file against the checksum that its job gives, before it is loaded."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from worker.errors import ModelMismatch

CHECKSUM: Final = "ML_MODEL_CHECKSUM"


def verify_model(path: str | Path, variables: Mapping[str, str] = os.environ) -> None:
    """Compare a file with ML_MODEL_CHECKSUM, ALGORITHM:HEX; without that, accept it. Raises ModelMismatch, ValueError
    for a checksum that cannot be read, and OSError."""
    expected = variables.get(CHECKSUM, "")
    if not expected:
        return
    algorithm, _, digits = expected.partition(":")
    if algorithm not in hashlib.algorithms_guaranteed or algorithm.startswith("shake") or not digits:
        raise ValueError(f"{CHECKSUM}={expected[:80]!r}: write an algorithm such as sha256, a colon, and hex digits")
    with Path(path).open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if not hmac.compare_digest(found, digits.lower()):
        raise ModelMismatch(f"{path} has {algorithm} {found}, and the job wants {digits[:200]}: do not load it")
