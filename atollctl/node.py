"""`atoll node`: the phase of every GPU machine, and the declaration that one is gone for good.

`release` and `forget` write one entry into the spec of the node's GpuNodeStatus, in the caller's own name; a policy
requires the verb declare-gone. The controllers act on it, with an event and a log line. This command impersonates
nobody and deletes nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import orjson
import typer

from atoll.api import names
from atoll.api.node_status import GONE_MAX, GoneMachine, GpuNodeStatus
from atoll.api.times import format_microtime, parse_microtime
from atoll.cluster.errors import MalformedValue
from atoll.cluster.leases import may_be_gpu_lease, parse_lease
from atoll.cluster.ledger import Ledger
from atoll.cluster.machine_life import MACHINE_LIFE, MachineFacts, newest_sequence, phase_of, sign_of_life
from atoll.cluster.objects import Lease, Node, Pod, decode_lease, decode_node, decode_pod
from atoll.cluster.reports import silence_seconds_max
from atoll.cluster.unknown_pods import unknown_pods
from atoll.kube import patches, paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import AlreadyExists, Conflict, Forbidden, KubeError, NotFound
from atollctl.options import ContextName, Kubeconfig
from atollctl.output import Output, OutputOption, show_json, show_table
from atollctl.sentences import sentence

STATUS_REFUSED = 2
ATTEMPTS_MAX = 5
RENEWAL_SECONDS = 3.0
"""An agent has reported the end of a pod by then."""
RELEASER_ROLE = "the ClusterRole atoll-machine-releaser"
SELF_REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
COLUMNS = ("NODE", "STANDS", "GPUS", "LEASES", "IN DOUBT", "REASON", "MOVES ON BY")

app = typer.Typer(help="Show GPU machines; declare one gone for good.", no_args_is_help=True)

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Name of the machine's Node.")]
Reason = Annotated[str, typer.Option(help="How you know that the machine is off for good.")]
NodeUid = Annotated[str, typer.Option("--uid", help="Uid of the machine's Node, if several machines had the name.")]


class DeclarationRefused(Exception):
    """The known facts contradict the declaration, or do not tell which machine is meant."""


@dataclass(frozen=True, slots=True)
class ClusterMachines:
    """Inputs of the commands, by node name. leases: (node, node uid, in doubt) of every GPU Lease; refusals: why
    reports do not count."""

    nodes: dict[str, Node]
    statuses: dict[str, GpuNodeStatus]
    heartbeats: dict[str, Lease]
    leases: tuple[tuple[str, str, bool], ...]
    refusals: Mapping[str, str]

    def facts(self, name: str, now: datetime) -> MachineFacts:
        """Return the facts about one machine."""
        beat = self.heartbeats.get(name)
        return MachineFacts(
            self.nodes.get(name),
            self.statuses.get(name),
            is_heard=beat is not None and is_fresh(beat, now),
            refusal=self.refusals.get(name, ""),
        )


@app.command(name="list")
def list_nodes(kubeconfig: Kubeconfig = None, context: ContextName = None, output: OutputOption = Output.TEXT) -> None:
    """Show every machine that has or had GPUs: its phase, what is held there, what ends the phase."""
    try:
        found = asyncio.run(_read(kubeconfig, context))
    except KubeError as error:
        _refuse(f"cannot list nodes: {sentence(error)}")
    rows = machine_rows(found, datetime.now(UTC))
    if output is Output.JSON:
        keys = ("node", "stands", "gpus", "leases", "inDoubt", "reason", "movesOnBy")
        show_json([dict(zip(keys, row, strict=True)) for row in rows])
    elif rows:
        show_table(COLUMNS, rows)
    else:
        typer.echo("no node has or had GPUs: is Atoll's agent running on the machines with GPUs?")


@app.command()
def release(
    node: NodeName, reason: Reason, uid: NodeUid = "", kubeconfig: Kubeconfig = None, context: ContextName = None
) -> None:
    """Declare a machine off for good: GPUs of pods that left it are freed."""
    _declare(node, reason, uid, kubeconfig, context, forget=False)


@app.command()
def forget(
    node: NodeName, reason: Reason, uid: NodeUid = "", kubeconfig: Kubeconfig = None, context: ContextName = None
) -> None:
    """Declare a machine off for good, under any name: its report and heartbeat are deleted as well."""
    _declare(node, reason, uid, kubeconfig, context, forget=True)


def machine_rows(found: ClusterMachines, now: datetime) -> list[tuple[str, ...]]:
    """One row per name that has a report, a heartbeat or Leases."""
    held = Counter(node for node, _, _ in found.leases)
    doubted = Counter(node for node, _, in_doubt in found.leases if in_doubt)
    rows: list[tuple[str, ...]] = []
    for name in sorted(found.statuses.keys() | found.heartbeats.keys() | held.keys()):
        facts = found.facts(name, now)
        phase = phase_of(facts)
        status = found.statuses.get(name)
        gpus = len(status.status.devices) if status is not None and status.status is not None else 0
        rules = MACHINE_LIFE[phase]
        rows.append((name, str(phase), str(gpus), str(held[name]), str(doubted[name]), facts.refusal, rules.moves_on))
    return rows


def declaration_of(
    found: ClusterMachines, node: str, *, uid: str, reason: str, by: str, now: datetime, forget: bool
) -> GoneMachine:
    """Return the declaration for the machine that is meant. Raises DeclarationRefused."""
    facts = found.facts(node, now)
    report = facts.status.status if facts.status is not None else None
    known = {lease_uid for name, lease_uid, _ in found.leases if name == node and lease_uid}
    known |= {report.node_uid} if report is not None and report.node_uid else set()
    known |= {facts.node.metadata.uid} if facts.node is not None else set()
    meant = {uid} if uid else known
    if len(meant) != 1:
        told = f"several machines had that name, choose one with --uid: {', '.join(sorted(known))}"
        raise DeclarationRefused(told if meant else "no such machine is known; see `atoll node list`")
    (node_uid,) = meant
    if node_uid not in known:
        raise DeclarationRefused(
            f"no machine of that name had the uid {node_uid}; known: {', '.join(sorted(known)) or 'none'}"
        )
    if sign := sign_of_life(node_uid, facts):
        raise DeclarationRefused(sign)
    if forget and facts.node is not None:
        raise DeclarationRefused(
            f"its Node exists; delete it first (kubectl delete node {node}), or use `atoll node release`"
        )
    return GoneMachine(
        node_uid=node_uid,
        reason=reason[:256],
        by=by[:256],
        time=format_microtime(now),
        sequence=newest_sequence(facts),
        forget=forget,
    )


def with_declaration(declarations: Iterable[GoneMachine], declaration: GoneMachine) -> tuple[GoneMachine, ...]:
    """Return the declarations with this one, which replaces an earlier one for the same machine; the oldest are
    dropped."""
    return (*(one for one in declarations if one.node_uid != declaration.node_uid), declaration)[-GONE_MAX:]


def is_fresh(beat: Lease, now: datetime) -> bool:
    """Return whether a heartbeat is fresh, by the clocks of two machines; the controllers only use their own clock."""
    try:
        age = (now - parse_microtime(beat.spec.renew_time or "")).total_seconds()
    except (ValueError, OverflowError):
        return False
    return age <= silence_seconds_max(beat)


def _declare(node: str, reason: str, uid: str, kubeconfig: Path | None, context: str | None, *, forget: bool) -> None:
    if not reason.strip():
        _refuse("--reason must say how you know that the machine is off for good; it is recorded")
    try:
        declaration = asyncio.run(_write(node, reason, uid, kubeconfig, context, forget=forget))
    except (DeclarationRefused, KubeError) as error:
        _refuse(f"cannot declare node {node} gone: {sentence(error, roles=RELEASER_ROLE)}")
    more = ", report and heartbeat are deleted" if forget else ""
    typer.echo(
        f"machine {declaration.node_uid} of node {node} is declared gone by {declaration.by}: {reason}\n"
        f"the controllers free the GPUs of pods that left it{more} once they have seen its agent silent for long enough"
    )


async def _write(
    node: str, reason: str, uid: str, kubeconfig: Path | None, context: str | None, *, forget: bool
) -> GoneMachine:
    async with await ApiClient.connect(kubeconfig, context, user_agent="atoll-node") as client:
        by = await _who(client)
        for attempt in range(ATTEMPTS_MAX):
            found = await _read_with(client)
            declaration = declaration_of(
                found, node, uid=uid, reason=reason, by=by, now=datetime.now(UTC), forget=forget
            )
            status = found.statuses.get(node)
            gone = [
                one.to_json() for one in with_declaration(status.spec.gone if status is not None else (), declaration)
            ]
            try:
                await _send(client, node, status, gone)
            except (AlreadyExists, Conflict, NotFound):
                if attempt == ATTEMPTS_MAX - 1:
                    raise
                continue
            return declaration
    raise AssertionError("the last attempt answers or raises")


async def _send(client: ApiClient, node: str, status: GpuNodeStatus | None, gone: list[dict[str, object]]) -> None:
    if status is None:
        body: dict[str, object] = {
            "apiVersion": names.API_VERSION,
            "kind": "GpuNodeStatus",
            "metadata": {"name": node},
            "spec": {"gone": gone},
        }
        await client.create(paths.gpunodestatuses(), body)
        return
    metadata = status.metadata
    body = patches.merge_patch(uid=metadata.uid, resource_version=metadata.resource_version, spec={"gone": gone})
    await client.patch(paths.gpunodestatuses(node), body)


async def _who(client: ApiClient) -> str:
    """Return our user name at the API server, which the policy checks."""
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    answer = orjson.loads(await client.create(SELF_REVIEWS, review))
    return str(answer["status"]["userInfo"]["username"])


async def _read(kubeconfig: Path | None, context: str | None) -> ClusterMachines:
    async with await ApiClient.connect(kubeconfig, context, user_agent="atoll-node") as client:
        return await _read_with(client, judges=True)


async def _read_with(client: ApiClient, *, judges: bool = False) -> ClusterMachines:
    """Read the machines; with `judges` also why reports do not count, which needs all pods."""
    nodes, statuses, beats, leases = await asyncio.gather(
        client.list(paths.nodes(), decode_node),
        client.list(paths.gpunodestatuses(), GpuNodeStatus.model_validate_json),
        client.list(paths.leases(names.HEARTBEAT_NAMESPACE), decode_lease),
        client.list(paths.leases(names.SYSTEM_NAMESPACE), decode_lease),
    )
    return ClusterMachines(
        {one.metadata.name: one for one in nodes.items},
        {one.metadata.name: one for one in statuses.items},
        {one.metadata.name: one for one in beats.items},
        tuple(_held(leases.items)),
        await _refusals(client, nodes.items, statuses.items, leases.items) if judges else {},
    )


async def _refusals(
    client: ApiClient, nodes: Sequence[Node], reports: Sequence[GpuNodeStatus], leases: Sequence[Lease]
) -> Mapping[str, str]:
    """Return why reports do not count, by node name; nothing, and say so, if the user may not list pods. Pods are read
    last: one that was bound meanwhile is known."""
    from atoll.explain.snapshot import ClusterSnapshot, ledger_of

    try:
        pods = await client.list(paths.pods(), decode_pod)
    except Forbidden as error:
        typer.echo(f"cannot tell which reports are refused: {sentence(error)}", err=True)
        return {}
    found = ClusterSnapshot(
        "", nodes=tuple(nodes), pods=tuple(pods.items), reports=tuple(reports), leases=tuple(leases)
    )
    ledger = ledger_of(found)
    unknown = _unknown_pods(reports, pods.items, ledger)
    if unknown:
        await asyncio.sleep(RENEWAL_SECONDS)
        renewed = await client.list(paths.gpunodestatuses(), GpuNodeStatus.model_validate_json)
        unknown &= _unknown_pods(renewed.items, pods.items, ledger)
    return {**ledger.uncounted, **{node: names.REJECT_UNKNOWN_POD for node, _ in unknown}}


def _unknown_pods(reports: Sequence[GpuNodeStatus], found: Iterable[Pod], ledger: Ledger) -> frozenset[tuple[str, str]]:
    """Return node and uid of pods that a kubelet runs and nobody knows. A pod that has just ended looks so until the
    agent's next report."""
    by_uid = {pod.metadata.uid: pod for pod in found}
    listed = {
        report.metadata.name: {entry.uid for entry in report.status.pods if entry.kubelet}
        for report in reports
        if report.status is not None
    }
    return frozenset(
        (report.metadata.name, uid)
        for report in reports
        for uid in unknown_pods(report, by_uid, ledger) & listed.get(report.metadata.name, set())
    )


def _held(leases: Iterable[Lease]) -> Iterable[tuple[str, str, bool]]:
    for lease in leases:
        if may_be_gpu_lease(lease):
            try:
                record = parse_lease(lease)
            except MalformedValue:
                continue
            yield record.node, record.node_uid, names.LEASE_IN_DOUBT in lease.metadata.annotations


def _refuse(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(STATUS_REFUSED)
