"""An explanation of a gang as lines for a terminal: members, domains level by level, what would help.

In: a GangExplanation. Out: lines of plain text, as `atollctl.explain_text` does it for pods.
"""

from collections.abc import Iterator
from itertools import groupby
from textwrap import wrap
from typing import Final

from atoll.explain.decision import IndexedSnapshot
from atoll.explain.gang_explanation import GangExplanation, GangState
from atoll.explain.gang_wording import GANG_HELPLESS, domain_text, gang_sentence
from atollctl.explain_text import WIDTH, waits_text

DOMAINS_SHOWN: Final = 4
"""Domains of one level, unless all are wanted."""
MEMBERS_SHOWN: Final = 8


def gang_lines(told: GangExplanation, scene: IndexedSnapshot, *, show_all: bool = False) -> Iterator[str]:
    """Yield the answer: headline, members, domains, what would help."""
    reason = f" ({told.reason})" if told.reason else ""
    yield f"gang {told.gang}: {told.state}{reason}{waits_text(told.waits_seconds)}"
    yield from wrap(told.headline, WIDTH, initial_indent="  ", subsequent_indent="  ")
    stages = "; ".join(f"{count} {stage}" for stage, count in told.stages)
    yield f"  {_present_text(told)}" + (f": {stages}" if stages else "")
    yield from _domains(told, show_all=show_all)
    yield from _seats(told, show_all=show_all)
    if told.help.proposals:
        yield ""
        yield "What would help, the cheapest first; each was decided again:"
        for number, proposal in enumerate(told.help.proposals, 1):
            text = gang_sentence(proposal, scene)
            yield from wrap(text, WIDTH, initial_indent=f"  {number}. ", subsequent_indent="     ")
    if told.help.helpless:
        yield ""
        useless = "; ".join(GANG_HELPLESS[kind] for kind in told.help.helpless)
        yield from wrap("What would not: " + useless, WIDTH, subsequent_indent="  ")
    for kind in told.help.cut:
        yield f"The search for {kind} was cut: there may be more."


def _present_text(told: GangExplanation) -> str:
    """Return how many can start; of a gang that has started that says nothing."""
    if told.state in (GangState.RUNS, GangState.LACKS):
        return "members"
    count, _, short = told.present.partition("; ")
    return f"{count} can start" + (f", {short} needed" if short else "")


def _domains(told: GangExplanation, *, show_all: bool) -> Iterator[str]:
    """Each pod set by itself, level by level."""
    for pod_set, fits in groupby(told.domains, key=lambda fit: fit.pod_set):
        yield ""
        yield f"pod set {pod_set}, by itself:"
        for _, group in groupby(fits, key=lambda fit: fit.level):
            rows = list(group)
            for fit in rows if show_all else rows[:DOMAINS_SHOWN]:
                yield from wrap(domain_text(fit), WIDTH, initial_indent="  ", subsequent_indent="    ")
            if not show_all and len(rows) > DOMAINS_SHOWN:
                yield f"  and {len(rows) - DOMAINS_SHOWN} more: -o wide shows them"


def _seats(told: GangExplanation, *, show_all: bool) -> Iterator[str]:
    if not told.assignments:
        return
    yield ""
    shown = told.assignments if show_all else told.assignments[:MEMBERS_SHOWN]
    for name, node, ids in shown:
        yield f"  {name}: {node} GPUs {','.join(map(str, ids))}"
    if len(shown) < len(told.assignments):
        yield f"  and {len(told.assignments) - len(shown)} more: -o wide shows them"
