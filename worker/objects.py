"""S3, Google's and Azure's object stores through one client without dependencies, as a file system of fsspec.

In: a scheme; addresses and credentials come from the variables and metadata servers that the clouds' own tools know.
Out: a file system whose exclusive creation the server decides, and whose downloads go to the disk piece by piece.
Separate, because it alone needs `obstore`; other file systems of fsspec do as well.
"""

from __future__ import annotations

from pathlib import Path

from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.fsspec import FsspecStore

PIECE_BYTES = 8 * 1024 * 1024


class Objects(FsspecStore):  # type: ignore[misc]
    """obstore's file system, which by itself overwrites in mode `create` and downloads into memory."""

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        bucket, key = self._split_path(path)
        try:
            await self._construct_store(bucket).put_async(key, value, mode=mode)
        except (AlreadyExistsError, PreconditionError) as error:
            raise FileExistsError(path) from error

    async def _get_file(self, rpath: str, lpath: str, **_: object) -> None:
        bucket, key = self._split_path(rpath)
        answer = await self._construct_store(bucket).get_async(key)
        with Path(lpath).open("wb") as file:  # noqa: ASYNC230 - fsspec's own loop, one download at a time
            async for piece in answer.stream(min_chunk_size=PIECE_BYTES):
                file.write(piece)


def connect(scheme: str) -> Objects:
    """Return the file system of `s3`, `gs` or `az`."""
    return Objects(scheme, skip_instance_cache=True)
