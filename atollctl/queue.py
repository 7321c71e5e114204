"""`atoll queue apply|list|show`: tenants' queues and their quotas, through the job service.

Output follows kubectl. Exit status 1 if the service refuses, 2 if it cannot be reached.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from atollctl.job_service import (
    CLUSTER,
    SERVER,
    Authority,
    ClusterName,
    Server,
    Token,
    asked,
    client_of,
    read_file,
)
from atollctl.output import Output, OutputOption, TableOption, show_json, show_line, show_table

app = typer.Typer(no_args_is_help=True)
QUEUES: Final = "queues"
GPU: Final = "gpu.scheduling/"


@app.command(name="apply")
def apply_queues(
    file: Annotated[Path, typer.Option("-f", "--filename", help="The file of queues, as YAML or JSON.")],
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    cluster: ClusterName = CLUSTER,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
) -> None:
    """Apply the file of a cluster's queues: flavors, cohorts, tenants, namespaces, queues and priority classes."""
    client = client_of(server, token_file, ca, cluster, collection=QUEUES)
    headers = {"Content-Type": "application/yaml"}
    query = {"dry_run": str(dry_run).lower()}
    body = read_file(file, what="file of queues")
    done = asked(client, "PUT", "", query=query, body=body, headers=headers, file=file).json()
    for change in done["changes"]:
        verb, what = change.split(" ", 1)
        show_line(f"{what}: {_past(verb)}{' (dry run)' if dry_run else ''}")
    if not done["changes"]:
        show_line("nothing to change")
    if not done["has_kueue"]:
        typer.echo("The cluster has no Kueue: jobs start at once, without quota.", err=True)
    for told in (*done["obstacles"], *done["hints"]):
        typer.echo(told, err=True)
    raise typer.Exit(1 if done["obstacles"] else 0)


def _past(verb: str) -> str:
    return {"create": "is created", "change": "is changed", "remove": "is removed"}.get(verb, verb)


@app.command(name="list")
def list_queues(
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    cluster: ClusterName = CLUSTER,
    output: TableOption = "table",
) -> None:
    """List queues with the GPUs of their quota."""
    client = client_of(server, token_file, ca, cluster, collection=QUEUES)
    found = asked(client, "GET", "", query={"page_size": 1000}).json()
    if output == "json":
        show_json(found)
        return
    for told in (found["message"], *found["problems"]):
        if told:
            typer.echo(told, err=True)
    if not found["items"]:
        typer.echo("No queues found.", err=True)
        return
    columns = ("NAME", "TENANT", "COHORT", "PENDING", "ADMITTED", "GPUS", "BORROWED", "STATE")
    show_table(columns, (_row(one) for one in found["items"]))


@app.command(name="show")
def show_queue(
    name: Annotated[str, typer.Argument(metavar="QUEUE", help="Name of a queue.", show_default=False)],
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    cluster: ClusterName = CLUSTER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show a queue, its quotas and what is used."""
    client = client_of(server, token_file, ca, cluster, collection=QUEUES)
    one = asked(client, "GET", f"/{quote(name, safe='')}").json()
    if output is Output.JSON:
        show_json(one)
        return
    for label, value in _facts(one):
        show_line(f"{label + ':':<12}{value}")
    show_line("")
    rows = (
        (
            amount["flavor"],
            amount["resource"],
            amount["nominal"],
            amount["used"],
            amount["borrowed"],
            amount["borrow_limit"] or "",
            amount["lend_limit"] or "",
        )
        for amount in one["amounts"]
    )
    show_table(("FLAVOR", "RESOURCE", "NOMINAL", "USED", "BORROWED", "BORROW LIMIT", "LEND LIMIT"), rows)


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    gpus = [amount for amount in one["amounts"] if amount["resource"].startswith(GPU)]
    used = f"{_sum(gpus, 'used')}/{_sum(gpus, 'nominal')}"
    counts = (str(one["pending"]), str(one["admitted"]))
    return (one["name"], one["tenant"], one["cohort"] or "", *counts, used, str(_sum(gpus, "borrowed")), _state(one))


def _sum(amounts: Sequence[Mapping[str, Any]], field: str) -> int:
    return sum(int(one[field]) for one in amounts if one[field].isdigit())


def _state(one: Mapping[str, Any]) -> str:
    if one["stop"]:
        return f"stopped ({one['stop']})"
    return "active" if one["is_active"] else "not active" if one["is_active"] is False else "unknown"


def _facts(one: Mapping[str, Any]) -> list[tuple[str, str]]:
    share = one["weighted_share"]
    rows = [
        ("Name", one["name"]),
        ("Tenant", one["tenant"]),
        ("Namespaces", ", ".join(one["namespaces"])),
        ("Cohort", one["cohort"] or ""),
        ("Critical", "borrows nothing, is never preempted" if one["critical"] else ""),
        ("State", _state(one)),
        ("Message", one["message"]),
        ("Jobs", f"{one['admitted']} admitted, {one['pending']} pending"),
        ("Share", f"{share} per mille" if share is not None else ""),
    ]
    return [(label, value) for label, value in rows if value]
