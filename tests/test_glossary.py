"""docs/glossary.md agrees with the code, both ways."""

import ast
import re
from collections.abc import Iterator

import pytest

from atoll.api import names
from atoll.cluster import allocations, leases, soft_reservations
from atoll.cluster.transitions import Availability, Occupancy, Verb
from tests.docs_blocks import REPOSITORY
from tests.test_tidy import parsed
from topology import islands

WORDS_MAX = 40
PRODUCT = ("topology", "atoll", "extender", "webhook", "agent", "controllers", "atollctl")
TEXT = (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| ")][
    1:
]
CODE_NAMES = {name for *_, code in ROWS for name in re.findall(r"`([^`]+)`", code)}
CORE = (allocations, leases, soft_reservations, islands)
"""Rooms whose every class is a word of the glossary."""
KINDS = ("GpuClaim", "GpuNodeStatus", "GpuGang", "Topology")
ANNOTATIONS = (*names.USER_ANNOTATIONS, *names.OWN_ANNOTATIONS)


def defined_names() -> Iterator[str]:
    """Yield every name that the product defines: classes, functions, constants, members of enums."""
    for path in (file for room in PRODUCT for file in (REPOSITORY / room).rglob("*.py")):
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield node.name
                case ast.Assign():
                    yield from (target.id for target in node.targets if isinstance(target, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield name


def test_glossary_has_few_words_once_each() -> None:
    """A reader can hold them in mind."""
    words = [word for word, *_ in ROWS]
    assert len(words) == len(set(words))
    assert 20 < len(words) <= WORDS_MAX


def test_every_word_has_its_name_in_the_code() -> None:
    """A class, function or annotation that is renamed takes its word along."""
    known = {*defined_names(), *ANNOTATIONS, names.GANG_GATE}
    assert sorted(CODE_NAMES - known) == []
    assert all(re.search("`[^`]+`", code) for *_, code in ROWS)


@pytest.mark.parametrize("state", [*Occupancy, *Verb, *Availability], ids=str)
def test_every_state_and_verb_of_a_device_is_told(state: Occupancy | Verb | Availability) -> None:
    """The two state machines are written in words of the glossary."""
    assert state.name in CODE_NAMES


def test_every_kind_annotation_and_core_class_is_told() -> None:
    """What stands on objects, and the classes of the core, are words of the glossary."""
    classes = {
        name
        for room in CORE
        for name, value in vars(room).items()
        if isinstance(value, type) and value.__module__ == room.__name__ and not name.startswith("_")
    }
    assert sorted({*classes, *KINDS, *ANNOTATIONS} - CODE_NAMES) == []
