"""The webhook's serving certificate, taken from the Secret atoll-webhook-tls and replaced while it runs.

New connections get the newest pair that could be loaded; open ones stay as they are. The Secret is read through the API
(`atoll.service.tls` follows files): it arrives within a second instead of the kubelet's minute, and the key touches no
disk.
"""

import asyncio
import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import structlog
from cryptography import x509

from atoll.kube.cache import Change, ChangeKind
from atoll.service.tls import TLS_VERSION_MIN

log = structlog.get_logger(__name__)


class SecretMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """Identity of the Secret."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class TlsSecret(msgspec.Struct, frozen=True):
    """The Secret as the API server shows it; values are decoded from base64."""

    metadata: SecretMetadata
    data: dict[str, bytes] = {}


decode_secret = msgspec.json.Decoder(TlsSecret).decode


class ServingCertificate:
    """Holds the newest good pair. With `client_ca` every client must show a certificate that it signed."""

    def __init__(self, *, client_ca: Path | None = None) -> None:
        self._client_ca = client_ca
        self._current: ssl.SSLContext | None = None
        self.loaded = asyncio.Event()
        """Set once there is a pair to serve."""
        self.ends_timestamp = 0.0
        """When the served certificate ends, in seconds since 1970; 0 while there is none."""

    def on_change(self, change: Change[TlsSecret]) -> None:
        """Take over a new pair; a deleted Secret or a pair that does not fit leaves the last good one in use."""
        if change.kind is ChangeKind.DELETED:
            log.warning("Kept the certificate of a deleted Secret")
            return
        certificate, key = (change.object.data.get(name, b"") for name in ("tls.crt", "tls.key"))
        try:
            self._current = _load(certificate, key, client_ca=self._client_ca)
            self.ends_timestamp = x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()
        except (OSError, ValueError) as error:
            log.warning("Kept the old certificate, the Secret holds no usable pair", err=type(error).__name__)
            return
        self.loaded.set()
        log.info("Loaded a certificate", resource_version=change.object.metadata.resource_version)

    def context(self) -> ssl.SSLContext:
        """Return the context to listen with; call it when `loaded` is set."""
        assert self._current is not None
        listening = _new_context(client_ca=self._client_ca)
        listening.sni_callback = self._choose
        return listening

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _listening: ssl.SSLContext) -> None:
        assert self._current is not None
        connection.context = self._current


def _load(certificate: bytes, key: bytes, *, client_ca: Path | None) -> ssl.SSLContext:
    context = _new_context(client_ca=client_ca)
    with _file_in_memory(certificate + b"\n" + key) as file:
        context.load_cert_chain(file)
    return context


def _new_context(*, client_ca: Path | None) -> ssl.SSLContext:
    """Return a context without a certificate; the listening one needs it all, a connection keeps its verify mode."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = TLS_VERSION_MIN
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextmanager
def _file_in_memory(content: bytes) -> Iterator[str]:
    """Give the name of a file that ends with the block: OpenSSL reads keys from files alone."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("certificate"), "wb", buffering=0) as file:
            file.write(content)
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        yield file.name
