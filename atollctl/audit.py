"""`atoll audit`: checks on a live cluster that Atoll keeps its promises.

Prints findings with evidence and next step, as text or JSON; exit status 1 when there is one. Read-only unless
`--repair` is given. Lists taken one after another can disagree while pods come and go, so a finding is reported only
when two audits in a row have it.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.api.reservations import GpuReservation
from atoll.api.times import format_microtime
from atoll.cluster.audit_remedies import AuditRepair, remedy
from atoll.cluster.consistency import Finding, audit
from atoll.cluster.ledger_dump import compare
from atoll.cluster.objects import decode_lease, decode_pod
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import KubeError
from atollctl.audit_repair import CONTROLLERS, ExtenderAddress, RepairOutcome, read_memory, repair
from atollctl.options import ContextName, Kubeconfig
from atollctl.output import TableOption
from atollctl.sentences import sentence

PAUSE_SECONDS = 2.0
OVERDUE_SECONDS = 60.0
"""The controllers take back expired reservations within seconds; the rest allows for clock differences."""
STATUS_FINDINGS = 1
STATUS_UNREACHABLE = 2
WIDTH_WITHOUT_TERMINAL = 240
"""Width for logs and pipes, wide enough not to cut findings."""
TOKEN_VARIABLE = "ATOLL_EXTENDER_TOKEN"  # noqa: S105 - the name of a variable


def audit_cluster(
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    output: TableOption = "table",
    *,
    extender: Annotated[
        str, typer.Option(help=f"Address of an extender to compare as well; token in ${TOKEN_VARIABLE}.")
    ] = "",
    extender_ca: Annotated[Path | None, typer.Option(help="CA of that extender's certificate.")] = None,
    do_repair: Annotated[
        bool,
        typer.Option("--repair", help=f"Carry out the proposals, as {CONTROLLERS}; needs the right to impersonate."),
    ] = False,
) -> None:
    """Check that no GPU is promised twice or leaked, and every allocation is as promised."""
    address = ExtenderAddress(extender, os.environ.get(TOKEN_VARIABLE, ""), extender_ca) if extender else None
    try:
        findings = asyncio.run(find_twice(kubeconfig, context, extender=address))
        outcomes = asyncio.run(repair_all(findings, kubeconfig, context)) if do_repair else {}
    except (KubeError, OSError, ValueError, msgspec.MsgspecError) as error:
        typer.echo(f"cannot audit: {sentence(error)}", err=True)
        raise typer.Exit(STATUS_UNREACHABLE) from error
    if output == "json":
        typer.echo(json.dumps([as_dict(finding, outcomes.get(finding)) for finding in findings], indent=2))
    else:
        print_findings(findings, outcomes, Console())
    left = [finding for finding in findings if finding not in outcomes or not outcomes[finding].is_done]
    raise typer.Exit(STATUS_FINDINGS if left else 0)


async def find_twice(
    kubeconfig: Path | None, context: str | None = None, *, extender: ExtenderAddress | None = None
) -> tuple[Finding, ...]:
    """Return findings that two audits in a row have. Raises KubeError, and OSError if the extender does not answer."""
    async with await ApiClient.connect(kubeconfig, context, user_agent="atoll-audit") as client:
        first = await _find(client, extender)
        if not first:
            return ()
        await asyncio.sleep(PAUSE_SECONDS)
        second = set(await _find(client, extender))
        return tuple(finding for finding in first if finding in second)


async def repair_all(
    findings: Sequence[Finding], kubeconfig: Path | None, context: str | None = None
) -> dict[Finding, RepairOutcome]:
    """Repair one after another. Raises KubeError if the API server cannot be reached."""
    connect = ApiClient.connect(kubeconfig, context, user_agent="atoll-audit", impersonate=CONTROLLERS)
    async with await connect as client:
        return {finding: await repair(client, finding) for finding in findings}


async def _find(client: ApiClient, extender: ExtenderAddress | None) -> tuple[Finding, ...]:
    reports, leases, pods, reservations = await asyncio.gather(
        client.list(paths.gpunodestatuses(), GpuNodeStatus.model_validate_json),
        client.list(paths.leases(names.SYSTEM_NAMESPACE), decode_lease),
        client.list(paths.pods(), decode_pod),
        client.list(paths.gpureservations(), GpuReservation.model_validate_json),
    )
    overdue = format_microtime(datetime.now(UTC) - timedelta(seconds=OVERDUE_SECONDS))
    found = audit(pods.items, leases.items, reports.items, now=overdue, reservations=reservations.items)
    if extender is None:
        return found
    return tuple(sorted({*found, *compare(await read_memory(extender), pods.items, leases.items)}))


def as_dict(finding: Finding, outcome: RepairOutcome | None = None) -> dict[str, object]:
    """Return a finding for the JSON output; `problem` is its name for programs."""
    proposed = remedy(finding)
    return {
        "promise": finding.promise,
        "problem": finding.problem.name,
        "text": str(finding.problem),
        "subject": finding.subject,
        "detail": finding.detail,
        "nextStep": proposed.next_step,
        "repair": str(proposed.repair),
        **({} if outcome is None else {"repaired": outcome.is_done, "outcome": outcome.text}),
    }


def print_findings(findings: Sequence[Finding], outcomes: dict[Finding, RepairOutcome], console: Console) -> None:
    """Print a table; words are wrapped, never cut."""
    if not findings:
        text = "All promises hold: no GPU held twice, no Lease leaked, every allocation as promised."
        console.print(text, soft_wrap=True)
        return
    table = Table(show_lines=True)
    for title in ("Promise", "Problem", "Object", "Evidence", "Next step", *(("Repair",) if outcomes else ())):
        table.add_column(title, overflow="fold")
    for finding in findings:
        outcome = outcomes.get(finding)
        told = (outcome.text,) if outcome is not None else ()
        table.add_row(
            str(finding.promise), str(finding.problem), finding.subject, finding.detail, _next(finding), *told
        )
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDTH_WITHOUT_TERMINAL)
    console.print(table)


def _next(finding: Finding) -> str:
    proposed = remedy(finding)
    return (
        f"{proposed.next_step}; --repair: {proposed.repair}"
        if proposed.repair is not AuditRepair.NONE
        else proposed.next_step
    )
