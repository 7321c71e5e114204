"""Checkpoints that are encrypted before they are stored: on disk, in S3 and in any file system of fsspec."""

from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from pyrage import decrypt, x25519

from worker import Checkpoints, CheckpointSettings, KeyRefused
from worker.encryption import MAGIC, EncryptedStore, read_key
from worker.stores import ObjectStore, Store

WEIGHTS = b"secret weights " * 200_000


def begin(store: Store, uri: str, key: x25519.Identity | None) -> Checkpoints:
    """Begin an attempt of the job."""
    return Checkpoints(EncryptedStore(store, key), job_id="job", uri=uri)


def weights_of(checkpoints: Checkpoints) -> bytes | None:
    """Return the newest weights; None for a start from zero."""
    with checkpoints.restore() as restored:
        return None if restored is None else restored.paths["model"].read_bytes()


def stored_parts(store: Store) -> list[bytes]:
    """Return the bytes of all parts as they are stored."""
    return [store.read(key) for key in store.list_sizes() if key.startswith("weights/")]


def test_what_is_stored_cannot_be_read_without_the_key(store: Store, uri: str) -> None:
    """The parts are of age's format, which any tool of it reads with the key; a resume gets the weights."""
    key = x25519.Identity.generate()
    begin(store, uri, key).save(7, {"model": WEIGHTS, "optimizer": lambda file: file.write(b"o")})

    stored = stored_parts(store)

    assert len(stored) == 2
    assert not any(b"secret" in part for part in stored)
    assert {decrypt(part, [key]) for part in stored} == {WEIGHTS, b"o"}
    assert weights_of(begin(store, uri, key)) == WEIGHTS


def test_a_job_that_gets_a_key_goes_on_from_before(store: Store, uri: str) -> None:
    """What was stored in clear is restored; what comes next is encrypted."""
    key = x25519.Identity.generate()
    begin(store, uri, None).save(1, {"model": b"in clear"})
    second = begin(store, uri, key)

    assert weights_of(second) == b"in clear"
    second.save(2, {"model": b"hidden"})
    assert weights_of(begin(store, uri, key)) == b"hidden"
    assert sorted(part.startswith(MAGIC) for part in stored_parts(store)) == [False, True]


@pytest.mark.parametrize("wrong", [None, x25519.Identity.generate()], ids=["no key", "another key"])
def test_without_the_right_key_nothing_starts_from_zero(store: Store, uri: str, wrong: x25519.Identity | None) -> None:
    """A valid checkpoint that cannot be read is no missing one: the job ends and says what it lacks."""
    begin(store, uri, x25519.Identity.generate()).save(1, {"model": WEIGHTS})

    with pytest.raises(KeyRefused, match=r"ATOLL_CHECKPOINT_KEY_FILE|not for this key"):
        weights_of(begin(store, uri, wrong))


@pytest.mark.parametrize("position", [30, 150, 1000, -1])
def test_a_damaged_part_is_skipped_for_the_checkpoint_before(cloud: MemoryFileSystem, uri: str, position: int) -> None:
    """Whichever byte differs: age finds it, in the header or behind."""
    key, memory = x25519.Identity.generate(), ObjectStore(cloud, "bucket/run/")
    checkpoints = begin(memory, uri, key)
    checkpoints.save(1, {"model": b"before"})
    checkpoints.save(2, {"model": WEIGHTS})
    newest = max(key for key in memory.list_sizes() if key.startswith("weights/"))
    damaged = bytearray(memory.read(newest))
    damaged[position] ^= 1
    cloud.pipe_file(f"bucket/run/{newest}", bytes(damaged))

    assert weights_of(begin(memory, uri, key)) == b"before"


def test_a_full_disk_is_told(store: Store) -> None:
    """age's binding drops errors of writing; a part that was not written must not be committed."""

    class Full:
        def write(self, key: str, produce: object) -> None:
            produce(FullFile())  # type: ignore[operator]

        create = read = list_sizes = delete = fetch = None

    class FullFile:
        def write(self, _data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            """Nothing is buffered."""

    sealed = EncryptedStore(Full(), x25519.Identity.generate())  # type: ignore[arg-type]

    with pytest.raises(OSError, match="No space left"):
        sealed.write("weights/1-1/model", lambda file: file.write(b"w"))


@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=200_000))
def test_any_bytes_come_back(data: bytes) -> None:
    """Empty parts, and those around age's chunks of 64 KiB, too."""

    class Cloud(MemoryFileSystem):
        store, pseudo_dirs = {}, [""]

    sealed = EncryptedStore(ObjectStore(Cloud(skip_instance_cache=True), "bucket/"), x25519.Identity.generate())
    checkpoints = Checkpoints(sealed, job_id="job", uri="gs://bucket/")

    checkpoints.save(1, {"model": data})

    assert weights_of(checkpoints) == data


KEY = str(x25519.Identity.generate())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param(None, "cannot be read", id="missing"),
        pytest.param("# created: now\n", "has 0 keys", id="comment alone"),
        pytest.param(f"{KEY}\n{KEY}\n", "has 2 keys", id="two keys"),
        pytest.param("age1publickey\n", "holds no key of age", id="public key"),
        pytest.param("AGE-SECRET-KEY-1XYZ\n", "holds no key of age", id="broken key"),
    ],
)
def test_a_key_file_that_is_none_is_told_without_its_content(tmp_path: Path, text: str | None, told: str) -> None:
    """The message names the file and what to do; what might be a key is in no log."""
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)

    with pytest.raises(KeyRefused, match=told) as refused:
        read_key(path)

    assert str(path) in str(refused.value)
    assert "SECRET" not in str(refused.value)


def test_the_variable_names_the_key(tmp_path: Path) -> None:
    """As `age-keygen` writes the file, with comments."""
    path, uri = tmp_path / "key", f"file://{tmp_path}/run/"
    path.write_text(f"# created: 2026-01-02\n# public key: age1...\n{KEY}\n")
    variables = {
        "ATOLL_JOB_ID": "job",
        "ATOLL_CHECKPOINT_URI": uri,
        "ATOLL_CHECKPOINT_PREFIXES": uri,
        "ATOLL_CHECKPOINT_KEY_FILE": str(path),
    }

    CheckpointSettings.from_environment(variables).open().save(1, {"model": WEIGHTS})

    parts = list((tmp_path / "run" / "weights").rglob("model"))
    assert [file.read_bytes().startswith(MAGIC) for file in parts] == [True]
    assert weights_of(CheckpointSettings.from_environment(variables).open()) == WEIGHTS
