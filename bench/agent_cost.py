"""`python -m bench.agent_cost`: cost of an agent on an idle node: CPU per poll, memory, bytes written per hour.

The agent is the real process with the real NVML bindings, over a mock of the driver's library that plays an 8-GPU
machine; the API server is a stub that stores one report and counts the bytes it receives. The mock answers faster than
a driver: see bench.hardware for what a driver adds.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import ClientSession, web
from rich.console import Console
from rich.table import Table

from bench.figures import Row
from devcluster.mock_nvml import MachineFile, build
from devcluster.mock_nvml.library import environment
from devcluster.pci_tree import PlayedPciTree
from topology.profiles import profile

POLL_SECONDS = 0.25
HEARTBEAT_SECONDS = 1.0
REAL_POLL_SECONDS = 30.0
REAL_HEARTBEAT_SECONDS = 60.0
NODE = "bench-node"
COLLECTIONS = frozenset({"pods", "nodes", "leases", "gpunodestatuses"})


@dataclass
class Stub:
    """An API server for one agent: an empty cluster with one Node and the agent's own writes."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    report_bytes: list[int] = field(default_factory=list)
    heartbeat_bytes: list[int] = field(default_factory=list)
    version: int = 1

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer lists and watches with nothing; store writes and count them with their headers."""
        if request.method == "GET" and request.query.get("watch"):
            return await self._watch(request)
        if request.method == "GET":
            if request.path.rpartition("/")[2] in COLLECTIONS:
                return web.json_response({"items": [], "metadata": {"resourceVersion": str(self.version)}})
            return self._found(request.path)
        body = await request.json()
        size = len(await request.read()) + sum(len(a) + len(b) + 4 for a, b in request.raw_headers)
        path = request.path.removesuffix("/status")
        if request.method == "POST":
            path = f"{path}/{body['metadata']['name']}"
        elif path not in self.objects:
            return self._found(path)
        (self.heartbeat_bytes if "/leases/" in path else self.report_bytes).append(size)
        return web.json_response(self._merge(path, body))

    def _found(self, path: str) -> web.Response:
        missing = {"kind": "Status", "code": 404, "reason": "NotFound"}
        return web.json_response(self.objects.get(path, missing), status=200 if path in self.objects else 404)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if request.query.get("sendInitialEvents"):
            metadata = {"resourceVersion": "1", "annotations": {"k8s.io/initial-events-end": "true"}}
            await response.write(json.dumps({"type": "BOOKMARK", "object": {"metadata": metadata}}).encode() + b"\n")
        await asyncio.sleep(3600)
        return response

    def _merge(self, path: str, patch: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        old = self.objects.get(path, {"metadata": {"uid": "u"}})
        merged: dict[str, Any] = _merged(old, patch)
        merged["metadata"] |= {"resourceVersion": str(self.version), "name": path.rpartition("/")[2]}
        self.objects[path] = merged
        return merged


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.agent_cost", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of observation")
    parser.add_argument("--machine", default="dgx-h100", help="name of a known machine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(_measure(Path(folder), options.machine, options.seconds))
    table = Table("what", "value", "how")
    for row in rows:
        table.add_row(row.what, row.value, row.how)
    Console().print(table)
    return 0


async def _measure(folder: Path, name: str, seconds: float) -> list[Row]:
    machine = MachineFile(profile(name), seed=NODE)
    machine.write(folder / "machine")
    stub = Stub()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stub.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (folder / "kubeconfig").write_text(_kubeconfig(runner.addresses[0][1]))
    health = _free_port()
    agent = await asyncio.create_subprocess_exec(
        *_command(folder, health),
        env=os.environ | environment(build(folder), folder / "machine"),
        stderr=(folder / "log").open("w"),
    )
    try:
        return await _watch(agent, stub, seconds, health)
    except TimeoutError:
        sys.stderr.write((folder / "log").read_text()[-4000:])
        raise
    finally:
        if agent.returncode is None:
            agent.terminate()
        await agent.wait()
        await runner.cleanup()


async def _looks(health: int) -> float:
    """The agent's own count of looks so far: fewer than planned on a busy machine."""
    async with ClientSession() as session, session.get(f"http://127.0.0.1:{health}/metrics") as response:
        text = await response.text()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("atoll_agent_looks_total "))


async def _watch(agent: asyncio.subprocess.Process, stub: Stub, seconds: float, health: int) -> list[Row]:
    pid = agent.pid
    deadline = time.monotonic() + 60
    while not (stub.report_bytes and stub.heartbeat_bytes):
        if time.monotonic() > deadline or agent.returncode is not None:
            raise TimeoutError("the agent published nothing within a minute")
        await asyncio.sleep(0.1)
    await asyncio.sleep(5.0)
    first_report = max(stub.report_bytes)
    reports, heartbeats, looks, before = (
        len(stub.report_bytes),
        len(stub.heartbeat_bytes),
        await _looks(health),
        _cpu_seconds(pid),
    )
    await asyncio.sleep(seconds)
    polls = max(1.0, await _looks(health) - looks)
    cpu_ms = 1000 * (_cpu_seconds(pid) - before) / polls
    quiet = stub.report_bytes[reports:]
    beats = stub.heartbeat_bytes[heartbeats:]
    per_beat = sum(beats) / max(1, len(beats))
    hourly = per_beat * 3600 / REAL_HEARTBEAT_SECONDS + sum(quiet) / polls * 3600 / REAL_POLL_SECONDS
    memory = [_memory_kib(process) for process in _family(pid)]
    return [
        Row("CPU per poll", f"{cpu_ms:.1f} ms", f"agent and worker, {polls:.0f} polls, heartbeats included"),
        Row("CPU of an idle node", f"{100 * cpu_ms / 1000 / REAL_POLL_SECONDS:.3f} %", "of one core, a poll per 30 s"),
        Row("memory", f"{sum(one['Rss'] for one in memory) / 1024:.1f} MiB", "resident, agent and worker"),
        Row(
            "memory, shared pages once", f"{sum(one['Pss'] for one in memory) / 1024:.1f} MiB", "proportional set size"
        ),
        Row("memory of the agent alone", f"{memory[0]['Rss'] / 1024:.1f} MiB", "resident"),
        Row("first report", f"{first_report} bytes", "with request headers"),
        Row("reports while idle", f"{len(quiet)}", "a report is written when something changed"),
        Row("written per hour", f"{hourly:.0f} bytes", f"{per_beat:.0f} bytes per heartbeat of 60 s"),
    ]


def _command(folder: Path, health: int) -> tuple[str, ...]:
    flags = {
        "node": NODE,
        "kubeconfig": str(folder / "kubeconfig"),
        "poll-seconds": str(POLL_SECONDS),
        "urgent-seconds": str(POLL_SECONDS),
        "heartbeat-seconds": str(HEARTBEAT_SECONDS),
        "start-jitter-seconds": "0",
        "health-port": str(health),
        "pci-devices": str(PlayedPciTree(folder / "pci").devices),
        "kubelet-url": "http://127.0.0.1:9",
    }
    return (sys.executable, "-m", "agent", *(f"--{name}={value}" for name, value in flags.items()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kubeconfig(port: int) -> str:
    entry = {"cluster": {"server": f"http://127.0.0.1:{port}"}, "name": "c"}
    user = {"name": "u", "user": {"token": "t"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    content = {"apiVersion": "v1", "kind": "Config", "clusters": [entry], "users": [user], "contexts": [context]}
    return yaml.safe_dump(content | {"current-context": "x"})


def _merged(old: object, patch: object) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(patch, dict):
        return patch
    base = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            base.pop(key, None)
        else:
            base[key] = _merged(base.get(key), value)
    return base


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(int(child) for child in {*children, *_children(pid)})]


def _children(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from (task / "children").read_text().split()


def _cpu_seconds(pid: int) -> float:
    ticks = 0
    for process in _family(pid):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory_kib(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.partition(":")[0]: int(line.split()[1]) for line in lines}


if __name__ == "__main__":
    sys.exit(main())
