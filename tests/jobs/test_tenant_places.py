"""TEN-1: what a tenant keeps in object stores stays below its own prefix, and no job names that of another tenant."""

from typing import Any

import pytest
from pydantic import ValidationError

from atoll.jobs.errors import JobMistake
from atoll.jobs.settings import RenderSettings
from tests.jobs.render import env, rendered

PREFIXED = RenderSettings(
    checkpoint_prefixes=("s3://shared/",), tenant_prefixes=("s3://runs/{tenant}/", "gs://team-{tenant}/")
)
OWN_ALONE = RenderSettings(tenant_prefixes=("s3://runs/{tenant}/",))
CHECKPOINT, MODEL = "ext_ml_checkpoint_storage_uri", "ext_ml_model_registry_uri"


def training(settings: RenderSettings, tenant: str | None, **fields: Any) -> dict[str, str | None]:
    """Return the variables of a training with checkpoints."""
    says = {"job_type": "training", "tenant_id": tenant, "ext_ml_checkpoint_enabled": True} | fields
    return env(rendered(settings=settings, **says))


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        (PREFIXED, {CHECKPOINT: "s3://runs/acme/tune/"}),
        (PREFIXED, {CHECKPOINT: "s3://runs/acme/"}),
        (PREFIXED, {CHECKPOINT: "gs://team-acme/tune/"}),
        (PREFIXED, {CHECKPOINT: "s3://shared/tune/"}),
        (PREFIXED, {MODEL: "s3://runs/acme/model/"}),
        (PREFIXED, {MODEL: "s3://public-models/model/"}),
        (PREFIXED, {MODEL: "hf://org/name"}),
        (OWN_ALONE, {CHECKPOINT: "file:///checkpoints/"}),
        (PREFIXED, {}),
    ],
)
def test_a_job_names_places_of_its_tenant_and_shared_ones(settings: RenderSettings, fields: dict[str, Any]) -> None:
    """Volumes are the tenant's own anyway; models of nobody may be loaded."""
    assert training(settings, "acme", **fields)


@pytest.mark.parametrize(
    ("tenant", "fields", "limit"),
    [
        ("acme", {CHECKPOINT: "s3://runs/globex/tune/"}, "belongs to tenant globex, and this job is of tenant acme"),
        ("acme", {CHECKPOINT: "s3://runs/acme-2/"}, "belongs to tenant acme-2, and this job is of tenant acme"),
        ("acme", {CHECKPOINT: "gs://team-globex/a/"}, "belongs to tenant globex, and this job is of tenant acme"),
        ("acme", {CHECKPOINT: "s3://runs/%67lobex/a/"}, "belongs to tenant globex, and this job is of tenant acme"),
        ("acme", {CHECKPOINT: "s3://elsewhere/a/"}, "belongs to no tenant, and this job is of tenant acme"),
        ("acme", {CHECKPOINT: "file:///data/"}, "belongs to no tenant, and this job is of tenant acme"),
        ("acme", {MODEL: "s3://runs/globex/model/"}, "belongs to tenant globex, and this job is of tenant acme"),
        (None, {CHECKPOINT: "s3://runs/globex/a/"}, "belongs to tenant globex, and this job names no tenant_id"),
    ],
)
def test_a_place_of_another_tenant_is_refused(tenant: str | None, fields: dict[str, Any], limit: str) -> None:
    """It is said whose it is, and where the job's own are; a hidden letter hides nothing."""
    with pytest.raises(JobMistake) as caught:
        training(PREFIXED, tenant, **fields)

    ((name, uri),) = fields.items()
    assert (caught.value.problem.attribute, caught.value.problem.value) == (name, repr(uri))
    assert caught.value.problem.limit == limit
    own = "s3://shared/ or s3://runs/acme/ or gs://team-acme/" if tenant else "s3://shared/"
    assert caught.value.problem.hint == f"name a place below {own}"


def test_the_worker_restores_from_its_tenants_places_alone() -> None:
    """The list that the worker trusts has the tenant's own prefixes in it, and no other's."""
    assert training(OWN_ALONE, "acme", **{CHECKPOINT: "s3://runs/acme/a/"})["ATOLL_CHECKPOINT_PREFIXES"] == (
        "s3://runs/acme/"
    )
    assert training(OWN_ALONE, "acme")["ATOLL_CHECKPOINT_PREFIXES"] == "s3://runs/acme/ file:///checkpoints/"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tenant_prefixes": ["s3://runs/"]}, "must have {tenant} in it once"),
        ({"tenant_prefixes": ["s3://{tenant}/{tenant}/"]}, "must have {tenant} in it once"),
        (
            {"tenant_prefixes": ["s3://runs/{tenant}/"], "checkpoint_prefixes": ["s3://runs/"]},
            "checkpoint_prefixes s3://runs/ would open s3://runs/{tenant}/ to every tenant",
        ),
    ],
)
def test_prefixes_that_keep_nobody_apart_are_refused(given: dict[str, Any], told: str) -> None:
    """Administrators learn it at the start."""
    with pytest.raises(ValidationError, match=told.replace("{", r"\{")):
        RenderSettings.model_validate(given)
