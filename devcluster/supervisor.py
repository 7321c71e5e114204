"""First process in a cluster's namespaces; owns every other process there.

It answers each JSON line on a Unix socket in the cluster's folder (spawn, signal, wait, forget, status, disown, stop)
with one JSON line. It restarts nothing. It ends with all other processes on request, or when its owner's end of a pipe
closes unless the owner has disowned it; then it also removes the folder and the cgroups.

As process 1 of its process namespace it reaps orphans, and the kernel kills all other processes when it dies.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from devcluster import proxy
from devcluster.errors import ControlError
from devcluster.processes import ProcessTable, Start
from devcluster.state import remove_cluster_folder, socket_path

_LINE_BYTES_MAX = 1 << 20


class Supervisor:
    """Answers requests until stopped."""

    def __init__(self, owner: int) -> None:
        """Start without processes. `owner` is the read end of a pipe; end of file means that the owner has ended."""
        self._table = ProcessTable()
        self._owner = owner
        self.stopping = asyncio.Event()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client: one answer per line, until it disconnects."""
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                answer = await self._answer(line)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        writer.close()

    def reap(self) -> None:
        """Reap every child that has ended, including adopted orphans."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._table.reaped(pid, os.waitstatus_to_exitcode(status))

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            return {"ok": True, **await self._perform(request.pop("op"), request)}
        except (ControlError, OSError) as error:
            return {"ok": False, "error": str(error)}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return {"ok": False, "error": f"bad request {line[:200]!r}: {error!r}"}

    async def _perform(self, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
        match operation:
            case "spawn":
                return {"pid": self._table.spawn(Start(**fields))}
            case "signal":
                self._table.signal(fields["name"], signal.Signals[f"SIG{fields['signal']}"])
            case "wait":
                return {"exit_code": await self._wait(**fields)}
            case "forget":
                self._table.forget(fields["name"])
            case "status":
                return {"processes": self._table.status()}
            case "disown":
                asyncio.get_running_loop().remove_reader(self._owner)
            case "stop":
                self.stopping.set()
            case _:
                raise ControlError(f"unknown operation {operation!r}")
        return {}

    async def _wait(self, name: str, timeout_seconds: float) -> int | None:
        process = self._table.get(name)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.ended.wait(), timeout_seconds)
        return process.exit_code


async def supervise(folder: Path, *, listeners: Sequence[socket.socket], owner: int, server: tuple[str, int]) -> None:
    """Serve until stopped or until the owner ends; relay every listener to the API server."""
    supervisor = Supervisor(owner)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, supervisor.reap)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stopping.set)
    loop.add_reader(owner, supervisor.stopping.set)
    control = await asyncio.start_unix_server(
        supervisor.connected, path=str(socket_path(folder)), limit=_LINE_BYTES_MAX
    )
    relays = [await proxy.relay(listener, host=server[0], port=server[1]) for listener in listeners]
    await supervisor.stopping.wait()
    for service in (control, *relays):
        service.close()
    loop.remove_signal_handler(signal.SIGCHLD)


def end_everything() -> None:
    """Kill every process of this namespace and of nested ones, and wait until all are gone."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def main() -> None:
    """Take over the descriptors that the owner passed, then supervise."""
    parser = argparse.ArgumentParser(description="supervise the processes of one development cluster")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--listener", type=int, required=True, help="descriptor of a listening socket of the host")
    parser.add_argument(
        "--lock", type=int, required=True, help="descriptor of the locked file, held while the supervisor runs"
    )
    parser.add_argument("--owner", type=int, required=True, help="descriptor of a pipe that the owner holds open")
    parser.add_argument("--server", type=_address, required=True, help="address:port of the API server inside")
    parser.add_argument("--service", type=_address, required=True, help="address:port of the Service that pods use")
    options = parser.parse_args()
    listeners = (socket.socket(fileno=options.listener), proxy.early_listener(*options.service))
    asyncio.run(supervise(options.folder, listeners=listeners, owner=options.owner, server=options.server))
    end_everything()
    remove_cluster_folder(options.folder)


if __name__ == "__main__":
    main()
