"""Certificates of the webhook: when a key pair is still good, when it is renewed, and what the API server must trust.

`plan_certificates` takes what is stored and published now, the names to serve and the time, and returns what should be
stored and published; new keys are made inside. No I/O, so that a test runs years of rotation in a second.

A rotation of the authority never breaks a connection, because each step waits for the one before:
1. A third of its life before the end a new authority is made. It and the old one are published together; the serving
   certificate stays with the old one, whose key is thrown away.
2. When the new authority has been published for `settle`, it signs a new serving certificate.
3. The old authority stays published until it expires: a webhook that has not reloaded yet is still trusted.
What is missing, broken, expired or for other names is replaced at once: there is nothing left to break.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BACKDATE: Final = timedelta(hours=1)
"""Certificates are valid from this long before they are made: machines disagree about the time."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """How long certificates live. A serving certificate always ends before the authority that signed it."""

    authority: timedelta = timedelta(days=365)
    serving: timedelta = timedelta(days=90)
    settle: timedelta = timedelta(minutes=10)
    """How long every API server has to notice a newly published authority before anything depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCertificates:
    """What the cluster holds now; None or empty for what is missing."""

    authority: KeyPair | None = None
    previous: bytes = b""
    """Certificate of the authority before this one."""
    serving: KeyPair | None = None
    published: bytes = b""
    """caBundle of the webhook configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificatePlan:
    """What the cluster should hold; equal to what it holds when nothing is due. Carry out in this order of fields."""

    authority: KeyPair
    previous: bytes
    bundle: bytes
    serving: KeyPair
    serving_ends: datetime


def plan_certificates(
    stored: StoredCertificates, *, names: Sequence[str], now: datetime, lifetimes: Lifetimes
) -> CertificatePlan:
    """Decide what to store and publish at `now`, for a webhook that is reached under `names` (DNS names, addresses)."""
    authority, previous = _plan_authority(stored, now=now, lifetimes=lifetimes)
    trusted = _usable_certificates(authority.certificate + previous, now=now)
    serving = _plan_serving(stored, authority=authority, trusted=trusted, names=names, now=now, lifetimes=lifetimes)
    return CertificatePlan(
        authority=authority,
        previous=previous,
        bundle=b"".join(certificate.public_bytes(Encoding.PEM) for certificate in trusted),
        serving=serving,
        serving_ends=x509.load_pem_x509_certificate(serving.certificate).not_valid_after_utc,
    )


def make_authority(*, now: datetime, life: timedelta) -> KeyPair:
    """Make a self-signed authority that may sign serving certificates and nothing below them."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Atoll webhook authority {serial % 2**32:08x}")])
    builder = (
        _builder(key, serial=serial, subject=subject, issuer=subject, now=now, ends=now + life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return _key_pair(builder.sign(key, hashes.SHA256()), key)


def make_serving(authority: KeyPair, *, names: Sequence[str], now: datetime, life: timedelta) -> KeyPair:
    """Make a serving certificate for `names`, signed by `authority`, which it does not outlive."""
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = load_pem_private_key(authority.key, password=None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    ends = min(now + life, issuer.not_valid_after_utc)
    serial = x509.random_serial_number()
    builder = (
        _builder(key, serial=serial, subject=subject, issuer=issuer.subject, now=now, ends=ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(_authority_identifier(issuer), critical=False)
    )
    return _key_pair(builder.sign(issuer_key, hashes.SHA256()), key)


def _plan_authority(stored: StoredCertificates, *, now: datetime, lifetimes: Lifetimes) -> tuple[KeyPair, bytes]:
    """Return the authority to sign with, and the certificate of the one before while it is trusted."""
    authority = stored.authority
    certificate = _matching_certificate(authority) if authority else None
    if authority is None or certificate is None or now >= certificate.not_valid_after_utc:
        return make_authority(now=now, life=lifetimes.authority), b""
    if _is_due(certificate, now=now):
        return make_authority(now=now, life=lifetimes.authority), authority.certificate
    return authority, stored.previous if _usable_certificates(stored.previous, now=now) else b""


def _plan_serving(
    stored: StoredCertificates,
    *,
    authority: KeyPair,
    trusted: Sequence[x509.Certificate],
    names: Sequence[str],
    now: datetime,
    lifetimes: Lifetimes,
) -> KeyPair:
    """Return the pair to serve; a working one is renewed only by an authority that has been published for a while."""
    serving, signer = stored.serving, trusted[0]
    if serving is None or _must_replace(serving, trusted=trusted, names=names, now=now):
        return make_serving(authority, names=names, now=now, life=lifetimes.serving)
    is_published = signer in _usable_certificates(stored.published, now=now)
    has_settled = is_published and now >= signer.not_valid_before_utc + BACKDATE + lifetimes.settle
    if has_settled and _should_replace(serving, signer=signer, now=now):
        return make_serving(authority, names=names, now=now, life=lifetimes.serving)
    return serving


def _must_replace(
    serving: KeyPair, *, trusted: Sequence[x509.Certificate], names: Sequence[str], now: datetime
) -> bool:
    """Tell whether no API server would accept the certificate under these names."""
    certificate = _matching_certificate(serving)
    if certificate is None or now >= certificate.not_valid_after_utc:
        return True
    if _served_names(certificate) != {_general_name(name) for name in names}:
        return True
    return not any(_is_signed_by(certificate, authority) for authority in trusted)


def _should_replace(serving: KeyPair, *, signer: x509.Certificate, now: datetime) -> bool:
    certificate = x509.load_pem_x509_certificate(serving.certificate)
    return _is_due(certificate, now=now) or not _is_signed_by(certificate, signer)


def _is_due(certificate: x509.Certificate, *, now: datetime) -> bool:
    """Tell whether only a third of the certificate's life is left."""
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return now >= certificate.not_valid_after_utc - life / 3


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _matching_certificate(pair: KeyPair) -> x509.Certificate | None:
    """Return the certificate of a pair whose two halves can be read and belong together."""
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        key = load_pem_private_key(pair.key, password=None)
    except (ValueError, TypeError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return None
    halves = (certificate.public_key(), key.public_key())
    certified, owned = (half.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for half in halves)
    return certificate if certified == owned else None


def _usable_certificates(bundle: bytes, *, now: datetime) -> list[x509.Certificate]:
    """Return the certificates of a bundle that have not expired; none of one that cannot be read."""
    try:
        certificates = x509.load_pem_x509_certificates(bundle) if bundle else []
    except ValueError:
        return []
    return [certificate for certificate in certificates if now < certificate.not_valid_after_utc]


def _served_names(certificate: x509.Certificate) -> set[x509.GeneralName]:
    try:
        return set(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (x509.ExtensionNotFound, ValueError):
        return set()


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    key: ec.EllipticCurvePrivateKey,
    *,
    serial: int,
    subject: x509.Name,
    issuer: x509.Name,
    now: datetime,
    ends: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .serial_number(serial)
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _authority_identifier(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    return KeyPair(
        certificate=certificate.public_bytes(Encoding.PEM),
        key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
