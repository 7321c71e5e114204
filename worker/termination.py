"""How the record of the last checkpoint, or why there is no model, leaves the container: as its termination message.

In: a record or words. Out: a line in a file, which kubelet reads. No credential of the API server has to lie beside the
training's code for this. Whoever reads the pod's status takes `last_checkpoint` out of the message, or nothing, if it
is cut off or not JSON.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Final

from worker.records import Record

PATH: Final = Path("/dev/termination-log")
FAILURE: Final = b"Model"
"""How every failure begins."""
FAILURE_LENGTH_MAX: Final = 400
BYTES_MAX: Final = 4096
"""Kubelet cuts off what goes beyond."""

logger = logging.getLogger(__name__)


def message_of(record: Record) -> bytes:
    """Return the message; metrics are left out where they do not fit."""
    told = record.told()
    data = json.dumps({"last_checkpoint": told}, separators=(",", ":")).encode()
    if len(data) > BYTES_MAX:
        data = json.dumps({"last_checkpoint": {**told, "metrics": {}}}, separators=(",", ":")).encode()
    return data


def tell_last(record: Record, path: Path | None = None) -> None:
    """Put the record in the place of the last one."""
    _replace(path, message_of(record), over=b"")


def tell_failure(told: str, path: Path | None = None) -> None:
    """Say why the container is about to end, unless the message is a checkpoint: that is worth more."""
    _replace(path, told[:FAILURE_LENGTH_MAX].encode()[:BYTES_MAX], over=FAILURE)


def untell_failure(path: Path | None = None) -> None:
    """Take back what `tell_failure` said."""
    _replace(path, b"", over=FAILURE)


def _replace(path: Path | None, message: bytes, *, over: bytes) -> None:
    """Replace the message if it is empty or begins with `over`. Outside of a container there is no such file, and
    nothing happens.

    The file is mounted into the container, so that it cannot be renamed over; one write of a few bytes replaces it.
    """
    path = path or Path(os.environ.get("ATOLL_TERMINATION_LOG") or PATH)
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return
    try:
        before = os.pread(descriptor, len(over), 0)
        if before in (b"", over):
            os.ftruncate(descriptor, os.pwrite(descriptor, message, 0))
    except OSError as error:
        logger.warning("Failed to write the termination message: %s: %r", path, error)
    finally:
        os.close(descriptor)
