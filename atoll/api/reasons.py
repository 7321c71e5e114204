"""Writes the tables of event reasons and conditions into docs/reference.md, between their marks.

Reads `names` and `next_steps`; people write the rest of the page. With --check it only reports a stale page.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.api import names
from atoll.api.markdown import table
from atoll.api.next_steps import CONDITION_STEPS, EVENT_STEPS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"


def sections() -> dict[str, str]:
    """Return the generated text by the name of its mark."""
    events = ((f"`{reason}`", meaning, EVENT_STEPS[reason]) for reason, meaning in names.EVENT_REASONS.items())
    conditions = (
        (kind, f"`{condition}`", f"`{reason}`", meaning, step)
        for (kind, condition, reason), (meaning, step) in CONDITION_STEPS.items()
    )
    return {
        "events": table(("Reason", "Means", "Next step"), events),
        "conditions": table(("Of", "Condition", "Reason", "Means", "Next step"), conditions),
    }


def rendered(page: str) -> str:
    """Return the page with its generated sections updated. Raises ValueError if a mark is missing."""
    for name, text in sections().items():
        begin, end = f"<!-- generated: {name}, by python -m atoll.api.reasons -->\n", f"<!-- end of {name} -->\n"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise ValueError(f"the page must hold {begin.strip()} and {end.strip()} once")
        page = pattern.sub((begin + "\n" + text + "\n" + end).replace("\\", r"\\"), page)
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with --check report a stale one and return 1."""
    parser = argparse.ArgumentParser(prog="python -m atoll.api.reasons", description="Generate tables of reasons.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is stale")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (%(default)s)")
    options = parser.parse_args(arguments)
    present = options.page.read_text(encoding="utf-8")
    wanted = rendered(present)
    if options.check:
        if present != wanted:
            sys.stderr.write(f"stale: {options.page}; run python -m atoll.api.reasons\n")
        return int(present != wanted)
    options.page.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
