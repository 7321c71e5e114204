"""The route that runs a command in a container of a job. The audit has the command before it runs."""

from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from atoll.jobs.permissions import JobPermission
from atoll.kube.errors import ApiError, KubeError
from jobs.asking import OneJob
from jobs.pod_exec import ExecRefused
from jobs.pod_logs import NoPods
from jobs.problems import ApiRefusal, documented, problem


class ExecRequest(BaseModel):
    """A command to run."""

    model_config = ConfigDict(extra="forbid")

    command: Annotated[
        list[Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]],
        Field(min_length=1, max_length=64, description="program and arguments; no shell reads them"),
    ]
    pod: Annotated[
        str | None, Field(min_length=1, max_length=253, description="a pod of the job; its first pod by default")
    ] = None
    timeout_seconds: Annotated[
        int, Field(ge=1, le=60, description="how long to wait for the end; the command may go on")
    ] = 30


class ExecView(BaseModel):
    """What a command printed, and how it ended."""

    stdout: str
    stderr: str
    exit_code: Annotated[int | None, Field(description="null if it did not end in time")]
    is_truncated: Annotated[bool, Field(description="it printed more than a MiB")]


def add_exec_routes(app: FastAPI) -> None:
    """Add the route to the application."""
    app.post(
        "/api/clusters/{cluster}/jobs/{job_id}/exec",
        responses=documented(400, 401, 403, 404, 409, 422, 429, 503),
    )(run_command)


async def run_command(asked: OneJob, request: ExecRequest) -> ExecView:
    """Run a command in a container of a job, without input, and return its output when it ends."""
    record = await asked.allowed(JobPermission.EXEC, {"command": request.command, "pod": request.pod})
    try:
        done = await asked.parts.commands.run(
            record, request.command, pod=request.pod, timeout_seconds=request.timeout_seconds
        )
    except NoPods as error:
        raise ApiRefusal(problem(409, "no-pods", "No pods", str(error))) from error
    except (ExecRefused, ApiError) as error:
        raise ApiRefusal(problem(409, "not-run", "The command did not run", str(error))) from error
    except KubeError as error:
        raise ApiRefusal(problem(503, "unavailable", "The cluster does not answer", str(error))) from error
    return ExecView(
        stdout=done.stdout.decode("utf-8", "replace"),
        stderr=done.stderr.decode("utf-8", "replace"),
        exit_code=done.exit_code,
        is_truncated=done.is_truncated,
    )
