"""Runs a command in a container of a job, over a WebSocket through the API server to the kubelet.

Without a terminal and without input: the command runs to its end, and its output is returned, up to a limit.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from urllib.parse import urlencode

import aiohttp
from yarl import URL

from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.credentials import Credentials
from atoll.kube.errors import Unanswered, truncate
from jobs.pod_logs import pod_of
from jobs.records import JobRecord

PROTOCOL: Final = "v4.channel.k8s.io"
STDOUT, STDERR, STATUS = 1, 2, 3
OUTPUT_BYTES_MAX: Final = 1024 * 1024
CONNECT_SECONDS: Final = 10.0


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


class CommandRunner(Protocol):
    """Runs commands in containers of jobs."""

    async def run(
        self, record: JobRecord, command: Sequence[str], *, pod: str | None, timeout_seconds: float
    ) -> ExecResult:
        """Run a command. Raises NoPods, ExecRefused, KubeError."""
        ...


class PodExec:
    """Runs commands through the API server."""

    def __init__(
        self, client_of: Callable[[JobRecord], Awaitable[ApiClient]], credentials: Credentials, *, cluster: str
    ) -> None:
        self._client_of = client_of
        self._credentials = credentials
        self._cluster = cluster

    async def run(
        self, record: JobRecord, command: Sequence[str], *, pod: str | None, timeout_seconds: float
    ) -> ExecResult:
        """Run a command in the first container of a pod of the job; only in the cluster of the credentials."""
        if record.cluster_id != self._cluster:
            raise ExecRefused(
                f"job {record.name} is in cluster {record.cluster_id}: exec works in {self._cluster} alone"
            )
        name = await pod_of(await self._client_of(record), record, pod)
        path, result = paths.pods(record.namespace, name, "exec"), ExecResult()
        query = urlencode([*(("command", word) for word in command), ("stdout", "true"), ("stderr", "true")])
        url = URL(f"{self._credentials.host}{path}?{query}", encoded=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=timeout, proxy=self._credentials.proxy) as session:
                async with asyncio.timeout(timeout_seconds):
                    await self._talk(session, url, result)
        except TimeoutError:
            return result
        except aiohttp.WSServerHandshakeError as error:
            raise ExecRefused(f"the cluster answers {error.status}: {truncate(error.message)}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"exec failed: {error}", path=path, sent=True) from error
        return result

    async def _talk(self, session: aiohttp.ClientSession, url: URL, result: ExecResult) -> None:
        secure = self._credentials.ssl_context
        async with session.ws_connect(
            url,
            protocols=(PROTOCOL,),
            headers=await self._credentials.headers(),
            ssl=secure if secure is not None else True,
            server_hostname=self._credentials.server_hostname,
            max_msg_size=4 * OUTPUT_BYTES_MAX,
        ) as socket:
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                    continue
                if result.take(message.data[0], message.data[1:]):
                    return
