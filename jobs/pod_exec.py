"""Runs a command in a container of a job, over a WebSocket through the API server to the kubelet.

Without a terminal it gets no input and runs to its end, and its output is returned, up to a limit. With one, keys and
sizes go to it and output comes back until it ends. Messages begin with the number of their channel, as Kubernetes has
them; only the last one differs, see `ended`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Protocol
from urllib.parse import urlencode

import aiohttp
from yarl import URL

from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import Unanswered, truncate
from atoll.service.runtime import until_first
from jobs.pod_logs import pod_of
from jobs.records import JobRecord

PROTOCOL: Final = "v4.channel.k8s.io"
STDIN, STDOUT, STDERR, STATUS, SIZE = range(5)
OUTPUT_BYTES_MAX: Final = 1024 * 1024
CONNECT_SECONDS: Final = 10.0
TERMINAL_SECONDS: Final = 3600.0
"""The longest session: permissions are checked when it begins."""
ALIVE_SECONDS: Final = 30.0
"""How often the API server is asked whether it is there."""


class ExecRefused(Exception):
    """The cluster does not run the command."""


@dataclass(slots=True)
class ExecResult:
    """What a command printed, and how it ended; None if it did not end in time. `is_truncated`: there was more."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    exit_code: int | None = None
    is_truncated: bool = False

    def take(self, channel: int, data: bytes) -> bool:
        """Take a message of the kubelet; True if it was the last one. Raises ExecRefused."""
        if channel == STATUS:
            self.exit_code = exit_code_of(data)
            return True
        if channel in (STDOUT, STDERR):
            output = self.stdout if channel == STDOUT else self.stderr
            room = OUTPUT_BYTES_MAX - len(output)
            output += data[:room]
            self.is_truncated = self.is_truncated or len(data) > room
        return False


def exit_code_of(status: bytes) -> int:
    """Return the exit code in the kubelet's last message. Raises ExecRefused if the command did not run."""
    try:
        told = json.loads(status)
        if told["status"] == "Success":
            return 0
        causes = (told.get("details") or {}).get("causes") or ()
        return next(int(one["message"]) for one in causes if one.get("reason") == "ExitCode")
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ExecRefused(truncate(status.decode("utf-8", "replace"))) from error


def ended(status: bytes) -> bytes:
    """Return the last message to a terminal: the exit code, or null and why the command did not run."""
    try:
        told = {"exit_code": exit_code_of(status), "message": ""}
    except ExecRefused as error:
        told = {"exit_code": None, "message": str(error)}
    return bytes([STATUS]) + json.dumps(told).encode()


class TerminalUser(Protocol):
    """Whoever sits at a terminal."""

    async def accept(self) -> None:
        """Begin: the command runs."""
        ...

    async def receive(self) -> bytes | None:
        """Return the next message, or None if they went away."""
        ...

    async def send(self, message: bytes) -> None:
        """Send a message."""
        ...


class CommandRunner(Protocol):
    """Runs commands in containers of jobs."""

    async def run(
        self, record: JobRecord, command: Sequence[str], *, pod: str | None, timeout_seconds: float
    ) -> ExecResult:
        """Run a command. Raises NoPods, ExecRefused, KubeError."""
        ...

    async def open_terminal(
        self, record: JobRecord, command: Sequence[str], *, pod: str | None, terminal: TerminalUser
    ) -> None:
        """Run a command at a terminal until it ends. Raises NoPods, ExecRefused, KubeError."""
        ...


class PodExec:
    """Runs commands through the API server of the job's cluster."""

    def __init__(self, client_of: Callable[[JobRecord], Awaitable[ApiClient]]) -> None:
        self._client_of = client_of

    async def run(
        self, record: JobRecord, command: Sequence[str], *, pod: str | None, timeout_seconds: float
    ) -> ExecResult:
        """Run a command in the first container of a pod of the job."""
        result = ExecResult()
        connected = self._connected(record, command, pod, streams=("stdout", "stderr"))
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds), connected as socket:
                async for message in socket:
                    is_output = message.type is aiohttp.WSMsgType.BINARY and message.data
                    if is_output and result.take(message.data[0], message.data[1:]):
                        break
        return result

    async def open_terminal(
        self, record: JobRecord, command: Sequence[str], *, pod: str | None, terminal: TerminalUser
    ) -> None:
        """Run a command at a terminal, for TERMINAL_SECONDS at most. It may go on if the other side goes away."""
        limit, is_open = asyncio.timeout(CONNECT_SECONDS), False
        try:
            async with limit, self._connected(record, command, pod, streams=("stdin", "stdout", "tty")) as socket:
                await terminal.accept()
                is_open = True
                limit.reschedule(asyncio.get_running_loop().time() + TERMINAL_SECONDS)
                await until_first(_type_in(socket, terminal), _show(socket, terminal))
        except TimeoutError as error:
            if not is_open:
                raise Unanswered("exec got no answer in time", path=record.namespace, sent=True) from error

    @asynccontextmanager
    async def _connected(
        self, record: JobRecord, command: Sequence[str], pod: str | None, *, streams: Sequence[str]
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Yield the connection to the kubelet. Raises NoPods, ExecRefused, KubeError."""
        client = await self._client_of(record)
        credentials = client.credentials
        path = paths.pods(record.namespace, await pod_of(client, record, pod), "exec")
        query = urlencode([*(("command", word) for word in command), *((stream, "true") for stream in streams)])
        secure = credentials.ssl_context
        try:
            async with (
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS), proxy=credentials.proxy
                ) as session,
                session.ws_connect(
                    URL(f"{credentials.host}{path}?{query}", encoded=True),
                    protocols=(PROTOCOL,),
                    headers=await credentials.headers(),
                    ssl=secure if secure is not None else True,
                    server_hostname=credentials.server_hostname,
                    heartbeat=ALIVE_SECONDS,
                    max_msg_size=4 * OUTPUT_BYTES_MAX,
                ) as socket,
            ):
                yield socket
        except aiohttp.WSServerHandshakeError as error:
            raise ExecRefused(f"the cluster answers {error.status}: {truncate(error.message)}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"exec failed: {error}", path=path, sent=True) from error


async def _type_in(socket: aiohttp.ClientWebSocketResponse, terminal: TerminalUser) -> None:
    while (message := await terminal.receive()) is not None:
        if message and message[0] in (STDIN, SIZE):
            await socket.send_bytes(message)


async def _show(socket: aiohttp.ClientWebSocketResponse, terminal: TerminalUser) -> None:
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        if message.data[0] == STATUS:
            await terminal.send(ended(message.data[1:]))
            return
        if message.data[0] == STDOUT:
            await terminal.send(message.data)
