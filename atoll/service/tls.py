"""Server-side TLS whose certificate, key and client CA are renewed while the server runs.

Files are checked when a client connects, at most once a second:
a rotated certificate or a withdrawn client CA counts from the next handshake on, without a timer. Connections that are
open do not change. A half-written or broken set of files is reported, and the last good one stays in use.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from atoll.service.errors import CertificateError

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
TLS_VERSION_MIN = ssl.TLSVersion.TLSv1_3
"""All callers (kube-apiserver, kube-scheduler, browsers, curl) speak 1.3. In 1.2 client certificates are sent in clear,
and resumed sessions skip the check against a withdrawn client CA."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca` every client must have a certificate signed by it."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that changes when a file is written or replaced; OSError if one is missing."""
        files = [self.certificate, self.key, *([self.client_ca] if self.client_ca else [])]
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in (file.stat() for file in files))


def server_context(files: TlsFiles, *, monotonic_seconds: Callable[[], float]) -> ssl.SSLContext:
    """Return a context that follows `files`; raises CertificateError if they cannot be used now."""
    try:
        stamp = files.stamp()
        context = _load(files)
    except (OSError, ssl.SSLError) as error:
        raise CertificateError(f"cannot use {files.certificate} with {files.key}: {error}") from error
    follower = _Follower(files, context, stamp, monotonic_seconds)
    context.sni_callback = follower.choose
    return context


class _Follower:
    """Keeps the newest valid context and gives it to each new connection."""

    def __init__(
        self,
        files: TlsFiles,
        context: ssl.SSLContext,
        stamp: tuple[tuple[int, int, int], ...],
        monotonic_seconds: Callable[[], float],
    ) -> None:
        self._files = files
        self._current = context
        self._stamp = stamp
        self._monotonic_seconds = monotonic_seconds
        self._look_at = 0.0

    def choose(self, connection: ssl.SSLObject, _name: str | None, _listening: ssl.SSLContext) -> None:
        now = self._monotonic_seconds()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._reload_if_changed()
        connection.context = self._current

    def _reload_if_changed(self) -> None:
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return
            self._current = _load(self._files)
            self._stamp = stamp
        except (OSError, ssl.SSLError) as error:
            log.warning("Kept the old certificate", file=str(self._files.certificate), err=str(error))
        else:
            log.info("Loaded a new certificate", file=str(self._files.certificate))


def _load(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = TLS_VERSION_MIN
    context.num_tickets = 0  # a resumed session would skip the check against a client CA that was withdrawn
    context.load_cert_chain(files.certificate, files.key)
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
