"""The last checkpoint in a termination message: what the worker writes is read, and nothing else does harm."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.jobs.last_checkpoint import MESSAGE_LENGTH_MAX, LastCheckpoint, checkpoint_in
from tests.worker.test_records import RECORD
from worker.termination import message_of

TOLD = {"last_checkpoint": RECORD.told()}


def test_what_the_worker_tells_is_read() -> None:
    """Every field comes back, also where the training counts no epochs and has no loss."""
    for record in (RECORD, replace(RECORD, epoch=None, loss=None, metrics={})):
        found = checkpoint_in(message_of(record).decode())
        assert found is not None
        assert json.loads(found.model_dump_json()) == record.told()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"step": -1}, id="step below 0"),
        pytest.param({"step": "30"}, id="step as text"),
        pytest.param({"step": 10**15}, id="step too large"),
        pytest.param({"epoch": 2**63}, id="epoch too large"),
        pytest.param({"loss": float("nan")}, id="loss not a number"),
        pytest.param({"metrics": {"a": float("inf")}}, id="infinite metric"),
        pytest.param({"metrics": {"a\x1b[2J": 1.0}}, id="control characters"),
        pytest.param({"metrics": {str(number): 1.0 for number in range(101)}}, id="too many metrics"),
        pytest.param({"storage_key": "http://10.0.0.1/"}, id="no place of checkpoints"),
        pytest.param({"storage_key": "s3://bucket/a\nb"}, id="two lines"),
        pytest.param({"created_at": "2026-01-02T03:04:05"}, id="no zone"),
        pytest.param({"created_at": "yesterday"}, id="no time"),
        pytest.param({"job_id": "j" * 254}, id="long id"),
    ],
)
def test_a_container_cannot_tell_nonsense(changes: dict[str, Any]) -> None:
    """One field that no worker writes, and the message tells no checkpoint."""
    assert checkpoint_in(json.dumps({"last_checkpoint": RECORD.told() | changes})) is None


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("", id="empty"),
        pytest.param("panic: out of memory", id="a program's own"),
        pytest.param(json.dumps(TOLD)[:-9], id="cut off"),
        pytest.param(json.dumps(TOLD) + " " * MESSAGE_LENGTH_MAX, id="too long"),
        pytest.param("[" * MESSAGE_LENGTH_MAX, id="deep"),
        pytest.param("\ud800", id="half a character"),
    ],
)
def test_other_messages_tell_none(message: str) -> None:
    """Most containers end with another message, or with none."""
    assert checkpoint_in(message) is None


@given(
    message=st.text()
    | st.dictionaries(st.sampled_from([*RECORD.told()]), st.none() | st.text() | st.floats()).map(
        lambda fields: json.dumps({"last_checkpoint": RECORD.told() | fields})
    )
)
def test_nothing_crashes_it(message: str) -> None:
    """Whatever a container writes, it is a checkpoint or none."""
    assert isinstance(checkpoint_in(message), LastCheckpoint | None)
