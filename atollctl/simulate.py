"""`atoll simulate`: would these pods fit, where, with which GPUs, and what would be left.

Nodes can be added or removed and pods left out. Status 0: every pod fits; 1: one does not; 2: no answer. Read-only.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atollctl.cluster_source import (
    STATUS_UNREACHABLE,
    STATUS_WAITS,
    Extender,
    ExtenderAuthority,
    Namespace,
    SnapshotFile,
    namespace_of,
    read_cluster,
    with_past_asks,
)
from atollctl.options import ContextName, Kubeconfig
from atollctl.output import Output, OutputOption, show_json, show_line
from atollctl.sentences import sentence

if TYPE_CHECKING:
    from atoll.api.claims import GpuClaim
    from atoll.api.gangs import GpuGang
    from atoll.cluster.objects import Pod
    from atoll.explain.simulation import PodOutcome, Simulation
    from atoll.explain.snapshot import ClusterSnapshot

_ADDED = re.compile(r"(?:([0-9]{1,4})x)?([a-z0-9][a-z0-9.-]{0,252})", re.ASCII)


class QuestionMistake(ValueError):
    """The question names an object that does not exist."""


def simulate_pods(
    manifests: Annotated[list[Path], typer.Option("-f", "--filename", help="Pods, workloads and GpuClaims.")],
    add: Annotated[
        list[str] | None, typer.Option(help="Nodes to add: COUNTxSHAPE of a known machine, or COUNTxNODE.")
    ] = None,
    remove: Annotated[list[str] | None, typer.Option(help="A node to remove, with its pods.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="A pod to end first: NAMESPACE/NAME or NAME.")] = None,
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    snapshot: SnapshotFile = None,
    extender: Extender = "",
    extender_ca: ExtenderAuthority = None,
    output: OutputOption = Output.TEXT,
    *,
    no_preemption: Annotated[bool, typer.Option("--no-preemption", help="Evict no pods.")] = False,
) -> None:
    """Show where pods that do not exist yet would run."""
    from atoll.explain.codec import with_objects
    from atoll.explain.simulation import simulate
    from atollctl.manifests import ManifestMistake, read_manifests, shaped

    found = read_cluster(kubeconfig, context, snapshot=snapshot, purpose="simulate")
    namespace = namespace_of(namespace, kubeconfig, context, snapshot)
    found = with_past_asks(found, extender, extender_ca, purpose="simulate")
    try:
        wanted = read_manifests(manifests, namespace=namespace)
        found = changed_cluster(found, add or (), remove or (), without or (), namespace)
        found = with_objects(found, claims=new_claims(found, wanted.claims))
        found = replace(found, priority_classes=(*found.priority_classes, *wanted.priority_classes))
        asking = shaped(wanted.pods, namespace=namespace, cluster=found)
    except (OSError, ManifestMistake, QuestionMistake) as error:
        typer.echo(f"cannot simulate: {sentence(error)}", err=True)
        raise typer.Exit(STATUS_UNREACHABLE) from error
    if not wanted.makes_pods:
        typer.echo("cannot simulate: there is no pod in the files, and nothing that makes pods", err=True)
        raise typer.Exit(STATUS_UNREACHABLE)
    for ignored in wanted.ignored:
        typer.echo(
            f"left out: {ignored} is no pod, no workload of pods, no GpuClaim, GpuGang or PriorityClass", err=True
        )
    answer = simulate(
        found, asking, (*wanted.gangs, *made_gangs(found, asking, wanted.gangs)), preempts=not no_preemption
    )
    if output is Output.JSON:
        show_json(as_json(answer))
    else:
        for line in text_lines(answer, show_all=output is Output.WIDE):
            show_line(line)
    raise typer.Exit(0 if all(one.allocation is not None for one in answer.outcomes) else STATUS_WAITS)


def new_claims(found: "ClusterSnapshot", claims: "Sequence[GpuClaim]") -> "list[GpuClaim]":
    """Return the claims that do not exist yet. Raises QuestionMistake for an existing one with another request, which
    the API server would refuse."""
    new = []
    for claim in claims:
        space, name = claim.metadata.namespace, claim.metadata.name
        before = found.claim(space, name)
        if before is None:
            new.append(claim)
        elif before.spec != claim.spec:
            raise QuestionMistake(
                f"GpuClaim {space}/{name} is there and asks for something else, which cannot be changed: give the new "
                "one another name"
            )
    return new


def made_gangs(found: "ClusterSnapshot", asking: "Sequence[Pod]", given: "Sequence[GpuGang]") -> "list[GpuGang]":
    """Return the GpuGangs that the controllers would create for members that give their number."""
    from atoll.api.gangs import GpuGang
    from atoll.cluster.gangs.membership import gang_key
    from atoll.cluster.gangs.sizes import size_of
    from controllers.gangs.creation import gang_body, kueue_requests_of, pod_sets_of

    known = {(one.metadata.namespace, one.metadata.name) for one in (*found.gangs, *given)}
    members: dict[tuple[str, str], list[Pod]] = {}
    for pod in asking:
        key = gang_key(pod)
        if key is not None and key not in known:
            members.setdefault(key, []).append(pod)
    made = []
    for key, pods in members.items():
        size = size_of(pods)
        sets = pod_sets_of(pods, size) if size is not None else None
        wishes = kueue_requests_of(pods)
        if sets is not None and not isinstance(wishes, str):
            made.append(GpuGang.model_validate(gang_body(key, sets, [], wishes)))
    return made


def changed_cluster(
    found: "ClusterSnapshot",
    add: Sequence[str],
    remove: Sequence[str],
    without: Sequence[str],
    namespace: str,
) -> "ClusterSnapshot":
    """Return the cluster with the requested changes. Raises QuestionMistake."""
    from atoll.explain.changes import with_nodes, without_pods
    from atoll.explain.simulation import without_nodes

    known = {node.metadata.name for node in found.nodes}
    for name in remove:
        if name not in known:
            raise QuestionMistake(f"--remove {name}: there is no such node")
    gone = []
    for text in without:
        space, _, name = text.rpartition("/")
        pod = found.pod(space or namespace, name)
        if pod is None:
            raise QuestionMistake(f"--without {text}: there is no such pod in namespace {space or namespace}")
        gone.append(pod.metadata.uid)
    added: list[Any] = []
    for text in add:
        added += _added(found, text, {*known, *(one.node.metadata.name for one in added)})
    return with_nodes(without_nodes(without_pods(found, gone), remove), added)


def _added(found: "ClusterSnapshot", text: str, taken: "Collection[str]") -> "list[Any]":
    from atoll.explain.shapes import known_machine, like_node
    from atoll.explain.simulation import ADDED_MAX, numbered
    from topology.errors import ProfileError

    match = _ADDED.fullmatch(text)
    count, shape = (int(match[1] or 1), match[2]) if match is not None else (0, "")
    if count == 0:
        raise QuestionMistake(f"--add {text}: write COUNTxSHAPE, such as 4xdgx-h100")
    if count > ADDED_MAX:
        raise QuestionMistake(f"--add {text}: at most {ADDED_MAX} nodes of a kind can be added")
    names = numbered(count, shape, taken)
    node = next((one for one in found.nodes if one.metadata.name == shape), None)
    report = next((one for one in found.reports if one.metadata.name == shape and one.status is not None), None)
    if node is not None and report is not None:
        return [like_node(found, node, report, name=name) for name in names]
    try:
        return [known_machine(shape, found, name=name) for name in names]
    except ProfileError as error:
        raise QuestionMistake(f"--add {text}: no node of that name, and {error}") from error


def text_lines(answer: "Simulation", *, show_all: bool) -> list[str]:
    """Return the answer as lines."""
    lines = [_line(one) for one in answer.outcomes]
    fitting = sum(one.allocation is not None for one in answer.outcomes)
    before, after = sum(answer.before.free.values()), sum(answer.after.free.values())
    totals = (
        f"{fitting} of {len(answer.outcomes)} pods fit. Free GPUs: {before} before, {after} after; largest set on one"
    )
    lines += ["", f"{totals} island: {answer.before.largest_island} before, {answer.after.largest_island} after"]
    changed = [name for name, free in answer.after.free.items() if show_all or free != answer.before.free.get(name, 0)]
    lines += [f"  {name}: {answer.before.free.get(name, 0)} -> {answer.after.free[name]} free" for name in changed]
    return lines


def _line(one: "PodOutcome") -> str:
    name = f"{one.pod.metadata.namespace}/{one.pod.metadata.name}"
    if one.allocation is None:
        return f"{name}: does not fit: {_why(one)}"
    ids = " GPUs " + ",".join(map(str, one.allocation.device_ids)) if one.allocation.device_ids else ""
    ring = f", ring {one.ring_gbps:g} GB/s" if one.ring_gbps else ""
    islands = f" on {'+'.join(one.islands)}" if one.islands else ""
    evicted = f"; pushes out {', '.join(one.evicted)}" if one.evicted else ""
    return f"{name}: {one.node}{ids}{islands}{ring}{evicted}"


def _why(one: "PodOutcome") -> str:
    return one.explanation.headline if one.explanation is not None else one.note


def _state(one: "PodOutcome") -> str:
    if one.explanation is not None:
        return str(one.explanation.state)
    return "fits" if one.allocation is not None else "gang"


def as_json(answer: "Simulation") -> dict[str, Any]:
    """Return the answer as plain values."""
    return {
        "pods": [
            {
                "pod": f"{one.pod.metadata.namespace}/{one.pod.metadata.name}",
                "fits": one.allocation is not None,
                "node": one.node,
                "deviceIds": list(one.allocation.device_ids) if one.allocation is not None else [],
                "uuids": list(one.allocation.uuids) if one.allocation is not None else [],
                "islands": list(one.islands),
                "ringGBps": one.ring_gbps,
                "relativeQuality": one.relative_quality,
                "state": _state(one),
                "headline": _why(one),
                "evicted": list(one.evicted),
            }
            for one in answer.outcomes
        ],
        "before": {"free": dict(answer.before.free), "largestIsland": answer.before.largest_island},
        "after": {"free": dict(answer.after.free), "largestIsland": answer.after.largest_island},
    }
