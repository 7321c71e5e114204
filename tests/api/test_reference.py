"""docs/reference.md and names.py name the same things."""

import re
from pathlib import Path

import pytest

from atoll.api import names
from topology.choice import Reason

TEXT = (Path(__file__).parents[2] / "docs/reference.md").read_text(encoding="utf-8")
ROWS = {
    tuple(cell.strip() for cell in line.strip("|").split("|")) for line in TEXT.splitlines() if line.startswith("|")
}


def test_event_reasons_are_told_as_the_code_tells_them() -> None:
    """Each reason has its row, word for word."""
    assert {(f"`{reason}`", meaning) for reason, meaning in names.EVENT_REASONS.items()} <= ROWS


def test_every_rejection_is_explained() -> None:
    """Each text that kube-scheduler may show has its row, and no row explains a text that is never shown.

    Required GPUs are asked for by the extender's own repeats, never by a claim.
    """
    shown = {value for key, value in vars(names).items() if key.startswith("REJECT_")}
    shown |= {reason.value for reason in Reason} - {Reason.REQUIRED.value}
    section = TEXT.partition("## Why a node was refused")[2]
    told = set(re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)) - {"Text", "---"}
    assert told == shown


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            value
            for key, value in vars(names).items()
            if isinstance(value, str) and key.isupper() and re.fullmatch(r"[a-z.]*gpu\.scheduling/\S*[a-z]", value)
        }
        - {names.API_VERSION}
    ),
)
def test_every_name_is_in_the_reference(name: str) -> None:
    """Each annotation, label, resource and gate stands on the page."""
    assert f"`{name}" in TEXT


@pytest.mark.parametrize("word", [*names.VISIBLE_DEVICES_VARIABLES, names.SCHEDULER_NAME, names.RUNTIME_CLASS])
def test_variables_and_classes_are_in_the_reference(word: str) -> None:
    """Each variable that Atoll sets or refuses stands on the page, and so do scheduler and RuntimeClass."""
    assert f"`{word}`" in TEXT


def test_conditions_are_in_the_reference() -> None:
    """Each condition type stands on the page."""
    for key, value in vars(names).items():
        if key.startswith("CONDITION_"):
            assert f"| `{value}` |" in TEXT
