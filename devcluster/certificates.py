"""CA of a development cluster and the certificates that it signs, as PEM files with mode 0600."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = dt.timedelta(days=365)
_CLOCK_SKEW = dt.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class KeyPairFiles:
    """Paths of a certificate and its private key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Subject:
    """Subject of a certificate: Kubernetes reads common_name as the user and organization as a group."""

    common_name: str
    organization: str | None = None
    dns_names: Sequence[str] = ()
    addresses: Sequence[str] = ()


class CertificateAuthority:
    """Signs certificates with a key in the cluster's folder."""

    def __init__(self, folder: Path, *, now: dt.datetime) -> None:
        """Load the folder's authority, or create it; certificates are valid for a year from `now`."""
        self.folder = folder
        self.pair = KeyPairFiles(certificate=folder / "ca.crt", key=folder / "ca.key")
        self._now = now
        if self.pair.key.exists():
            self._key = load_key(self.pair.key)
            self._certificate = x509.load_pem_x509_certificate(self.pair.certificate.read_bytes())
        else:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._key = ec.generate_private_key(ec.SECP256R1())
            self._certificate = self._make_root()
            write_private(self.pair.key, key_bytes(self._key))
            write_private(self.pair.certificate, pem(self._certificate))

    def issue(self, file_name: str, subject: Subject) -> KeyPairFiles:
        """Sign a certificate for client and server use; write it and its key."""
        pair = KeyPairFiles(certificate=self.folder / f"{file_name}.crt", key=self.folder / f"{file_name}.key")
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = (
            self._builder(subject_name(subject), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        names = alternative_names(subject)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        write_private(pair.key, key_bytes(key))
        write_private(pair.certificate, pem(builder.sign(self._key, hashes.SHA256())))
        return pair

    def _make_root(self) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "atoll-devcluster")])
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = self._builder(name, self._key.public_key(), issuer=name)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())

    def _builder(
        self, name: x509.Name, key: ec.EllipticCurvePublicKey, *, issuer: x509.Name | None = None
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer or self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _CLOCK_SKEW)
            .not_valid_after(self._now + _LIFETIME)
        )


def subject_name(subject: Subject) -> x509.Name:
    """The distinguished name of a subject."""
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, subject.common_name)]
    if subject.organization:
        attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, subject.organization))
    return x509.Name(attributes)


def alternative_names(subject: Subject) -> list[x509.GeneralName]:
    """Alternative names and IP addresses of a server."""
    addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in subject.addresses]
    return [*(x509.DNSName(name) for name in subject.dns_names), *addresses]


def write_signing_key(path: Path) -> None:
    """Write the key that signs service account tokens."""
    write_private(path, key_bytes(ec.generate_private_key(ec.SECP256R1())))


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Load a private key that this module wrote."""
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode a private key as PEM in the traditional format, which every Go program reads."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def pem(certificate: x509.Certificate) -> bytes:
    """Encode a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def write_private(path: Path, content: bytes) -> None:
    """Write a file with mode 0600 from the first byte on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
