"""The supervisor's process table: starts, signals and removes named processes, and records their exit. Linux only."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from devcluster.errors import ControlError


@dataclass(frozen=True, slots=True)
class Start:
    """A process to start: whole environment, input, output, and the node to run in, if any."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    log: str
    stdin: str
    stderr: str
    node: str | None


@dataclass(slots=True)
class Process:
    """One named process; a wrapped one was started through nsenter, whose child is the real process."""

    name: str
    popen: subprocess.Popen[bytes]
    wrapped: bool
    exit_code: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def real_pid(self) -> int:
        """Process id of the real process for the supervisor; of the wrapper until the real one has started."""
        children = self._children() if self.wrapped else []
        return children[0] if children else self.popen.pid

    def _children(self) -> list[int]:
        try:
            text = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text()
        except OSError:
            return []
        return [int(pid) for pid in text.split()]


class ProcessTable:
    """Starts processes and keeps them by name; the supervisor reports their exit."""

    def __init__(self) -> None:
        """Start with an empty table."""
        self._processes: dict[str, Process] = {}

    def spawn(self, start: Start) -> int:
        """Start a process under a free name; return its process id. Raises ControlError if the name is in use."""
        present = self._processes.get(start.name)
        if present is not None and present.exit_code is None:
            raise ControlError(f"process {start.name!r} runs already: stop it first")
        command = start.argv if start.node is None else [*self.enter(start.node), start.cwd, *start.argv]
        try:
            popen = _popen(command, start)
        except OSError as error:
            raise ControlError(f"cannot start {start.name!r}: {error}") from error
        self._processes[start.name] = Process(name=start.name, popen=popen, wrapped=start.node is not None)
        return popen.pid

    def enter(self, node: str) -> list[str]:
        """Return the command prefix to run inside a node; its first argument is the working folder."""
        holder = self.get(f"node@{node}")
        if holder.exit_code is not None:
            raise ControlError(f"node {node!r} is stopped")
        pid = holder.popen.pid
        spaces = {"mount": "mnt", "net": "net", "pid": "pid_for_children"}
        flags = [f"--{option}=/proc/{pid}/ns/{space}" for option, space in spaces.items()]
        return ["nsenter", *flags, "--", "/bin/sh", "-c", 'cd "$0" && exec "$@"']

    def get(self, name: str) -> Process:
        """Return the process of that name. Raises ControlError if there is none."""
        if name not in self._processes:
            raise ControlError(f"no process {name!r}; there are: {', '.join(sorted(self._processes)) or 'none'}")
        return self._processes[name]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the real process. To one that has ended, KILL is done; any other raises ControlError."""
        process = self.get(name)
        if process.exit_code is not None:
            if number == signal.SIGKILL:
                return
            raise ControlError(f"process {name!r} has ended with {process.exit_code}")
        pid = process.real_pid()
        os.kill(pid, number)
        if number == signal.SIGCONT and pid != process.popen.pid:
            # nsenter stops together with its child and would never notice the child's exit.
            os.kill(process.popen.pid, number)

    def forget(self, name: str) -> None:
        """Drop a process that has ended."""
        if self.get(name).exit_code is None:
            raise ControlError(f"process {name!r} still runs")
        del self._processes[name]

    def reaped(self, pid: int, exit_code: int) -> None:
        """Record the exit of a child; other orphans are ignored."""
        for process in self._processes.values():
            if process.popen.pid == pid and process.exit_code is None:
                process.exit_code = process.popen.returncode = exit_code
                process.ended.set()

    def status(self) -> dict[str, dict[str, Any]]:
        """Return every process by name: id, running or not, exit code (negative: signal), resident memory in bytes."""
        return {name: _describe(process) for name, process in sorted(self._processes.items())}


def _popen(command: Sequence[str], start: Start) -> subprocess.Popen[bytes]:
    with (
        Path(start.log).open("ab") as output,
        Path(start.stderr).open("ab") as complaints,
        Path(start.stdin).open("rb") as source,
    ):
        return subprocess.Popen(
            command,
            env=dict(start.env),
            cwd=start.cwd,
            stdin=source,
            stdout=output,
            stderr=complaints,
            start_new_session=True,
        )


def _describe(process: Process) -> dict[str, Any]:
    running = process.exit_code is None
    pid = process.real_pid() if running else process.popen.pid
    return {
        "pid": pid,
        "running": running,
        "exit_code": process.exit_code,
        "rss_bytes": _resident_bytes(pid) if running else 0,
    }


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
