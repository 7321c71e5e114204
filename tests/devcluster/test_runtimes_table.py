"""docs/runtimes.md promises a test per row; page and tests stay consistent."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_tidy import parsed

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "e2e" / "test_isolation.py"
AMD_TESTS = ROOT / "tests" / "e2e" / "test_amd.py"


def rows() -> list[tuple[str, str]]:
    """First and last cell of each row of the table."""
    lines = (ROOT / "docs" / "runtimes.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [(row[0], row[-1]) for row in cells[2:]]


def probes() -> set[str]:
    """Names of the probes of rows that cannot be shown."""
    tree = parsed(TESTS.read_text())
    (found,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "PROBES"
    )
    assert isinstance(found, ast.Dict)
    return {key.value for key in found.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


@pytest.mark.parametrize(("setup", "shown"), rows())
def test_a_row_is_shown_by_a_test_or_says_that_it_is_not(setup: str, shown: str) -> None:
    """A name in the last column is a test that exists, or a probe for what this machine lacks."""
    found = re.fullmatch(r"(not shown: )?`(.+)`", shown)
    assert found is not None, f"{setup}: {shown}"
    is_missing, name = found.groups()
    text = TESTS.read_text() + AMD_TESTS.read_text()
    assert name in (probes() if is_missing else re.findall(r"^def (test_\w+)\(", text, re.MULTILINE))


def test_every_probe_is_a_row() -> None:
    """A probe whose row was dropped would fail one day for nothing."""
    told = " ".join(shown for _, shown in rows())
    assert {name for name in probes() if f"`{name}`" not in told} == set()
