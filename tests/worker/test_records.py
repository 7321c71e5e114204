"""Records of checkpoints: only written records are ever read as records."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import CorruptCheckpoint
from worker.records import Part, Record, Version, committed, decode, encode, leftovers, newest_attempt

VERSION = Version(2, 30)
RECORD = Record(
    job_id="job",
    version=VERSION,
    epoch=1,
    loss=0.25,
    metrics={"accuracy": 0.5},
    storage_key="s3://bucket/run/weights/00000002-000000000000030/",
    created_at="2026-01-02T03:04:05Z",
    parts=(Part("model", 3, "ab" * 32),),
)


def test_a_record_comes_back_as_it_was() -> None:
    """What is written is what is read."""
    assert decode(encode(RECORD), version=VERSION, job_id="job") == RECORD


@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject) -> None:
    """One bit turned, or the end cut off at any place, and it is no record any more."""
    content = bytearray(encode(RECORD))
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    with pytest.raises(CorruptCheckpoint):
        decode(bytes(content), version=VERSION, job_id="job")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 100_000))
def test_nonsense_is_corrupt(content: bytes) -> None:
    """Whatever lies under a record's name is told as corrupt; nothing crashes."""
    with pytest.raises(CorruptCheckpoint):
        decode(content, version=VERSION, job_id="job")


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(replace(RECORD, version=Version(2, 31)), id="of another step"),
        pytest.param(replace(RECORD, version=Version(3, 30)), id="of another attempt"),
        pytest.param(replace(RECORD, job_id="another"), id="of another job"),
        pytest.param(replace(RECORD, parts=(Part("../model", 3, "ab" * 32),)), id="whose part leads elsewhere"),
    ],
)
def test_a_whole_record_at_the_wrong_place(other: Record) -> None:
    """A record that is right in itself and does not belong where it lies is not used."""
    with pytest.raises(CorruptCheckpoint):
        decode(encode(other), version=VERSION, job_id="job")


def test_a_newer_attempt_stands_before_any_step() -> None:
    """The order that resumes and the count follow; keys of others mean nothing."""
    keys = ["committed/00000001-000000000000900.json", "committed/00000002-000000000000005.json", "committed/x.json"]
    assert committed([*keys, "weights/00000009-000000000000001/model"]) == [Version(2, 5), Version(1, 900)]
    assert newest_attempt([*keys, "attempts/00000004.json", "attempts/none"]) == 4
    assert newest_attempt([]) == 0


def test_what_may_go() -> None:
    """The oldest beyond the count; parts without a record, except those of the attempt that may still be ending."""
    keys = {
        "attempts/00000001.json": True,
        "attempts/00000002.json": False,
        "attempts/00000003.json": False,
        "weights/00000001-000000000000001/model": True,
        "weights/00000002-000000000000002/model": False,
        "weights/00000003-000000000000003/model": True,
        "weights/00000003-000000000000004/model": False,
        "weights/00000004-000000000000001/model": False,
        "committed/00000003-000000000000004.json": False,
        "staging/00000001.json.0f": True,
        "staging/00000002.json.0f": False,
        "notes.txt": False,
    }
    expired, loose = leftovers(keys, generation=3, kept=1)
    assert (expired, loose) == ([], [key for key, goes in keys.items() if goes])
    expired, _ = leftovers(["committed/00000001-000000000000009.json", *keys], generation=3, kept=1)
    assert expired == [Version(1, 9)]
