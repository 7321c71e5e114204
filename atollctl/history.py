"""`atoll history NODE/ID`: holders and health of one GPU over time, as far as objects still show them.

Prints lines, the oldest first, or JSON; status 2 if there is no such GPU. A saved snapshot has no events. Read-only.
"""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from atollctl.cluster_source import STATUS_UNREACHABLE, SnapshotFile, read_cluster, read_events
from atollctl.gpu import Target, TargetMistake, split_target
from atollctl.options import ContextName, Kubeconfig
from atollctl.output import Output, OutputOption, show_json, show_line, show_table
from atollctl.sentences import sentence

if TYPE_CHECKING:
    from atoll.explain.history import RecordedEvent


def show_history(
    target: Target,
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    snapshot: SnapshotFile = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show the history of one GPU: its holders, faults and events."""
    from atoll.explain.history import NoSuchGpu, timeline_of
    from atoll.kube.errors import KubeError

    found = read_cluster(kubeconfig, context, snapshot=snapshot, purpose="show the history")
    events: tuple[RecordedEvent, ...] = ()
    try:
        node, device_id = split_target(target)
        if snapshot is None:
            events = asyncio.run(read_events(kubeconfig, context))
        story = timeline_of(found, events, node, device_id)
    except (NoSuchGpu, TargetMistake, KubeError, OSError) as error:
        typer.echo(f"cannot show the history: {sentence(error)}", err=True)
        raise typer.Exit(STATUS_UNREACHABLE) from error
    if output is Output.JSON:
        show_json(asdict(story))
        return
    reason = f" ({story.reason})" if story.reason else ""
    holder = f"held by {story.holder}" if story.holder else "held by nobody"
    show_line(f"GPU {story.gpu}: {story.model}, {story.uuid}, {story.state}{reason}, {holder}")
    rows = [(entry.time or "now", entry.kind, entry.text, entry.source) for entry in story.entries]
    if output is Output.WIDE:
        show_table(("TIME", "WHAT", "TEXT", "SOURCE"), rows)
    elif rows:
        show_table(("TIME", "WHAT", "TEXT"), [row[:3] for row in rows])
    told = "a snapshot has no events" if snapshot is not None else "events are gone after an hour by default"
    typer.echo(f"{len(rows)} entries; deleted pods appear only in events, and {told}")
