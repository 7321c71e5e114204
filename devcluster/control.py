"""Client of a cluster's supervisor: one request and one answer over the socket in the cluster's folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster.errors import ControlError
from devcluster.state import socket_path

_ANSWER_SECONDS_MAX = 30.0


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A supervised process: process id inside the cluster, exit code once ended (negative: signal number)."""

    pid: int
    running: bool
    exit_code: int | None
    rss_bytes: int


class Control:
    """Operations of the supervisor; each raises ControlError if the supervisor refuses it or is unreachable."""

    def __init__(self, folder: Path) -> None:
        """Use the supervisor of the cluster in that folder."""
        self._folder = folder
        self._socket = str(socket_path(folder))

    def spawn(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        node: str | None = None,
        cwd: Path | None = None,
        stdin: Path | None = None,
        stderr: Path | None = None,
    ) -> int:
        """Start a process. `env` is its whole environment (default: ours), `node` where it runs (default: no node)."""
        return int(
            self._request(
                "spawn",
                name=name,
                argv=[str(part) for part in argv],
                env=dict(os.environ if env is None else env),
                cwd=str(cwd or Path.cwd()),
                log=str(log),
                stdin=str(stdin or os.devnull),
                stderr=str(stderr or log),
                node=node,
            )["pid"]
        )

    def signal(self, name: str, signal: str) -> None:
        """Send a signal such as KILL or STOP; KILL does nothing to a process that has ended."""
        self._request("signal", name=name, signal=signal)

    def wait(self, name: str, *, timeout_seconds: float) -> int | None:
        """Wait for a process; return its exit code, or None on timeout."""
        answer = self._request(
            "wait", name=name, timeout_seconds=timeout_seconds, answer_seconds=timeout_seconds + _ANSWER_SECONDS_MAX
        )
        return None if answer["exit_code"] is None else int(answer["exit_code"])

    def status(self) -> dict[str, ProcessStatus]:
        """All processes by name."""
        processes: dict[str, dict[str, Any]] = self._request("status")["processes"]
        return {name: ProcessStatus(**fields) for name, fields in processes.items()}

    def disown(self) -> None:
        """Tell the supervisor to keep running after its owner ends."""
        self._request("disown")

    def stop(self) -> None:
        """Tell the supervisor to end everything; returns at once."""
        self._request("stop")

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        node: str | None = None,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, wait for it and return its output. Raises ControlError on timeout."""
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="run-") as scratch:
            source, output, complaints = (Path(scratch) / name for name in ("stdin", "stdout", "stderr"))
            source.write_text(stdin)
            name = Path(scratch).name
            self.spawn(name, argv, log=output, env=env, node=node, stdin=source, stderr=complaints)
            exit_code = self.wait(name, timeout_seconds=timeout_seconds)
            if exit_code is None:
                self.signal(name, "KILL")
                self.wait(name, timeout_seconds=_ANSWER_SECONDS_MAX)
            self._request("forget", name=name)
            if exit_code is None:
                raise ControlError(f"{argv[0]} did not end within {timeout_seconds} s: {output.read_text()[-500:]}")
            command = [str(part) for part in argv]
            return subprocess.CompletedProcess(command, exit_code, output.read_text(), complaints.read_text())

    def _request(
        self, operation: str, *, answer_seconds: float = _ANSWER_SECONDS_MAX, **fields: object
    ) -> dict[str, Any]:
        line = json.dumps({"op": operation, **fields}).encode() + b"\n"
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(answer_seconds)
                connection.connect(self._socket)
                connection.sendall(line)
                answer = json.loads(connection.makefile("rb").readline() or b"null")
        except (OSError, ValueError) as error:
            raise ControlError(f"the supervisor at {self._socket} does not answer: {error}") from error
        if answer is None:
            raise ControlError(f"the supervisor at {self._socket} closed the connection without an answer")
        if not answer["ok"]:
            raise ControlError(answer["error"])
        fields_of_answer: dict[str, Any] = answer
        return fields_of_answer
