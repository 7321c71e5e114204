"""Requests are honoured or refused, never dropped: every field and annotation has a test of its effect."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.api import names
from atoll.api.crds import rendered_files
from atoll.cluster.gangs import kueue_topology, membership
from tests.api.honoured_fields import FIELDS, FOREIGN_KEYS, KEYS, REFUSED

REPOSITORY = Path(__file__).parent.parent.parent
NO_KEYS = {
    "API_VERSION",
    "GPU_RESOURCE",
    "MIG_RESOURCE_PREFIX",
    "GANG_GATE",
    "FABRIC_LEVEL",
    "POD_AS_PROMISED",
    "POD_TAKES_WRITES",
}
"""Names with the prefix of annotations that are a version, resources, a gate, a level and a condition."""
NAMED = {
    **{f"{kind} {field}": test for kind, fields in FIELDS.items() for field, test in fields.items()},
    **{getattr(names, key): test for key, test in KEYS.items()},
    **FOREIGN_KEYS,
}


def leaves(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield every field that holds a value, not other fields alone."""
    for name, field in schema["properties"].items():
        here = f"{path}.{name}".removeprefix(".")
        inner = field.get("items", field)
        if "properties" in inner:
            yield from leaves(inner, here)
        else:
            yield here


def test_every_field_of_every_spec_has_a_test_of_its_effect() -> None:
    """The list is that of the CRDs: a field that is added and mapped to nothing fails here."""
    written = {}
    for text in rendered_files().values():
        spec = yaml.safe_load(text)["spec"]
        properties = spec["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
        written[spec["names"]["kind"]] = sorted(leaves(properties["spec"]))

    assert {kind: sorted(fields) for kind, fields in FIELDS.items()} == written


def test_every_annotation_and_label_has_a_test_of_its_effect() -> None:
    """Atoll's own are those of the module of names; others' are those that gangs read."""
    own = {
        key
        for key, value in vars(names).items()
        if isinstance(value, str) and re.match(r"^(?:\w+\.)?(gpu\.scheduling|kubernetes\.io)/", value)
    }
    assert set(KEYS) == own - NO_KEYS
    assert set(FOREIGN_KEYS) == {
        *kueue_topology.KUEUE_ANNOTATIONS,
        *membership.RANKING_ANNOTATIONS,
        *membership.SET_LABELS,
    }


@pytest.mark.parametrize("asked", NAMED)
def test_the_test_of_an_effect_exists(asked: str) -> None:
    """It is named by its file, and stands there."""
    path, _, name = NAMED[asked].partition("::")
    text = (REPOSITORY / path).read_text(encoding="utf-8")

    assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{asked}: {path} has no {name}"


LOST = {
    f"{kind} {field}": test
    for kind, fields in FIELDS.items()
    for field, test in fields.items()
    if test != REFUSED and "/e2e/" not in test
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("field", LOST)
def test_the_test_of_a_field_fails_when_the_field_is_lost(field: str) -> None:
    """Whoever reads the object reads it without this one field: a test that passes all the same shows no effect."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.api.dropped_field", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, LOST[field]],
        cwd=REPOSITORY,
        env={**os.environ, "ATOLL_DROPPED_FIELD": field},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 1, run.stdout[-2000:] + run.stderr[-1000:]
    assert "1 failed" in run.stdout
