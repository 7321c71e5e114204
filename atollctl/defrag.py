"""`atoll defrag --count N`: pods that would have to move so that a set of that size fits, and their new places.

Prints ranked plans as text or JSON. Status 0: the set fits or a plan makes room; 1: no plan does; 2: no answer.
Read-only: nothing is moved.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.api.claims import DeviceClaim, InterconnectKind, PlacementPolicy
from atoll.api.forms import message_of
from atollctl.cluster_source import (
    STATUS_UNREACHABLE,
    STATUS_WAITS,
    Namespace,
    SnapshotFile,
    namespace_of,
    read_cluster,
)
from atollctl.options import ContextName, Kubeconfig
from atollctl.output import Output, OutputOption, counted, show_json, show_line

if TYPE_CHECKING:
    from atoll.cluster.allocations import Allocation
    from atoll.explain.defrag import Defrag, MovePlan


def find_plans(
    count: Annotated[int, typer.Option("--count", help="GPUs of the set to make room for.", min=1, max=1024)],
    policy: Annotated[PlacementPolicy, typer.Option(help="As in a claim.")] = PlacementPolicy.ISLAND,
    interconnect: Annotated[InterconnectKind, typer.Option(help="As in a claim.")] = InterconnectKind.ANY,
    model: Annotated[list[str] | None, typer.Option(help="Accepted model; any by default.")] = None,
    priority: Annotated[int, typer.Option(help="Priority of the new pod: pods with a higher one are not moved.")] = 0,
    tolerate: Annotated[
        list[str] | None, typer.Option(help="Key of a taint that the pod tolerates, such as nvidia.com/gpu.")
    ] = None,
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    snapshot: SnapshotFile = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Rank the moves that would make room for a set of GPUs; nothing is moved."""
    from pydantic import ValidationError

    from atoll.api.base import ObjectMeta
    from atoll.api.claims import GpuClaim, GpuClaimSpec
    from atoll.explain.decision import index_snapshot
    from atoll.explain.defrag import DefragRequest, find_moves

    found = read_cluster(kubeconfig, context, snapshot=snapshot, purpose="look for moves")
    namespace = namespace_of(namespace, kubeconfig, context, snapshot)
    try:
        devices = DeviceClaim(count=count, policy=policy, interconnect=interconnect, models=tuple(model or ()))
        metadata = ObjectMeta(name="asked-set", namespace=namespace, uid="uid-of-asked-claim")
        claim = GpuClaim(metadata=metadata, spec=GpuClaimSpec(devices=devices))
    except ValidationError as error:
        typer.echo(f"cannot look for moves: {message_of(error.errors()[0])}", err=True)
        raise typer.Exit(STATUS_UNREACHABLE) from error
    answer = find_moves(index_snapshot(found), DefragRequest(claim, priority, tuple(tolerate or ())))
    if output is Output.JSON:
        show_json(as_json(answer))
    else:
        for line in text_lines(answer, count):
            show_line(line)
    raise typer.Exit(0 if answer.fits is not None or answer.plans else STATUS_WAITS)


def text_lines(answer: "Defrag", count: int) -> list[str]:
    """Return the answer as lines."""
    from atoll.explain.wording import nodes_text

    if answer.fits is not None:
        return [f"{counted(count, 'GPU fits', 'GPUs fit')} now, without any move: {_place(answer.fits)}"]
    lines = []
    for number, plan in enumerate(answer.plans, 1):
        moves = counted(len(plan.moves), "move", "moves")
        lines.append(f"{number}. {moves}: then {count} GPUs fit on {_place(plan.room)}")
        lines += [f"     {_name(move)}: {_place(move.source)} -> {_place(move.target)}" for move in plan.moves]
    if not answer.plans:
        lines.append(f"no moves of pods make room for {count} GPUs")
    for reason, number in answer.unmoved.items():
        lines.append(f"not moved: {counted(number, 'pod', 'pods')}, {reason}")
    lines += [f"left out: {nodes_text(number)}, {_closed(reason)}" for reason, number in answer.closed.items()]
    if answer.is_cut:
        lines.append("the search was cut: there may be more")
    return lines


def _closed(reason: str) -> str:
    from atoll.cluster.host_fit import TAINTED

    return f"{reason}: name its key by --tolerate where the pod endures it" if reason == TAINTED else reason


def _place(allocation: "Allocation") -> str:
    return f"{allocation.node} GPUs {','.join(map(str, allocation.device_ids))}"


def _name(move: Any) -> str:  # noqa: ANN401 - a Move
    return f"{move.pod.metadata.namespace}/{move.pod.metadata.name}"


def as_json(answer: "Defrag") -> dict[str, Any]:
    """Return the answer as plain values."""
    return {
        "fits": _allocation(answer.fits) if answer.fits is not None else None,
        "plans": [_plan(plan) for plan in answer.plans],
        "unmoved": dict(answer.unmoved),
        "closed": dict(answer.closed),
        "searchCut": answer.is_cut,
    }


def _plan(plan: "MovePlan") -> dict[str, Any]:
    return {
        "room": _allocation(plan.room),
        "moves": [
            {"pod": _name(move), "from": _allocation(move.source), "to": _allocation(move.target)}
            for move in plan.moves
        ],
    }


def _allocation(one: "Allocation") -> dict[str, Any]:
    return {"node": one.node, "deviceIds": list(one.device_ids), "uuids": list(one.uuids)}
