"""Entry point: mounts the commands. Heavy imports stay inside the commands, so that `atoll --help` is quick."""

import errno
import os
import sys
from importlib.util import find_spec
from typing import Annotated, Final

import typer

from atoll import VERSION
from atollctl import (
    agent,
    audit,
    choose,
    cluster,
    defrag,
    explain,
    gangs,
    gpu,
    history,
    job,
    job_server,
    job_service,
    node,
    pipeline,
    queue,
    simulate,
    snapshot,
    top,
    topo,
    usage,
    usecase,
)

STATUS_OUTPUT_LOST: Final = 2
OUTPUT_LOST: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full or broken disk."""

app = typer.Typer(name="atoll", no_args_is_help=True, add_completion=True)
if find_spec("devcluster") is not None:  # the image has none
    from devcluster.commands import app as dev

    app.add_typer(dev, name="dev", help="A real Kubernetes with real nodes on this machine.")
app.add_typer(gpu.app, name="gpu", help="Cordon single GPUs and show their health.")
app.add_typer(node.app, name="node", help="Show GPU machines; declare one gone for good.")
app.add_typer(job.app, name="job", help="Check, render and explain jobs, and submit them to the job service.")
app.add_typer(pipeline.app, name="pipeline", help="Pipelines of jobs and other steps, in the job service.")
app.add_typer(usecase.app, name="usecase", help="Services that work together, from a template, in the job service.")
app.add_typer(job_server.app, name="jobs", help="The job service.")
app.add_typer(cluster.app, name="cluster", help="Clusters of the job service: health, free GPUs, drain.")
app.add_typer(queue.app, name="queue", help="Tenants' queues in Kueue, kept by the job service.")
job.app.command(name="submit")(job_service.submit_jobs)
job.app.command(name="list")(job_service.list_service_jobs)
job.app.command(name="show")(job_service.show_job)
job.app.command(name="cancel")(job_service.cancel_job)
job.app.command(name="retry")(job_service.retry_failed_job)
job.app.command(name="pause")(job_service.pause_job)
job.app.command(name="resume")(job_service.resume_paused_job)
job.app.command(name="exec")(job_service.run_in_job)
job.app.command(name="logs")(job_service.show_logs)
app.command(name="usage")(usage.show_usage)
app.command(name="agent", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(agent.run_agent)
app.command(name="audit")(audit.audit_cluster)
app.command(name="explain")(explain.explain_subject)
app.command(name="simulate")(simulate.simulate_pods)
app.command(name="top")(top.show_top)
app.command(name="gangs")(gangs.list_gangs)
app.command(name="history")(history.show_history)
app.command(name="defrag")(defrag.find_plans)
app.command(name="snapshot")(snapshot.save_snapshot)
app.command(name="topo")(topo.show_topology)
app.command(name="choose")(choose.choose_gpus)


@app.command(name="version")
def show_version() -> None:
    """Print the version."""
    typer.echo(VERSION)


def _show_version_and_end(is_asked: bool) -> None:  # noqa: FBT001 - as click calls it
    if is_asked:
        show_version()
        raise typer.Exit


@app.callback()
def root(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version_and_end, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """The right GPUs for every pod."""


def main() -> None:
    """Run the command line. An answer that cannot be written gives one sentence."""
    try:
        app()
    except OSError as error:
        if error.errno not in OUTPUT_LOST:
            raise
        typer.echo(f"cannot write the answer: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try to write the rest again at exit
        sys.exit(STATUS_OUTPUT_LOST)


if __name__ == "__main__":
    main()
