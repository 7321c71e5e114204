"""Creation and replacement of certificates over years, with a clock that tests move."""

import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.verification import PolicyBuilder, Store

from controllers.certificates import (
    CertificatePlan,
    KeyPair,
    Lifetimes,
    StoredCertificates,
    make_authority,
    make_serving,
    plan_certificates,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)
NAMES = ("atoll-webhook.atoll-system.svc", "10.255.0.1")
LIVES = Lifetimes()


def plan(stored: StoredCertificates, now: datetime, *, names: tuple[str, ...] = NAMES) -> CertificatePlan:
    return plan_certificates(stored, names=names, now=now, lifetimes=LIVES)


def carried_out(made: CertificatePlan) -> StoredCertificates:
    """Return the state after every write of a plan succeeded."""
    return StoredCertificates(
        authority=made.authority, previous=made.previous, serving=made.serving, published=made.bundle
    )


def is_trusted(serving: KeyPair, *, bundle: bytes, now: datetime) -> bool:
    """Verify the serving certificate as a TLS client would: chain, name, time."""
    store = Store(x509.load_pem_x509_certificates(bundle))
    verifier = PolicyBuilder().store(store).time(now).build_server_verifier(x509.DNSName(NAMES[0]))
    try:
        verifier.verify(x509.load_pem_x509_certificate(serving.certificate), [])
    except x509.verification.VerificationError:
        return False
    return True


def test_an_empty_cluster_gets_everything_at_once() -> None:
    """Nothing is there to break, so authority, bundle and serving certificate come in one round and fit together."""
    made = plan(StoredCertificates(), NOW)

    assert is_trusted(made.serving, bundle=made.bundle, now=NOW)
    assert made.previous == b""
    context = ssl.create_default_context(cadata=made.bundle.decode())
    assert len(context.get_ca_certs()) == 1


def test_a_fresh_state_is_left_alone() -> None:
    """The plan equals what is stored, so that no round writes anything."""
    state = carried_out(plan(StoredCertificates(), NOW))

    assert carried_out(plan(state, NOW + timedelta(days=1))) == state


def test_the_serving_certificate_is_renewed_with_a_third_left() -> None:
    """90 days of life: kept on day 59, renewed on day 61, by the same authority and bundle."""
    state = carried_out(plan(StoredCertificates(), NOW))

    assert plan(state, NOW + timedelta(days=59)).serving == state.serving
    renewed = plan(state, NOW + timedelta(days=61))
    assert renewed.serving != state.serving
    assert (renewed.authority, renewed.bundle) == (state.authority, state.published)


def test_a_new_authority_overlaps_with_the_old_one() -> None:
    """Both are published first; the serving certificate moves only after the new one has been published and settled."""
    start = carried_out(plan(StoredCertificates(), NOW))
    late = NOW + timedelta(days=250)
    state = replace(start, serving=make_serving(_authority_of(start), names=NAMES, now=late, life=LIVES.serving))

    rotated = plan(state, late)
    assert rotated.authority != state.authority
    assert rotated.previous == _authority_of(state).certificate
    assert len(x509.load_pem_x509_certificates(rotated.bundle)) == 2
    assert rotated.serving == state.serving

    too_early = plan(carried_out(rotated), late + timedelta(minutes=9))
    assert too_early.serving == state.serving

    settled = plan(carried_out(too_early), late + timedelta(minutes=11))
    assert settled.serving != state.serving
    assert is_trusted(settled.serving, bundle=rotated.authority.certificate, now=late)
    assert settled.bundle == rotated.bundle


def test_an_unpublished_authority_signs_nothing_that_is_served() -> None:
    """While the configuration cannot be patched, the old serving certificate stays, however long that takes."""
    start = carried_out(plan(StoredCertificates(), NOW))
    late = NOW + timedelta(days=250)
    state = replace(start, serving=make_serving(_authority_of(start), names=NAMES, now=late, life=LIVES.serving))

    rotated = plan(state, late)
    unpublished = replace(carried_out(rotated), published=_pem(state.published))

    assert plan(unpublished, late + timedelta(days=5)).serving == state.serving


def test_three_years_of_daily_rounds_never_serve_what_is_not_trusted() -> None:
    """Whatever was published a day ago trusts what is served today, and what is published today trusts yesterday's."""
    state = StoredCertificates()
    authorities, bundle_before, serving_before = set(), b"", None
    for day in range(3 * 365):
        now = NOW + timedelta(days=day)
        made = plan(state, now)
        if serving_before is not None:
            assert is_trusted(made.serving, bundle=bundle_before, now=now)
            assert is_trusted(serving_before, bundle=made.bundle, now=now)
        assert len(x509.load_pem_x509_certificates(made.bundle)) <= 2
        state, bundle_before, serving_before = carried_out(made), made.bundle, made.serving
        authorities.add(made.authority.certificate)

    assert len(authorities) == 5


OTHER = make_authority(now=NOW, life=timedelta(days=365))
BASE = carried_out(plan(StoredCertificates(), NOW))


def _authority_of(stored: StoredCertificates) -> KeyPair:
    assert stored.authority is not None
    return stored.authority


def _pem(bundle: bytes) -> bytes:
    return x509.load_pem_x509_certificates(bundle)[0].public_bytes(Encoding.PEM)


@pytest.mark.parametrize(
    "serving",
    [
        pytest.param(None, id="missing"),
        pytest.param(KeyPair(b"junk", b"junk"), id="junk"),
        pytest.param(KeyPair(BASE.serving.certificate, OTHER.key) if BASE.serving else None, id="halves-of-two-pairs"),
        pytest.param(make_serving(OTHER, names=NAMES, now=NOW, life=timedelta(days=90)), id="signed-by-a-stranger"),
        pytest.param(
            make_serving(_authority_of(BASE), names=("other.svc",), now=NOW, life=timedelta(days=90)), id="other-names"
        ),
        pytest.param(
            make_serving(_authority_of(BASE), names=NAMES, now=NOW - timedelta(days=5), life=timedelta(days=4)),
            id="expired",
        ),
    ],
)
def test_an_unusable_serving_certificate_is_replaced_at_once(serving: KeyPair | None) -> None:
    """Nobody would accept it, so there is no overlap to wait for."""
    made = plan(replace(BASE, serving=serving), NOW)

    assert made.serving != serving
    assert made.authority == BASE.authority
    assert is_trusted(made.serving, bundle=made.bundle, now=NOW)


@pytest.mark.parametrize(
    "authority",
    [
        pytest.param(None, id="deleted"),
        pytest.param(KeyPair(b"junk", b"junk"), id="junk"),
        pytest.param(KeyPair(OTHER.certificate, _authority_of(BASE).key), id="halves-of-two-pairs"),
        pytest.param(make_authority(now=NOW - timedelta(days=9), life=timedelta(days=8)), id="expired"),
    ],
)
def test_an_unusable_authority_is_replaced_together_with_what_it_signed(authority: KeyPair | None) -> None:
    """A leaked key is dealt with by deleting the Secret: the old authority is trusted no longer."""
    made = plan(replace(BASE, authority=authority), NOW)

    assert made.authority != authority
    assert len(x509.load_pem_x509_certificates(made.bundle)) == 1
    assert is_trusted(made.serving, bundle=made.bundle, now=NOW)


def test_each_key_may_do_only_what_it_is_for() -> None:
    """The authority signs certificates and lists of revoked ones, the other proves who serves."""

    def uses(pair: KeyPair) -> set[str]:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        found = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
        return {name.removeprefix("_") for name, is_allowed in vars(found).items() if is_allowed}

    assert BASE.serving is not None
    assert uses(_authority_of(BASE)) == {"key_cert_sign", "crl_sign"}
    assert uses(BASE.serving) == {"digital_signature"}


def test_a_serving_certificate_never_outlives_its_authority() -> None:
    """A chain that is half expired is refused by every client."""
    authority = make_authority(now=NOW, life=timedelta(days=10))
    serving = make_serving(authority, names=NAMES, now=NOW, life=timedelta(days=90))

    assert x509.load_pem_x509_certificate(serving.certificate).not_valid_after_utc == NOW + timedelta(days=10)


def test_a_machine_whose_clock_is_behind_accepts_a_new_certificate() -> None:
    """Two minutes of skew are normal; certificates are valid from an hour before they are made."""
    made = plan(StoredCertificates(), NOW)

    assert is_trusted(made.serving, bundle=made.bundle, now=NOW - timedelta(minutes=2))
    assert carried_out(plan(carried_out(made), NOW - timedelta(minutes=2))) == carried_out(made)


def test_keys_are_not_shown() -> None:
    """A pair that ends up in a log shows its certificate at most."""
    assert "BEGIN CERTIFICATE" in repr(BASE)
    assert "PRIVATE" not in repr(BASE)
