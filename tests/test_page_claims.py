"""Every statement in docs/gangs.md and docs/ledger.md has a test."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page_claims import PAGES

REPOSITORY = Path(__file__).parent.parent
ITEM = r"(?:- |\d+\. )"


def statements(text: str) -> Iterator[str]:
    """Yield paragraphs, points and rows, each in one line; code blocks that are manifests and headings say nothing."""
    without_code = re.sub(r"^```\w+\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n", without_code):
        lines = [line for line in block.split("\n") if not re.match(r"#|```", line)]
        body = "\n".join(lines).strip("\n")
        if body.lstrip().startswith("|"):
            yield from (" ".join(row.split()) for row in body.split("\n")[2:])
        elif re.match(ITEM, body):
            yield from (" ".join(item.split()) for item in re.split(rf"\n(?={ITEM})", body))
        elif body.strip():
            yield " ".join(body.split())


@pytest.mark.parametrize("page", PAGES)
def test_every_statement_of_the_page_names_its_tests(page: str) -> None:
    """A sentence that is added without a test fails here, and so does an entry of one that is gone."""
    said = list(statements((REPOSITORY / page).read_text(encoding="utf-8")))
    claims = PAGES[page]
    without = [one[:80] for one in said if sum(one.startswith(start) for start in claims) != 1]
    unsaid = [start for start in claims if not any(one.startswith(start) for one in said)]

    assert without == []
    assert unsaid == []


def test_the_tests_behind_the_pages_exist() -> None:
    """They are named by their functions."""
    texts = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    known = {name for text in texts for name in re.findall(r"^(?:async )?def (test_\w+)\(", text, re.MULTILINE)}
    named = {name for claims in PAGES.values() for tests in claims.values() for name in tests.split()}

    assert named - known == set()
