"""Encrypts secrets before they are stored: the database, its backups and its logs never hold them in clear.

The key is in a file of 32 bytes as URL-safe base64, and nowhere else. Without the file nothing secret can be stored.
"""

from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from atoll.service.errors import SettingsError


class SecretBox:
    """Encrypts and decrypts short texts."""

    def __init__(self, key: bytes) -> None:
        self._fernet = Fernet(key)

    @classmethod
    def of(cls, file: Path | None) -> "SecretBox | None":
        """Return a box with the key of a file; None without a file. Raises SettingsError."""
        if file is None:
            return None
        try:
            return cls(file.read_bytes().strip())
        except (OSError, ValueError) as error:
            hint = "write 32 random bytes as URL-safe base64: head -c 32 /dev/urandom | base64 | tr +/ -_"
            raise SettingsError(f"cannot use secret key {file}: {type(error).__name__}; {hint}") from error

    def seal(self, text: str) -> str:
        """Return a text encrypted."""
        return self._fernet.encrypt(text.encode()).decode()

    def open(self, sealed: str) -> str | None:
        """Return the text; None if another key sealed it."""
        try:
            return self._fernet.decrypt(sealed.encode()).decode()
        except InvalidToken:
            return None
