"""The routes that run a command in a container of a job. The audit has the command before it runs, not what is typed.

A browser cannot open a terminal: it sends no token with a WebSocket, but would open one for any site.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Final

from fastapi import FastAPI, Query, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field
from starlette.websockets import WebSocketState

from atoll.jobs.base import NO_NUL
from atoll.jobs.permissions import JobPermission
from atoll.kube.errors import ApiError, KubeError
from jobs.asking import OneJob
from jobs.pod_exec import ExecRefused
from jobs.pod_logs import NoPods
from jobs.problems import ApiRefusal, documented, problem

EXEC: Final = "/api/clusters/{cluster}/jobs/{job_id}/exec"
TERMINALS_EACH_MAX: Final = 4
"""Terminals that one caller has open at a time, so that one alone does not take all."""
CLOSE_SECONDS: Final = 5.0
"""How long the user of a terminal may take to read the rest; then the connection is cut."""

Word = Annotated[str, Field(max_length=4096, pattern=NO_NUL)]
PodName = Annotated[
    str | None, Field(min_length=1, max_length=253, description="a pod of the job; its first pod by default")
]


class ExecRequest(BaseModel):
    """A command to run."""

    model_config = ConfigDict(extra="forbid")

    command: Annotated[
        list[Word], Field(min_length=1, max_length=64, description="program and arguments; no shell reads them")
    ]
    pod: PodName = None
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
    """Add the routes to the application."""
    app.post(EXEC, responses=documented(400, 401, 403, 404, 409, 422, 429, 503))(run_command)
    app.websocket(EXEC)(open_terminal)


async def run_command(asked: OneJob, request: ExecRequest) -> ExecView:
    """Run a command in a container of a job, without input, and return its output when it ends."""
    record = await asked.allowed(JobPermission.EXEC, {"command": request.command, "pod": request.pod})
    try:
        done = await asked.parts.commands.run(
            record, request.command, pod=request.pod, timeout_seconds=request.timeout_seconds
        )
    except (NoPods, ExecRefused, KubeError) as error:
        raise _refusal(error) from error
    return ExecView(
        stdout=done.stdout.decode("utf-8", "replace"),
        stderr=done.stderr.decode("utf-8", "replace"),
        exit_code=done.exit_code,
        is_truncated=done.is_truncated,
    )


class SocketTerminal:
    """The terminal at the other end of a WebSocket."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def accept(self) -> None:
        """Accept the WebSocket."""
        await self._socket.accept()

    async def receive(self) -> bytes | None:
        """Return the next binary message, or None at the end."""
        try:
            while True:
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    return None
                if message.get("bytes") is not None:
                    return bytes(message["bytes"])
        except RuntimeError:  # it was closed in the meantime
            return None

    async def send(self, message: bytes) -> None:
        """Send a message, if the other side is still there."""
        with suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.send_bytes(message)


async def open_terminal(
    socket: WebSocket,
    asked: OneJob,
    command: Annotated[list[Word], Query(min_length=1, max_length=64)],
    pod: Annotated[PodName, Query()] = None,
) -> None:
    """Run a command at a terminal. Messages are binary and begin with their channel: 0 keys, 4 the size as JSON with
    Width and Height; back come 1 output and, at the end, 3 with exit_code and message."""
    if "origin" in socket.headers:
        raise ApiRefusal(problem(403, "other-site", "Cross-site request", "browsers cannot open a terminal"))
    extra = {"command": command, "pod": pod, "terminal": True}
    record = await asked.allowed(JobPermission.EXEC, extra)
    with _counted(asked):
        try:
            await asked.parts.commands.open_terminal(record, command, pod=pod, terminal=SocketTerminal(socket))
        except (NoPods, ExecRefused, KubeError) as error:
            if socket.application_state is WebSocketState.CONNECTING:
                raise _refusal(error) from error
        if socket.application_state is WebSocketState.CONNECTED:
            with suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await socket.close()


@contextmanager
def _counted(asked: OneJob) -> Iterator[None]:
    """Count an open terminal of the caller. Raises ApiRefusal if they have too many."""
    name, terminals = asked.caller.name, asked.parts.terminals
    if terminals[name] >= TERMINALS_EACH_MAX:
        detail = f"{name} has {terminals[name]} terminals open: close one"
        raise ApiRefusal(problem(429, "too-many", "Too many terminals", detail), headers={"Retry-After": "60"})
    terminals[name] += 1
    try:
        yield
    finally:
        terminals[name] -= 1
        if not terminals[name]:
            del terminals[name]


def _refusal(error: NoPods | ExecRefused | KubeError) -> ApiRefusal:
    if isinstance(error, NoPods):
        return ApiRefusal(problem(409, "no-pods", "No pods", str(error)))
    if isinstance(error, ExecRefused | ApiError):
        return ApiRefusal(problem(409, "not-run", "The command did not run", str(error)))
    return ApiRefusal(problem(503, "unavailable", "The cluster does not answer", str(error)))
