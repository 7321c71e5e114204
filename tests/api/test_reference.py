"""docs/reference.md and names.py name the same things."""

import re
from pathlib import Path

import pytest

from atoll.api import names
from atoll.api.next_steps import CONDITION_STEPS, EVENT_STEPS
from atoll.api.reasons import main, rendered
from topology.choice import Reason

TEXT = (Path(__file__).parents[2] / "docs/reference.md").read_text(encoding="utf-8")


def test_page_tells_what_the_code_tells() -> None:
    """Events and conditions stand on the page word for word; `make verify` fails of the same."""
    assert rendered(TEXT) == TEXT


def test_a_stale_page_fails_the_check(tmp_path: Path) -> None:
    """A table that somebody edited, or a reason that was added, is noticed, and put right by the same command."""
    page = tmp_path / "reference.md"
    page.write_text(TEXT.replace("| `GpuUnhealthy` |", "| `GpuSick` |"))

    assert main(["--check", "--page", str(page)]) == 1
    assert main(["--page", str(page)]) == 0
    assert main(["--check", "--page", str(page)]) == 0
    assert page.read_text() == TEXT


def test_every_reason_has_its_next_step() -> None:
    """No event and no condition leaves its reader alone."""
    assert set(EVENT_STEPS) == set(names.EVENT_REASONS)
    told: dict[tuple[str, str], set[str]] = {(kind, condition): set() for kind, condition, _ in CONDITION_STEPS}
    for kind, condition, reason in CONDITION_STEPS:
        told[kind, condition].add(reason)
    gangs = {("GpuGang", condition): set(reasons) for condition, reasons in names.GANG_CONDITIONS.items()}
    assert gangs.items() <= told.items()
    conditions = {value for key, value in vars(names).items() if key.startswith("CONDITION_")}
    assert conditions <= {condition for _, condition in told}
    assert all(step for step in EVENT_STEPS.values())
    assert all(meaning and step for meaning, step in CONDITION_STEPS.values())


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
