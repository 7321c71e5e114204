"""S3, Google's and Azure's object stores through one client without dependencies, as a file system of fsspec.

Addresses and credentials come from the variables and metadata servers of the clouds' own tools. It has only the calls
of fsspec's interface that checkpoints need; other file systems of fsspec work as well. obstore's own file system does
not: it overwrites instead of creating, downloads into memory, and sometimes aborts a process at its regular end.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from fsspec import AbstractFileSystem
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import from_url

PIECE_BYTES: Final = 8 * 1024 * 1024


class Objects(AbstractFileSystem):  # type: ignore[misc]
    """Buckets of one scheme; a path is `bucket/key`."""

    cachable = False  # of fsspec: the next one reads the variables anew

    def __init__(self, scheme: str) -> None:
        """Does not connect yet."""
        super().__init__()
        self.protocol = scheme
        self._bucket = cache(lambda bucket: from_url(f"{scheme}://{bucket}"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        """Write an object; in mode `create` only if the server has none."""
        store, key = self._split(path)
        try:
            store.put(key, value, mode=mode)
        except (AlreadyExistsError, PreconditionError) as error:
            raise FileExistsError(path) from error

    def cat_file(self, path: str, **_: object) -> bytes:
        """Return the bytes of an object."""
        store, key = self._split(path)
        return bytes(store.get(key).bytes())

    def put_file(self, lpath: str, rpath: str, **_: object) -> None:
        """Upload a file, a large one in parts that appear together."""
        store, key = self._split(rpath)
        store.put(key, Path(lpath))

    def get_file(self, rpath: str, lpath: str, **_: object) -> None:
        """Download piece by piece."""
        with Path(lpath).open("wb") as file:
            file.writelines(self.pieces(rpath)[1])

    def pieces(self, path: str) -> tuple[int, Iterator[bytes]]:
        """Return the size of an object, and its bytes piece by piece."""
        store, key = self._split(path)
        answer = store.get(key)
        return answer.meta["size"], answer.stream(min_chunk_size=PIECE_BYTES)

    def find(self, path: str, **_: object) -> dict[str, dict[str, Any]]:
        """Return every object below a path with its size."""
        store, key = self._split(path)
        bucket = path.partition("/")[0]
        found = (entry for entries in store.list(key) for entry in entries)
        return {f"{bucket}/{entry['path']}": {"size": entry["size"]} for entry in found}

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        store, key = self._split(path)
        store.delete(key)

    def _split(self, path: str) -> tuple[Any, str]:
        bucket, _, key = path.partition("/")
        return self._bucket(bucket), key


def connect(scheme: str) -> Objects:
    """Return the file system of `s3`, `gs` or `az`."""
    return Objects(scheme)
