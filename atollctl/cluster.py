"""`atoll cluster register|list|show|drain|remove`: the clusters of the job service.

Output follows kubectl. Exit status 1 if the service refuses, 2 if it cannot be reached.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from atollctl.job_service import SERVER, Authority, Server, Token, asked, client_of
from atollctl.output import Output, OutputOption, TableOption, show_json, show_line, show_table
from atollctl.service_client import ServiceClient

app = typer.Typer(no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="CLUSTER", help="Name of the cluster.", show_default=False)]


@app.command(name="register")
def register_cluster(
    name: Name,
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    file: Annotated[str, typer.Option("--file", help="Name of a kubeconfig in the service's kubeconfig_folder.")] = "",
    secret: Annotated[
        str,
        typer.Option("--secret", help="NAMESPACE/NAME/KEY of a Secret with one, in the service's own cluster."),
    ] = "",
    region: Annotated[str, typer.Option("--region", help="Region, such as eu-west-1.")] = "",
    tenants: Annotated[
        list[str] | None, typer.Option("--tenant", help="Only for this tenant; may be given again. Default: all.")
    ] = None,
    prices: Annotated[
        list[str] | None, typer.Option("--price", help="GPUTYPE=USD per hour, or cpu=USD; may be given again.")
    ] = None,
    latency_ms: Annotated[float, typer.Option("--latency-ms", min=0, help="Latency to users, milliseconds.")] = 0.0,
) -> None:
    """Register a cluster, or change what the service knows about it."""
    if file and secret:
        raise typer.BadParameter("give --file or --secret, one of both")
    reference = f"file:{file}" if file else f"secret:{secret}" if secret else ""
    body = {
        "kubeconfig": reference,
        "region": region,
        "tenants": tenants or [],
        "prices": dict(_price(text) for text in prices or ()),
        "latency_ms": latency_ms,
    }
    headers = {"Content-Type": "application/json"}
    asked(_client(server, token_file, ca, name), "PUT", "", body=json.dumps(body).encode(), headers=headers)
    show_line(f"cluster/{name} registered")


def _price(text: str) -> tuple[str, float]:
    kind, _, amount = text.partition("=")
    try:
        return kind, float(amount)
    except ValueError:
        raise typer.BadParameter(f"--price {text}: write GPUTYPE=USD, such as nvidia-h100=2.50") from None


@app.command(name="list")
def list_clusters(
    server: Server = SERVER, token_file: Token = None, ca: Authority = None, output: TableOption = "table"
) -> None:
    """List clusters with their health and free GPUs."""
    found = asked(_client(server, token_file, ca, ""), "GET", "").json()
    if output == "json":
        show_json(found)
        return
    columns = ("NAME", "STATE", "HEALTH", "REGION", "GPUS FREE", "JOBS", "MESSAGE")
    show_table(columns, (_row(one) for one in found["items"]))


@app.command(name="show")
def show_cluster(
    name: Name,
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show a cluster: its terms, its health, and its GPUs by type and free island."""
    one = asked(_client(server, token_file, ca, name), "GET", "").json()
    if output is Output.JSON:
        show_json(one)
        return
    for label, value in _facts(one):
        show_line(f"{label + ':':<12}{value}")
    show_line("")
    rows = ((gpus["gpu_type"], str(gpus["total"]), str(gpus["free"]), _islands(gpus)) for gpus in one["capacity"])
    show_table(("GPU TYPE", "TOTAL", "FREE", "ISLANDS BY FREE GPUS"), rows)


@app.command(name="drain")
def drain_cluster(
    name: Name,
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Let the cluster take jobs again.")] = False,
) -> None:
    """Let a cluster take no new jobs. Services, trainings and waiting jobs move; batches that run may end there."""
    asked(_client(server, token_file, ca, name), "POST", "/activate" if undo else "/drain")
    show_line(f"cluster/{name} {'takes jobs again' if undo else 'is draining'}")


@app.command(name="remove")
def remove_cluster(
    name: Name,
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Even if it has active jobs: they fail.")] = False,
) -> None:
    """Remove a drained cluster."""
    query = {"force": str(force).lower()}
    done = asked(_client(server, token_file, ca, name), "DELETE", "", query=query).json()
    failed = f"; {done['jobs_failed']} jobs failed" if done["jobs_failed"] else ""
    show_line(f"cluster/{name} removed{failed}")


def _client(server: str, token_file: Any, ca: Any, name: str) -> ServiceClient:  # noqa: ANN401 - paths or None
    return client_of(server, token_file, ca, name, collection="")


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    gpus = ", ".join(f"{gpus['gpu_type']} {gpus['free']}/{gpus['total']}" for gpus in one["capacity"])
    jobs = str(sum(one["jobs"].values())) if one["jobs"] is not None else ""
    return one["name"], one["state"], _health(one), one["region"], gpus, jobs, one["message"]


def _health(one: Mapping[str, Any]) -> str:
    if one["checked_at"] is None:
        return "unknown"
    return "healthy" if one["is_healthy"] else "unreachable"


def _islands(gpus: Mapping[str, Any]) -> str:
    sizes = sorted(gpus["islands"].items(), key=lambda item: -int(item[0]))
    return ", ".join(f"{count} x {size}" for size, count in sizes)


def _facts(one: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("Name", one["name"]),
        ("State", one["state"]),
        ("Health", _health(one)),
        ("Message", one["message"]),
        ("Kubeconfig", one["kubeconfig"] or ""),
        ("Region", one["region"]),
        ("Tenants", ", ".join(one["tenants"])),
        ("Prices", ", ".join(f"{kind} {price:g} USD/h" for kind, price in sorted(one["prices"].items()))),
        ("Latency", f"{one['latency_ms']:g} ms" if one["latency_ms"] else ""),
        ("Jobs", ", ".join(f"{count} {state}" for state, count in (one["jobs"] or {}).items())),
    ]
    return [(label, value) for label, value in rows if value]
