"""`atoll explain`: why a pod waits, down to GPUs and islands, and what would help.

Takes pod/NAME, gang/NAME or claim/NAME. Status 0: everything runs or fits; 1: something waits; 2: no answer.
`atoll.explain` makes the answers. Read-only.
"""

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from atoll.service.collector import without_collector
from atollctl.cluster_source import (
    STATUS_UNREACHABLE,
    STATUS_WAITS,
    Namespace,
    SnapshotFile,
    namespace_of,
    read_cluster,
)
from atollctl.options import ContextName, Kubeconfig
from atollctl.output import Output, OutputOption, show_json, show_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.cluster.objects import Pod
    from atoll.explain.decision import IndexedSnapshot
    from atoll.explain.snapshot import ClusterSnapshot


Subject = Annotated[str, typer.Argument(metavar="pod/NAME|gang/NAME|claim/NAME", help="What to explain.")]
NAMESPACES_SHOWN = 3
PODS = ("pod", "pods", "po")
GANG_KINDS = ("gang", "gangs", "gpugang", "gpugangs", "ggang")


def explain_subject(
    subject: Subject,
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    snapshot: SnapshotFile = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Explain why a pod or a gang waits for its GPUs, and what would help."""
    with without_collector():
        found = read_cluster(kubeconfig, context, snapshot=snapshot, purpose="explain")
        _explain(found, subject, namespace_of(namespace, kubeconfig, context, snapshot), output)


def _explain(found: "ClusterSnapshot", subject: str, namespace: str, output: Output) -> None:
    from atoll.explain.decision import index_snapshot
    from atoll.explain.explanation import PodState, explain
    from atoll.explain.wording import explanation_json
    from atollctl.explain_text import lines

    scene = index_snapshot(found)
    if subject.partition("/")[0] in GANG_KINDS:
        _explain_gang(scene, subject, namespace, output)
    chosen = pods_of(found, subject, namespace)
    _tell_unread(scene, chosen)
    told = [(explain(scene, pod), pod) for pod in chosen]
    if output is Output.JSON:
        show_json([explanation_json(one, scene, pod) for one, pod in told])
    else:
        for number, (one, pod) in enumerate(told):
            for line in (*([""] if number else []), *lines(one, scene, pod, show_all=output is Output.WIDE)):
                show_line(line)
    content = {PodState.BOUND, PodState.ENDED, PodState.FITS, PodState.NO_GPUS}
    raise typer.Exit(0 if all(one.state in content for one, _ in told) else STATUS_WAITS)


def _explain_gang(scene: "IndexedSnapshot", subject: str, namespace: str, output: Output) -> NoReturn:
    from atoll.explain.gang_decision import index_gangs
    from atoll.explain.gang_explanation import CONTENT, explain_gang
    from atoll.explain.gang_wording import gang_json
    from atollctl.explain_text import gang_lines

    name = subject.partition("/")[2]
    gang = scene.snapshot.gang(namespace, name)
    if gang is None:
        others = [one.metadata.namespace for one in scene.snapshot.gangs if one.metadata.name == name]
        _refuse(f"there is no GpuGang {name!r} in namespace {namespace}{elsewhere(others)}", subject)
    gangs = index_gangs(scene)
    _tell_unread(scene, gangs.pods_of.get((namespace, name), ()))
    told = explain_gang(gangs, gang)
    if output is Output.JSON:
        show_json(gang_json(told, scene))
    else:
        for line in gang_lines(told, scene, show_all=output is Output.WIDE):
            show_line(line)
    raise typer.Exit(0 if told.state in CONTENT else STATUS_WAITS)


def _tell_unread(scene: "IndexedSnapshot", pods: "Iterable[Pod]") -> None:
    """Say which objects matter to the pods that the user may not list."""
    from atoll.cluster.feasibility import listed
    from atoll.cluster.volume_fit import claim_names

    asked = tuple(pods)
    minds_volumes = any(True for pod in asked for _ in claim_names(pod))
    minds_namespaces = any(map(scene.minds_neighbours, asked))
    missing = [one for one in scene.snapshot.unread if (minds_namespaces if one == "namespaces" else minds_volumes)]
    if missing:
        typer.echo(
            f"note: you may not list {listed(missing, 'and')}, so the answer leaves out what they say; the ClusterRole "
            "atoll-reader allows it",
            err=True,
        )


def elsewhere(namespaces: "Iterable[str]") -> str:
    """Return a hint: other namespaces that have an object of that name, or that there is none."""
    told = sorted(set(namespaces))
    if not told:
        return ", and in no other; `kubectl get` lists what there is"
    more = f" and {len(told) - NAMESPACES_SHOWN} more" if len(told) > NAMESPACES_SHOWN else ""
    return f"; there is one in {', '.join(told[:NAMESPACES_SHOWN])}{more}: choose it by -n"


def _refuse(message: str, subject: str) -> NoReturn:
    typer.echo(f"cannot explain {subject}: {message}", err=True)
    raise typer.Exit(STATUS_UNREACHABLE)


def pods_of(found: "ClusterSnapshot", subject: str, namespace: str) -> "list[Pod]":
    """Return the pods of the subject. Ends the command with one sentence if there are none."""
    from atoll.cluster import pods

    kind, slash, name = subject.rpartition("/")
    kind = kind if slash else "pod"
    if not name:
        _refuse("write pod/NAME, gang/NAME or claim/NAME", repr(subject))
    if kind in PODS:
        pod = found.pod(namespace, name)
        chosen = [pod] if pod is not None else []
    elif kind in ("claim", "gpuclaim", "gpuclaims", "gclaim"):
        chosen = [pod for pod in found.pods if pod.metadata.namespace == namespace and pods.claim_name(pod) == name]
        if not chosen and found.claim(namespace, name) is not None:
            typer.echo(f"claim {namespace}/{name}: no pod names it in its annotation gpu.scheduling/claim")
            raise typer.Exit(0)
    else:
        _refuse("write pod/NAME, gang/NAME or claim/NAME", repr(subject))
    if not chosen:
        objects = found.pods if kind in PODS else found.claims
        others = [one.metadata.namespace for one in objects if one.metadata.name == name]
        _refuse(f"there is none in namespace {namespace}{elsewhere(others)}", f"{kind}/{name}")
    return sorted(chosen, key=lambda pod: pod.metadata.name)
