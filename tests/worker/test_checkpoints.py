"""Saving, resuming and expiring checkpoints on disk, in S3 and in any file system of fsspec."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from tests.worker.faults import FaultyStore
from worker import Checkpoints, CorruptCheckpoint, Fenced, PlaceRefused, State, StoreUnfit, Version
from worker.objects import Objects, connect
from worker.records import RECORD_BYTES_MAX, committed
from worker.stores import ObjectStore, Store

JOB = "job-1"
PLACE = "gs://bucket/run/"


def begin(store: Store, **settings: object) -> Checkpoints:
    """Begin an attempt of the job."""
    return Checkpoints(store, **{"job_id": JOB, "uri": PLACE, **settings})


@pytest.fixture
def memory(cloud: MemoryFileSystem) -> ObjectStore:
    """A store in memory."""
    return ObjectStore(cloud, "bucket/run/")


def resumed(checkpoints: Checkpoints) -> tuple[int, bytes] | None:
    """Return the step to go on with and the weights, None for a start from zero."""
    with checkpoints.restore() as restored:
        return None if restored is None else (restored.next_step, restored.paths["model"].read_bytes())


def test_resumes_behind_the_newest(store: Store, uri: str) -> None:
    """What was saved last comes back whole, with its counters, and the training goes on one step further."""
    first = begin(store, uri=uri, now=lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert resumed(first) is None
    for step in (10, 20):
        first.save(step, {"model": b"w%d" % step, "optimizer": b""}, epoch=1, loss=0.5, metrics={"accuracy": 0.9})

    second = begin(store, uri=uri)

    assert resumed(second) == (21, b"w20")
    with second.restore() as restored:
        assert restored is not None
        assert set(restored.paths) == {"model", "optimizer"}
        assert restored.record.told() == {
            "job_id": JOB,
            "epoch": 1,
            "step": 20,
            "loss": 0.5,
            "metrics": {"accuracy": 0.9},
            "storage_key": f"{uri}weights/00000001-000000000000020/",
            "created_at": "2026-01-02T03:04:05Z",
        }


def test_weights_without_their_record_do_not_exist(store: Store, uri: str) -> None:
    """EDGE-17, CKP-5: a process that died before the record left all the weights of step 20; the resume goes on behind
    step 10, and with no other checkpoint it starts from zero. A save after one more start removes them."""
    first = begin(store, uri=uri)
    first.save(10, {"model": b"w10"})
    lost = first.save(20, {"model": b"w20"}).version
    store.delete(lost.record_key)
    weights = [key for key in store.list_sizes() if lost.name in key]
    second = begin(store, uri=uri)
    found = resumed(second)
    begin(store, uri=uri).save(11, {"model": b"w11"})
    left = [key for key in store.list_sizes() if lost.name in key]
    for version in committed(store.list_sizes()):
        store.delete(version.record_key)

    assert weights
    assert (found, left) == ((11, b"w10"), [])
    assert resumed(begin(store, uri=uri)) is None


def test_the_oldest_go_first(store: Store, uri: str) -> None:
    """The newest n stay, with their parts and nothing else; each of the others has passed through all four states."""
    states: list[tuple[int, State]] = []
    checkpoints = begin(store, uri=uri, kept=2, observe=lambda version, state: states.append((version.step, state)))
    for step in range(1, 5):
        checkpoints.save(step, {"model": b"w"})

    assert committed(store.list_sizes()) == [Version(1, 4), Version(1, 3)]
    assert {key.split("/")[1] for key in store.list_sizes() if key.startswith("weights/")} == {
        Version(1, 3).name,
        Version(1, 4).name,
    }
    assert [state for step, state in states if step == 1] == list(State)
    assert [state for step, state in states if step == 4] == list(State)[:3]


def test_interval_counts_from_the_last_commit(memory: ObjectStore) -> None:
    """A checkpoint is due when the interval is over since the start or the last one."""
    seconds = [0.0]
    checkpoints = begin(memory, interval_seconds=300, monotonic=lambda: seconds[0])
    assert not checkpoints.is_due()
    seconds[0] = 300
    assert checkpoints.is_due()
    checkpoints.save(1, {"model": b"w"})
    assert not checkpoints.is_due()


def damaged(store: Store, key: str, how: str) -> None:
    """Damage an object behind the back of everybody."""
    if how == "gone":
        store.delete(key)
        return
    content = bytearray(store.read(key))
    content[len(content) // 2] ^= 1
    store.write(key, lambda file: file.write(content[:-1] if how == "cut" else content))


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
@pytest.mark.parametrize("what", ["weights/{}/model", "committed/{}.json"])
def test_a_corrupt_newest_falls_back(
    store: Store, uri: str, what: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage to record or weights costs that checkpoint alone, and is told; with all damaged it starts from zero."""
    first = begin(store, uri=uri)
    for step in (1, 2):
        first.save(step, {"model": b"weights of %d" % step})
    damaged(store, what.format(Version(1, 2).name), how)

    assert resumed(begin(store, uri=uri)) == (2, b"weights of 1")
    assert ("corrupt" in caplog.text) == (what.format("") + how != "committed/.jsongone")

    damaged(store, what.format(Version(1, 1).name), how)
    assert resumed(begin(store, uri=uri)) is None
    assert "starting from zero" in caplog.text


def test_an_unreachable_store_is_no_missing_checkpoint(memory: ObjectStore) -> None:
    """Whatever call fails while resuming, the failure comes out: nothing starts from zero, or further back, for it."""
    begin(memory).save(1, {"model": b"one"})
    begin(memory).save(2, {"model": b"two"})

    def fail() -> None:
        raise PermissionError("no answer")

    whole = FaultyStore(memory, at=0, when="before", act=fail)
    resumed(begin(whole))
    for call in range(1, whole.calls + 1):
        with pytest.raises(PermissionError):
            resumed(begin(FaultyStore(memory, at=call, when="before", act=fail)))


@pytest.mark.parametrize("when", ["before", "after", "half"])
def test_a_failed_save_costs_nothing_but_itself(memory: ObjectStore, when: str) -> None:
    """Whatever call fails, the process may go on: what was committed stays, and the next save clears up behind it."""

    def fail() -> None:
        raise PermissionError("no answer")

    for call in range(1, 11):
        faulty = FaultyStore(memory, at=0, when=when, act=fail)
        checkpoints = begin(faulty, kept=1)
        before = resumed(checkpoints)
        step = 0 if before is None else before[0]
        faulty.calls, faulty.at = 0, call
        try:
            checkpoints.save(step, {"model": b"w%d" % step, "optimizer": b"o"})
        except PermissionError:
            assert resumed(checkpoints) in (before, (step + 1, b"w%d" % step))
            checkpoints.save(step, {"model": b"w%d" % step, "optimizer": b"o"})
        faulty.at = 0
        assert resumed(checkpoints) == (step + 1, b"w%d" % step)
        checkpoints.save(step + 1, {"model": b"next", "optimizer": b"o"})
    checkpoints.save(step + 2, {"model": b"last"})
    left = {Path(key).parts[1] for key in memory.list_sizes() if key.startswith("weights/")}
    assert left - {Version(checkpoints.generation, step + 2).name} <= {Version(9, step - 1).name}


def test_a_lost_answer_of_a_commit_is_a_commit(memory: ObjectStore) -> None:
    """A client that asks again after a lost answer hears that the record exists; it is its own."""

    class AsksTwice(FaultyStore):
        def create(self, key: str, data: bytes) -> None:
            super().create(key, data)
            if key.startswith("committed/"):
                super().create(key, data)

    checkpoints = begin(AsksTwice(memory, at=0, when="before", act=lambda: None))
    checkpoints.save(1, {"model": b"w"})
    assert resumed(checkpoints) == (2, b"w")


def test_an_old_pod_is_fenced(store: Store, uri: str) -> None:
    """When the new pod has begun, the old one, still ending, saves no more; also where both are at the same step."""
    old = begin(store, uri=uri)
    old.save(1, {"model": b"old"})
    new = begin(store, uri=uri)

    with pytest.raises(Fenced, match="attempt 2 of job 'job-1' has begun"):
        old.save(2, {"model": b"old"})
    assert resumed(new) == (2, b"old")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kept", [1, 3])
def test_an_old_pod_that_slept_harms_nobody(cloud: MemoryFileSystem, when: str, kept: int) -> None:
    """The old process stands still at any call of its save while a new one resumes, saves and is killed itself."""
    for call in range(1, 12):
        store = ObjectStore(cloud, f"bucket/{when}-{kept}-{call}/")
        begin(store, kept=kept).save(1, {"model": b"first"})
        seen: list[tuple[int, bytes] | None] = []

        def meanwhile(store: Store = store, seen: list[tuple[int, bytes] | None] = seen) -> None:
            new = begin(store, kept=kept)
            seen.append(resumed(new))
            for step in range(10, 13):
                new.save(step, {"model": b"new"})

        slow = FaultyStore(store, at=0, when=when, act=meanwhile)
        old = begin(slow, kept=kept)
        slow.calls, slow.at = 0, call
        try:
            old.save(2, {"model": b"old"})
        except Fenced:
            assert seen
        if not seen:
            assert call >= 5
            break
        assert seen in ([(2, b"first")], [(3, b"old")]), "the new one began from a whole one"
        assert resumed(begin(store, kept=kept)) == (13, b"new"), "and its own are never hidden by the old one's"
        assert len(committed(store.list_sizes())) <= kept + 1


class LookedBefore(Checkpoints):
    """An old pod that looked for a newer one before there was one, and sleeps until it commits."""

    def _unfenced(self) -> dict[str, int]:
        return self._store.list_sizes()


def test_a_checkpoint_that_expires_while_it_is_read(cloud: MemoryFileSystem) -> None:
    """An old pod's last save pushes out what the new one is reading: the new one looks again, it does not go back."""
    seen = []
    for call in range(1, 9):
        store = ObjectStore(cloud, f"bucket/{call}/")
        old = LookedBefore(store, job_id=JOB, uri=PLACE, kept=1)
        old.save(1, {"model": b"one"})
        reading = FaultyStore(store, at=0, when="before", act=lambda old=old: old.save(2, {"model": b"two"}))
        new = begin(reading)
        reading.calls, reading.at = 0, call
        seen.append(resumed(new))
    assert seen == [(3, b"two")] * 3 + [(2, b"one")] * 5


def test_many_claim_at_once(store: Store, uri: str) -> None:
    """Eight processes that begin at the same moment get eight generations; the disk and the server decide."""
    barrier = threading.Barrier(8)

    def claim(_: int) -> int:
        barrier.wait()
        return begin(store, uri=uri).generation

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(claim, range(8))) == list(range(1, 9))


def test_create_is_exclusive(store: Store) -> None:
    """Of eight that create one object one wins, and its bytes are there whole."""
    barrier = threading.Barrier(8)

    def create(number: int) -> bool:
        barrier.wait()
        try:
            store.create("committed/one", b"%d" % number * 1000)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert store.read("committed/one") == b"%d" % won.index(True) * 1000
    assert store.list_sizes() == {"committed/one": 1000}


def test_large_parts_arrive_whole(store: Store, uri: str) -> None:
    """Parts beyond one piece of an upload come back as they were; what is not there is told as missing."""
    block = bytes(range(256)) * 4096
    checkpoints = begin(store, uri=uri)
    checkpoints.save(1, {"model": lambda file: [file.write(block) for _ in range(24)], "empty": b""})
    with checkpoints.restore() as restored:
        assert restored is not None
        assert restored.paths["model"].read_bytes() == block * 24
    for call in (lambda: store.read("committed/none"), lambda: store.fetch("weights/none", Path("/tmp")).stat()):
        with pytest.raises(FileNotFoundError):
            call()
    store.delete("committed/none")


class Overwrites(MemoryFileSystem):
    """A file system that takes no notice of mode `create`, as some do."""

    store, pseudo_dirs = {}, [""]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        super().pipe_file(path, value)


def test_a_store_that_overwrites_is_refused() -> None:
    """Where two processes could win one generation nothing is saved at all."""
    with pytest.raises(StoreUnfit, match="conditional writes"):
        begin(ObjectStore(Overwrites(skip_instance_cache=True), "bucket/run/"))


@pytest.mark.parametrize("uri", ["gs://bucket/run/", "az://container/run/", "s3://bucket/run/"])
def test_clouds_through_fsspec(uri: str, cloud: MemoryFileSystem) -> None:
    """Any scheme works through a file system that keeps the contract; without one, the built-in client is asked."""
    begun = Checkpoints.open(uri, job_id=JOB, allowed=[uri], filesystem=cloud)
    begun.save(1, {"model": b"w"})
    assert resumed(Checkpoints.open(uri, job_id=JOB, allowed=[uri], filesystem=cloud)) == (2, b"w")
    client = connect(uri.partition(":")[0])
    assert isinstance(client, Objects)
    assert isinstance(client, AbstractFileSystem)


def test_another_job_has_another_folder(memory: ObjectStore) -> None:
    """Two jobs at one place would push out each other's checkpoints and resume from them."""
    begin(memory).save(1, {"model": b"w"})
    with pytest.raises(PlaceRefused, match="belongs to job 'job-1'"):
        begin(memory, job_id="job-2")


def test_a_planted_record_is_passed_over(memory: ObjectStore) -> None:
    """A record of another job, or one too large to be one, is no checkpoint of this job."""
    begin(memory).save(1, {"model": b"w"})
    stranger = memory.read(Version(1, 1).record_key).replace(b'"job-1"', b'"job-2"')
    memory.create(Version(1, 7).record_key, stranger)
    memory.create(Version(1, 8).record_key, b" " * (RECORD_BYTES_MAX + 1))
    memory.create("committed/../../etc/passwd", b"{}")
    assert resumed(begin(memory)) == (2, b"w")


@pytest.mark.parametrize(
    ("step", "parts", "message"),
    [
        pytest.param(-1, {"model": b""}, "step -1", id="a step before the first"),
        pytest.param(10**15, {"model": b""}, "step 1000", id="a step of too many digits"),
        pytest.param(1, {}, "0 parts", id="nothing to save"),
        pytest.param(1, {"../model": b""}, "part '../model'", id="a path for a name"),
        pytest.param(1, {".hidden": b""}, "part '.hidden'", id="a dot in front"),
        pytest.param(1, {"a/b": b""}, "part 'a/b'", id="a slash"),
    ],
)
def test_mistakes_are_told(memory: ObjectStore, step: int, parts: dict[str, bytes], message: str) -> None:
    """What cannot be saved is refused before anything is written."""
    checkpoints = begin(memory)
    checkpoints.save(5, {"model": b"w"})
    before = memory.list_sizes()
    with pytest.raises(ValueError, match=message):
        checkpoints.save(step, parts)
    assert memory.list_sizes() == before


def test_numbers_that_json_lacks_stop_no_save(memory: ObjectStore) -> None:
    """A loss that has diverged is left out; the weights are saved all the same."""
    record = begin(memory).save(1, {"model": b"w"}, loss=float("nan"), metrics={"norm": float("inf"), "rate": 0.1})
    assert (record.loss, record.metrics) == (None, {"rate": 0.1})
    assert resumed(begin(memory)) == (2, b"w")


def test_removing_old_ones_fails_quietly(memory: ObjectStore, caplog: pytest.LogCaptureFixture) -> None:
    """A store that lets nothing be removed keeps too much; saving goes on, and it is told."""

    class KeepsAll(FaultyStore):
        def delete(self, key: str) -> None:
            raise PermissionError(key)

    checkpoints = begin(KeepsAll(memory, at=0, when="before", act=lambda: None), kept=1)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            checkpoints.save(step, {"model": b"w"})
    assert "Failed to remove old checkpoints" in caplog.text
    assert resumed(checkpoints) == (3, b"w")


def test_corrupt_is_an_error_of_ours() -> None:
    """Callers catch one base for everything that this package raises itself."""
    from worker import CheckpointError

    assert all(issubclass(one, CheckpointError) for one in (CorruptCheckpoint, Fenced, PlaceRefused, StoreUnfit))
