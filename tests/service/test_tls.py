"""TLS: rotation without a restart, removed clients are refused, broken files change nothing."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from atoll.service.errors import CertificateError
from atoll.service.http import add_health, application, listening
from atoll.service.tls import TlsFiles, server_context
from tests.service.certificates import Authority


class Tls:
    """A TLS server on certificate files that the test rewrites."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority("server authority")
        self.clients = Authority("client authority")
        self.files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "client-ca.crt")
        self.trusted = self.authority.write_certificate(folder / "ca.crt")
        self.clients.write_certificate(folder / "client-ca.crt")
        self.authority.issue("first", self.files.certificate, self.files.key)
        self.folder = folder
        self.seconds = 1000.0
        self.port = 0

    def new_files(self, write: Callable[[], object]) -> None:
        """Change files and let the moment of looking again come."""
        write()
        self.seconds += 2

    async def call(self, client: Authority | None) -> str:
        """Open a new connection and return the server certificate's name."""
        context = ssl.create_default_context(cafile=str(self.trusted))
        if client is not None:
            client.issue("client", self.folder / "client.crt", self.folder / "client.key")
            context.load_cert_chain(self.folder / "client.crt", self.folder / "client.key")
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        shown = writer.get_extra_info("peercert")
        writer.close()
        if not answer:
            raise ConnectionError("the server hung up")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        return str(dict(pair for part in shown["subject"] for pair in part)["commonName"])


@pytest.fixture
async def tls(tmp_path: Path) -> AsyncIterator[Tls]:
    tls = Tls(tmp_path)
    app = application()
    add_health(app)
    context = server_context(tls.files, monotonic_seconds=lambda: tls.seconds)
    async with listening(app, "127.0.0.1", 0, context) as tls.port:
        yield tls


async def test_rotated_certificate_is_shown_to_the_next_client(tls: Tls) -> None:
    """A certificate that was replaced on disk is used without a restart."""
    assert await tls.call(tls.clients) == "first"
    tls.new_files(lambda: tls.authority.issue("second", tls.files.certificate, tls.files.key))

    assert await tls.call(tls.clients) == "second"


async def test_client_without_a_certificate_is_refused(tls: Tls) -> None:
    """With a client CA nobody gets in who does not show a certificate of it."""
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await tls.call(None)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await tls.call(Authority("client authority"))


async def test_withdrawn_client_authority_is_out_and_the_new_one_in(tls: Tls) -> None:
    """A client CA that was replaced no longer counts: rotation takes away as well as adds."""
    old, new = tls.clients, Authority("new client authority")
    assert tls.files.client_ca is not None
    client_ca = tls.files.client_ca
    assert await tls.call(old) == "first"
    tls.new_files(lambda: new.write_certificate(client_ca))

    assert await tls.call(new) == "first"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await tls.call(old)


@pytest.mark.parametrize("broken", [b"", b"not a certificate"], ids=["empty", "garbage"])
async def test_half_written_files_keep_the_old_certificate(tls: Tls, broken: bytes) -> None:
    """While files do not fit together the last good ones serve, and the next good ones are taken."""
    tls.new_files(lambda: tls.files.certificate.write_bytes(broken))
    assert await tls.call(tls.clients) == "first"
    tls.new_files(lambda: tls.files.certificate.unlink())
    assert await tls.call(tls.clients) == "first"
    tls.new_files(lambda: tls.authority.issue("second", tls.files.certificate, tls.files.key))

    assert await tls.call(tls.clients) == "second"


async def test_key_of_another_certificate_keeps_the_old_pair(tls: Tls, tmp_path: Path) -> None:
    """Certificate and key change one after the other; between the two writes the old pair serves."""
    tls.new_files(lambda: tls.authority.issue("second", tls.files.certificate, tmp_path / "other.key"))

    assert await tls.call(tls.clients) == "first"


def test_files_that_cannot_be_used_at_start_are_named(tmp_path: Path) -> None:
    """A server that cannot ever serve says at once which files are wrong."""
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    with pytest.raises(CertificateError, match=r"tls\.crt"):
        server_context(files, monotonic_seconds=lambda: 0.0)

    (tmp_path / "tls.crt").write_text("x")
    (tmp_path / "tls.key").write_text("x")
    with pytest.raises(CertificateError, match=r"tls\.key"):
        server_context(files, monotonic_seconds=lambda: 0.0)
