"""`atoll usage`: GPU-hours and cost by tenant, project, user, model or job, as a table, JSON or CSV.

From the job service, which records who holds which GPU. Exit status 1 if it refuses, 2 if it cannot be reached.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal

import typer

from atollctl.job_service import CLUSTER, SERVER, Authority, ClusterName, Server, Token, asked, client_of
from atollctl.output import show_json, show_line, show_table

USAGE: Final = "usage"
HOURS: Final = ("used", "idle", "reserved", "free", "stranded", "unavailable", "unseen", "total")


def show_usage(
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    cluster: ClusterName = CLUSTER,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", help="tenant (default), project, user, model, job, namespace, node; may be given again."),
    ] = None,
    days: Annotated[float, typer.Option("--days", min=0.001, max=366, help="The last days, up to now.")] = 30,
    output: Annotated[
        Literal["table", "json", "csv"], typer.Option("-o", "--output", help="table, json or csv.")
    ] = "table",
) -> None:
    """Show GPU-hours and cost. Operators see every GPU, idle and free ones too; others see their tenants."""
    client = client_of(server, token_file, ca, cluster, collection=USAGE)
    now = datetime.now(UTC)
    keys = by or ["tenant"]
    start = (now - timedelta(days=days)).isoformat()
    query = {"by": keys, "start": start, "end": now.isoformat()}
    if output == "csv":
        for line in asked(client, "GET", ".csv", query=query).body.decode().splitlines():
            show_line(line)
        return
    found = asked(client, "GET", "", query=query).json()
    if output == "json":
        show_json(found)
        return
    if not found["rows"]:
        typer.echo("No GPU time was recorded.", err=True)
        return
    shown = [name for name in HOURS if found["sum"]["gpu_hours"][name] is not None]
    rows = [(*(one["group"][key] or "-" for key in keys), *_cells(one, shown)) for one in found["rows"]]
    total = ("TOTAL", *("" for _ in keys[1:]), *_cells(found["sum"], shown))
    show_table((*map(str.upper, keys), *(f"{name.upper()} GPU-H" for name in shown), "COST USD"), [*rows, total])


def _cells(row: Mapping[str, Any], shown: list[str]) -> tuple[str, ...]:
    hours = row["gpu_hours"]
    return (*(f"{hours[name]:.2f}" for name in shown), f"{row['cost_usd']:.2f}")
