"""Commands in containers of jobs: through the API server's WebSocket, bounded, and audited before they run."""

import asyncio
import fcntl
import json
import os
import pty
import socket
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from atoll.api import job_names
from atoll.kube import paths
from atoll.kube.client import ApiClient
from jobs import bounds, exec_routes, pod_exec
from jobs.cluster_store import ClusterTerms, register_cluster
from jobs.database import Database, opened
from jobs.listener import GuardedWebSocket, serving
from jobs.pod_exec import OUTPUT_BYTES_MAX, PROTOCOL, ExecRefused, ExecResult, PodExec, exit_code_of
from jobs.pod_logs import NoPods
from jobs.records import JobRecord
from tests.fakes.api_server import FakeApiServer
from tests.fakes.clock import until
from tests.fakes.listening import kubeconfig, listening
from tests.jobservice.service import JOBS, JobService

SUCCESS = b'{"status": "Success"}'
FAILURE = json.dumps(
    {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "3"}]}, "message": "exit code 3"}
).encode()
RECORD = JobRecord(id="j1", cluster_id="local", name="tune", namespace="tenant-acme", state="running")


@pytest.mark.parametrize(("status", "code"), [(SUCCESS, 0), (FAILURE, 3)])
def test_the_last_message_says_how_the_command_ended(status: bytes, code: int) -> None:
    """Success is 0; else the code is among the causes."""
    assert exit_code_of(status) == code


@pytest.mark.parametrize(
    "status",
    [
        b"",
        b"[]",
        b'{"status": "Failure", "message": "no such file"}',
        b'{"status": "Failure", "details": {"causes": 1}}',
    ],
)
def test_a_command_that_did_not_run_is_told(status: bytes) -> None:
    """In the words of the kubelet, whatever they are."""
    with pytest.raises(ExecRefused):
        exit_code_of(status)


def test_output_is_kept_up_to_a_limit() -> None:
    """What is beyond it is dropped, and that is said."""
    result = ExecResult()
    result.take(1, b"x" * (OUTPUT_BYTES_MAX + 1))

    assert (len(result.stdout), result.is_truncated) == (OUTPUT_BYTES_MAX, True)


class ExecKubelet:
    """Answers exec as the API server does."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.messages = [b"\x01hello\n", b"\x02warning\n", b"\x03" + FAILURE]
        self.typed: list[bytes] = []
        self.floods = False

    async def _flood(self, socket: web.WebSocketResponse) -> None:
        while True:
            await socket.send_bytes(b"\x01" + b"y\n" * 8192)

    async def exec(self, request: web.Request) -> web.WebSocketResponse:
        """Send the messages, then close, or say nothing more. At a terminal, repeat what is typed until a q."""
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        self.commands.append(request.query.getall("command"))
        if self.floods:
            flood = asyncio.ensure_future(self._flood(socket))
            async for _ in socket:
                pass
            flood.cancel()
            return socket
        if request.query.get("tty") == "true":
            async for typed in socket:
                self.typed.append(typed.data)
                await socket.send_bytes(b"\x01" + typed.data)
                if typed.data == b"\x00q":
                    await socket.send_bytes(b"\x03" + FAILURE)
            return socket
        for message in self.messages:
            await socket.send_bytes(message)
        await socket.receive()
        return socket


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[PodExec, ExecKubelet]]:
    """A runner, and the kubelet behind it."""
    kubelet, server = ExecKubelet(), FakeApiServer()
    pod = {"metadata": {"name": "tune-0", "labels": {job_names.JOB_ID: "j1"}, "creationTimestamp": "2026-01-31"}}
    server.put(paths.pods("tenant-acme", "tune-0"), pod)
    application = web.Application()
    application.router.add_get(paths.pods("tenant-acme", "tune-0", "exec"), kubelet.exec)
    application.router.add_route("*", "/{tail:.*}", server._answer)
    async with listening(application) as url:
        config = kubeconfig(tmp_path, url)
        async with await ApiClient.connect(config) as client:

            async def client_of(_record: JobRecord) -> ApiClient:
                return client

            yield PodExec(client_of), kubelet


async def test_a_command_runs_and_its_output_comes_back(running: tuple[PodExec, ExecKubelet]) -> None:
    """Both streams and the exit code; the words of the command arrive as they are."""
    runner, kubelet = running
    done = await runner.run(RECORD, ["sh", "-c", "echo hello & exit 3"], pod=None, timeout_seconds=5)

    assert kubelet.commands == [["sh", "-c", "echo hello & exit 3"]]
    assert (bytes(done.stdout), bytes(done.stderr), done.exit_code) == (b"hello\n", b"warning\n", 3)


async def test_a_command_that_does_not_end_gives_what_it_printed(running: tuple[PodExec, ExecKubelet]) -> None:
    """Without an exit code; a pod of another job is not found."""
    runner, kubelet = running
    kubelet.messages = [b"\x01hello\n"]
    done = await runner.run(RECORD, ["sleep", "100"], pod=None, timeout_seconds=0.2)

    assert (bytes(done.stdout), done.exit_code) == (b"hello\n", None)
    with pytest.raises(NoPods):
        await runner.run(RECORD, ["true"], pod="other-0", timeout_seconds=1)


async def test_the_audit_has_the_command_before_it_runs(tmp_path: Path) -> None:
    """Who ran what in which job, also when it was refused; the output is not stored."""
    database: Database = opened(f"sqlite:///{tmp_path}/jobs.db")
    async with JobService.of(database) as service:
        made = (await service.submit()).json()
        request: dict[str, Any] = {"command": ["cat", "/etc/hosts"]}
        refused = await service.call("POST", f"{JOBS}/{made['id']}/exec", by="two", json=request)
        done = await service.call("POST", f"{JOBS}/{made['id']}/exec", json=request)
        service.commands.fails = ExecRefused("no such file")
        failed = await service.call("POST", f"{JOBS}/{made['id']}/exec", json=request)
        audit = (await service.call("GET", "/api/clusters/local/audit", by="amy")).json()["items"]
    database.close()

    assert refused.status_code == 403
    assert done.json() == {"stdout": "cat\n/etc/hosts", "stderr": "warning", "exit_code": 3, "is_truncated": False}
    assert (failed.status_code, failed.json()["type"]) == (409, "urn:atoll:not-run")
    assert [(one["user"], one["action"], one["answer"], one["extra"]["command"]) for one in audit[:3]] == [
        ("ann", "job:exec", "allowed", ["cat", "/etc/hosts"]),
        ("ann", "job:exec", "allowed", ["cat", "/etc/hosts"]),
        ("two", "job:exec", "refused", ["cat", "/etc/hosts"]),
    ]
    assert len(service.commands.asked) == 2


@dataclass
class TerminalService:
    """The service behind its listener, a job of it in a cluster, and the kubelet there."""

    service: JobService
    kubelet: ExecKubelet
    session: aiohttp.ClientSession
    url: str

    @asynccontextmanager
    async def terminal(
        self, by: str = "ann", query: str = "command=sh&command=-l", **headers: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a terminal in somebody's name."""
        mine = {"Authorization": f"Bearer {by}"} if by else {}
        async with self.session.ws_connect(f"{self.url}?{query}", headers=mine | headers) as socket:
            yield socket

    async def refusal(self, **asked: str) -> int:
        """Return the status with which a terminal is refused."""
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with self.terminal(**asked):
                pass
        return refused.value.status


@pytest.fixture
async def terminals(tmp_path: Path) -> AsyncIterator[TerminalService]:
    """A service with one job, whose pod is in the cluster `far`."""
    database, kubelet, server = opened(f"sqlite:///{tmp_path}/jobs.db"), ExecKubelet(), FakeApiServer()
    application = web.Application()
    application.router.add_get(paths.pods("tenant-acme", "tune-0", "exec"), kubelet.exec)
    application.router.add_route("*", "/{tail:.*}", server._answer)
    async with JobService.of(database) as service, listening(application) as far:
        terms = ClusterTerms(kubeconfig="file:far")
        await database.write(
            lambda session: register_cluster(session, "far", terms, now=service.clock.now(), actor="ops")
        )
        job = {"name": "tune", "job_type": "batch", "container": {"image": "busybox:1"}}
        made = (await service.call("POST", "/api/clusters/far/jobs", json=job)).json()
        pod = {"metadata": {"name": "tune-0", "labels": {job_names.JOB_ID: made["id"]}}}
        server.put(paths.pods("tenant-acme", "tune-0"), pod)
        async with await ApiClient.connect(kubeconfig(tmp_path, far)) as client:

            async def client_of(record: JobRecord) -> ApiClient:
                assert record.cluster_id == "far"
                return client

            service.app.state.parts = replace(service.app.state.parts, commands=PodExec(client_of))
            async with serving(service.app, "127.0.0.1", 0) as port, aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{port}/api/clusters/far/jobs/{made['id']}/exec"
                yield TerminalService(service, kubelet, session, url)
    database.close()


async def test_a_terminal_in_another_cluster_passes_keys_sizes_and_output(terminals: TerminalService) -> None:
    """Each message goes to the kubelet and comes back as output; the end brings the exit code. Other channels do not
    pass, and the audit has the command but not what is typed."""
    size = b'\x04{"Width": 120, "Height": 40}'
    async with terminals.terminal() as socket:
        for typed in (size, b"\x00ls\r", b"\x02no", b"\x00q"):
            await socket.send_bytes(typed)
        answers = [message.data async for message in socket]
    told = (await terminals.service.call("GET", "/api/clusters/far/audit", by="amy")).json()["items"]

    assert terminals.kubelet.typed == [size, b"\x00ls\r", b"\x00q"]
    assert answers[:3] == [b"\x01" + size, b"\x01\x00ls\r", b"\x01\x00q"]
    assert json.loads(answers[3][1:]) == {"exit_code": 3, "message": ""}
    entry = next(one for one in told if one["action"] == "job:exec")
    assert (entry["user"], entry["extra"]) == ("ann", {"command": ["sh", "-l"], "pod": None, "terminal": True})


async def test_a_terminal_is_refused_like_any_other_request(terminals: TerminalService) -> None:
    """Without a token, the permission, a job that can be seen, a command or a pod; and from a browser."""
    assert await terminals.refusal(by="") == 401
    assert await terminals.refusal(by="vic") == 403
    assert await terminals.refusal(by="zoe/others") == 404
    assert await terminals.refusal(Origin="http://127.0.0.1") == 403
    assert await terminals.refusal(query="pod=tune-0") == 422
    assert await terminals.refusal(query="command=sh&pod=other-0") == 409
    assert terminals.kubelet.commands == []


async def test_terminals_have_a_number_of_their_own(
    terminals: TerminalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it one is refused, and a closed one makes room; the kubelet is left when the user goes away."""
    monkeypatch.setattr(bounds, "TERMINALS_MAX", 1)
    async with terminals.terminal() as socket:
        await socket.send_bytes(b"\x00x")
        assert (await socket.receive()).data == b"\x01\x00x"
        assert await terminals.refusal() == 429
    async with terminals.terminal():
        pass
    assert len(terminals.kubelet.commands) == 2


async def test_a_user_has_few_terminals(terminals: TerminalService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has theirs open is refused another one, others are not, and a closed one makes room."""
    monkeypatch.setattr(exec_routes, "TERMINALS_EACH_MAX", 1)
    async with terminals.terminal():
        assert await terminals.refusal() == 429
        async with terminals.terminal(by="amy"):
            pass
    await until(lambda: not terminals.service.app.state.parts.terminals)
    async with terminals.terminal():
        pass


@pytest.mark.parametrize("why", ["its time is over", "it answers no ping"])
async def test_a_terminal_whose_user_stops_reading_is_released(
    terminals: TerminalService, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The connection is cut, whatever waits to be read, and the next user has the place."""
    lost: list[GuardedWebSocket] = []
    keep_alive, connection_lost = GuardedWebSocket.start_keepalive, GuardedWebSocket.connection_lost

    def impatient(self: GuardedWebSocket) -> None:
        if why == "it answers no ping":
            self.ping_interval = self.ping_timeout = 0.5
        self.close_timeout = 0.05
        keep_alive(self)

    def watched(self: GuardedWebSocket, error: Exception | None) -> None:
        lost.append(self)
        connection_lost(self, error)

    monkeypatch.setattr(GuardedWebSocket, "start_keepalive", impatient)
    monkeypatch.setattr(GuardedWebSocket, "connection_lost", watched)
    monkeypatch.setattr(exec_routes, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(pod_exec, "TERMINAL_SECONDS", 1.0 if why == "its time is over" else 60.0)
    monkeypatch.setattr(bounds, "TERMINALS_MAX", 1)
    terminals.kubelet.floods = True
    url = URL(terminals.url)
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nAuthorization: Bearer ann\r\n"
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.connect((url.host, url.port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=1024)
    writer.write(f"GET {url.path}?command=yes HTTP/1.1\r\nHost: x\r\n{upgrade}{key}\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    await until(lambda: bool(lost), timeout_seconds=20)
    await until(lambda: not terminals.service.app.state.parts.terminals)
    terminals.kubelet.floods = False
    async with terminals.terminal(by="amy"):
        pass
    writer.close()


async def test_the_command_line_connects_its_terminal(terminals: TerminalService, tmp_path: Path) -> None:
    """The size goes first, keys go raw, output comes back, and the status is the command's."""
    (tmp_path / "token").write_text("ann")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    server = terminals.url.partition("/api")[0]
    options = ("--server", server, "--token-file", str(tmp_path / "token"), "--cluster", "far")
    command = (sys.executable, "-m", "atollctl", "job", "exec", *options, "-it", "tune", "--", "sh", "-l")
    process = await asyncio.create_subprocess_exec(*command, stdin=slave, stdout=slave, stderr=slave)
    await until(lambda: len(terminals.kubelet.typed) == 1, timeout_seconds=60)
    os.write(master, b"q")
    status = await asyncio.wait_for(process.wait(), 60)
    shown = os.read(master, 4096)
    os.close(master)
    os.close(slave)

    assert (status, terminals.kubelet.commands) == (3, [["sh", "-l"]])
    assert terminals.kubelet.typed == [b'\x04{"Width": 120, "Height": 40}', b"\x00q"]
    assert b"\x00q" in shown
