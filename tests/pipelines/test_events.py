"""What becomes an event: notifications of buckets as stores send them, and topics that an event belongs to."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.pipelines.events import events_of_notification, is_notification, topics_of

RECORD = {
    "eventVersion": "2.1",
    "eventSource": "aws:s3",
    "awsRegion": "us-east-1",
    "eventTime": "2026-01-31T12:00:00.000Z",
    "eventName": "ObjectCreated:Put",
    "responseElements": {"x-amz-request-id": "C3D13FE58DE4C810", "x-amz-id-2": "FMyUVURI"},
    "s3": {
        "bucket": {"name": "models", "arn": "arn:aws:s3:::models"},
        "object": {"key": "llama/a+b%2B%C3%A9.bin", "size": 5, "sequencer": "0A1B2C3D4E5F678901"},
    },
}
"""As Amazon documents it; MinIO's has the same parts, and versitygw's the name with s3: and the key as it is."""


def with_key(key: str, name: str = "s3:ObjectCreated:Put") -> dict[str, Any]:
    """Return a record of another object."""
    made: dict[str, Any] = json.loads(json.dumps(RECORD))
    made["s3"]["object"]["key"], made["eventName"] = key, name
    return made


@pytest.mark.parametrize(
    ("record", "key"),
    [
        (RECORD, "llama/a b+é.bin"),
        (with_key("llama/a+b%2B%C3%A9.bin"), "llama/a b+é.bin"),
        (with_key("llama/a b+é.bin"), "llama/a b+é.bin"),
    ],
    ids=["amazon", "minio", "versitygw"],
)
def test_a_notification_of_a_bucket_is_an_event(record: dict[str, Any], key: str) -> None:
    """With the adapter's names; sent again it has the same id, and another object another one."""
    content = {"Records": [record]}
    first, again = (events_of_notification(content)[0] for _ in range(2))

    assert is_notification(content)
    assert first["event.type"] == "com.amazonaws.s3.ObjectCreated:Put"
    assert first["event.source"] == "aws:s3.us-east-1.models"
    assert (first["event.subject"], first["event.data"]) == (key, record)
    assert first["event.id"] == again["event.id"]
    assert first["event.id"] != events_of_notification({"Records": [with_key("other")]})[0]["event.id"]


@pytest.mark.parametrize(
    "broken",
    [None, {}, {"eventName": "x"}, with_key("k", ""), with_key("k" * 1025), "x", RECORD | {"s3": 1}],
    ids=lambda one: json.dumps(one)[:30],
)
def test_a_broken_record_is_told(broken: Any) -> None:
    """Whatever is sent, the error says what a record must have."""
    with pytest.raises(ValueError, match="a record"):
        events_of_notification({"Records": [broken]})


def test_a_store_may_ask_whether_anybody_listens() -> None:
    """Its test is a notification of nothing; other bodies are none."""
    test = {"Service": "S3", "Event": "s3:TestEvent", "Bucket": "b"}

    assert is_notification(test)
    assert events_of_notification(test) == ()
    assert not any(map(is_notification, (None, [], {}, {"Records": 1}, {"specversion": "1.0", "Records": []})))
    with pytest.raises(ValueError, match="at most 100 records"):
        events_of_notification({"Records": [RECORD] * 101})


@given(st.text("ab.:", min_size=1, max_size=12))
def test_a_topic_may_end_in_a_star_after_a_dot_or_colon(event_type: str) -> None:
    """The topics are the type itself, and every beginning of it that ends so."""
    whole = {event_type[:end] + "*" for end in range(1, len(event_type) + 1) if event_type[end - 1] in ".:"}

    assert set(topics_of(event_type)) == {event_type} | whole
