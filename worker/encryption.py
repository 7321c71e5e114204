"""Encrypts the parts of checkpoints before they are stored, in the format of age (https://age-encryption.org).

In: the file of an age identity, as `age-keygen` writes it. Records and claims stay readable: the job service and people
look at them. A part that was stored before there was a key is read as it is. pyrage is only imported with a key.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from worker.errors import CorruptCheckpoint, KeyRefused, OtherKey
from worker.records import Part
from worker.stores import Measured, Produce, Store

if TYPE_CHECKING:
    from pyrage.x25519 import Identity

MAGIC: Final = b"age-encryption.org/"
OTHER_KEY: Final = "No matching keys found"
"""How pyrage words that a file is for another key: all other errors are of the file."""
KEY_BYTES_MAX: Final = 16 * 1024


def read_key(path: Path) -> Identity:
    """Return the identity in a file; lines that begin with # are comments. Raises KeyRefused."""
    from pyrage import IdentityError, x25519

    try:
        with path.open("rb") as file:
            lines = file.read(KEY_BYTES_MAX).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyRefused(f"the key file {path} cannot be read: {error}") from error
    words = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if len(words) != 1:
        raise KeyRefused(f"the key file {path} has {len(words)} keys: write one with `age-keygen`")
    try:
        return x25519.Identity.from_str(words[0])
    except IdentityError as error:
        raise KeyRefused(f"the key file {path} holds no key of age: write one with `age-keygen`") from error


class EncryptedStore:
    """A store whose parts are encrypted with a key; without one, encrypted parts are refused."""

    def __init__(self, store: Store, key: Identity | None, *, scratch: Path | None = None) -> None:
        """scratch: folder for what is not encrypted yet; the system's own by default."""
        self._store = store
        self._key = key
        self._scratch = scratch
        self.create, self.read = store.create, store.read
        self.list_sizes, self.delete = store.list_sizes, store.delete

    def write(self, key: str, produce: Produce) -> Part:
        """Write an object, encrypted: the size is that of what is stored, the checksum that of what was given."""
        if self._key is None:
            return self._store.write(key, produce)
        with tempfile.TemporaryFile(prefix="checkpoint-", dir=self._scratch) as plain:
            measured = Measured(cast("BinaryIO", plain))
            produce(cast("BinaryIO", measured))
            plain.seek(0)
            stored = self._store.write(key, lambda file: self._encrypt(cast("BinaryIO", plain), file))
        return Part(stored.name, stored.size_bytes, measured.part(key).sha256)

    def fetch(self, key: str, folder: Path) -> Path:
        """Return the path of a local file with an object's bytes. Raises KeyRefused, CorruptCheckpoint, OtherKey."""
        path = self._store.fetch(key, folder)
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return path
        if self._key is None:
            raise KeyRefused(f"{key} is encrypted: set ATOLL_CHECKPOINT_KEY_FILE to the file of its key")
        plain = Path(tempfile.mkdtemp(dir=folder), path.name)
        self._decrypt(path, plain, key)
        if path.parent == folder:
            path.unlink()
        return plain

    def _encrypt(self, plain: BinaryIO, file: BinaryIO) -> None:
        """Encrypt into a file. pyrage drops errors of writing, so they are kept and raised here."""
        from pyrage import encrypt_io

        assert self._key is not None
        guarded = _Guarded(file)
        encrypt_io(plain, cast("BinaryIO", guarded), [self._key.to_public()])
        if guarded.error is not None:
            raise guarded.error

    def _decrypt(self, path: Path, plain: Path, key: str) -> None:
        from pyrage import DecryptError, decrypt_io

        assert self._key is not None
        with path.open("rb") as file, plain.open("wb") as target:
            guarded = _Guarded(cast("BinaryIO", target))
            try:
                decrypt_io(cast("BinaryIO", file), cast("BinaryIO", guarded), [self._key])
            except (DecryptError, OSError) as error:
                if str(error) == OTHER_KEY:
                    raise OtherKey(f"{key} is not for this key: mount the one that it was saved with") from None
                raise guarded.error or CorruptCheckpoint(f"{key} cannot be decrypted: {error}") from error
        if guarded.error is not None:
            raise guarded.error


class _Guarded:
    """A binary file that remembers the first error of writing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: bytes) -> int:
        """Write on; after an error nothing more is written."""
        try:
            if self.error is None:
                return self._file.write(data)
        except BaseException as error:
            self.error = error
            raise
        return len(data)

    def flush(self) -> None:
        """Hand on what is buffered."""
        try:
            self._file.flush()
        except BaseException as error:
            self.error = error
            raise
