"""`atoll audit`: check on a live cluster that Atoll keeps its promises.

In: a kubeconfig. Out: findings on the terminal or as JSON, and exit status 1 when there is one. Read-only. Lists that
are taken one after another may disagree while pods come and go, so only what two audits in a row find is reported.
"""

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.consistency import Finding, audit
from atoll.cluster.objects import decode_lease, decode_pod
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import KubeError

PAUSE_SECONDS = 2.0
STATUS_FINDINGS = 1
STATUS_UNREACHABLE = 2


class Output(StrEnum):
    """How findings are printed."""

    TABLE = "table"
    JSON = "json"


def audit_cluster(
    kubeconfig: Annotated[Path | None, typer.Option(help="Kubeconfig; the usual one by default.")] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
    output: Annotated[Output, typer.Option("-o", "--output")] = Output.TABLE,
) -> None:
    """Check that no GPU is promised twice, none is leaked, and every allocation is what was promised."""
    try:
        findings = asyncio.run(find_twice(kubeconfig, context))
    except KubeError as error:
        typer.echo(f"cannot audit: {error}", err=True)
        raise typer.Exit(STATUS_UNREACHABLE) from error
    if output is Output.JSON:
        typer.echo(json.dumps([_as_dict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    raise typer.Exit(STATUS_FINDINGS if findings else 0)


async def find_twice(kubeconfig: Path | None, context: str | None = None) -> tuple[Finding, ...]:
    """Return what two audits in a row both find. Raises KubeError."""
    async with await ApiClient.connect(kubeconfig, context, user_agent="atoll-audit") as client:
        first = await _find(client)
        if not first:
            return ()
        await asyncio.sleep(PAUSE_SECONDS)
        second = set(await _find(client))
        return tuple(finding for finding in first if finding in second)


async def _find(client: ApiClient) -> tuple[Finding, ...]:
    reports, leases, pods = await asyncio.gather(
        client.list(paths.gpunodestatuses(), GpuNodeStatus.model_validate_json),
        client.list(paths.leases(names.SYSTEM_NAMESPACE), decode_lease),
        client.list(paths.pods(), decode_pod),
    )
    return audit(pods.items, leases.items, reports.items)


def _as_dict(finding: Finding) -> dict[str, object]:
    return {
        "promise": finding.promise,
        "problem": str(finding.problem),
        "subject": finding.subject,
        "detail": finding.detail,
    }


def _print(findings: tuple[Finding, ...]) -> None:
    console = Console()
    if not findings:
        console.print("All promises hold: no GPU held twice, no Lease leaked, every allocation as promised.")
        return
    table = Table("Promise", "Problem", "Object", "Detail")
    for finding in findings:
        table.add_row(str(finding.promise), str(finding.problem), finding.subject, finding.detail)
    console.print(table)
