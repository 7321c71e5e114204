"""`atoll usecase templates|create|list|show|delete`: services that work together, deployed through the job service.

Exit status 1 if the service refuses or a use case that is waited for does not become healthy, 2 if the service does
not answer.
"""

import json
import time
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from atollctl.cluster_source import STATUS_WAITS
from atollctl.job_service import SERVER, Authority, Server, Token, asked, client_of, refuse
from atollctl.options import name_and_value
from atollctl.output import Output, OutputOption, TableOption, age_text, plain, show_json, show_line, show_table
from atollctl.service_client import ServiceClient

app = typer.Typer(no_args_is_help=True)

COLLECTION: Final = "usecases"
POLL_SECONDS: Final = 1.0
JSON: Final = {"Content-Type": "application/json"}
USECASES_MAX: Final = 200

UseCaseName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a deployed use case.", show_default=False)]


@app.command(name="templates")
def list_templates(
    server: Server = SERVER, token_file: Token = None, ca: Authority = None, output: TableOption = "table"
) -> None:
    """List the templates, and the parameters of each."""
    found = asked(_client(server, token_file, ca), "GET", "/templates").json()
    if output == "json":
        show_json(found)
        return
    rows = ((one["id"], _parameters(one["parameters"]), one["description"]) for one in found["items"])
    show_table(("TEMPLATE", "PARAMETERS", "DESCRIPTION"), rows)


@app.command(name="create")
def create_usecase(
    template: Annotated[str, typer.Argument(metavar="TEMPLATE", help="Id of a template.", show_default=False)],
    name: Annotated[str, typer.Option("--name", help="Name of the use case.", show_default=False)],
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of a parameter, as JSON or text; may be given again."),
    ] = None,
    project: Annotated[str, typer.Option("--project", help="Project that it belongs to.")] = "",
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is healthy.")] = False,
) -> None:
    """Deploy a use case from a template."""
    client = _client(server, token_file, ca)
    body = {"template_id": template, "name": name, "parameters": dict(name_and_value(one) for one in parameters or ())}
    body |= {"project_id": project} if project else {}
    made = asked(client, "POST", "/deploy", body=json.dumps(body).encode(), headers=JSON).json()
    show_line(f"usecase/{made['name']} {made['status']} ({made['deployment_id']})")
    while wait and made["status"] == "deploying":
        time.sleep(POLL_SECONDS)
        made = asked(client, "GET", f"/deployments/{made['deployment_id']}").json()
    if wait:
        show_line(
            f"usecase/{made['name']} {made['status']}" + (f" at {made['entrypoint']}" if made["entrypoint"] else "")
        )
        if made["status"] != "healthy":
            refuse(plain(made["message"]) or f"it is {made['status']}", STATUS_WAITS)


@app.command(name="list")
def list_usecases(
    server: Server = SERVER, token_file: Token = None, ca: Authority = None, output: TableOption = "table"
) -> None:
    """List deployed use cases."""
    found = asked(_client(server, token_file, ca), "GET", "/deployments", query={"page_size": USECASES_MAX}).json()
    if output == "json":
        show_json(found)
        return
    if not found["items"]:
        typer.echo("No use cases found.", err=True)
        return
    now = datetime.now(UTC)
    rows = (
        (
            one["name"],
            one["template_id"],
            one["tenant_id"],
            one["status"],
            one["entrypoint"] or "",
            age_text((now - datetime.fromisoformat(one["created_at"])).total_seconds()),
        )
        for one in found["items"]
    )
    show_table(("NAME", "TEMPLATE", "TENANT", "STATUS", "ENTRY POINT", "AGE"), rows)


@app.command(name="show")
def show_usecase(
    name: UseCaseName,
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show a use case and its components."""
    found = _usecase(_client(server, token_file, ca), name)
    if output is Output.JSON:
        show_json(found)
        return
    for label, value in (
        ("Status", found["status"]),
        ("Message", found["message"]),
        ("Template", found["template_id"]),
        ("Parameters", json.dumps(found["parameters"])),
        ("Entry point", found["entrypoint"] or ""),
    ):
        if value:
            show_line(f"{label + ':':<14}{plain(value)}")
    show_line("")
    rows = ((one["name"], one["status"], one["job_id"] or "", one["endpoint"] or "") for one in found["components"])
    show_table(("COMPONENT", "STATUS", "JOB", "ENDPOINT"), rows)


@app.command(name="delete")
def delete_usecase(name: UseCaseName, server: Server = SERVER, token_file: Token = None, ca: Authority = None) -> None:
    """Delete a use case: its jobs are cancelled, and it is gone once they have ended."""
    client = _client(server, token_file, ca)
    done = asked(client, "DELETE", f"/deployments/{_usecase(client, name)['deployment_id']}").json()
    show_line(f"usecase/{done['name']} {done['status']}")


def _client(server: str, token_file: Any, ca: Any) -> ServiceClient:  # noqa: ANN401 - paths, or none
    return client_of(server, token_file, ca, "", collection=COLLECTION)


def _usecase(client: ServiceClient, name: str) -> dict[str, Any]:
    items: list[dict[str, Any]] = asked(client, "GET", "/deployments", query={"name": name}).json()["items"]
    if not items:
        refuse(f"there is no use case {plain(name)}", STATUS_WAITS)
    return items[0]


def _parameters(schema: dict[str, Any]) -> str:
    """Return the names of parameters, those that must be given marked."""
    return ", ".join(f"{name}{'*' if name in schema['required'] else ''}" for name in schema["properties"])
