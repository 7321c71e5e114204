"""Events that begin runs: names and values of a CloudEvent, and what becomes one.

A notification of a bucket, in the form that S3 gives it, becomes a CloudEvent as the adapter of the CloudEvents project
has it. An entry of a job's history becomes one when the job enters a state.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, TypeGuard
from urllib.parse import unquote_plus

from atoll.jobs.states import JobState, JobStep
from atoll.pipelines.expressions import ValueType

EVENT_NAMES: Final = {
    "event.id": ValueType.TEXT,
    "event.source": ValueType.TEXT,
    "event.type": ValueType.TEXT,
    "event.subject": ValueType.TEXT,
    "event.data": ValueType.ANY,
}
OWN: Final = "atoll."
"""Types that begin so are told by the service itself, and taken from nobody else."""
JOB: Final = f"{OWN}job."
BUCKET: Final = "com.amazonaws.s3."
ANY_REST: Final = "*"
RECORDS_MAX: Final = 100
TEXT_LENGTH_MAX: Final = 1024
ENTERS: Final = frozenset({"create", *(step.value for step in JobStep)})
"""Entries of a history with which a job enters a state; the others are requests."""

Event = Mapping[str, Any]
"""Values of EVENT_NAMES."""


def topics_of(event_type: str) -> tuple[str, ...]:
    """Return the topics that an event's type belongs to: itself, and each beginning up to a dot or colon with `*`."""
    ends = [number + 1 for number, one in enumerate(event_type) if one in ".:"]
    return (event_type, *(event_type[:end] + ANY_REST for end in ends))


def is_notification(content: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a body has the form of a bucket's notification."""
    if not isinstance(content, dict) or "specversion" in content:
        return False
    is_test = content.get("Event") == "s3:TestEvent"  # sent to see whether anybody listens
    return is_test or isinstance(content.get("Records"), list)


def events_of_notification(content: Mapping[str, Any]) -> tuple[Event, ...]:
    """Return the events of a notification. A record sent again gives the same id. Raises ValueError."""
    records: Sequence[Any] = content.get("Records") or ()
    if len(records) > RECORDS_MAX:
        raise ValueError(f"a notification has at most {RECORDS_MAX} records, and this one has {len(records)}")
    return tuple(_event_of_record(one) for one in records)


def _event_of_record(record: Any) -> Event:  # noqa: ANN401 - whatever was sent
    try:
        stored, name = record["s3"], record["eventName"].removeprefix("s3:")
        bucket, key = stored["bucket"]["name"], _unquoted(stored["object"]["key"])
        texts = (record.get("eventSource") or "aws:s3", record.get("awsRegion") or "", bucket, name, key)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError("a record must have eventName, s3.bucket.name and s3.object.key") from error
    if not name or not all(isinstance(one, str) and len(one) <= TEXT_LENGTH_MAX for one in texts):
        raise ValueError(f"a record has texts of at most {TEXT_LENGTH_MAX} characters")
    source, region, *_ = texts
    return {
        "event.id": sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32],
        "event.source": ".".join(part for part in (source, region, bucket) if part),
        "event.type": BUCKET + name,
        "event.subject": key,
        "event.data": record,
    }


def _unquoted(key: str) -> str:
    """Return a key as its bucket has it: S3 and MinIO quote it as in a form, others send it as it is."""
    return unquote_plus(key) if key.isascii() and " " not in key else key


def event_of_job(number: int, state: JobState, cluster: str, job: Mapping[str, Any]) -> Event:
    """Return the event that a job entered a state. `number`: of the entry of its history; `job`: what it tells."""
    return {
        "event.id": str(number),
        "event.source": f"/clusters/{cluster}/jobs",
        "event.type": JOB + state.value,
        "event.subject": str(job["name"]),
        "event.data": dict(job),
    }
