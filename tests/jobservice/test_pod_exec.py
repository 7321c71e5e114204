"""Commands in containers of jobs: through the API server's WebSocket, bounded, and audited before they run."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atoll.api import job_names
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.credentials import Credentials
from jobs.database import Database, opened
from jobs.pod_exec import OUTPUT_BYTES_MAX, PROTOCOL, ExecRefused, ExecResult, PodExec, exit_code_of
from jobs.pod_logs import NoPods
from jobs.records import JobRecord
from tests.fakes.api_server import FakeApiServer
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

    async def exec(self, request: web.Request) -> web.WebSocketResponse:
        """Send the messages, then close, or say nothing more."""
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        self.commands.append(request.query.getall("command"))
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

            yield PodExec(client_of, await Credentials.load(config), cluster="local"), kubelet


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
    far = JobRecord(id="j1", cluster_id="far", name="tune", namespace="tenant-acme", state="running")
    with pytest.raises(ExecRefused, match="exec works in local alone"):
        await runner.run(far, ["true"], pod=None, timeout_seconds=1)


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
