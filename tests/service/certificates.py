"""A small certificate authority for the TLS tests."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
FAR_AHEAD = LONG_AGO + timedelta(days=36500)


class Authority:
    """Signs certificates for an address and for clients."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._certificate = self._build(self._name, self._key).sign(self._key, hashes.SHA256())

    def write_certificate(self, path: Path) -> Path:
        path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))
        return path

    def issue(self, common_name: str, certificate: Path, key: Path, *, address: str = "127.0.0.1") -> None:
        """Write a fresh key and its certificate."""
        private = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))])
        signed = self._build(_name(common_name), private, is_authority=False).add_extension(names, critical=False)
        pem = serialization.Encoding.PEM
        certificate.write_bytes(signed.sign(self._key, hashes.SHA256()).public_bytes(pem))
        form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        key.write_bytes(private.private_bytes(pem, form, plain))

    def _build(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool = True
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(LONG_AGO)
            .not_valid_after(FAR_AHEAD)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
