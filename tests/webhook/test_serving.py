"""Certificates that are replaced while a real TLS server runs."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from atoll.kube.cache import Change, ChangeKind
from atoll.service.http import listening
from controllers.certificates import KeyPair, make_authority, make_serving
from webhook.serving import SecretMetadata, ServingCertificate, TlsSecret

NOW = datetime.now(UTC)
YEAR = timedelta(days=365)


def change(pair: KeyPair, kind: ChangeKind = ChangeKind.MODIFIED) -> Change[TlsSecret]:
    """Build what the watch says when the Secret holds this pair."""
    data = {"tls.crt": pair.certificate, "tls.key": pair.key}
    return Change(kind, TlsSecret(metadata=SecretMetadata(name="atoll-webhook-tls"), data=data))


def made_by(authority: KeyPair, *, days: int = 90) -> KeyPair:
    return make_serving(authority, names=("127.0.0.1",), now=NOW, life=timedelta(days=days))


async def hello(_request: web.Request) -> web.Response:
    return web.Response(text="hello")


def hello_application() -> web.Application:
    app = web.Application()
    app.router.add_get("/", hello)
    return app


async def greet(port: int, *, trusting: KeyPair, showing: Path | None = None) -> str:
    """Connect, trusting one authority alone; raises ClientConnectorError if the server shows another's certificate."""
    context = ssl.create_default_context(cadata=trusting.certificate.decode())
    if showing is not None:
        context.load_cert_chain(showing)
    async with aiohttp.ClientSession() as session, session.get(f"https://127.0.0.1:{port}/", ssl=context) as answer:
        return await answer.text()


async def test_new_connections_get_the_new_certificate_and_open_ones_go_on() -> None:
    """Rotation without restart: a kept connection works on under the old certificate, a new one sees the new."""
    old, new = make_authority(now=NOW, life=YEAR), make_authority(now=NOW, life=YEAR)
    certificate = ServingCertificate()
    certificate.on_change(change(made_by(old), ChangeKind.ADDED))
    trust_old = ssl.create_default_context(cadata=old.certificate.decode())
    async with listening(hello_application(), "127.0.0.1", 0, certificate.context()) as port:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as kept:
            url = f"https://127.0.0.1:{port}/"
            async with kept.get(url, ssl=trust_old) as answer:
                assert await answer.text() == "hello"

            certificate.on_change(change(made_by(new)))

            async with kept.get(url, ssl=trust_old) as answer:
                assert await answer.text() == "hello"
        assert await greet(port, trusting=new) == "hello"
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await greet(port, trusting=old)


@pytest.mark.parametrize(
    "worse",
    [
        pytest.param(change(KeyPair(b"", b"")), id="empty"),
        pytest.param(change(KeyPair(b"junk", b"junk")), id="junk"),
        pytest.param(change(made_by(make_authority(now=NOW, life=YEAR)), ChangeKind.DELETED), id="deleted"),
        pytest.param(
            change(
                KeyPair(
                    made_by(make_authority(now=NOW, life=YEAR)).certificate,
                    made_by(make_authority(now=NOW, life=YEAR)).key,
                )
            ),
            id="halves-of-two-pairs",
        ),
    ],
)
async def test_a_bad_secret_leaves_the_last_good_certificate(worse: Change[TlsSecret]) -> None:
    """Serving the old pair is better than serving none: the controllers will put it right."""
    authority = make_authority(now=NOW, life=YEAR)
    certificate = ServingCertificate()
    certificate.on_change(change(made_by(authority), ChangeKind.ADDED))
    ends = certificate.ends_timestamp

    certificate.on_change(worse)

    async with listening(hello_application(), "127.0.0.1", 0, certificate.context()) as port:
        assert await greet(port, trusting=authority) == "hello"
    assert certificate.ends_timestamp == ends == int((NOW + timedelta(days=90)).timestamp())


async def test_nothing_is_loaded_from_a_bad_secret() -> None:
    """The server does not start before there is a pair to serve."""
    certificate = ServingCertificate()

    certificate.on_change(change(KeyPair(b"junk", b"junk"), ChangeKind.ADDED))

    assert not certificate.loaded.is_set()
    assert certificate.ends_timestamp == 0


def client_pair(authority: KeyPair) -> bytes:
    """Make a client certificate with its key, signed by the authority."""
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = load_pem_private_key(authority.key, password=None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder(issuer_name=issuer.subject, subject_name=x509.Name([]), public_key=key.public_key())
        .serial_number(7)
        .not_valid_before(NOW)
        .not_valid_after(NOW + YEAR / 2)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM) + private


async def test_a_client_ca_turns_strangers_away(tmp_path: Path) -> None:
    """With mutual TLS nobody but the API server can ask which claims exist."""
    authority, clients = make_authority(now=NOW, life=YEAR), make_authority(now=NOW, life=YEAR)
    client_ca, known, stranger = (tmp_path / name for name in ("ca.crt", "known.pem", "stranger.pem"))
    client_ca.write_bytes(clients.certificate)
    known.write_bytes(client_pair(clients))
    stranger.write_bytes(client_pair(authority))
    certificate = ServingCertificate(client_ca=client_ca)
    certificate.on_change(change(made_by(authority), ChangeKind.ADDED))

    async with listening(hello_application(), "127.0.0.1", 0, certificate.context()) as port:
        assert await greet(port, trusting=authority, showing=known) == "hello"
        for refused in (None, stranger):
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await greet(port, trusting=authority, showing=refused)
