"""docs/testing.md agrees with the code: every named test exists, and every case names one."""

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
    for path, names in re.findall(r"`(tests/[\w/]+\.py)`:\s+((?:`test_\w+`(?:,\s+)?)+)", PAGE)
    for name in re.findall(r"`(test_\w+)`", names)
)
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
PRODUCT = ("atoll", "extender", "webhook", "agent", "controllers", "atollctl")


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda value: str(value))
def test_every_test_that_the_page_names_exists(path: str, name: str) -> None:
    """A situation is held by a test, not by the memory of one."""
    assert re.search(rf"^(async )?def {name}\(", (REPOSITORY / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("title", SECTIONS)
def test_every_situation_says_how_it_is_held(title: str) -> None:
    """Below each situation stands a test, or why it cannot arise; none stands twice in a section."""
    situations = re.findall(r"^- \*\*((?:.|\n  )+?)\*\*\n((?:  .+\n?)+)", SECTIONS[title], re.MULTILINE)
    assert situations
    assert len(re.findall(r"^- ", SECTIONS[title], re.MULTILINE)) == len({name for name, _ in situations})


def test_every_test_on_the_page_is_read() -> None:
    """No name of a test escapes the check above by where it stands."""
    assert {name for _, name in NAMED} == set(re.findall(r"`(test_\w+)`", PAGE))


def test_nothing_of_atolls_can_keep_an_object_from_being_deleted() -> None:
    """No part writes a finalizer or an owner reference on a Lease or a pod: with Atoll down everything can go."""
    bodies = [lease_body(make_reservation(), 0, "GPU-0"), binding_body(make_pod(), "n1", {}, "1")]
    assert not [body for body in bodies if {"finalizers", "ownerReferences"} & body["metadata"].keys()]
    sources = (path for folder in PRODUCT for path in (REPOSITORY / folder).rglob("*.py"))
    assert [path for path in sources if re.search(r"[\"']finalizers[\"']", path.read_text(encoding="utf-8"))] == []
