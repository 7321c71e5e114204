"""`atoll pipeline apply|run|list|show|cancel|rerun|trigger`: pipelines, through the job service.

Output follows kubectl. A run is named as PIPELINE or PIPELINE/NUMBER; without a number it is the newest. Exit status 1
if the service refuses or a run that is waited for does not succeed, 2 if the service cannot be reached.
"""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final
from uuid import uuid4

import typer

from atollctl.cluster_source import STATUS_WAITS
from atollctl.job_service import (
    SERVER,
    Authority,
    Server,
    Token,
    asked,
    client_of,
    read_file,
    refuse,
)
from atollctl.options import name_and_value
from atollctl.output import Output, OutputOption, TableOption, age_text, plain, show_json, show_line, show_table
from atollctl.service_client import ServiceClient

app = typer.Typer(no_args_is_help=True)

COLLECTION: Final = "pipelines"
POLL_SECONDS: Final = 1.0
ENDED: Final = ("succeeded", "failed", "cancelled")
JSON: Final = {"Content-Type": "application/json"}
RUNS_MAX: Final = 200

PipelineName = Annotated[str, typer.Argument(metavar="PIPELINE", help="Name of a pipeline.", show_default=False)]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE[/NUMBER]", help="A run of a pipeline; the newest without a number.", show_default=False
    ),
]


@app.command(name="apply")
def apply_pipeline(
    file: Annotated[Path, typer.Option("-f", "--filename", help="A pipeline, as YAML or JSON.")],
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
) -> None:
    """Create a pipeline, or change the one of its name."""
    client = _client(server, token_file, ca)
    headers = {"Content-Type": "application/yaml"}
    answer = asked(client, "POST", "", body=read_file(file, what="pipeline"), headers=headers, file=file)
    made = answer.json()
    show_line(f"pipeline/{made['name']} {'created' if answer.status == 201 else 'configured'} ({made['id']})")
    for one in made["pipeline"].get("notes", ()):
        typer.echo(f"note: {plain(one)}", err=True)


@app.command(name="run")
def run_pipeline(
    pipeline: PipelineName,
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="NAME=VALUE of an input, as JSON or text; may be given again."),
    ] = None,
    key: Annotated[str, typer.Option("--key", help="Idempotency key: repeating it begins no second run.")] = "",
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the run has ended.")] = False,
) -> None:
    """Begin a run."""
    client = _client(server, token_file, ca)
    found = _pipeline(client, pipeline)
    body = json.dumps({"inputs": dict(name_and_value(one) for one in inputs or ())}).encode()
    headers = JSON | {"Idempotency-Key": key or str(uuid4())}
    begun = asked(client, "POST", f"/{found['id']}/execute", body=body, headers=headers).json()
    show_line(f"run/{pipeline}/{begun['number']} {begun['status']}")
    if wait:
        _wait(client, found, begun)


@app.command(name="list")
def list_pipelines(
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    output: TableOption = "table",
) -> None:
    """List pipelines."""
    found = asked(_client(server, token_file, ca), "GET", "", query={"page_size": RUNS_MAX}).json()
    if output == "json":
        show_json(found)
        return
    if not found["items"]:
        typer.echo("No pipelines found.", err=True)
        return
    now = datetime.now(UTC)
    rows = (
        (
            one["name"],
            one["tenant_id"],
            str(len(one["pipeline"]["steps"])),
            str(one["runs_begun"]),
            _age(one["created_at"], now),
        )
        for one in found["items"]
    )
    show_table(("NAME", "TENANT", "STEPS", "RUNS", "AGE"), rows)


@app.command(name="show")
def show_run(
    run: RunName,
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show a run and its steps."""
    client = _client(server, token_file, ca)
    _, found = _run(client, run)
    if output is Output.JSON:
        show_json(found)
        return
    for label, value in (
        ("Run", str(found["number"])),
        ("Status", found["status"]),
        ("Message", found["message"]),
        ("Cause", found["cause"]),
        ("Inputs", json.dumps(found["inputs"]) if found["inputs"] else ""),
        *(("Note", one) for one in found["notes"]),
        ("Started", found["started_at"] or ""),
        ("Ended", found["completed_at"] or ""),
    ):
        if value:
            show_line(f"{label + ':':<14}{plain(value)}")
    show_line("")
    rows = (
        (
            one["name"],
            one["status"],
            str(one["attempt"]),
            age_text(one["duration_seconds"]) if one["duration_seconds"] is not None else "",
            one["job_id"] or "",
            one["error"] or one["skipped_because"] or one["output"].get("message", ""),
        )
        for one in found["steps"]
    )
    show_table(("STEP", "STATUS", "TRY", "TOOK", "JOB", "MESSAGE"), rows)


@app.command(name="cancel")
def cancel_run(run: RunName, server: Server = SERVER, token_file: Token = None, ca: Authority = None) -> None:
    """Cancel a run and the jobs of its steps."""
    client = _client(server, token_file, ca)
    owner, found = _run(client, run)
    done = asked(client, "DELETE", f"/{owner['id']}/executions/{found['execution_id']}").json()
    told = done["status"] if done["status"] in ENDED else "is being cancelled"
    show_line(f"run/{owner['name']}/{done['number']} {told}")


@app.command(name="rerun")
def rerun(run: RunName, server: Server = SERVER, token_file: Token = None, ca: Authority = None) -> None:
    """Begin a run that keeps what succeeded in a failed or cancelled one."""
    client = _client(server, token_file, ca)
    owner, found = _run(client, run)
    begun = asked(client, "POST", f"/{owner['id']}/executions/{found['execution_id']}/rerun").json()
    show_line(f"run/{owner['name']}/{begun['number']} {begun['status']}")


@app.command(name="trigger")
def trigger_pipeline(
    pipeline: PipelineName,
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    file: Annotated[Path | None, typer.Option("-f", "--filename", help="A trigger to create, as JSON.")] = None,
    cron: Annotated[str, typer.Option("--cron", help="Create a trigger of type cron, such as '0 2 * * *'.")] = "",
    timezone: Annotated[str, typer.Option("--timezone", help="Time zone of --cron.")] = "UTC",
    enable: Annotated[str, typer.Option("--enable", metavar="ID", help="Enable a trigger.")] = "",
    disable: Annotated[str, typer.Option("--disable", metavar="ID", help="Disable a trigger.")] = "",
    delete: Annotated[str, typer.Option("--delete", metavar="ID", help="Delete a trigger.")] = "",
) -> None:
    """List the triggers of a pipeline; create, enable, disable or delete one."""
    if sum(map(bool, (file, cron, enable, disable, delete))) > 1:
        raise typer.BadParameter("give one of -f, --cron, --enable, --disable and --delete")
    client = _client(server, token_file, ca)
    path = f"/{_pipeline(client, pipeline)['id']}/triggers"
    if delete:
        asked(client, "DELETE", f"{path}/{delete}")
        show_line(f"trigger/{delete} deleted")
    elif enable or disable:
        body = json.dumps({"enabled": bool(enable)}).encode()
        asked(client, "PATCH", f"{path}/{enable or disable}", body=body, headers=JSON)
        show_line(f"trigger/{enable or disable} {'enabled' if enable else 'disabled'}")
    elif file is not None or cron:
        given = {"trigger_type": "cron", "cron_expression": cron, "timezone": timezone}
        body = json.dumps(given).encode() if file is None else read_file(file, what="trigger")
        _show_made(asked(client, "POST", path, body=body, headers=JSON, file=file).json())
    else:
        _show_triggers(asked(client, "GET", path, query={"page_size": RUNS_MAX}).json())


def _show_made(made: Mapping[str, Any]) -> None:
    show_line(f"trigger/{made['id']} created" + (f", next run {made['next_run']}" if made["next_run"] else ""))
    if made["webhook_secret"]:
        show_line(f"deliver to {made['url']}, signed with {made['webhook_secret']} (shown only now)")


def _show_triggers(found: Mapping[str, Any]) -> None:
    if not found["items"]:
        typer.echo("No triggers found.", err=True)
        return
    rows = (
        (one["id"], one["trigger_type"], str(one["enabled"]).lower(), one["next_run"] or "", one["last_message"])
        for one in found["items"]
    )
    show_table(("ID", "TYPE", "ENABLED", "NEXT RUN", "MESSAGE"), rows)
    if found["total"] > len(found["items"]):
        typer.echo(f"{found['total'] - len(found['items'])} more are not shown", err=True)


def _client(server: str, token_file: Path | None, ca: Path | None) -> ServiceClient:
    return client_of(server, token_file, ca, "", collection=COLLECTION)


def _pipeline(client: ServiceClient, name: str) -> dict[str, Any]:
    items: list[dict[str, Any]] = asked(client, "GET", "", query={"name": name}).json()["items"]
    if not items:
        refuse(f"there is no pipeline {plain(name)}", STATUS_WAITS)
    return items[0]


def _run(client: ServiceClient, wanted: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pipeline and a run of it."""
    name, _, number = wanted.partition("/")
    owner = _pipeline(client, name)
    path = f"/{owner['id']}/executions"
    items = asked(client, "GET", path, query={"page_size": RUNS_MAX}).json()["items"]
    chosen = next((one for one in items if not number or str(one["number"]) == number), None)
    if chosen is None:
        refuse(f"there is no run {plain(wanted)}", STATUS_WAITS)
    return owner, asked(client, "GET", f"{path}/{chosen['execution_id']}").json()


def _wait(client: ServiceClient, owner: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Wait for the end of a run. Exits with status 1 unless it succeeds."""
    while found["status"] not in ENDED:
        time.sleep(POLL_SECONDS)
        found = asked(client, "GET", f"/{owner['id']}/executions/{found['execution_id']}").json()
    show_line(f"run/{owner['name']}/{found['number']} {found['status']}")
    if found["status"] != "succeeded":
        refuse(plain(found["message"]), STATUS_WAITS)


def _age(moment: str, now: datetime) -> str:
    return age_text((now - datetime.fromisoformat(moment)).total_seconds())
