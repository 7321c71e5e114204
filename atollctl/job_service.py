"""`atoll job submit|list|show|cancel|retry|pause|resume|exec|logs`: the client of the job service.

Output follows kubectl. A name means the newest job of that name. Exit status 1 if the service refuses, 2 if it cannot
be reached.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn
from uuid import UUID, uuid4

import typer

from atollctl.cluster_source import STATUS_UNREACHABLE, STATUS_WAITS
from atollctl.output import Output, OutputOption, TableOption, age_text, plain, show_json, show_line, show_table
from atollctl.service_client import ServiceAnswer, ServiceClient, ServiceUnreachable
from atollctl.terminal import TerminalRefused, run_at_terminal

POLL_SECONDS: Final = 1.0
ENDED: Final = ("succeeded", "failed", "cancelled")
FILE_BYTES_MAX: Final = 1024 * 1024
MESSAGE_WIDTH: Final = 60
EXEC_SECONDS: Final = 20
"""Less than the client waits for an answer."""

Server = Annotated[str, typer.Option("--server", envvar="ATOLL_JOBS_SERVER", help="URL of the job service.")]
Token = Annotated[
    Path | None, typer.Option("--token-file", envvar="ATOLL_JOBS_TOKEN_FILE", help="File with the token to send.")
]
Authority = Annotated[
    Path | None, typer.Option("--ca", envvar="ATOLL_JOBS_CA", help="PEM file of the CA of the service's certificate.")
]
ClusterName = Annotated[
    str,
    typer.Option("--cluster", envvar="ATOLL_JOBS_CLUSTER", help="Name of a cluster; auto lets the service choose."),
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name or id of a job.", show_default=False)]
SERVER: Final = "http://127.0.0.1:8090"
CLUSTER: Final = "local"


def submit_jobs(
    files: Annotated[list[Path], typer.Option("-f", "--filename", help="A job, as YAML or JSON; may be given again.")],
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    cluster: ClusterName = CLUSTER,
    key: Annotated[str, typer.Option("--key", help="Idempotency key: repeating it creates no second job.")] = "",
) -> None:
    """Submit jobs to the job service."""
    if key and len(files) > 1:
        raise typer.BadParameter("--key works with one job only: submit the jobs one by one")
    client = client_of(server, token_file, ca, cluster)
    for file in files:
        headers = {"Idempotency-Key": key or str(uuid4()), "Content-Type": "application/yaml"}
        answer = asked(client, "POST", "", body=read_file(file), headers=headers, file=file)
        made = answer.json()
        show_line(f"job/{made['name']} {'created' if answer.status == 201 else 'unchanged'} ({made['id']})")


def list_service_jobs(
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    cluster: ClusterName = CLUSTER,
    status: Annotated[
        list[str] | None, typer.Option("--status", help="Only jobs in this state; may be given again.")
    ] = None,
    project: Annotated[str, typer.Option("--project", help="Only jobs of this project.")] = "",
    page: Annotated[int, typer.Option(min=1, help="Page number, newest jobs first.")] = 1,
    page_size: Annotated[int, typer.Option(min=1, max=200, help="Jobs per page.")] = 50,
    output: TableOption = "table",
) -> None:
    """List jobs, newest first."""
    query: dict[str, Any] = {"page": page, "page_size": page_size, "status": status or []}
    if project:
        query["project_id"] = project
    found = asked(client_of(server, token_file, ca, cluster), "GET", "", query=query).json()
    if output == "json":
        show_json(found)
        return
    if not found["items"]:
        typer.echo("No jobs found.", err=True)
        return
    now = datetime.now(UTC)
    columns = ("NAME", "STATUS", "TYPE", "TENANT", "RETRIES", "AGE", "ID", "MESSAGE")
    show_table(columns, (_row(one, now) for one in found["items"]))
    shown_to = (page - 1) * page_size + len(found["items"])
    if found["total"] > shown_to:
        typer.echo(f"{shown_to} of {found['total']} jobs: --page {page + 1} shows more", err=True)


def show_job(
    job: JobName,
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    cluster: ClusterName = CLUSTER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show a job, its state and its history."""
    client = client_of(server, token_file, ca, cluster)
    found = _job(client, job)
    if output is Output.JSON:
        show_json(found)
        return
    for label, value in _facts(found):
        show_line(f"{label + ':':<14}{value}")
    cost = asked(client, "GET", f"/{found['id']}/cost").json()
    for label, value in _cost_facts(found, cost):
        show_line(f"{label + ':':<14}{value}")
    if found["choice"] is not None:
        show_line("")
        show_choice(found["choice"])
    events = asked(client, "GET", f"/{found['id']}/events", query={"page_size": 200}).json()
    show_line("")
    now = datetime.now(UTC)
    rows = ((_age(one["at"], now), one["what"], one["status"], one["actor"], one["message"]) for one in events["items"])
    show_table(("AGE", "WHAT", "STATUS", "BY", "MESSAGE"), rows)


def show_choice(choice: Mapping[str, Any]) -> None:
    """Print the score sheet of the choice of a cluster."""
    parts = list(choice["weights"])
    rows = []
    for row in choice["rows"]:
        mark = "*" if row["cluster"] == choice["chosen"] else ""
        numbers = [f"{row['parts'][name]:.2f}" if name in row["parts"] else "" for name in parts]
        score = f"{row['score']:.3f}" if not row["excluded"] else ""
        rows.append((row["cluster"] + mark, score, *numbers, _fit(row), row["excluded"] or row["reason"]))
    weighted = (f"{name.upper()} x{choice['weights'][name]:g}" for name in parts)
    show_table(("CLUSTER", "SCORE", *weighted, "FITS", "WHY NOT"), rows)


def _fit(row: Mapping[str, Any]) -> str:
    if row["excluded"]:
        return ""
    if row["fits"]:
        return "now"
    return f"in {row['wait_seconds']:.0f} s" if row["wait_seconds"] is not None else "unknown"


def cancel_job(
    job: JobName,
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    cluster: ClusterName = CLUSTER,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the cluster has none of its objects.")] = False,
) -> None:
    """Cancel a job."""
    client = client_of(server, token_file, ca, cluster)
    found = asked(client, "DELETE", f"/{_job(client, job)['id']}").json()
    while wait and found["status"] not in ENDED:
        time.sleep(POLL_SECONDS)
        found = asked(client, "GET", f"/{found['id']}").json()
    done = found["status"] if found["status"] in ENDED else "is being cancelled"
    show_line(f"job/{found['name']} {done}")


def _command(verb: str, help_text: str, told: Callable[[Mapping[str, Any]], str]) -> Callable[..., None]:
    """Return the command that sends a request without a body about one job. `told`: what is printed of the answer."""

    def command(
        job: JobName,
        server: Server = SERVER,
        token_file: Token = None,
        ca: Authority = None,
        cluster: ClusterName = CLUSTER,
    ) -> None:
        client = client_of(server, token_file, ca, cluster)
        found = asked(client, "POST", f"/{_job(client, job)['id']}/{verb}").json()
        show_line(f"job/{found['name']} {told(found)}")

    command.__doc__ = help_text
    return command


retry_failed_job = _command("retry", "Retry a failed job.", lambda one: f"is retried (attempt {one['attempt']})")
pause_job = _command(
    "pause",
    "Pause a job: its pods end, its checkpoints stay, and it waits until it is resumed.",
    lambda one: "is paused" if one["status"] == "pending" else "is being paused",
)
resume_paused_job = _command("resume", "Resume a paused job.", lambda one: f"is resumed (attempt {one['attempt']})")


def run_in_job(
    job: JobName,
    command: Annotated[list[str], typer.Argument(help="Program and arguments, after --.", show_default=False)],
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    cluster: ClusterName = CLUSTER,
    pod: Annotated[str, typer.Option("--pod", help="Name of a pod of the job; its first pod by default.")] = "",
    *,
    at_terminal: Annotated[
        bool, typer.Option("-t", "-i", "--terminal", help="Connect this terminal with it: keys, size and output.")
    ] = False,
) -> None:
    """Run a command in a container of a job and exit with its status; it gets no input without -t."""
    client = client_of(server, token_file, ca, cluster)
    if at_terminal:
        _run_at_terminal(client, _job(client, job)["id"], {"command": command} | ({"pod": pod} if pod else {}))
    request: dict[str, Any] = {"command": command, "timeout_seconds": EXEC_SECONDS} | ({"pod": pod} if pod else {})
    body, headers = json.dumps(request).encode(), {"Content-Type": "application/json"}
    done = asked(client, "POST", f"/{_job(client, job)['id']}/exec", body=body, headers=headers).json()
    typer.echo(done["stdout"], nl=False)
    typer.echo(done["stderr"], err=True, nl=False)
    if done["exit_code"] is None:
        refuse(f"the command did not end within {EXEC_SECONDS} s; it may go on", STATUS_WAITS)
    raise typer.Exit(done["exit_code"])


def _run_at_terminal(client: ServiceClient, job_id: str, query: Mapping[str, Any]) -> NoReturn:
    try:
        status = run_at_terminal(client, f"/{job_id}/exec", query)
    except TerminalRefused as error:
        refuse(str(error), STATUS_WAITS)
    except ServiceUnreachable as error:
        refuse(str(error), STATUS_UNREACHABLE)
    if status is None:
        refuse("the connection ended before the command did; it may go on", STATUS_WAITS)
    raise typer.Exit(status)


def show_logs(
    job: JobName,
    server: Server = SERVER,
    token_file: Token = None,
    ca: Authority = None,
    cluster: ClusterName = CLUSTER,
    pod: Annotated[str, typer.Option("--pod", help="Name of a pod of the job; its first pod by default.")] = "",
    tail: Annotated[int, typer.Option("--tail", min=0, max=100_000, help="Lines to print, from the end.")] = 100,
    *,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow until the container ends.")] = False,
) -> None:
    """Print the logs of a pod of a job; those in the archive once its pods are gone."""
    client = client_of(server, token_file, ca, cluster)
    query: dict[str, Any] = {"tail": tail, "follow": str(follow).lower()} | ({"pod": pod} if pod else {})
    found = _job(client, job)
    try:
        path, echo = f"/{found['id']}/logs", lambda chunk: typer.echo(chunk, nl=False)
        answer = client.stream(path, query, echo, begin=_say_archive)
    except ServiceUnreachable as error:
        refuse(str(error), STATUS_UNREACHABLE)
    if answer is not None:
        refuse(answer.told(), STATUS_WAITS)


def _say_archive(headers: Mapping[str, str]) -> None:
    """Say on standard error that a log is from the archive."""
    place = {name.lower(): value for name, value in headers.items()}.get("atoll-log-archive")
    if place is not None:
        typer.echo(f"the pod is gone: its log as archived in {plain(place)}", err=True)


def client_of(
    server: str, token_file: Path | None, ca: Path | None, cluster: str, *, collection: str = "jobs"
) -> ServiceClient:
    """Return a client for one collection of a cluster. Exits if the options are wrong."""
    try:
        return ServiceClient.of(server, token_file=token_file, ca=ca, cluster=cluster, collection=collection)
    except (OSError, ValueError) as error:
        refuse(f"cannot use the job service: {error}", STATUS_UNREACHABLE)


def asked(
    client: ServiceClient,
    method: str,
    path: str,
    *,
    query: Mapping[str, Any] | None = None,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> ServiceAnswer:
    """Return the response of the service. Exits if it refuses or cannot be reached."""
    try:
        answer = client.ask(method, path, query=query or {}, body=body, headers=headers or {})
    except ServiceUnreachable as error:
        refuse(str(error), STATUS_UNREACHABLE)
    if answer.status < 300:
        return answer
    for line in answer.lines():
        typer.echo(plain(f"{file}: {line}" if file is not None else line), err=True)
    raise typer.Exit(STATUS_UNREACHABLE if answer.status in (429, 503) else STATUS_WAITS)


def _job(client: ServiceClient, wanted: str) -> dict[str, Any]:
    """Return a job by its id, or the newest one with a name."""
    try:
        job_id = str(UUID(wanted))
    except ValueError:
        found = asked(client, "GET", "", query={"name": wanted, "page_size": 1}).json()
        if not found["items"]:
            refuse(f"there is no job {plain(wanted)}", STATUS_WAITS)
        first: dict[str, Any] = found["items"][0]
        return first
    one: dict[str, Any] = asked(client, "GET", f"/{job_id}").json()
    return one


def _row(one: Mapping[str, Any], now: datetime) -> tuple[str, ...]:
    status = f"{one['status']} (cancelling)" if _is_cancelling(one) else one["status"]
    message = one["message"] if len(one["message"]) <= MESSAGE_WIDTH else one["message"][: MESSAGE_WIDTH - 3] + "..."
    age = _age(one["created_at"], now)
    return one["name"], status, one["job_type"], one["tenant_id"], str(one["retry_count"]), age, one["id"], message


def _is_cancelling(one: Mapping[str, Any]) -> bool:
    return one["cancel_requested_at"] is not None and one["status"] not in ENDED


def _facts(one: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("Name", one["name"]),
        ("Id", one["id"]),
        ("Status", one["status"] + (" (cancelling)" if _is_cancelling(one) else "")),
        ("Message", one["message"]),
        ("Type", one["job_type"]),
        ("Cluster", one["cluster_id"]),
        ("Tenant", one["tenant_id"] + (f", project {one['project_id']}" if one["project_id"] else "")),
        ("Created by", one["created_by"]),
        ("Object", f"{one['object_kind']} {one['namespace']}/{one['object_name']}"),
        ("Try", f"{one['attempt']}; {one['retry_count']} retries, {one['preemption_count']} preemptions"),
        ("Created", one["created_at"]),
        ("Started", one["started_at"] or ""),
        ("Ended", one["ended_at"] or ""),
        ("Checkpoint", _checkpoint_text(one.get("last_checkpoint"))),
        ("Logs", _archive_text(one.get("log_archive", []))),
        ("Offer", _offer_text(one.get("topology_wait"), one["status"])),
    ]
    return [(label, value) for label, value in rows if value]


def _checkpoint_text(told: Mapping[str, Any] | None) -> str:
    if told is None:
        return ""
    numbers = ", ".join(f"{key} {told[key]}" for key in ("step", "epoch", "loss") if told[key] is not None)
    return f"{numbers}; saved {told['created_at']} to {told['storage_key']}"


def _archive_text(kept: Sequence[Mapping[str, Any]]) -> str:
    """Return where the logs of the newest archived attempt are; else why there are none."""
    there = [one["folder"] for one in kept if not all(one["pods"].values())]
    return there[-1] if there else "; ".join(f"not archived: {one['message']}" for one in kept[-1:] if one["message"])


def _offer_text(wait: Mapping[str, Any] | None, status: str) -> str:
    offer = (wait or {}).get("offer")
    if offer is None or status in ENDED:
        return ""
    return f"it fitted with topology {offer['suggested']} at {offer['at']}; {offer['slower']}"


def _cost_facts(one: Mapping[str, Any], cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    estimate, hours = one["estimate"] or {}, cost["gpu_hours"]
    expected = "" if estimate.get("usd") is None else f"{estimate['usd']:.2f} USD"
    reasons = "; ".join(estimate.get("reasons", ()))
    so_far = "" if cost["is_final"] else " so far"
    spent = f"{cost['cost_usd']:.2f} USD{so_far}, for {hours['total']:.2f} GPU-hours ({hours['idle']:.2f} idle)"
    rows = [
        ("Estimate", f"{expected} ({reasons})" if expected else reasons),
        ("Cost", spent if hours["total"] else ""),
        ("Advice", cost["advice"]),
    ]
    return [(label, value) for label, value in rows if value]


def _age(moment: str, now: datetime) -> str:
    return age_text((now - datetime.fromisoformat(moment)).total_seconds())


def read_file(file: Path, *, what: str = "job") -> bytes:
    """Return the bytes of a file to send. Exits if it cannot be read."""
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        refuse(f"cannot read the {what}: {error}", STATUS_UNREACHABLE)
    if len(data) > FILE_BYTES_MAX:
        refuse(f"cannot read the {what}: {file} is larger than {FILE_BYTES_MAX} bytes", STATUS_WAITS)
    return data


def refuse(message: str, status: int) -> NoReturn:
    """Print why, and exit."""
    typer.echo(plain(message), err=True)
    raise typer.Exit(status)
