"""Queries and changes of the files of queues. Each function is the work of one transaction."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy.orm import Session

from atoll.jobs.queue_file import QueueFile
from jobs.errors import RecordUnreadable
from jobs.records import QueueFileRecord


def queue_file_of(session: Session, cluster_id: str) -> QueueFileRecord | None:
    """Return the file of a cluster, or None if none was applied."""
    return session.get(QueueFileRecord, cluster_id)


def queues_in(record: QueueFileRecord | None) -> QueueFile | None:
    """Return what a file says; None without one. Raises RecordUnreadable."""
    if record is None:
        return None
    try:
        return QueueFile.model_validate(record.document)
    except ValidationError as error:
        raise RecordUnreadable(f"the file of queues of cluster {record.cluster_id}", error) from error


def store_queue_file(
    session: Session, cluster_id: str, document: dict[str, Any], *, now: datetime, actor: str
) -> QueueFileRecord:
    """Store a file, in place of the earlier one."""
    record = session.get(QueueFileRecord, cluster_id, with_for_update=True)
    if record is None:
        record = QueueFileRecord(cluster_id=cluster_id, generation=0, checked_generation=0, problems=[])
        session.add(record)
    record.document, record.applied_by, record.applied_at = document, actor, now
    record.generation += 1
    session.flush()
    return record


def forget_queue_file(session: Session, cluster_id: str) -> None:
    """Forget the file of a cluster: its queues are no longer kept."""
    record = session.get(QueueFileRecord, cluster_id)
    if record is not None:
        session.delete(record)


def note_check(session: Session, cluster_id: str, *, generation: int, has_kueue: bool, problems: Sequence[str]) -> None:
    """Record how far the cluster agrees with a generation of its file."""
    record = session.get(QueueFileRecord, cluster_id, with_for_update=True)
    if record is None or record.generation != generation:
        return
    record.checked_generation, record.has_kueue, record.problems = generation, has_kueue, list(problems)
    session.flush()
