"""Certificates and kubeconfigs of a cluster: subject, issuer and file mode."""

from __future__ import annotations

import base64
import datetime as dt
import json
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from devcluster.certificates import CertificateAuthority, Subject
from devcluster.kubeconfigs import write_kubeconfig

NOW = dt.datetime(2026, 11, 28, tzinfo=dt.UTC)


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    """A new authority."""
    return CertificateAuthority(tmp_path / "pki", now=NOW)


def test_an_issued_certificate_names_user_group_and_addresses(authority: CertificateAuthority) -> None:
    """Kubernetes takes user and group from the subject, clients check names and addresses."""
    subject = Subject("system:node:dgx1", "system:nodes", ("dgx1",), ("10.255.0.11",))

    pair = authority.issue("node", subject)

    certificate = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "system:node:dgx1"
    assert certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value == "system:nodes"
    assert names.get_values_for_type(x509.DNSName) == ["dgx1"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.255.0.11"]


def test_certificates_are_signed_by_the_authority_of_the_folder(authority: CertificateAuthority) -> None:
    """Who attaches later loads the same authority and signs certificates that the cluster trusts."""
    again = CertificateAuthority(authority.folder, now=NOW)

    pair = again.issue("late", Subject("late"))

    root = x509.load_pem_x509_certificate(authority.pair.certificate.read_bytes())
    certificate = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
    certificate.verify_directly_issued_by(root)


def test_certificates_are_valid_in_spite_of_a_slow_clock(authority: CertificateAuthority) -> None:
    """A process whose clock is a little behind must not refuse a new certificate."""
    certificate = x509.load_pem_x509_certificate(authority.issue("a", Subject("a")).certificate.read_bytes())

    assert certificate.not_valid_before_utc < NOW < certificate.not_valid_after_utc


def test_nobody_else_may_read_keys_and_kubeconfigs(authority: CertificateAuthority, tmp_path: Path) -> None:
    """Every credential is a file of mode 0600."""
    pair = authority.issue("admin", Subject("admin", "system:masters"))
    path = write_kubeconfig(
        tmp_path / "kubeconfigs" / "admin", server="https://x", authority=authority.pair.certificate, client=pair
    )

    for file in (*authority.folder.iterdir(), path):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_kubeconfig_embeds_everything(authority: CertificateAuthority, tmp_path: Path) -> None:
    """It works from any folder, also after it was copied elsewhere."""
    path = write_kubeconfig(
        tmp_path / "kube", server="https://x:1", authority=authority.pair.certificate, token="secret"
    )

    config = json.loads(path.read_text())
    cluster = config["clusters"][0]["cluster"]
    assert cluster["server"] == "https://x:1"
    assert base64.b64decode(cluster["certificate-authority-data"]) == authority.pair.certificate.read_bytes()
    assert config["users"][0]["user"] == {"token": "secret"}
