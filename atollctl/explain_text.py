"""An explanation of a pod or a gang as lines for a terminal, with the islands of the nodes as a picture.

Plain text without colour, so that a pipe and a screen reader get the same.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isfinite
from textwrap import wrap
from typing import Final

from atoll.cluster.objects import Pod
from atoll.explain.decision import IndexedSnapshot
from atoll.explain.explanation import Explanation, NodeGroup
from atoll.explain.gang_explanation import GangExplanation, GangState
from atoll.explain.gang_wording import GANG_HELPLESS, domain_text, gang_sentence
from atoll.explain.nodes import IslandState, NodeAnswer
from atoll.explain.wording import HELPLESS, group_text, holders_text, sentence

NODES_SHOWN: Final = 4
"""Nodes shown per group, unless all are requested."""
WIDTH: Final = 110
LEGEND: Final = "islands: 3 free, 3# held, 3! not given out, 3- not what the claim accepts"


def lines(told: Explanation, scene: IndexedSnapshot, pod: Pod, *, show_all: bool = False) -> Iterator[str]:
    """Yield the answer: headline, nodes by group, what would help."""
    yield f"pod {told.pod}: {told.state}" + waits_text(told.waits_seconds)
    yield from wrap(told.headline, WIDTH, initial_indent="  ", subsequent_indent="  ")
    if told.asked:
        yield f"  {told.asked}"
    for group in told.groups:
        yield ""
        yield from _group(group, scene, show_all=show_all)
    if any(one.islands for group in told.groups for one in group.nodes):
        yield ""
        yield f"  {LEGEND}"
    texts = [sentence(proposal, scene, pod) for proposal in told.help.proposals]
    yield from _help(texts, [HELPLESS[kind] for kind in told.help.helpless], told.help.cut)


def _group(group: NodeGroup, scene: IndexedSnapshot, *, show_all: bool) -> Iterator[str]:
    yield group_text(len(group.nodes), group.standing, group.reason, group.others)
    shown = group.nodes if show_all else group.nodes[:NODES_SHOWN]
    for one in shown:
        yield f"  {one.node}: {one.detail}" if one.detail else f"  {one.node}"
        if one.islands:
            yield f"    {picture(one)}"
        held = holders_text(scene, one.node) if any(part.held for part in one.islands) else ""
        if held:
            yield from wrap(f"held by {held}", WIDTH, initial_indent="    ", subsequent_indent="      ")
    if len(shown) < len(group.nodes):
        yield f"  and {len(group.nodes) - len(shown)} more: -o wide shows them"


def picture(one: NodeAnswer) -> str:
    """Return the islands of a node in brackets, each GPU with the mark for its state."""
    return "  ".join(f"{part.name} [{' '.join(_marks(part))}]" for part in one.islands)


def _marks(part: IslandState) -> list[str]:
    groups: Sequence[tuple[tuple[int, ...], str]] = (
        (part.free, ""),
        (part.held, "#"),
        (part.withheld, "!"),
        (part.unfit, "-"),
    )
    marked = sorted((device_id, mark) for ids, mark in groups for device_id in ids)
    return [f"{device_id}{mark}" for device_id, mark in marked]


def _help(texts: Sequence[str], useless: Sequence[str], cut: Sequence[str]) -> Iterator[str]:
    """Yield what would help, what would not, and searches that hit their limit."""
    if texts:
        yield ""
        yield "What would help, the cheapest first; each was decided again:"
        for number, text in enumerate(texts, 1):
            yield from wrap(text, WIDTH, initial_indent=f"  {number}. ", subsequent_indent="     ")
    if useless:
        yield ""
        yield from wrap("What would not: " + "; ".join(useless), WIDTH, subsequent_indent="  ")
    for kind in cut:
        yield f"The search for {kind} was cut: there may be more."


def waits_text(seconds: float) -> str:
    """Return the age of an object; empty if unknown."""
    if not isfinite(seconds):
        return ""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    told = f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f", created {told} ago"


DOMAINS_SHOWN: Final = 4
"""Domains shown per level, unless all are requested."""
MEMBERS_SHOWN: Final = 8


def gang_lines(told: GangExplanation, scene: IndexedSnapshot, *, show_all: bool = False) -> Iterator[str]:
    """Yield the answer: headline, members, domains, what would help."""
    reason = f" ({told.reason})" if told.reason else ""
    yield f"gang {told.gang}: {told.state}{reason}{waits_text(told.waits_seconds)}"
    yield from wrap(told.headline, WIDTH, initial_indent="  ", subsequent_indent="  ")
    stages = "; ".join(f"{count} {stage}" for stage, count in told.stages)
    yield f"  {_present_text(told)}" + (f": {stages}" if stages else "")
    for pod_set, asked in told.asked:
        subject = f"pod set {pod_set}" if pod_set else "all members together"
        yield from wrap(f"{subject}: {asked}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    yield from _domains(told, show_all=show_all)
    yield from _seats(told, show_all=show_all)
    texts = [gang_sentence(proposal, scene) for proposal in told.help.proposals]
    yield from _help(texts, [GANG_HELPLESS[kind] for kind in told.help.helpless], told.help.cut)


def _present_text(told: GangExplanation) -> str:
    """Return how many members can start; empty for a gang that has started or never will."""
    if told.state in (GangState.RUNS, GangState.LACKS):
        return "members"
    count, _, short = told.present.partition("; ")
    if told.state is GangState.NEVER:
        return f"{count} wait"
    return f"{count} can start" + (f", {short} needed" if short else "")


def _domains(told: GangExplanation, *, show_all: bool) -> Iterator[str]:
    """Yield the domains of each pod set by itself, level by level."""
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
