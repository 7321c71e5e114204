"""`atoll top`: the cluster's islands of GPUs, their holders and health, and the waiting pods.

Shows a live view on a terminal, one picture with `--once` or into a pipe, or JSON. Read-only, by LIST. The view uses at
most one part in LOAD_PARTS of a core, so a large cluster is refreshed less often.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from atoll.kube.errors import KubeError
from atollctl.cluster_source import SnapshotFile, read_cluster, read_live
from atollctl.options import ContextName, Kubeconfig
from atollctl.output import Output, OutputOption, age_text, counted, plain, show_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from atoll.explain.overview import Gpu, NodeLine, Overview
    from atoll.explain.snapshot import ClusterSnapshot

LOAD_PARTS: Final = 25
"""At most this part of a core, 4 %, is used by the view."""
WAITING_SHOWN: Final = 10
NODES_SHOWN: Final = 40
MARKS: Final = {"free": "", "held": "#", "foreign": "?"}
STYLES: Final = {"free": "green", "held": "yellow", "foreign": "magenta"}
LEGEND: Final = "3 free, 3# held, 3! not given out, 3? used by somebody who does not hold it"

Seconds = Annotated[float, typer.Option(help="Least seconds between two looks.", min=0.5, max=3600)]
NamespaceOption = Annotated[
    str, typer.Option("-n", "--namespace", help="Only waiting pods and holders of this namespace.")
]


def show_top(
    namespace: NamespaceOption = "",
    refresh: Seconds = 2.0,
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    snapshot: SnapshotFile = None,
    output: OutputOption = Output.TEXT,
    *,
    once: Annotated[bool, typer.Option("--once", help="Show it once and exit.")] = False,
) -> None:
    """Show nodes, islands and GPUs, their holders, and waiting pods."""
    from rich.console import Console

    first = _seen(read_cluster(kubeconfig, context, snapshot=snapshot, purpose="show the cluster"), namespace)
    if output is Output.JSON:
        show_json(as_json(first))
        return
    console = Console(highlight=False)
    is_wide = output is Output.WIDE
    if once or snapshot is not None or not console.is_terminal:
        for line in lines(first, is_wide=is_wide):
            console.print(line, soft_wrap=True)
        return

    def look() -> "Overview":
        return _seen(asyncio.run(read_live(kubeconfig, context)), namespace)

    watch(console, first, look, refresh, is_wide=is_wide)


def _seen(found: "ClusterSnapshot", namespace: str) -> "Overview":
    from atoll.explain.decision import index_snapshot
    from atoll.explain.overview import overview

    return overview(index_snapshot(found), namespace=namespace)


def pause_seconds(refresh: float, spent: float) -> float:
    """Return the pause after a look that took `spent` CPU seconds."""
    return max(refresh, spent * (LOAD_PARTS - 1))


def watch(
    console: "Console", first: "Overview", look: "Callable[[], Overview]", refresh: float, *, is_wide: bool
) -> None:
    """Show look after look until the user ends it. A failed look leaves the last picture and says that it is old."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    seen, trouble = first, ""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            before = 0.0
            while True:
                notes = [Text(trouble, style="red")] if trouble else []
                live.update(Group(*notes, *lines(seen, is_wide=is_wide)), refresh=True)
                time.sleep(pause_seconds(refresh, time.process_time() - before if before else 0.0))
                before = time.process_time()
                try:
                    seen, trouble = look(), ""
                except (KubeError, OSError) as error:
                    trouble = f"The cluster does not answer: {error}. This is how it was at {seen.taken_at}."
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def lines(seen: "Overview", *, is_wide: bool) -> "Iterator[RenderableType]":
    """Yield the view, line by line."""
    from rich.text import Text

    states = {gpu.state for node in seen.nodes for gpu in node.gpus}
    told = ", ".join(f"{seen.count(state)} {state}" for state in ("free", "held", *sorted(states - {"free", "held"})))
    yield Text(
        f"{counted(seen.count(), 'GPU', 'GPUs')} on {counted(len(seen.nodes), 'node', 'nodes')}: {told}. "
        f"{counted(len(seen.waiting), 'pod waits', 'pods wait')}. {seen.taken_at}"
    )
    if not seen.nodes:
        yield Text("No node reports a GPU: is Atoll's agent running on the machines that have some?")
    shown = seen.nodes if is_wide else seen.nodes[:NODES_SHOWN]
    for node in shown:
        yield _node_text(node)
        yield from (Text(f"    {plain(line)}") for line in _details(node, is_wide=is_wide))
    if len(shown) < len(seen.nodes):
        yield Text(f"and {len(seen.nodes) - len(shown)} nodes more: -o wide shows them")
    if seen.nodes:
        yield Text(f"islands: {LEGEND}")
    if seen.waiting:
        yield Text("")
        yield Text("Waiting:")
    rows = seen.waiting if is_wide else seen.waiting[:WAITING_SHOWN]
    for row in rows:
        asked = counted(row.asked, "GPU", "GPUs")
        yield Text(plain(f"  {row.pod}  {asked}, {age_text(row.waits_seconds)}: {row.reason}"))
    if len(rows) < len(seen.waiting):
        yield Text(f"  and {len(seen.waiting) - len(rows)} more: -o wide shows them")


def _node_text(node: "NodeLine") -> Any:  # noqa: ANN401 - a rich Text
    from rich.text import Text

    text = Text(plain(f"{node.node}  {node.models}  {node.count('free')}/{len(node.gpus)} free"))
    for note in (node.closed, f"silent: {node.silence}" if node.is_silent else ""):
        text.append(f"  {note}" if note else "", style="red")
    for island in node.islands:
        text.append(f"  {island.name} [")
        for number, gpu in enumerate(island.gpus):
            text.append(" " if number else "")
            text.append(f"{gpu.id}{MARKS.get(gpu.state, '!')}", style=STYLES.get(gpu.state, "red"))
        text.append("]")
    return text


def _details(node: "NodeLine", *, is_wide: bool) -> Iterator[str]:
    by_holder: dict[str, list[int]] = {}
    for gpu in node.gpus:
        for holder in gpu.holders:
            by_holder.setdefault(holder, []).append(gpu.id)
    held = [f"{holder}: {','.join(map(str, ids))}" for holder, ids in sorted(by_holder.items())]
    if held:
        more = f"; and {len(held) - 6} pods more" if len(held) > 6 and not is_wide else ""
        yield "; ".join(held if is_wide else held[:6]) + more
    yield from (_ill_text(gpu) for gpu in node.gpus if gpu.state not in ("free", "held") or gpu.reason)


def _ill_text(gpu: "Gpu") -> str:
    return f"{gpu.id} {gpu.state}" + (f": {gpu.reason}" if gpu.reason else "")


def as_json(seen: "Overview") -> dict[str, Any]:
    """Return the view as plain values."""
    return {
        "takenAt": seen.taken_at,
        "gpus": seen.count(),
        "free": seen.count("free"),
        "held": seen.count("held"),
        "nodes": [
            {
                "node": node.node,
                "models": node.models,
                "silent": node.is_silent,
                "silence": node.silence,
                "closed": node.closed,
                "islands": [
                    {
                        "name": island.name,
                        "kind": island.kind,
                        "gpus": [
                            {
                                "id": g.id,
                                "model": g.model,
                                "state": g.state,
                                "reason": g.reason,
                                "holders": [*g.holders],
                            }
                            for g in island.gpus
                        ],
                    }
                    for island in node.islands
                ],
            }
            for node in seen.nodes
        ],
        "waiting": [
            {
                "pod": row.pod,
                "asked": row.asked,
                "waitsSeconds": round(row.waits_seconds) if row.waits_seconds < 1e12 else None,
                "reason": row.reason,
            }
            for row in seen.waiting
        ],
    }
