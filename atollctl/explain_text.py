"""An explanation as lines for a terminal, with the islands of the nodes as a picture.

In: an Explanation. Out: lines of plain text; nothing is coloured, so that a pipe and a screen reader get the same.
"""

from collections.abc import Iterator, Sequence
from math import isfinite
from textwrap import wrap
from typing import Final

from atoll.cluster.objects import Pod
from atoll.explain.decision import IndexedSnapshot
from atoll.explain.explanation import Explanation, NodeGroup
from atoll.explain.nodes import IslandState, NodeAnswer
from atoll.explain.wording import HELPLESS, group_text, holders_text, sentence

NODES_SHOWN: Final = 4
"""Nodes of one group, unless all are wanted."""
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
    yield from _help(told, scene, pod)


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
    """Return the islands of a node in brackets, each GPU with the mark of its state."""
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


def _help(told: Explanation, scene: IndexedSnapshot, pod: Pod) -> Iterator[str]:
    if told.help.proposals:
        yield ""
        yield "What would help, the cheapest first; each was decided again:"
        for number, proposal in enumerate(told.help.proposals, 1):
            text = sentence(proposal, scene, pod)
            yield from wrap(text, WIDTH, initial_indent=f"  {number}. ", subsequent_indent="     ")
    if told.help.helpless:
        yield ""
        yield from wrap(
            "What would not: " + "; ".join(HELPLESS[kind] for kind in told.help.helpless), WIDTH, subsequent_indent="  "
        )
    for kind in told.help.cut:
        yield f"The search for {kind} was cut: there may be more."


def waits_text(seconds: float) -> str:
    """Return since when something is there; empty where that is not known."""
    if not isfinite(seconds):
        return ""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    told = f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f", created {told} ago"
