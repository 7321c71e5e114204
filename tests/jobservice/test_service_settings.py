"""The settings: no default opens the service by accident, and bad files give clear errors."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atoll.jobs.permissions import TenantGrant, TenantRole
from atoll.service.errors import SettingsError
from jobs.settings import AccessRules, JobServiceSettings, access_rules, render_settings


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "give access, a file with rules, or insecure_local"),
        ({"access": "a.yaml", "insecure_local": True}, "one of both"),
        ({"access": "a.yaml", "host": "0.0.0.0"}, "host 0.0.0.0 is no loopback address: give certificate and key"),
        ({"access": "a.yaml", "host": "0.0.0.0", "certificate": "c.pem"}, "give certificate and key"),
        ({"access": "a.yaml", "certificate": "c.pem"}, "certificate and key belong together"),
        (
            {"insecure_local": True, "host": "10.0.0.1", "certificate": "c.pem", "key": "k.pem"},
            "insecure_local is for loopback alone",
        ),
        ({"access": "a.yaml", "namespace": "{tenant}-{tenant}"}, "namespace may have {tenant} in it once"),
        ({"access": "a.yaml", "namespace": "{user}"}, "no other braces"),
    ],
)
def test_settings_that_would_be_open_are_refused(values: dict[str, Any], told: str) -> None:
    """Without rules, without TLS beyond this machine, or open to the network, the service does not start."""
    with pytest.raises(ValidationError) as refused:
        JobServiceSettings.model_validate(values)

    assert told in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        {"insecure_local": True},
        {"access": "a.yaml"},
        {"access": "a.yaml", "host": "0.0.0.0", "certificate": "c.pem", "key": "k.pem"},
        {"insecure_local": True, "host": "::1"},
    ],
)
def test_settings_that_are_safe_are_taken(values: dict[str, Any]) -> None:
    """On loopback, or with TLS and rules."""
    assert JobServiceSettings.model_validate(values).namespace_of("acme") == "tenant-acme"


def test_the_password_of_the_database_is_not_shown() -> None:
    """What a process logs of its settings leaves the password out."""
    settings = JobServiceSettings.model_validate({"insecure_local": True, "database": "postgresql://ann:unseen@h/db"})

    assert "unseen" not in str(settings.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"role": "member", "tenant": "acme"}, "give group or user"),
        ({"role": "member", "tenant": "acme", "user": "ann", "group": "g"}, "give group or user"),
        ({"role": "member", "user": "ann"}, "every other role needs one"),
        ({"role": "operator", "user": "ann", "tenant": "acme"}, "an operator has every tenant"),
        ({"role": "king", "user": "ann", "tenant": "acme"}, "rules.0.role"),
        ({"role": "member", "user": "ann", "tenant": "Not A Tenant"}, "rules.0.tenant"),
        ({"role": "member", "user": "ann", "tennant": "acme"}, "rules.0.tennant"),
    ],
)
def test_a_rule_with_a_mistake_is_told(tmp_path: Path, rule: dict[str, Any], told: str) -> None:
    """A rule about nobody, about everybody, or with a misspelt word stops the service before it listens."""
    file = tmp_path / "access.yaml"
    file.write_text(str({"rules": [rule]}).replace("'", '"'))

    with pytest.raises(SettingsError, match=f"bad access file {file}") as refused:
        access_rules(file)

    assert told in str(refused.value)


def test_grants_come_from_names_and_groups() -> None:
    """Every rule that names somebody, or a group of theirs, grants; none of the others does."""
    rules = AccessRules.model_validate(
        {
            "rules": [
                {"user": "ann", "role": "viewer", "tenant": "acme"},
                {"group": "team", "role": "member", "tenant": "acme", "project": "vision"},
                {"group": "ann", "role": "operator"},
                {"user": "team", "role": "operator"},
            ]
        }
    )

    assert rules.caller("ann", ("team", "staff")).grants == (
        TenantGrant(TenantRole.VIEWER, "acme"),
        TenantGrant(TenantRole.MEMBER, "acme", "vision"),
    )
    assert rules.caller("bob", ()).grants == ()


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    """A missing file, one of another kind, and one that is too large."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large").write_bytes(b"#" * (1024 * 1024 + 1))
    for name, told in (("none", "cannot read"), ("bytes", "cannot read"), ("large", "is larger than 1048576 bytes")):
        with pytest.raises(SettingsError, match=told):
            access_rules(tmp_path / name)
    (tmp_path / "render.yaml").write_text("gpus_per_pod_max: 4\n")

    assert render_settings(tmp_path / "render.yaml").gpus_per_pod_max == 4
    assert render_settings(None).gpus_per_pod_max == 8
