"""docs/testing.md keeps its word: every test that it names exists, and what it says of the code is so."""

import re
from pathlib import Path

import pytest

from atoll.cluster.leases import lease_body
from extender.bind_plan import binding_body
from tests.builders import make_pod, make_reservation

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs/testing.md").read_text(encoding="utf-8")
NAMED = sorted(
    (path, name)
    for path, names in re.findall(r"`(tests/[\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)", PAGE)
    for name in re.findall(r"`(test_\w+)`", names)
)
PRODUCT = ("atoll", "extender", "webhook", "agent", "controllers", "atollctl")


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda value: str(value))
def test_every_test_that_the_page_names_exists(path: str, name: str) -> None:
    """A situation is held by a test, not by the memory of one."""
    assert re.search(rf"^(async )?def {name}\(", (REPOSITORY / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("theme", "ABCDEFGKLM")
def test_every_theme_has_its_rows(theme: str) -> None:
    """Each heading has cases, and each case a row that says how it is held or why it cannot arise."""
    section = PAGE.partition(f"\n## {theme}. ")[2].partition("\n## ")[0]
    cases = re.findall(rf"^\| ({theme}\d+): .+ \| .+ \|$", section, re.MULTILINE)
    assert cases
    assert len(set(cases)) == len(cases)


def test_nothing_of_atolls_can_keep_an_object_from_being_deleted() -> None:
    """No part writes a finalizer or an owner reference on a Lease or a pod: with Atoll down everything can go."""
    bodies = [lease_body(make_reservation(), 0, "GPU-0"), binding_body(make_pod(), "n1", {}, "1")]
    assert not [body for body in bodies if {"finalizers", "ownerReferences"} & body["metadata"].keys()]
    sources = (path for folder in PRODUCT for path in (REPOSITORY / folder).rglob("*.py"))
    assert [path for path in sources if re.search(r"[\"']finalizers[\"']", path.read_text(encoding="utf-8"))] == []
