"""`atoll gpu`: cordon single GPUs, uncordon them, declare them healthy.

Each command patches the spec of the node's GpuNodeStatus once; that spec belongs to administrators. The entry names the
card by uuid, so it stays with the card if device ids change. The object's version fences the patch, so two
administrators do not undo each other's entries.
"""

import asyncio
import getpass
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from atoll.api.node_status import Cordon, Device, GpuNodeStatus, GpuNodeStatusSpec, HealthRelease
from atoll.api.times import format_microtime, parse_microtime
from atoll.cluster.health import DeviceHealth, judge
from atoll.kube import patches, paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import Conflict, KubeError, NotFound
from atollctl.options import ContextName, Kubeconfig
from atollctl.output import Output, OutputOption, show_json, show_table
from atollctl.sentences import OPERATORS, sentence

ATTEMPTS_MAX = 5
STATUS_REFUSED = 2
CLOCKS_APART_MAX = timedelta(minutes=1)

app = typer.Typer(help="Cordon single GPUs and show their health.", no_args_is_help=True)

Target = Annotated[str, typer.Argument(metavar="NODE/ID", help="Node, and the GPU's id as in `atoll topo`.")]
Reason = Annotated[str, typer.Option(help="Reason, shown to later readers.")]

Change = Callable[[GpuNodeStatus, Device], GpuNodeStatusSpec]


class TargetMistake(Exception):
    """The text does not name a GPU of the cluster."""


class ClockMistake(Exception):
    """The clock of a node is ahead of ours."""


@app.command()
def cordon(target: Target, reason: Reason, kubeconfig: Kubeconfig = None, context: ContextName = None) -> None:
    """Keep new pods off one GPU; its current holder keeps it."""
    if not reason.strip():
        _refuse("--reason must say why; it is shown to whoever waits for the GPU")
    _change(target, kubeconfig, context, lambda status, device: cordoned(status.spec, device.uuid, reason, by=_who()))
    typer.echo(f"GPU {target} is cordoned: {reason}")


@app.command()
def uncordon(target: Target, kubeconfig: Kubeconfig = None, context: ContextName = None) -> None:
    """Allow new pods on one GPU again."""
    _change(target, kubeconfig, context, lambda status, device: uncordoned(status.spec, device.uuid))
    typer.echo(f"GPU {target} is no longer cordoned")


@app.command()
def release(target: Target, reason: Reason, kubeconfig: Kubeconfig = None, context: ContextName = None) -> None:
    """Declare a quarantined GPU healthy: its faults until now no longer count."""
    if not reason.strip():
        _refuse("--reason must say why the GPU is well again")

    def change(status: GpuNodeStatus, device: Device) -> GpuNodeStatusSpec:
        return released(status.spec, device.uuid, moment_of(status, now=datetime.now(UTC)), reason, by=_who())

    standing = _change(target, kubeconfig, context, change)
    rest = "" if standing.may_be_given_out else f"; it is still {standing.state}: {standing.reason}"
    typer.echo(f"GPU {target} is released: {reason}{rest}")


@app.command(name="list")
def list_gpus(kubeconfig: Kubeconfig = None, context: ContextName = None, output: OutputOption = Output.TEXT) -> None:
    """Show every GPU with its state and the reason."""
    try:
        statuses = asyncio.run(_statuses(kubeconfig, context))
    except KubeError as error:
        _refuse(f"cannot list GPUs: {sentence(error)}")
    rows = []
    for status in sorted(statuses, key=lambda one: one.metadata.name):
        standings = judge(status).standings
        for device in status.status.devices if status.status is not None else ():
            standing = standings[device.uuid]
            name = f"{status.metadata.name}/{device.id}"
            profile = f" {device.mig.profile}" if device.mig is not None and device.mig.profile else ""
            rows.append((name, device.model + profile, str(standing.state), standing.reason))
    if output is Output.JSON:
        show_json([dict(zip(("gpu", "model", "standing", "reason"), row, strict=True)) for row in rows])
    elif rows:
        show_table(("GPU", "MODEL", "STANDING", "REASON"), rows)
    else:
        typer.echo("no node reports a GPU: is Atoll's agent running on the machines that have some?")


def cordoned(spec: GpuNodeStatusSpec, uuid: str, reason: str, *, by: str) -> GpuNodeStatusSpec:
    """The spec with the card cordoned, with this reason."""
    entry = Cordon(uuid=uuid, reason=reason[:256], by=by[:256])
    return spec.model_copy(update={"cordons": (*uncordoned(spec, uuid).cordons, entry)})


def uncordoned(spec: GpuNodeStatusSpec, uuid: str) -> GpuNodeStatusSpec:
    """The spec without a cordon of the card."""
    return spec.model_copy(update={"cordons": tuple(one for one in spec.cordons if one.uuid != uuid)})


def released(spec: GpuNodeStatusSpec, uuid: str, time: str, reason: str, *, by: str) -> GpuNodeStatusSpec:
    """The spec in which the card's incidents up to `time` no longer count."""
    others = tuple(one for one in spec.releases if one.uuid != uuid)
    entry = HealthRelease(uuid=uuid, time=time, reason=reason[:256], by=by[:256])
    return spec.model_copy(update={"releases": (*others, entry)})


def moment_of(status: GpuNodeStatus, *, now: datetime) -> str:
    """The time of a report by the node's clock, which its incidents use too: a release covers the incidents in the
    report and none after it. Raises ClockMistake."""
    told = status.status.observed_time if status.status is not None else None
    if not told:
        return format_microtime(now)
    ahead = parse_microtime(told) - now
    if ahead > CLOCKS_APART_MAX:
        raise ClockMistake(f"the clock of node {status.metadata.name} is {ahead} ahead of ours; set it right first")
    return told


def split_target(text: str) -> tuple[str, int]:
    """Node and device id of NODE/ID. Raises TargetMistake."""
    node, slash, number = text.rpartition("/")
    if not slash or not node or not (number.isascii() and number.isdigit()):
        raise TargetMistake(f"{text!r} names no GPU; write NODE/ID, such as gpu-node-1/3")
    return node, int(number)


def device_of(status: GpuNodeStatus, device_id: int) -> Device:
    """The device with an id. Raises TargetMistake."""
    devices = status.status.devices if status.status is not None else ()
    found = next((device for device in devices if device.id == device_id), None)
    if found is None:
        known = ", ".join(str(device.id) for device in devices) or "none"
        raise TargetMistake(f"node {status.metadata.name} has no GPU {device_id}; it has {known}")
    return found


def _change(target: str, kubeconfig: Path | None, context: str | None, change: Change) -> DeviceHealth:
    try:
        return asyncio.run(_change_spec(target, kubeconfig, context, change))
    except (TargetMistake, ClockMistake, KubeError) as error:
        _refuse(f"cannot change GPU {target}: {sentence(error, roles=OPERATORS)}")


async def _change_spec(target: str, kubeconfig: Path | None, context: str | None, change: Change) -> DeviceHealth:
    """Change the entry, and return the GPU's health afterwards."""
    node, device_id = split_target(target)
    async with await ApiClient.connect(kubeconfig, context, user_agent="atoll-gpu") as client:
        for attempt in range(ATTEMPTS_MAX):
            try:
                status = GpuNodeStatus.model_validate_json(await client.get(paths.gpunodestatuses(node)))
            except NotFound as error:
                raise TargetMistake(f"no agent reports a node {node}") from error
            device = device_of(status, device_id)
            spec = change(status, device).to_json()
            patch = {"cordons": spec.get("cordons", []), "releases": spec.get("releases", [])}
            body = patches.merge_patch(
                uid=status.metadata.uid, resource_version=status.metadata.resource_version, spec=patch
            )
            try:
                answer = await client.patch(paths.gpunodestatuses(node), body)
                return judge(GpuNodeStatus.model_validate_json(answer)).standings[device.uuid]
            except Conflict:
                if attempt == ATTEMPTS_MAX - 1:
                    raise
    raise AssertionError("the last attempt answers or raises")


async def _statuses(kubeconfig: Path | None, context: str | None) -> tuple[GpuNodeStatus, ...]:
    async with await ApiClient.connect(kubeconfig, context, user_agent="atoll-gpu") as client:
        return tuple((await client.list(paths.gpunodestatuses(), GpuNodeStatus.model_validate_json)).items)


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def _refuse(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(STATUS_REFUSED)
