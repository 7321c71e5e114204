"""Where bytes of checkpoints lie: a folder, or objects of any file system of fsspec.

In: keys (`weights/...`), bytes. Out: bytes, sizes, checksums. A store promises little: `create` makes an object whole
or not at all and only if there is none, `write` has written when it returns, `list_sizes` tells the truth of now. That
these suffice for checkpoints is the business of worker.checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol, cast
from uuid import uuid4

from worker.errors import PlaceRefused
from worker.places import Place, parse_place
from worker.records import STAGING, Part

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Produce = Callable[[BinaryIO], object]
"""Writes a part into an open binary file."""
CHUNK_BYTES: Final = 1024 * 1024


class Store(Protocol):
    """Keys are relative to the place, segments joined by slashes."""

    def create(self, key: str, data: bytes) -> None:
        """Make a small object, whole or not at all. Raises FileExistsError where there is one already."""

    def write(self, key: str, produce: Produce) -> Part:
        """Write an object of any size; what was there is replaced. Returns its size and checksum."""

    def read(self, key: str) -> bytes:
        """Return a small object. Raises FileNotFoundError."""

    def fetch(self, key: str, folder: Path) -> Path:
        """Return the path of a local file with an object's bytes, in the folder where it is a copy."""

    def list_sizes(self) -> dict[str, int]:
        """Return every key with its size in bytes."""

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens where there is none."""


def sha256_of(path: Path) -> str:
    """Return the checksum of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Measured:
    """A binary file that counts and hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> int:
        """Write on; torch.save and pickle need no more than this and flush."""
        self._hash.update(data)
        self._size += memoryview(data).nbytes
        return self._file.write(data)

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._file.flush()

    def part(self, key: str) -> Part:
        """Return what was written under the last segment of its key."""
        return Part(key.rpartition("/")[2], self._size, self._hash.hexdigest())


def _produce_into(file: BinaryIO, produce: Produce, key: str) -> Part:
    measured = Measured(file)
    produce(cast("BinaryIO", measured))
    file.flush()
    return measured.part(key)


class LocalStore:
    """A folder: of the machine, a volume, a network file system. Data and names are on the disk when a call returns."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def create(self, key: str, data: bytes) -> None:
        """Write beside, then link: the name appears with all of its bytes, and only where there was none."""
        target = self._ready(key)
        beside = self._ready(f"{STAGING}{target.name}.{uuid4().hex}")
        try:
            with beside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(beside, target)
        finally:
            beside.unlink(missing_ok=True)
        _sync(target.parent)

    def write(self, key: str, produce: Produce) -> Part:
        """Write in place: nobody reads parts before their record is there."""
        target = self._ready(key)
        with target.open("wb") as file:
            part = _produce_into(file, produce, key)
            os.fsync(file.fileno())
        _sync(target.parent)
        return part

    def read(self, key: str) -> bytes:
        """Return a small object."""
        return self._path(key).read_bytes()

    def fetch(self, key: str, folder: Path) -> Path:  # noqa: ARG002 - nothing is copied
        """Return where the file itself lies."""
        return self._path(key)

    def list_sizes(self) -> dict[str, int]:
        """Walk the folder; links are nobody's checkpoints."""
        found = {}
        for folder, _, names in os.walk(self._root, onerror=self._refuse):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    if not path.is_symlink():
                        found[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return found

    def delete(self, key: str) -> None:
        """Remove a file, and its folder when that was the last of a checkpoint."""
        path = self._path(key)
        path.unlink(missing_ok=True)
        if path.parent.parent != self._root:
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def _refuse(self, error: OSError) -> None:
        """Raise what keeps us from looking; a folder that somebody removes meanwhile holds nothing."""
        if not isinstance(error, FileNotFoundError) or error.filename == os.fspath(self._root):
            raise error

    def _path(self, key: str) -> Path:
        """Return the path of a key, which is reached through no link."""
        path = self._root / key
        if path.is_symlink() or path.parent.resolve() != self._root.resolve() / path.parent.relative_to(self._root):
            raise PlaceRefused(f"{path} is reached through a link: remove the link, checkpoints are plain files")
        return path

    def _ready(self, key: str) -> Path:
        """Return the path of a key whose folder is there and will stay."""
        path = self._path(key)
        missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            _sync(folder.parent)
        return path


class ObjectStore:
    """Objects below a prefix of a file system of fsspec that honours `pipe_file(..., mode="create")`.

    Parts are written to a local file first and uploaded from there: an upload out of a program that dies must not leave
    half an object under a whole name.
    """

    def __init__(self, filesystem: AbstractFileSystem, prefix: str, *, scratch: Path | None = None) -> None:
        self._filesystem = filesystem
        self._prefix = prefix
        self._scratch = scratch

    def create(self, key: str, data: bytes) -> None:
        """Make the object if there is none; the server decides who was first."""
        self._filesystem.pipe_file(self._prefix + key, data, mode="create")

    def write(self, key: str, produce: Produce) -> Part:
        """Write a local file, then upload it."""
        with tempfile.NamedTemporaryFile(prefix="checkpoint-", dir=self._scratch) as file:
            part = _produce_into(cast("BinaryIO", file), produce, key)
            self._filesystem.put_file(file.name, self._prefix + key)
        return part

    def read(self, key: str) -> bytes:
        """Return a small object."""
        data: bytes = self._filesystem.cat_file(self._prefix + key)
        return data

    def fetch(self, key: str, folder: Path) -> Path:
        """Download into the folder."""
        path = folder / key.rpartition("/")[2]
        self._filesystem.get_file(self._prefix + key, str(path))
        return path

    def list_sizes(self) -> dict[str, int]:
        """List everything below the prefix, past every cache."""
        self._filesystem.invalidate_cache()
        try:
            found = self._filesystem.find(self._prefix, detail=True)
        except FileNotFoundError:
            return {}
        return {name.partition(self._prefix)[2]: int(entry["size"]) for name, entry in found.items()}

    def delete(self, key: str) -> None:
        """Remove the object."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(self._prefix + key)


def open_store(place: Place, *, allowed: tuple[str, ...], filesystem: AbstractFileSystem | None = None) -> Store:
    """Return the store at an allowed place. Raises PlaceRefused for a folder that a link leads elsewhere."""
    if place.scheme == "file":
        root = Path("/", place.path)
        roots = [Path("/", one.path).resolve() for one in map(parse_place, allowed) if one.scheme == "file"]
        if not any(root.resolve().is_relative_to(one) for one in roots):
            raise PlaceRefused(f"{place.uri} leads to {root.resolve()}, which is on no allowed prefix")
        return LocalStore(root)
    if filesystem is None:
        from worker.objects import connect

        filesystem = connect(place.scheme)
    return ObjectStore(filesystem, f"{place.bucket}/{place.path}")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for downloads that goes with the block."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        yield Path(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
