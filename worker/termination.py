"""How the record of the last checkpoint leaves the container: as its termination message, which kubelet reads.

In: a record. Out: a line in a file. No credential of the API server has to lie beside the training's code for this.
Whoever reads the pod's status takes `last_checkpoint` out of the message, or nothing, if it is cut off or not JSON.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Final

from worker.records import Record

PATH: Final = Path("/dev/termination-log")
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
    """Put the record in the place of the last one. Outside of a container there is no such file, and nothing happens.

    The file is mounted into the container, so that it cannot be renamed over; one write of a few bytes replaces it.
    """
    path = path or Path(os.environ.get("ATOLL_TERMINATION_LOG") or PATH)
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except OSError:
        return
    try:
        os.ftruncate(descriptor, os.pwrite(descriptor, message_of(record), 0))
    except OSError as error:
        logger.warning("Failed to write the termination message: %s: %r", path, error)
    finally:
        os.close(descriptor)
