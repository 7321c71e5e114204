"""`atoll job`: checks jobs, renders them as objects, and explains where they would run.

In: files with one job each. Out: problems with their lines, manifests for kubectl, or an answer for the cluster or a
saved snapshot. It needs no service and writes nothing. Status 1: a job is refused or waits; 2: no answer.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from atollctl.cluster_source import (
    STATUS_UNREACHABLE,
    STATUS_WAITS,
    Namespace,
    SnapshotFile,
    namespace_of,
    read_cluster,
)
from atollctl.options import ContextName, Kubeconfig
from atollctl.output import Output, OutputOption, plain, show_json, show_line
from atollctl.sentences import sentence

if TYPE_CHECKING:
    from atoll.jobs.documents import ParsedJob
    from atoll.jobs.model import Job
    from atoll.jobs.rendering import Rendered
    from atoll.jobs.selection import KnownNode
    from atoll.jobs.settings import RenderSettings

app = typer.Typer(no_args_is_help=True)

Files = Annotated[list[Path], typer.Option("-f", "--filename", help="A job, as YAML or JSON; may be repeated.")]
SettingsFile = Annotated[
    Path | None, typer.Option("--settings", help="The administrator's settings for the cluster, as YAML.")
]


@app.command(name="validate")
def validate_jobs(files: Files, settings: SettingsFile = None) -> None:
    """Check jobs: every attribute, their combination, and whether they can become objects."""
    from atoll.jobs.errors import JobMistake, NodesUnknown

    chosen, refused = _settings(settings), False
    for file in files:
        parsed = _parsed(file, chosen)
        if parsed.job is None:
            refused = True
            continue
        from atollctl.job_answer import job_text

        try:
            rendered = _render(parsed.job, chosen, None)
            show_line(f"{file}: {job_text(parsed.job, rendered)}")
            for note in rendered.notes:
                if note.is_hint:
                    show_line(f"  {note}")
        except NodesUnknown as unknown:
            show_line(f"{file}: valid; {plain(str(parsed.located(unknown.problem)))}")
        except JobMistake as mistake:
            typer.echo(plain(f"{file}: {parsed.located(mistake.problem)}"), err=True)
            refused = True
    raise typer.Exit(STATUS_WAITS if refused else 0)


@app.command(name="render")
def render_jobs(
    files: Files,
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Namespace of jobs that name none.")] = "",
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    snapshot: SnapshotFile = None,
    settings: SettingsFile = None,
    *,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Read the cluster's nodes, for rules that Kubernetes cannot express.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A List as JSON, without comments.")] = False,
) -> None:
    """Print the objects that jobs become, with comments that map attributes to fields."""
    nodes, chosen = None, _settings(settings)
    if cluster or snapshot is not None:
        from atollctl.job_answer import known_nodes

        nodes = known_nodes(read_cluster(kubeconfig, context, snapshot=snapshot, purpose="render"))
    found = []
    for file in files:
        _, rendered = _rendered(file, chosen, nodes=nodes, namespace=namespace)
        found.append(rendered)
    if as_json:
        items = [one for rendered in found for one in rendered.objects]
        show_json({"apiVersion": "v1", "kind": "List", "items": items})
        return
    from atoll.jobs.text import manifest_text

    typer.echo("---\n".join(manifest_text(one) for one in found), nl=False)


@app.command(name="explain")
def explain_jobs(
    files: Files,
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    snapshot: SnapshotFile = None,
    settings: SettingsFile = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Explain where jobs would run, what they wait for, and what would help; nothing is created."""
    from atollctl.job_answer import answer_job, answer_json, answer_lines, known_nodes
    from atollctl.manifests import ManifestMistake
    from atollctl.simulate import QuestionMistake

    found, chosen = read_cluster(kubeconfig, context, snapshot=snapshot, purpose="explain"), _settings(settings)
    namespace = namespace_of(namespace, kubeconfig, context, snapshot)
    nodes, answers = known_nodes(found), []
    for file in files:
        job, rendered = _rendered(file, chosen, nodes=nodes, namespace=namespace)
        try:
            answers.append(answer_job(found, job, rendered, namespace=namespace, file=file))
        except (ManifestMistake, QuestionMistake) as error:
            _refuse(f"cannot explain: {sentence(error)}")
    if output is Output.JSON:
        show_json([answer_json(one) for one in answers])
    else:
        for number, one in enumerate(answers):
            for line in (*([""] if number else []), *answer_lines(one, show_all=output is Output.WIDE)):
                show_line(line)
    raise typer.Exit(0 if all(one.fits for one in answers) else STATUS_WAITS)


def _refuse(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(STATUS_UNREACHABLE)


def _parsed(file: Path, settings: "RenderSettings") -> "ParsedJob":
    """Read one job and report all its faults. Ends the command if the file cannot be read."""
    from atoll.jobs.documents import parse_job
    from atoll.ml.document import BYTES_MAX

    try:
        with file.open("rb") as stream:
            data = stream.read(BYTES_MAX + 1)
    except OSError as error:
        _refuse(f"cannot read the job: {sentence(error)}")
    parsed = parse_job(data, settings.policy())
    for problem in parsed.problems:
        typer.echo(plain(f"{file}: {problem}"), err=True)
    return parsed


def _rendered(
    file: Path, settings: "RenderSettings", *, nodes: "tuple[KnownNode, ...] | None", namespace: str
) -> "tuple[Job, Rendered]":
    """Return a job and its objects. Ends the command with the reason if the job is refused."""
    from atoll.jobs.base import is_short_name
    from atoll.jobs.errors import JobMistake

    parsed = _parsed(file, settings)
    if parsed.job is None:
        raise typer.Exit(STATUS_WAITS)
    job = parsed.job
    if namespace and not is_short_name(namespace):
        told = "no name of a namespace: lower-case letters, digits and hyphens, at most 63, no hyphen at an end"
        typer.echo(plain(f"--namespace {namespace[:64]!r} is {told}"), err=True)
        raise typer.Exit(STATUS_WAITS)
    if job.namespace is None and namespace:
        job = job.model_copy(update={"namespace": namespace})
    try:
        return job, _render(job, settings, nodes)
    except JobMistake as mistake:
        typer.echo(plain(f"{file}: {parsed.located(mistake.problem)}"), err=True)
        raise typer.Exit(STATUS_WAITS) from mistake


def _render(job: "Job", settings: "RenderSettings", nodes: "tuple[KnownNode, ...] | None") -> "Rendered":
    from atoll.jobs.rendering import render

    return render(job, settings, nodes=nodes, now_seconds=int(datetime.now(UTC).timestamp()))


def _settings(file: Path | None) -> "RenderSettings":
    """Return the administrator's settings. Ends the command if the file is not valid settings."""
    from pydantic import ValidationError

    from atoll.jobs.documents import problems_of_fields
    from atoll.jobs.settings import RenderSettings
    from atoll.ml.document import BYTES_MAX, read
    from atoll.ml.problems import AttributeProblem, shown

    if file is None:
        return RenderSettings()
    try:
        with file.open("rb") as stream:
            document = read(stream.read(BYTES_MAX + 1))
    except OSError as error:
        _refuse(f"cannot read the settings: {sentence(error)}")
    if isinstance(document, AttributeProblem):
        _refuse(f"cannot read the settings: {file}: {document}")
    if not isinstance(document.value, dict):
        has = "nothing" if document.value is None else shown(document.value)
        _refuse(f"cannot read the settings: {file}: must be a mapping, and has {has}; write gpus_per_pod_max: 8")
    try:
        return RenderSettings.model_validate(document.value)
    except ValidationError as error:
        problems = problems_of_fields(error, document, RenderSettings)
        _refuse("\n".join(f"cannot read the settings: {file}: {plain(str(one))}" for one in problems))
