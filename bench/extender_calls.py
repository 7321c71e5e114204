"""Time of filter and prioritize, relative to an aiohttp handler that parses the same body and returns all names.

    python -m bench.extender_calls [--nodes 100 1000 5000] [--rounds 200]

Extender and baseline run in one process of their own on one event loop; calls alternate between them, so that both see
the same machine. Node names come in one order with a rotating start, as kube-scheduler walks its list. The figure
is the time that kube-scheduler waits: filter and then prioritize of one pod, against two calls of the baseline with the
same bodies. `least` is the fastest call, `cpu` the processor time of the serving process as the kernel counts it: on a
busy machine these two are the most reliable.
"""

import argparse
import asyncio
import http.client
import multiprocessing
import random
import statistics
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
from aiohttp import web

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.allocations import Allocation
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Metadata, Node
from atoll.kube.mirror import ClusterMirror
from atoll.service.clock import SystemClock
from atoll.service.http import listening
from atoll.service.metrics import Metrics
from atoll.service.runtime import freeze_garbage
from extender import wire
from extender.app import BODY_BYTES_MAX, ExtenderParts, build_app
from extender.binder import Binder
from topology.profiles import Profile, profile

PROFILES = ("dgx-h100", "dgx1-v100", "l40s-8", "dgx-a100")
SEED = 7
WARM_ROUNDS = 20
UIDS = 8
"""Pods filtered but not yet bound at any time; each keeps an expectation."""


class StillMirror:
    """A constant ledger in place of a mirror."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.nodes = SimpleNamespace(store={("", name): Node(Metadata(name)) for name in ledger.nodes})

    def on_change(self, _listener: object) -> None:
        """Nothing changes."""

    def unready_reason(self) -> str:
        """Always ready."""
        return ""

    def claim(self, _namespace: str, _name: str) -> None:
        """No claims: pods ask by the bare resource."""

    def reservation_of(self, _pod: object) -> None:
        """Return no reservation: pods name none."""


class NoBinder:
    """A binder that binds nothing."""

    def failed_nodes(self, _uid: str) -> frozenset[str]:
        """No bind failed."""
        return frozenset()


def node_name(number: int) -> str:
    """Return a node name like a cloud provider's."""
    return f"gke-train-h100-pool-{number * 2654435761 % 2**32:08x}"


def fill(nodes: int) -> Ledger:
    """Return a ledger of machines with 8 GPUs, of four shapes, half in use in random patterns, with random CPU left."""
    rng = random.Random(SEED)
    ledger = Ledger()
    for gpus in (1, 2, 4, 8) * 25:
        ledger.fleet.count_ask(gpus, 16_000 * gpus)
    for number in range(nodes):
        name = node_name(number)
        known = profile(PROFILES[number % len(PROFILES)])
        ledger.put_report(report(name, known))
        ledger.put_heartbeat(name, time.monotonic(), 86_400.0)
        load = rng.choice((0.0, 0.5, 0.5, 1.0))
        used = tuple(device for device in range(8) if rng.random() < load)
        ledger.fleet.put_cpu(name, free_milli=rng.randrange(192_000), allocatable_milli=192_000)
        if used:
            ledger.assume(f"uid-{name}", Allocation(name, used, tuple(f"GPU-{name}-{i}" for i in used)))
    return ledger


def report(name: str, known: Profile) -> GpuNodeStatus:
    """Return the report of a machine of a known shape."""
    devices = [
        {
            "id": i,
            "uuid": f"GPU-{name}-{i}",
            "model": known.model,
            "memoryBytes": known.memory_bytes,
            "computeCapability": known.compute_capability,
            "numaNode": known.machine.numa[i],
            "index": i,
        }
        for i in range(8)
    ]
    links = {"nvlink": known.machine.links, "nvswitch": known.machine.nvswitch, "linkGBps": known.machine.link_gbps}
    return GpuNodeStatus.model_validate({"metadata": {"name": name}, "status": {"devices": devices, "links": links}})


def body(node_names: list[str], uid: str, gpus: int) -> bytes:
    """Return the arguments of filter as kube-scheduler sends them."""
    quantities = {names.GPU_RESOURCE: str(gpus), "cpu": "4", "memory": "32Gi"}
    container = {
        "name": "main",
        "image": "registry/train:1",
        "resources": {"limits": quantities, "requests": quantities},
    }
    pod = {
        "metadata": {
            "name": uid,
            "namespace": "team",
            "uid": uid,
            "labels": {"app": "train"},
            "creationTimestamp": None,
        },
        "spec": {"containers": [container], "schedulerName": names.SCHEDULER_NAME, "priority": 0},
        "status": {"phase": "Pending", "qosClass": "Guaranteed"},
    }
    return orjson.dumps({"Pod": pod, "Nodes": None, "NodeNames": node_names})


async def _baseline(request: web.Request) -> web.Response:
    call = wire.read_filter(await request.read())
    reply = {"NodeNames": call.node_names, "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": ""}
    return web.Response(body=orjson.dumps(reply), content_type="application/json")


def serve(nodes: int, ready: Connection) -> None:
    """Serve extender and baseline until the other end closes."""
    asyncio.run(_serve(nodes, ready))


async def _serve(nodes: int, ready: Connection) -> None:
    mirror, binder = cast("ClusterMirror", StillMirror(fill(nodes))), cast("Binder", NoBinder())
    app = build_app(ExtenderParts(mirror, binder, SystemClock(), Metrics("extender"), expectation_seconds=10.0))
    baseline = web.Application(client_max_size=BODY_BYTES_MAX)
    baseline.router.add_post("/filter", _baseline)
    freeze_garbage()
    runner = web.AppRunner(baseline, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with listening(app, "127.0.0.1", 0) as ours:
            ready.send((ours, runner.addresses[0][1]))
            await asyncio.to_thread(ready.poll, None)
    finally:
        await runner.cleanup()


@dataclass(frozen=True, slots=True)
class Spent:
    """Milliseconds of one or more calls: until the whole answer arrived, and of the server's CPU."""

    wall: float
    cpu: float

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.wall + other.wall, self.cpu + other.cpu)


class Caller:
    """One keep-alive connection, like kube-scheduler's."""

    def __init__(self, port: int, pid: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._schedule = Path(f"/proc/{pid}/schedstat")

    def call(self, verb: str, content: bytes) -> tuple[Spent, Any]:
        """Return the cost of the call, and the answer."""
        cpu, started = self._cpu_milliseconds(), time.perf_counter()
        self._connection.request("POST", f"/{verb}", content, {"Content-Type": "application/json"})
        answer = self._connection.getresponse().read()
        wall = 1000 * (time.perf_counter() - started)
        return Spent(wall, self._cpu_milliseconds() - cpu), orjson.loads(answer)

    def _cpu_milliseconds(self) -> float:
        return int(self._schedule.read_text().split()[0]) / 1e6


def measure(nodes: int, rounds: int) -> dict[str, list[Spent]]:
    """Return the cost of every call, by the kind of call."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(nodes, there))
    process.start()
    there.close()
    try:
        ours, theirs = (Caller(port, process.pid or 0) for port in here.recv())
        rng = random.Random(SEED)
        node_names = [node_name(number) for number in range(nodes)]
        samples: dict[str, list[Spent]] = {"filter": [], "prioritize": [], "both": [], "baseline": []}
        for number in range(WARM_ROUNDS + rounds):
            start = rng.randrange(nodes)
            node_names = node_names[start:] + node_names[:start]
            first = body(node_names, f"pod-{number % UIDS}", rng.choice((1, 2, 4, 8)))
            filtering, answer = ours.call("filter", first)
            second = orjson.dumps({**orjson.loads(first), "NodeNames": answer["NodeNames"]})
            prioritizing, best = ours.call("prioritize", second)
            assert best[0]["Host"] in answer["NodeNames"]
            plain = theirs.call("filter", first)[0] + theirs.call("filter", second)[0]
            if number >= WARM_ROUNDS:
                for name, value in zip(
                    samples, (filtering, prioritizing, filtering + prioritizing, plain), strict=True
                ):
                    samples[name].append(value)
        return samples
    finally:
        here.close()
        process.join(10)
        process.kill()


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    for nodes in arguments.nodes:
        samples = measure(nodes, arguments.rounds)
        print(f"{nodes} nodes x 8 GPUs, {arguments.rounds} pods, seed {SEED}")
        for name, spent in samples.items():
            values = [one.wall for one in spent]
            p50, p99 = statistics.median(values), statistics.quantiles(values, n=100)[98]
            cpu = statistics.median(one.cpu for one in spent)
            print(
                f"  {name:<12} p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   least {min(values):6.2f} ms   cpu {cpu:6.2f} ms"
            )
        both, plain = samples["both"], samples["baseline"]
        ratios = {
            "p50": statistics.median(one.wall for one in both) / statistics.median(one.wall for one in plain),
            "least": min(one.wall for one in both) / min(one.wall for one in plain),
            "cpu": statistics.median(one.cpu for one in both) / statistics.median(one.cpu for one in plain),
        }
        told = ", ".join(f"{ratio:.2f} by {name}" for name, ratio in ratios.items())
        print(f"  both against two calls of the baseline: {told} (target 1.5)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
